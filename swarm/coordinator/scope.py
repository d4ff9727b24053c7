"""What every scope of a run has: members, the model that they train, and facts that are taken for the journal. Pure.

A run without a pipeline is one scope. A run with one has its own, and one for each stage."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.swarm.coordinator import events as f
from shoal.swarm.coordinator.access import Access
from shoal.swarm.coordinator.membership import Membership
from shoal.swarm.coordinator.sent_bytes import SentBytes
from shoal.swarm.deadlines import Deadlines
from shoal.swarm.protocol.messages import PeerToCoordinatorDescribeModel
from shoal.swarm.protocol.run_file import RunFile

_EPOCH_STEP = 2**30
"""At least so much the epoch grows: the versions of as many rosters fit in between."""


class Scope:
    """Changed by facts alone (``record``, ``replay``), but for what heartbeats say and moments."""

    def __init__(self, run: RunFile, now_s: float, epoch: int) -> None:
        """``epoch`` grows from start to start; roster versions go on from it, as observers are not journaled."""
        self.run = run
        self.epoch = epoch
        self.deadlines = Deadlines(run.round.patience_s)
        self.membership = Membership(roster_version=epoch)
        self.model: PeerToCoordinatorDescribeModel | None = None
        self.elements = 0
        """Of the model: every contribution's claim is checked against that, and layouts are long."""
        self.anchor_version = 0
        self.announcements = 0
        self.now_s = now_s
        self.unix_offset_s = 0.0
        """Unix time less the clock of all moments here; whoever has the clocks keeps it right."""
        self.sent_bytes = SentBytes()
        self.access = Access(run.access)
        self._ticked_s = now_s
        self._facts: list[f.Fact] = []

    @property
    def has_ended(self) -> bool:
        """Whether nobody trains in it any more."""
        raise NotImplementedError

    def take_facts(self) -> list[f.Fact]:
        """The facts since the last call, for the journal."""
        taken, self._facts = self._facts, []
        return taken

    def replay(self, journal: Sequence[f.Fact], now_s: float) -> None:
        """Take over a journal; whoever was alive gets the whole patience to be heard again."""
        self.now_s = now_s
        for fact in journal:
            self._apply(fact)

    def begin(self) -> None:
        """Once the journal is taken over: whoever takes it over next shall know of us."""
        self.record(f.CoordinatorStarted(epoch=self.epoch))

    def record(self, fact: f.Fact) -> None:
        """Observers are no part of the run's history."""
        match fact:
            case f.MemberJoined(entry=entry):
                passing = entry.role == "observer"
            case f.MemberLost(peer=peer):
                passing = self.membership.is_observer(peer)
            case _:
                passing = False
        self._apply(fact)
        if not passing:
            self._keep(fact)
        if not isinstance(fact, f.LeaseGranted | f.SamplesDriven | f.SamplesClaimed):
            self.announcements += 1

    def _keep(self, fact: f.Fact) -> None:
        self._facts.append(fact)

    def _apply(self, fact: f.Fact) -> None:
        match fact:
            case f.ModelDescribed():
                self.model, self.elements = fact.model, fact.model.elements
            case f.MemberJoined():
                self.membership.join(fact, self.now_s, self.anchor_version)
            case f.MemberLost():
                self.membership.lose(fact)
                for peer in self.membership.forget_strangers(self.left_traces):
                    self.sent_bytes.forget(peer)
            case f.CoordinatorStarted():
                self.epoch = max(self.epoch, fact.epoch + _EPOCH_STEP)
                self.membership.roster_version = max(self.membership.roster_version, self.epoch)
            case _:
                raise AssertionError(f"no rule for {type(fact).__name__}")

    def has_record(self, peer: str) -> bool:
        """Whether enough of its work was committed (``Member.has_record``)."""
        member = self.membership.members.get(peer)
        return member is not None and member.has_record

    def standing(self, peer: str) -> int:
        """What speaks for keeping a member without a record: the committed rounds that it was in."""
        return self.membership.members[peer].rounds_committed

    def may_be_idle(self, peer: str) -> bool:
        """Whether it has to get on by itself, and does not only wait for others."""
        return not self.has_record(peer)

    def left_traces(self, peer: str) -> bool:
        """Whether the run would be another one without this member."""
        member = self.membership.members[peer]
        return bool(member.rounds_committed or member.tokens_committed or member.failures)

    def excuse_own_silence(self, now_s: float) -> float:
        """When we stood still (a suspended machine, a slow disk), nobody else was late. Returns for how long, or 0."""
        stood_s, self._ticked_s = now_s - self._ticked_s, now_s
        if stood_s <= self.deadlines.heartbeat_s:
            return 0.0
        self.membership.excuse(stood_s, now_s)
        return stood_s

    def lose_silent(self, now_s: float) -> None:
        """Whoever has not been heard for too long is out."""
        for peer in self.membership.silent(now_s, self.deadlines.dead_s):
            self.record(f.MemberLost(peer=peer, reason="silent"))
