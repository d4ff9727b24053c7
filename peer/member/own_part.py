"""What a training peer has of its own beside the run's state: given to its checkpoints, and taken up from them."""

from __future__ import annotations

import logging
from typing import Any

from torch import nn
from torch.optim import Optimizer

from shoal.compression.codec import CodecError
from shoal.peer.checkpoints.checkpoint import Checkpoint
from shoal.peer.checkpoints.local_state import carried_of, own_tree, restore_own
from shoal.peer.member.member import Member
from shoal.peer.training.anchor import State
from shoal.peer.training.data import LeasedSamples

log = logging.getLogger(__name__)


class OwnPart:
    """On the training thread."""

    def __init__(self, model: nn.Module, optimizer: Optimizer | None, samples: LeasedSamples, member: Member) -> None:
        self._model = model
        self._optimizer = optimizer
        self._samples = samples
        self._member = member

    def tree(self) -> dict[str, Any]:
        """All of it, by reference: see ``own_tree``."""
        carried = self._member.averager.carried
        return {**own_tree(self._optimizer, self._model, carried), **self._samples.counters()}

    def take_up(self, checkpoint: Checkpoint, state: State) -> bool:
        """Go on from it with ``state``, the run's; returns whether the residual came back, too.

        Optimizer, buffers and random state of some rounds ago are better than none. The residual belongs to its state,
        and only where none of it may be in a mean by now."""
        own = checkpoint.own
        if own is None or checkpoint.manifest.peer != self._member.client.peer:
            return False
        restore_own(own, self._optimizer, self._model)
        self._samples.count_on(own)
        carried = carried_of(own, state.anchor.numel())
        if carried is None or state is not checkpoint.state or self._member.client.view.plan is not None:
            return False
        try:
            self._member.averager.restore(carried)
        except CodecError as error:
            log.warning("going on without the residual of the checkpoint: %s", error)
            return False
        return True
