"""Divergence of local work: work that became infinite or not a number is done again a few times.

One machine or one batch may be at fault. After that the coordinator compares with the other peers: either the run goes
back to an earlier state, or this machine has to leave."""

from __future__ import annotations

from collections import Counter

import torch

from shoal.peer.training.anchor import AnchorState
from shoal.swarm.errors import Diverged
from shoal.swarm.protocol.types import DivergenceWord, KeptState

TRIES = 3

_DIVERGED = (
    "the run has diverged; host a new one with a lower learning rate ([inner] lr, [outer] lr) or more warm-up, from a "
    "checkpoint of an earlier round (`shoal host RUN.toml --from FOLDER`)"
)


class Divergence:
    """Count of diverged local work of one peer; in a pipeline all its stages share one, which outlives spans."""

    def __init__(self) -> None:
        self._times: Counter[int | None] = Counter()
        self._first: dict[int | None, KeptState] = {}
        self._found = ""

    @property
    def is_doubtful(self) -> bool:
        """Whether no work of this peer has been committed since some diverged; perhaps no peer can go on from here."""
        return bool(self._times)

    def clear(self) -> None:
        """Forget the failures: a round with this peer's work was committed, or the run has gone back."""
        self._times.clear()
        self._first.clear()

    def note_failure(self, stage: int | None, state: AnchorState, reason: str) -> KeptState | None:
        """Note that local work from ``state`` diverged. ``stage``: None without a pipeline; ``reason``: for people.

        Returns the state of the first failure if a further try is useless: at the third failure in a row, or, without
        stages, at once if the anchor itself is infinite or not a number. Otherwise returns None.
        """
        first = self._first.setdefault(stage, KeptState(anchor_version=state.version, digest=state.digest))
        self._times[stage] += 1
        where = "the model" if stage is None else f"stage {stage}"
        times, version = self._times[stage], state.version
        if not bool(torch.isfinite(state.anchor).all()):
            self._found = f"{where} at version {version} is itself infinite or not a number, for every peer alike"
            return first if times >= TRIES or stage is None else None
        self._found = f"the local work from version {version} of {where} diverged {times} times in a row: {reason}"
        return first if times >= TRIES else None

    def as_error(self, word: DivergenceWord) -> Diverged:
        """Make the error that ends this peer. ``word``: the coordinator's answer; empty if it was not asked."""
        at_fault = "this machine is at fault: check its memory and its driver, and join again"
        match word:
            case "at fault":
                advice = f"The other peers train on from there, so {at_fault}"
            case "unrecoverable":
                advice = f"It is the same for the other peers, and no earlier state is left to go back to: {_DIVERGED}"
            case _:
                advice = f"If the other peers train on, {at_fault}. If they stop, too, {_DIVERGED}"
        return Diverged(f"{self._found}. {advice}")
