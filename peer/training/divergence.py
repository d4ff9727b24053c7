"""Divergence of local work: results that are infinite or not a number are tried again a few times.

One machine or one batch may be at fault. After that the other peers are asked: either the run goes back to an earlier
state, or this machine has to leave."""

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
    """Of one peer. In a pipeline all its stages share one, which outlives them."""

    def __init__(self) -> None:
        self._times: Counter[int | None] = Counter()
        self._first: dict[int | None, KeptState] = {}
        self._found = ""

    @property
    def is_doubtful(self) -> bool:
        """Whether nothing of ours has counted since local work was of no use: nobody may be able to go on from here."""
        return bool(self._times)

    def clear(self) -> None:
        """A round was committed with our work in it, or the run has gone back."""
        self._times.clear()
        self._first.clear()

    def note_failure(self, stage: int | None, state: AnchorState, reason: str) -> KeptState | None:
        """The work of ``stage``, None without stages, came to nothing; it began at ``state``. Returns where that began,
        when it is of no use to try again: the third time since something of ours counted, or at once where the anchor
        itself is infinite or not a number, for every peer alike."""
        first = self._first.setdefault(stage, KeptState(anchor_version=state.version, digest=state.digest))
        self._times[stage] += 1
        where = "the model" if stage is None else f"stage {stage}"
        times, version = self._times[stage], state.version
        if not bool(torch.isfinite(state.anchor).all()):
            self._found = f"{where} at version {version} is itself infinite or not a number, for every peer alike"
            return first if times >= TRIES or stage is None else None
        self._found = f"the local work from version {version} of {where} was {times} times in a row of no use: {reason}"
        return first if times >= TRIES else None

    def as_error(self, word: DivergenceWord) -> Diverged:
        """Make the error that ends this peer, by the coordinator's word if there is one."""
        at_fault = "this machine is at fault: look at its memory and its driver, and join again"
        match word:
            case "at fault":
                advice = f"The others train on from there, so {at_fault}"
            case "hopeless":
                advice = f"It is the same for the others, and there is nothing better to go back to: {_DIVERGED}"
            case _:
                advice = f"If the other peers train on, {at_fault}. If they stop, too: {_DIVERGED}"
        return Diverged(f"{self._found}. {advice}")
