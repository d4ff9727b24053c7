"""What a peer kept of a stage: a checkpoint, and the states that the rounds kept beside it lead to."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from shoal.peer.checkpoints.checkpoint import read_checkpoint, read_verdicts
from shoal.peer.checkpoints.manifest import MANIFEST, Manifest, StageAbout
from shoal.peer.checkpoints.source import Source, refuse
from shoal.peer.checkpoints.store import CHECKPOINTS
from shoal.peer.history.catch_up import Steps, path, roll_forward
from shoal.peer.history.chain import unpack_history
from shoal.peer.history.file import HISTORY_FILE
from shoal.peer.history.round_records import RECORDS, Owner, RoundRecords
from shoal.peer.regular_file import read_regular
from shoal.peer.training.anchor import State
from shoal.peer.training.outer_optimizer import outer_of
from shoal.swarm.errors import StateFileError, WireError
from shoal.swarm.protocol.messages import Verdict
from shoal.swarm.protocol.run_file import parse_run_file
from shoal.swarm.protocol.verdict_chain import check_verdict

log = logging.getLogger(__name__)

_MOST_VERDICTS = 64
"""So much of the chain goes on into what is made of it, as in any checkpoint."""


@dataclass(frozen=True)
class KeptStage:
    """``known``: the verdicts that lie there, by round, none of them checked."""

    place: Path
    source: Source
    manifest: Manifest
    stage: StageAbout
    known: Mapping[int, Verdict] = field(repr=False)

    @classmethod
    def read(cls, place: Path, source: Source, manifest: Manifest) -> KeptStage:
        """Raises ``StateFileError``."""
        assert manifest.stage is not None
        own = {verdict.round: verdict for verdict in read_verdicts(source, manifest)}
        if manifest.round not in own or own[manifest.round].chain.hex() != manifest.chain:
            raise refuse(source.place(MANIFEST), "chain", "that of its last verdict", manifest.chain)
        beside = _history(place) if place.parent.name == CHECKPOINTS else {}
        return cls(place, source, manifest, manifest.stage, {**beside, **own})

    def standing(self) -> Iterator[Standing]:
        """Each round at whose end the stage stood at a state that can be had from here."""
        way: tuple[Verdict, ...] = ()
        for made in (self.known[self.manifest.round], *self.rounds):
            if made.round != self.manifest.round:
                way = (*way, made)
            for verdict in self._while_it_stood(made):
                yield Standing(self, verdict, way)

    @cached_property
    def rounds(self) -> tuple[Verdict, ...]:
        """The committed ones that lead on from the checkpoint, as far as their bytes lie beside it."""
        found = []
        for number in self._records.numbers():
            try:
                found.append(self._records.open(number).verdict)
            except StateFileError as error:
                log.warning("a round that was kept here cannot be used: %s", error)
        return tuple(path(found, self.manifest.anchor_version, bytes.fromhex(self.manifest.state_digest)))

    @property
    def _records(self) -> RoundRecords:
        owner = Owner(bytes.fromhex(self.manifest.run_hash), bytes.fromhex(self.manifest.coordinator_key))
        return RoundRecords(self.place.parent.with_name(RECORDS), owner)

    def _while_it_stood(self, made: Verdict) -> Iterator[Verdict]:
        """That verdict, and those before and after it of rounds that changed nothing."""
        yield made
        before = made
        while not before.committed:
            earlier = self.known.get(before.round - 1)
            if earlier is None or (earlier.anchor_version, earlier.chain) != (
                made.anchor_version,
                before.previous_chain,
            ):
                break
            yield earlier
            before = earlier
        after = made
        while (later := self.known.get(after.round + 1)) is not None and later.previous_chain == after.chain:
            if later.committed or later.anchor_version != made.anchor_version:
                break
            yield later
            after = later

    def chain_up_to(self, verdict: Verdict) -> tuple[Verdict, ...]:
        """What is known of the chain up to there, oldest first: an unbroken piece."""
        found = [verdict]
        while len(found) < _MOST_VERDICTS:
            earlier = self.known.get(found[-1].round - 1)
            if earlier is None or earlier.chain != found[-1].previous_chain:
                break
            found.append(earlier)
        return tuple(reversed(found))

    def load(self, way: tuple[Verdict, ...]) -> State:
        """The checkpoint's state, taken forward by those rounds. Raises ``StateFileError``."""
        state = read_checkpoint(self.source, bytes.fromhex(self.manifest.run_hash)).state
        if not way:
            return state
        run = parse_run_file(self.manifest.run_toml, f"{self.place}: the run file")
        coding = run.coding([(spec.name, spec.shape) for spec in self.manifest.layout])
        newest = way[-1].anchor_version
        state = roll_forward(state, self._records, Steps(run, coding, outer_of(run.outer)), newest)
        if state.version != newest:
            raise StateFileError(f"{self._records.folder}: the rounds there lead to version {state.version} only")
        return state


@dataclass(frozen=True)
class Standing:
    """The state at the end of the round of ``verdict``; ``way``: the rounds that lead to it from the checkpoint."""

    kept: KeptStage
    verdict: Verdict
    way: tuple[Verdict, ...]

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        return self.kept.chain_up_to(self.verdict)

    def load(self) -> State:
        return self.kept.load(self.way)

    def named_later(self) -> bytes | None:
        """The digest of this state by the next round's plan, as the coordinator signed it; None where that is not known
        here."""
        later = self.kept.known.get(self.verdict.round + 1)
        if later is None or later.plan is None or later.previous_chain != self.verdict.chain:
            return None
        if later.plan.anchor_version != self.verdict.anchor_version:
            return None
        try:
            check_verdict(later, bytes.fromhex(self.kept.manifest.coordinator_key))
        except WireError as error:
            log.warning("%s: %s", self.kept.place, error)
            return None
        return later.plan.state_digest


def _history(place: Path) -> dict[int, Verdict]:
    """What the peer's history of that stage says, as far as it can be read."""
    file = place.parent.with_name(HISTORY_FILE)
    try:
        return {verdict.round: verdict for verdict in unpack_history(read_regular(file), str(file)).verdicts}
    except FileNotFoundError:
        return {}
    except (OSError, StateFileError) as error:
        log.warning("going on without a history: %s", error)
        return {}
