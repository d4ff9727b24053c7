"""Local work that is infinite or not a number: tried again a few times, as one machine or one batch may be at fault,
and then given up, as it would be the same for ever."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from shoal.swarm.errors import Diverged

TRIES = 3


class Divergence:
    """Of one peer. In a pipeline all its stages share one, which outlives them."""

    def __init__(self) -> None:
        self._times: Counter[int | None] = Counter()

    def counted(self) -> None:
        """A round was committed with our work in it."""
        self._times.clear()

    def spoilt(self, stage: int | None, version: int, anchor: Tensor, reason: str) -> None:
        """The work of ``stage``, None without stages, came to nothing; it began at ``anchor``, (n,) float32. Raises
        ``Diverged`` the third time since something of ours counted."""
        self._times[stage] += 1
        if self._times[stage] < TRIES:
            return
        where = "the model" if stage is None else f"stage {stage}"
        if not bool(torch.isfinite(anchor).all()):
            found = f"{where} at version {version} is itself infinite or not a number, for every peer alike"
        else:
            found = f"the local work from version {version} of {where} was {TRIES} times in a row of no use: {reason}"
        raise Diverged(
            f"{found}. If the other peers train on, this machine is at fault: look at its memory and its driver, and "
            "join again. If they stop, too, the run has diverged: host a new one with a lower learning rate "
            "([inner] lr, [outer] lr) or more warm-up, from a checkpoint of an earlier round "
            "(`shoal host RUN.toml --from FOLDER`)"
        )
