"""Membership of a loop that brings vectors of its own to rounds, one after the other, and waits for their ends."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor, nn

from shoal.compression.range_reader import RangeReader, TensorReader
from shoal.compression.scratch import zeros
from shoal.peer.member.replica import TrainingSetup
from shoal.peer.network_thread import Interrupted
from shoal.peer.session import Readiness, Session
from shoal.peer.training.parameters import ParameterVector
from shoal.swarm.averaging.outcome import Committed
from shoal.swarm.errors import RunEnded

Bring = Callable[[Tensor], RangeReader]
"""Makes the contribution from the anchor, (n,) float32, on which the round is averaged."""


class _Given:
    """Local work that contributes what is given instead of training (a ``LocalWork``)."""

    def __init__(self, vector: ParameterVector) -> None:
        self._elements = vector.elements
        self.bring: Bring | None = None

    def step(self, samples: int, lr_factor: float) -> None:
        """Do nothing, because the work is given."""

    def contribution(self, anchor: Tensor) -> RangeReader:
        return TensorReader(zeros(self._elements)) if self.bring is None else self.bring(anchor)

    def reset_optimizer(self) -> None:
        """Do nothing, because the caller has its own optimizer."""

    def restart_from(self, anchor: Tensor) -> None:
        """Keep what is given, which is offered again until a round contains it."""

    def continue_from(self, anchor: Tensor) -> None:
        """Keep what is given, as ``restart_from``."""


class ArrayMember:
    """Member of a run that brings vectors; for use by one thread."""

    def __init__(self, session: Session, shapes: dict[str, tuple[int, ...]]) -> None:
        """``session``: connected and not started; ``shapes``: of the arrays that the vector is made of, by name.

        Raises ``ModelMismatch`` if the run's other members bring others, and the errors of ``Session.start``."""
        self._session = session
        self._work: _Given
        self._outcome: Committed | None = None
        model = nn.Module()
        for name, shape in shapes.items():
            # Zeros that take no memory; a parameter's name may not contain a dot.
            model.register_parameter(name.replace(".", "/"), nn.Parameter(torch.zeros(()).expand(shape)))
        session.start(TrainingSetup(model, make_work=self._make_work, on_committed=self._on_committed))

    @property
    def peer(self) -> str:
        """This member's peer id."""
        return self._session.peer

    @property
    def anchor(self) -> tuple[int, Tensor]:
        """Version and values, (n,) float32, of the run's anchor; a round overwrites it."""
        return self._session.anchor

    def bring(self, bring: Bring, weight: int) -> Committed | None:
        """Return the first committed round that was planned with what ``bring`` makes; None at the run's end.

        Blocks over aborted rounds, restarts of the coordinator and deaths of members. Raises the error that ended the
        connection."""
        self._work.bring, self._outcome = bring, None
        session, samples = self._session, self._session.samples
        while self._outcome is None:
            try:
                readiness = session.settle()
            except RunEnded:  # while it was out of step
                return None
            missing = weight - samples.in_round
            if readiness is Readiness.OVER:
                return None
            if readiness is Readiness.NOT_YET:
                continue
            if missing <= 0:
                with suppress(Interrupted):
                    session.wait_for_change()
            elif samples.next_batch(missing) is None:
                session.fetch_lease(missing)
            else:
                samples.finish_batch(torch.tensor(math.nan))
                session.report_now() if samples.in_round >= weight else session.report_progress()
        return self._outcome

    def close(self) -> None:
        """Leave the run."""
        self._session.close()

    def _make_work(self, vector: ParameterVector) -> _Given:
        self._work = _Given(vector)
        return self._work

    def _on_committed(self, outcome: Committed) -> None:
        if outcome.included:
            self._outcome = outcome
