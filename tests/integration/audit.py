"""Audit of a run while it goes on: the journal event by event, members' digests one by one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from shoal.swarm.coordinator.event_log import EventLog
from shoal.swarm.coordinator.events import JournalEvent, ModelDescribed, RoundPlanned, VerdictGiven
from shoal.swarm.coordinator.lease_ledger import LeaseLedger
from shoal.swarm.coordinator.round_scope import RoundScope
from shoal.swarm.protocol.run_file import RunFile
from shoal.swarm.protocol.verdict_chain import genesis
from shoal.swarm.sample_ranges import Ranges, count, from_wire, merge, subtract


class Audit:
    """One verdict a round, an unbroken chain, weights that are the tokens of their samples and sum up, every sample
    committed once, or leased once, or free. ``take`` the events in the journal's order, each once."""

    def __init__(self, run: RunFile) -> None:
        self._state = RoundScope(run, lambda data: data, EventLog(0.0, 0))
        self.verdicts: list[VerdictGiven] = []
        self.tokens = 0
        self._chain = genesis(run.hash)
        self._committed: Ranges = []
        self._spent: Ranges = []
        """Samples of masked work that was lost, which nobody trains on again."""
        self._history: list[tuple[int, Ranges]] = []
        """Of each committed round that was not undone, its tokens and samples."""
        self._plan: RoundPlanned | None = None
        self._tokens_per_sample = 1

    def take(self, events: Iterable[JournalEvent]) -> None:
        for event in events:
            self._state.apply(event)
            match event:
                case ModelDescribed():
                    self._tokens_per_sample = event.model.tokens_per_sample
                case RoundPlanned():
                    assert self._plan is None, "one plan a round"
                    self._plan = event
                case VerdictGiven():
                    self._take_verdict(event)
                    self._check_ledger(self._state.leases)

    def _take_verdict(self, event: VerdictGiven) -> None:
        verdict = event.verdict
        assert verdict.round == len(self.verdicts), "one verdict a round"
        assert verdict.previous_chain == self._chain, "an unbroken chain"
        self._chain = verdict.chain
        self.verdicts.append(event)
        if verdict.committed:
            assert self._plan is not None
            assert self._plan.plan == verdict.plan
            tokens, mine = 0, Ranges()
            for member, wire in zip(self._plan.plan.members, self._plan.ranges, strict=True):
                ranges = from_wire(wire)
                assert member.weight_tokens == count(ranges) * self._tokens_per_sample, "weights are tokens"
                if member.peer not in event.lost:
                    mine += ranges
                    tokens += member.weight_tokens
                elif verdict.plan is not None and verdict.plan.secure is not None:  # it may have left masked
                    self._spent = merge([*self._spent, *ranges])
            assert verdict.tokens == tokens, "the committed weights sum up"
            self._committed = merge([*self._committed, *mine])
            self._history.append((tokens, mine))
        else:
            assert verdict.tokens == 0
            if verdict.spent:
                assert self._plan is not None, "only masked work can be spent"
                ranges = [one for wire in self._plan.ranges for one in from_wire(wire)]
                self._spent = merge([*self._spent, *ranges])
        self.tokens += verdict.tokens
        for tokens, ranges in self._history[verdict.anchor_version :]:
            self.tokens -= tokens
            self._committed = subtract(self._committed, merge(ranges))
        self._history = self._history[: verdict.anchor_version]
        assert verdict.anchor_version == len(self._history)
        assert verdict.tokens_total == self.tokens
        assert count(self._committed) * self._tokens_per_sample == self.tokens
        self._plan = None

    def _check_ledger(self, ledger: LeaseLedger) -> None:
        held = [one for ranges in ledger.held.values() for one in ranges]
        at = 0
        for start, stop in sorted([*self._committed, *self._spent, *ledger.pool, *held]):
            assert start == at, f"samples from {min(start, at)} on are {'lost' if start > at else 'with two'}"
            at = stop
        assert at == ledger.fresh, "samples at the end are lost"


class Parity:
    """Checks that all members have the same digest of each anchor version, and the same end of each round."""

    def __init__(self) -> None:
        self._digests: dict[int, set[str]] = defaultdict(set)
        self._ends: dict[int, set[str]] = defaultdict(set)

    def take_events(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Take in the events of a member."""
        for event in events:
            kind = event["event"]
            if kind in ("synced", "committed") or (kind == "left" and event["digest"] is not None):
                self._digests[event["anchor_version"]].add(event["digest"])
            if kind in ("committed", "aborted"):
                self._ends[event["round"]].add(kind)

    def take_journal_events(self, events: Iterable[JournalEvent]) -> None:
        """Take in the coordinator's journal events."""
        for event in events:
            if isinstance(event, RoundPlanned):
                self._digests[event.plan.anchor_version].add(event.plan.state_digest.hex())
            if isinstance(event, VerdictGiven):
                self._ends[event.verdict.round].add("committed" if event.verdict.committed else "aborted")

    def check(self) -> dict[int, str]:
        """Check everything so far; returns the digests by version."""
        assert {version: found for version, found in self._digests.items() if len(found) > 1} == {}, "parity"
        assert {number: found for number, found in self._ends.items() if len(found) > 1} == {}, "one verdict for all"
        return {version: next(iter(found)) for version, found in self._digests.items()}
