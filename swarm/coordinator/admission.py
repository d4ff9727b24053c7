"""Admission to a scope: members come, describe their model and go, and every request's key is one of theirs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from shoal.swarm.coordinator import events as ev
from shoal.swarm.coordinator.access import OBSERVERS, OBSERVERS_PER_NETWORK, Access, gives_way
from shoal.swarm.coordinator.membership import Membership
from shoal.swarm.deadlines import Deadlines
from shoal.swarm.errors import CorpusError, ModelMismatch, NotAdmitted, RunEnded, Superseded, TryLater
from shoal.swarm.protocol.identity import peer_id, verify_certificate
from shoal.swarm.protocol.messages import PeerToCoordinatorDescribeModel
from shoal.swarm.protocol.run_file import RunFile
from shoal.swarm.protocol.types import Certificate, DeviceInfo, Role, RosterEntry, TensorSpec

# Bytes that members sent ------------------------------------------------------------------------------------

_MOST = 2**62
"""What a message has room for."""


@dataclass
class SentBytes:
    """A counter belongs to one process, which its CURVE key names: a member that starts again begins at 0."""

    _said: dict[str, tuple[bytes, int]] = field(default_factory=dict)
    """By peer: the process that it is, and what that one has said last."""
    _since_verdict: int = 0

    def begin(self, peer: str, curve_key: bytes) -> None:
        """A new process: all that it will have sent was sent from now on."""
        self._said[peer] = (curve_key, 0)

    def hear(self, peer: str, curve_key: bytes, sent_bytes: int) -> None:
        """A heartbeat. What a process that was there before us has sent since when nobody knows."""
        key, before = self._said.get(peer, (curve_key, sent_bytes))
        if key != curve_key:
            before = sent_bytes
        self._since_verdict += max(0, sent_bytes - before)
        self._said[peer] = (curve_key, max(before, sent_bytes))

    def forget(self, peer: str) -> None:
        """It has left for good."""
        self._said.pop(peer, None)

    def take(self) -> int:
        """The sum since it was taken last."""
        taken, self._since_verdict = min(self._since_verdict, _MOST), 0
        return taken


_MAX_ELEMENTS = 2**40
_EXACT_DTYPES = ("float32", "float64")
"""Parameters of these types hold every value of a float32 anchor."""

_BELIEVED_S = 86_400.0
"""For how long a newcomer's word that it gets on keeps its place without any work of it in a round: a very large state
over a slow link takes a day."""

DATA_DIFFERS = (
    "this machine's data differs from the run's: use the same Python version as the others, or ask the host for a run "
    'on the same files (data.source = "text:GLOB" or "tokens:FILE")'
)
"""All that is said of it: neither side shows the other what it has."""


class MemberScope:
    """What every scope of a run has: members, the model that they train, and events for the journal.

    A plain run is one scope; a pipeline has the run's own and one for each stage. The state is changed by events alone
    (``record``, ``replay``), but for what heartbeats say and for moments."""

    def __init__(self, run: RunFile, now_s: float, epoch: int) -> None:
        """``epoch``: of the lease on the journal; roster versions go on from it, as observers are not journaled."""
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
        self._events: list[ev.JournalEvent] = []

    @property
    def has_ended(self) -> bool:
        """Whether nobody trains in it any more."""
        raise NotImplementedError

    def take_events(self) -> list[ev.JournalEvent]:
        """The events since the last call, for the journal."""
        taken, self._events = self._events, []
        return taken

    def replay(self, journal: Sequence[ev.JournalEvent], now_s: float) -> None:
        """Take over a journal; whoever was alive gets the whole patience to be heard again."""
        self.now_s = now_s
        for event in journal:
            self._apply(event)

    def begin(self) -> None:
        """Once the journal is taken over: whoever takes it over next shall know of us."""
        self.record(ev.CoordinatorStarted(epoch=self.epoch))

    def record(self, event: ev.JournalEvent) -> None:
        """Observers are no part of the run's history."""
        match event:
            case ev.MemberJoined(entry=entry):
                passing = entry.role == "observer"
            case ev.MemberLost(peer=peer):
                passing = self.membership.is_observer(peer)
            case _:
                passing = False
        self._apply(event)
        if not passing:
            self._keep(event)
        if not isinstance(event, ev.LeaseGranted | ev.SamplesDriven | ev.SamplesClaimed):
            self.announcements += 1

    def _keep(self, event: ev.JournalEvent) -> None:
        self._events.append(event)

    def _apply(self, event: ev.JournalEvent) -> None:
        match event:
            case ev.ModelDescribed():
                self.model, self.elements = event.model, event.model.elements
            case ev.MemberJoined():
                self.membership.join(event, self.now_s, self.anchor_version)
            case ev.MemberLost():
                self.membership.lose(event)
                for peer in self.membership.forget_strangers(self.left_traces):
                    self.sent_bytes.forget(peer)
            case ev.CoordinatorStarted():
                self.membership.roster_version = max(self.membership.roster_version, self.epoch)
            case _:
                raise AssertionError(f"no rule for {type(event).__name__}")

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
            self.record(ev.MemberLost(peer=peer, reason="silent"))

    # Joining, describing the model, leaving: all but ``leave`` may raise a typed error for who asked ----------

    @contextmanager
    def joining(self, certificate: Certificate, role: Role, network: str, now_s: float) -> Iterator[str]:
        """While somebody joins: whom the certificate proves it to be. Before anything else is done for it: the limits
        of ``[access]``, then the certificate; of an identity that the run knows the certificate first, so that nobody
        else uses up what it may. Raises ``TryLater`` and ``NotAdmitted``."""
        self.refuse_replaced(certificate.curve_key)
        self._refuse_if_over(role)
        claimed, is_observer = peer_id(certificate.identity_key), role == "observer"
        member = self.membership.members.get(claimed)
        is_known = self.has_record(claimed) or (member is not None and member.alive)
        with self.access.under_way(certificate.curve_key, network, is_known):
            if not is_known:
                self.access.take(network, is_observer, now_s)
                self._make_room(claimed, role, network)
            peer = verify_certificate(certificate)
            if is_known:
                self.access.take_known(peer, now_s)
            yield peer

    def join(self, entry: RosterEntry, device: DeviceInfo, now_s: float, network: str = "") -> None:
        """Admit a member. The same identity with another key is a new process: the old one's work is free again."""
        self.now_s = now_s
        self.refuse_replaced(entry.certificate.curve_key)
        self._refuse_if_over(entry.role)
        known = self.membership.members.get(entry.peer)
        if known is not None and known.entry.role != "observer" and entry.role == "observer":
            raise NotAdmitted("this identity trains in the run; look at the run with another one")
        if known is not None and known.alive:
            if known.entry.certificate.curve_key == entry.certificate.curve_key:
                known.heard_s = now_s
                return
            self.record(ev.MemberLost(peer=entry.peer, reason="joined again"))
        in_its_place = self._make_room(entry.peer, entry.role, network)
        if in_its_place is not None:
            self.record(ev.MemberLost(peer=in_its_place, reason="made room for another network"))
        is_new = known is None or known.entry.certificate.curve_key != entry.certificate.curve_key
        if is_new and entry.role != "observer":
            self.sent_bytes.begin(entry.peer, entry.certificate.curve_key)
        self.record(ev.MemberJoined(entry=entry, device=device, network=network))

    def _refuse_if_over(self, role: Role) -> None:
        if self.has_ended and role != "observer":
            raise RunEnded(f"the run {self.run.run.name} is over; `shoal export` still gives its model")

    def _make_room(self, peer: str, role: Role, network: str) -> str | None:
        """Whether there is a place for it: None, or who has to go for it. Raises ``TryLater`` when there is none."""
        is_observer, has_record = role == "observer", self.has_record(peer)
        alike = [
            (other, one.network, self.standing(other))
            for other, one in self.membership.members.items()
            if one.alive and other != peer and (one.entry.role == "observer") == is_observer
        ]
        newcomers = [one for one in alike if is_observer or not self.has_record(one[0])]
        limits = self.run.access
        most, of_network = OBSERVERS, OBSERVERS_PER_NETWORK
        if not is_observer:
            most, of_network = limits.newcomers(len(alike) - len(newcomers)), limits.members_per_network
        is_full = not self.membership.places_left(role)
        if has_record:
            if not is_full:
                return None
        elif sum(of == network for _, of, _ in newcomers) >= of_network:
            raise TryLater(
                f"the run {self.run.run.name} has {of_network} {_what(is_observer)} from the network {network}, "
                "and takes no more from there: try again in a few minutes"
            )
        elif len(newcomers) < most and not is_full:
            return None
        in_its_place = gives_way(network, newcomers)
        if in_its_place is None:
            raise TryLater(
                f"the run {self.run.run.name} is full: it takes no more than {len(newcomers)} {_what(is_observer)}; "
                "try again in a few minutes"
            )
        return in_its_place

    def lose_idle(self, now_s: float) -> None:
        """Whoever has no record and gets on with nothing leaves its place to others; it may join again."""
        if self.has_ended:
            return
        patience_s = self.deadlines.newcomer_s(self.run.round.max_s)
        for peer, one in list(self.membership.members.items()):
            is_idle = now_s - one.progress_s > patience_s or now_s - one.worked_s > _BELIEVED_S
            if is_idle and one.alive and one.entry.role != "observer" and self.may_be_idle(peer):
                self.record(ev.MemberLost(peer=peer, reason="idle"))

    def describe_model(self, peer: str, model: PeerToCoordinatorDescribeModel) -> None:
        """Raises ``ModelMismatch`` or ``CorpusError`` naming the first difference to the run's first peer."""
        if self.membership.is_observer(peer):
            raise NotAdmitted("observers have no model")
        if self.model is None:
            elements = model.elements
            if not 0 < elements <= _MAX_ELEMENTS:
                raise ModelMismatch(f"a run's model has 1 to {_MAX_ELEMENTS} parameters, this one {elements}")
            inexact = next((spec for spec in model.layout if spec.dtype not in _EXACT_DTYPES), None)
            if inexact is not None:
                raise ModelMismatch(f"parameter {inexact.name} is {inexact.dtype}, and a run's anchor is float32")
            self._check_start(model.layout)
            self._check_pins(model)
            self.record(ev.ModelDescribed(model=model))
            return
        difference = first_difference(self.model.layout, model.layout)
        if difference:
            raise ModelMismatch(f"this model is not the run's: {difference}")
        if self.model.tokens_per_sample != model.tokens_per_sample:
            raise ModelMismatch(
                f"this model takes {model.tokens_per_sample} tokens a sample, the run's {self.model.tokens_per_sample}"
            )
        self._check_pins(model)
        if self._is_news(self.model, model):
            self.record(ev.ModelDescribed(model=model))
        if model.corpus_digest not in (None, self.model.corpus_digest):
            raise CorpusError(DATA_DIFFERS)

    def _check_start(self, layout: tuple[TensorSpec, ...]) -> None:
        start = self.run.start
        difference = start.difference(layout, whole=self.run.pipeline is None) if start else ""
        if start and difference:
            raise ModelMismatch(f"this model is not that of {start.source}, where the run starts: {difference}")

    def _check_pins(self, model: PeerToCoordinatorDescribeModel) -> None:
        """Whoever comes first: what the run file pins is not for members to say."""
        if self.run.pins is not None:
            self.run.pins.check_model(model)

    @staticmethod
    def _is_news(known: PeerToCoordinatorDescribeModel, model: PeerToCoordinatorDescribeModel) -> bool:
        """Whether it tells of the data what nobody has told before."""
        if known.corpus_digest is None:
            return model.corpus_digest is not None
        return known.samples is None and model.samples is not None and known.corpus_digest == model.corpus_digest

    def leave(self, peer: str, reason: str, now_s: float, trouble: str = "") -> None:
        self.now_s = now_s
        if self.membership.members[peer].alive:
            self.record(ev.MemberLost(peer=peer, reason=reason, trouble=trouble))

    def require_member(self, curve_key: bytes) -> str:
        """The live member that holds this key. Raises ``NotAdmitted``, or ``Superseded`` for its predecessor."""
        self.refuse_replaced(curve_key)
        peer = self.membership.holder(curve_key)
        if peer is None:
            raise NotAdmitted("not a member of this run (any more): join again")
        return peer

    def refuse_replaced(self, curve_key: bytes) -> None:
        """Raises ``Superseded``: two processes of one identity would put each other out for ever."""
        if curve_key in self.membership.replaced:
            raise Superseded


def _what(is_observer: bool) -> str:
    return "guests" if is_observer else "members without a record of committed work"


def first_difference(expected: tuple[TensorSpec, ...], found: tuple[TensorSpec, ...]) -> str:
    """A sentence on the first tensor that differs; empty when none does."""
    for index, (theirs, ours) in enumerate(zip(expected, found, strict=False)):
        if theirs != ours:
            return (
                f"parameter {index} is {ours.name} {list(ours.shape)} {ours.dtype} here, "
                f"{theirs.name} {list(theirs.shape)} {theirs.dtype} in the run"
            )
    if len(expected) != len(found):
        return f"it has {len(found)} parameters here, {len(expected)} in the run"
    return ""
