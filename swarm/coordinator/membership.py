"""Members of a scope: those that are alive, the states that they hold, and the roster."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice, takewhile
from types import MappingProxyType
from typing import Any, TypeVar

from shoal.swarm.coordinator.events import (
    MemberExpelled,
    MemberJoined,
    MemberKept,
    MemberLost,
    MemberMoved,
    PeerBanned,
    WorkStanding,
)
from shoal.swarm.coordinator.reachability import is_limited, walls
from shoal.swarm.coordinator.trust import counting, forfeit_credit, weightiest
from shoal.swarm.costs import cost_of, energy_between, price_of
from shoal.swarm.protocol.messages import PeerToCoordinatorHeartbeat
from shoal.swarm.protocol.timing import MemberTimes
from shoal.swarm.protocol.types import (
    MAX_DEVICE_W,
    MAX_STATUSES,
    MAX_TOLD_PATHS,
    RUN_MEMBERS,
    DeviceInfo,
    DeviceUse,
    Headway,
    KeptState,
    MemberStatus,
    PathReport,
    Role,
    RosterDelta,
    RosterEntry,
    WorkPhase,
)

T = TypeVar("T")

_FIRST_BAR, _LONGEST_BAR = 4, 64
"""Rounds without parts to own, after the first failure and at most."""

_FIRST_SUSPENSION, _LONGEST_SUSPENSION = 8, 1024
"""Rounds of a member's first suspension, and at most."""

_UNUSUAL = 3
"""Rounds with a contribution above its bound or next to nothing, from which on a member is suspended."""

_MISSED, _LONGEST_ABSENCE = 2, 64
"""Rounds in a row without a member's contribution until it is left out, and for how many at most."""

_TOLD_TROUBLES = 64
"""Most troubles in one status: a message has room for so many."""

_LONGEST_WALL = 300
_NO_WALLS: Mapping[str, str] = MappingProxyType({})
_NO_SPEEDS: Mapping[str, float] = MappingProxyType({})

_REMEMBERED_STRANGERS = 256
"""Departed members without a trace in the run; of many more, those that joined first are forgotten."""

_FORGOTTEN_AT_ONCE = 64
"""Those are looked for when so many more have left: looking costs as much as there are members that ever left."""

_REMEMBERED_KEYS = 4096
"""Most keys of replaced processes; of more, the earliest are forgotten, whose processes have given up by then."""

_MOST_TIME_S = 1e9
"""Most that is counted of a member's time, whatever becomes of the clock."""

_MOST_ENERGY_J = _MOST_TIME_S * MAX_DEVICE_W
"""Most that is counted of a member's energy."""

_LOGGED_CHANGES = 512
"""Most changes of the roster that are kept; a member further behind gets the whole roster."""


@dataclass
class Member:
    """Coordinator's record of one member. All but ``entry``, ``device``, ``tokens_committed``, ``rounds_committed``,
    ``bandwidth_bps``, ``barred_rounds``, ``failures`` and what stands between these and ``left`` comes from heartbeats.
    ``tokens_ahead``: done for the next round already, while this one is averaged (``overlap``). ``bandwidth_bps``: what
    is believed of its link, 0 for unknown, whatever it claims. ``failures``: how often it did not deliver
    what others had to get from it; for the next ``barred_rounds`` committed rounds that it takes part in, it owns
    nothing. ``credit``: for its committed work, which decays, ``credit_rounds``: rounds in which it earned any, and
    ``has_credit``: whether that is enough for its reports to decide (``trust.py``). ``pace_tps``: the tokens a second
    that it was seen to commit. ``missed``: rounds in a row whose mean
    lacks its contribution; ``absences``: how often it was left out for that, less what it has delivered since;
    ``out_until``: the first round that it may work for again. ``kept``: states that it could go back to;
    ``joined_version`` and ``seen_version``: the run's anchor version when its process joined, or came back after newer
    ones had been made, and the newest one while it was here. ``carried_tokens``: of work that rounds were planned with
    and left out, since the last one that had it all; ``last_tokens``: the
    weight of its last committed contribution; ``unusual_rounds``: in how many it was above its bound or next to
    nothing; ``worked_version``: the newest version from which work of its was committed; ``suspended_until``: the first
    round that its work counts in again, after that, or after the run went back behind rounds that it may have spoilt,
    ``suspensions`` times by now; ``work``: what validators found of it; ``diverged``: the state from which it says that
    its work is of no use. ``left``: why it is not alive any more, and ``trouble``, by its own word, what made it go.
    ``network``: where it comes from; ``invite``: the id of the invite that let its identity in; ``joined_s``: when it
    joined, in Unix time; ``present_s``: how long it was here, up to ``counted_to_s``, of which ``open_s`` in the open
    round, and ``round_s`` in the newest that has ended; ``worked_s``: when work of it was committed last, or when it
    joined; ``progress_s``: when it last said that it had got on with anything; ``unmet``: members with which it could
    make no connection; ``phase``: what its training does; ``use``: of its machine; ``times``: where the time of its
    last round went. ``energy_j``: what its GPU took up to the end of the last round, ``round_energy_j`` of it in that
    round, and ``open_energy_j`` since; ``metered``: the moment and the figure of its meter's last reading."""

    entry: RosterEntry
    device: DeviceInfo
    heard_s: float
    alive: bool = True
    activity: str = "joining"
    anchor_version: int | None = None
    state_digest: bytes | None = None
    tokens_done: int = 0
    tokens_ahead: int = 0
    tokens_per_s: float = 0.0
    step_s: float = 0.0
    loss: float | None = None
    chunks_moved: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    claimed_bps: float = 0.0
    bandwidth_bps: float = 0.0
    tokens_committed: int = 0
    rounds_committed: int = 0
    credit: int = 0
    credit_rounds: int = 0
    has_credit: bool = False
    pace_tps: float = 0.0
    missed: int = 0
    absences: int = 0
    out_until: int = 0
    barred_rounds: int = 0
    failures: int = 0
    carried_tokens: int = 0
    last_tokens: int = 0
    unusual_rounds: int = 0
    worked_version: int | None = None
    suspended_until: int = 0
    suspensions: int = 0
    work: WorkStanding = field(default_factory=WorkStanding)
    joined_version: int = 0
    seen_version: int = 0
    left: str = ""
    trouble: str = ""
    network: str = ""
    invite: str = ""
    joined_s: float = 0.0
    present_s: float = 0.0
    open_s: float = 0.0
    round_s: float = 0.0
    counted_to_s: float = 0.0
    energy_j: float = 0.0
    round_energy_j: float = 0.0
    open_energy_j: float = 0.0
    metered: tuple[float, float] | None = None
    worked_s: float = field(init=False)
    progress_s: float = field(init=False)
    kept: tuple[KeptState, ...] = ()
    headway: Headway = field(default_factory=Headway)
    diverged: KeptState | None = None
    paths: tuple[PathReport, ...] = ()
    unmet: tuple[str, ...] = ()
    phase: WorkPhase = "waiting"
    use: DeviceUse | None = None
    times: MemberTimes | None = None

    def __post_init__(self) -> None:
        self.worked_s = self.progress_s = self.heard_s

    def uncounted_s(self, unix_s: float) -> float:
        """Return for how long the member has been here since its time was last counted."""
        return max(0.0, unix_s - self.counted_to_s) if self.alive and self.counted_to_s else 0.0

    def count_time(self, unix_s: float) -> None:
        """Count the time that the member has been here."""
        since_s = self.uncounted_s(unix_s)
        self.present_s = min(self.present_s + since_s, _MOST_TIME_S)
        self.open_s = min(self.open_s + since_s, _MOST_TIME_S)
        self.counted_to_s = max(unix_s, self.counted_to_s)

    def count_energy(self, use: DeviceUse, now_s: float) -> None:
        """Count the energy since the last reading of the member's meter; the first one has none before it."""
        if use.energy_j is None:
            return
        if self.metered is not None:
            read_s, earlier_j = self.metered
            self.open_energy_j += energy_between(earlier_j, use.energy_j, now_s - read_s)
        self.metered = now_s, use.energy_j

    @property
    def told_energy_j(self) -> float | None:
        """Energy that its GPU has taken, with the open round; None where nothing measures it."""
        total = min(self.energy_j + self.open_energy_j, _MOST_ENERGY_J)
        return total if total or self.metered is not None else None

    @property
    def has_begun(self) -> bool:
        """Whether the member has reported anything but that it is alive."""
        return self.anchor_version is not None or bool(self.kept) or self.headway != Headway()

    @property
    def is_trainer(self) -> bool:
        return self.alive and self.entry.role in ("trainer", "contributor")

    @property
    def can_own(self) -> bool:
        """Whether the member may reduce a part."""
        return self.can_be_reached and not self.barred_rounds

    @property
    def can_be_reached(self) -> bool:
        """Whether the member may reduce a part if no reliable member can."""
        return self.entry.role == "trainer" and self.entry.reachable

    def fail(self) -> None:
        """Bar the member from owning parts, twice as long each time: a bad link is tried seldom."""
        self.barred_rounds = min(_FIRST_BAR << min(self.failures, 8), _LONGEST_BAR)
        self.failures += 1

    @property
    def is_always_unusual(self) -> bool:
        """Whether a member without credit brings what is no use in most rounds, by its own claims."""
        is_mostly = 2 * self.unusual_rounds > self.rounds_committed
        return not self.has_credit and self.unusual_rounds >= _UNUSUAL and is_mostly

    def suspend(self, current_round: int) -> None:
        """Suspend the member from the next round on, twice as long each time."""
        rounds = min(_FIRST_SUSPENSION << min(self.suspensions, 16), _LONGEST_SUSPENSION)
        self.suspended_until = current_round + 1 + rounds
        self.suspensions += 1

    def miss(self, round_number: int) -> None:
        """Note that the member's contribution was waited for and did not come.

        After two rounds in a row it is left out for 2, 4, 8 … rounds; after an absence, already for the next miss."""
        self.missed += 1
        if self.missed >= _MISSED:
            self.absences += 1
            self.missed = _MISSED - 1
            self.out_until = round_number + 1 + min(2 ** min(self.absences, 8), _LONGEST_ABSENCE)

    def deliver(self) -> None:
        """Note that a round was committed with the member's contribution."""
        self.missed = 0
        self.absences = max(0, self.absences - 1)

    @property
    def states(self) -> set[tuple[int, bytes]]:
        """Return all states that the member reports to hold or keep, as (version, digest)."""
        held = {(self.anchor_version, self.state_digest)} if self.anchor_version is not None else set()
        return {(version, digest) for version, digest in held if digest is not None} | {
            (one.anchor_version, one.digest) for one in self.kept
        }

    def forget_progress(self) -> None:
        """Forget uncommitted work, which is lost."""
        self.tokens_done = self.tokens_ahead = 0

    def enter_round(self, is_committed: bool) -> None:
        """Start the next round with the work done ahead, and with this one's unless that is committed."""
        self.tokens_done = self.tokens_ahead + (0 if is_committed else self.tokens_done)
        self.tokens_ahead = 0
        self.barred_rounds = max(0, self.barred_rounds - is_committed)


@dataclass
class Membership:
    """Members by peer id, and the roster with its version.

    Members stay known after they left; observers are forgotten, so that looking at a run leaves no traces.
    ``members``: all, in the order in which they joined last; ``live``: those of them that are here. What joining,
    leaving and a tick cost goes by the latter."""

    members: dict[str, Member] = field(default_factory=dict)
    live: dict[str, Member] = field(default_factory=dict)
    roster_version: int = 0
    places: int = field(default=RUN_MEMBERS, compare=False)
    """Most members of a role at a time; what a message has room for, but in simulations."""
    replaced: dict[bytes, None] = field(default_factory=dict)
    """CURVE keys of processes that another one of the same identity has replaced, in that order."""
    _changes: deque[tuple[int, str]] = field(
        default_factory=lambda: deque(maxlen=_LOGGED_CHANGES), compare=False, repr=False
    )
    """The roster's last versions, and the peer that joined or left in each."""
    _credits: int = field(default=0, compare=False)
    """Number of changes of members' credit, and of committed rounds."""
    _states: int = field(default=0, compare=False)
    """Number of changes of members' states."""
    _meetings: int = field(default=0, compare=False)
    """Number of changes of what decides on who can meet whom, but for the roster and credit."""
    _limited: set[str] = field(default_factory=set, compare=False, repr=False)
    """Live trainers that might not meet everybody; mostly there are none, and nothing has to be worked out."""
    _holders: dict[int, dict[bytes, dict[str, Member]]] = field(default_factory=dict, compare=False, repr=False)
    """Live trainers by the version and the digest of the state that they report."""
    _remembered: dict[str, tuple[Any, dict[Any, Any]]] = field(default_factory=dict, compare=False, repr=False)
    """Cached results over all members, which every message of every member needs, by what they depend on."""
    _quiet_until_s: float = field(default=-math.inf, compare=False, repr=False)
    """Moment before which nobody can have been silent for too long."""

    def join(self, event: MemberJoined, now_s: float, anchor_version: int) -> None:
        earlier = self.members.pop(event.entry.peer, None)
        self._leave(event.entry.peer)
        member = Member(event.entry, event.device, now_s, joined_version=anchor_version, seen_version=anchor_version)
        member.network, member.invite, member.joined_s = event.network, event.invite, event.at_s
        member.counted_to_s = event.at_s
        if earlier is not None:
            member.invite = event.invite or earlier.invite
            member.present_s, member.open_s, member.round_s = earlier.present_s, earlier.open_s, earlier.round_s
            member.energy_j, member.round_energy_j = earlier.energy_j, earlier.round_energy_j
            member.open_energy_j = earlier.open_energy_j
            member.tokens_committed = earlier.tokens_committed
            member.rounds_committed = earlier.rounds_committed
            member.credit, member.credit_rounds = earlier.credit, earlier.credit_rounds
            member.has_credit = earlier.has_credit
            member.last_tokens = earlier.last_tokens
            member.unusual_rounds, member.worked_version = earlier.unusual_rounds, earlier.worked_version
            member.suspended_until, member.suspensions = earlier.suspended_until, earlier.suspensions
            member.pace_tps, member.work = earlier.pace_tps, earlier.work
            member.barred_rounds, member.failures = earlier.barred_rounds, earlier.failures
            member.missed, member.absences, member.out_until = earlier.missed, earlier.absences, earlier.out_until
            if earlier.entry.certificate.curve_key != event.entry.certificate.curve_key:
                self._replace(earlier.entry.certificate.curve_key)
            elif earlier.seen_version == anchor_version:  # no newer one was made without this process
                member.joined_version = earlier.joined_version
        self.members[event.entry.peer] = member
        self._enter(event.entry.peer, member)
        self._note_change(event.entry.peer)

    def _enter(self, peer: str, member: Member) -> None:
        self.live[peer] = member
        self._note_limits(peer, member)

    def _leave(self, peer: str) -> None:
        member = self.live.pop(peer, None)
        self._limited.discard(peer)
        if member is not None:
            self._note_holder(peer, member, holds=False)

    def _note_limits(self, peer: str, member: Member) -> None:
        if member.is_trainer and is_limited(member):
            self._limited.add(peer)
        else:
            self._limited.discard(peer)

    def _note_holder(self, peer: str, member: Member, *, holds: bool) -> None:
        """Enter a member among those that hold the state that it reports, or take it out."""
        version, digest = member.anchor_version, member.state_digest
        if version is None or digest is None or member.entry.role not in ("trainer", "contributor"):
            return
        if holds:
            self._holders.setdefault(version, {}).setdefault(digest, {})[peer] = member
            return
        by_digest = self._holders.get(version, {})
        by_digest.get(digest, {}).pop(peer, None)
        if not by_digest.get(digest, True):
            del by_digest[digest]
        if not by_digest:
            self._holders.pop(version, None)

    def _replace(self, curve_key: bytes) -> None:
        self.replaced[curve_key] = None
        if len(self.replaced) > _REMEMBERED_KEYS:
            del self.replaced[next(iter(self.replaced))]

    def _note_change(self, peer: str) -> None:
        self.roster_version += 1
        self._changes.append((self.roster_version, peer))

    def move(self, event: MemberMoved) -> None:
        """Change the ways in which a member is reached."""
        member = self.members[event.peer]
        ways = {"addresses": event.addresses, "reachable": event.reachable}
        member.entry = member.entry.model_copy(update=ways)
        if event.peer in self.live:
            self._note_limits(event.peer, member)
        self._note_change(event.peer)

    def lose(self, event: MemberLost) -> None:
        self._note_change(event.peer)
        member = self.members[event.peer]
        self._leave(event.peer)
        if member.entry.role == "observer":
            del self.members[event.peer]
            return
        member.count_time(event.at_s)
        member.alive = False
        member.activity, member.left, member.trouble = "gone", event.reason, event.trouble
        member.tokens_per_s = 0.0
        member.forget_progress()

    def open_energy_j(self) -> dict[str, float]:
        """Return what members' GPUs have taken since the last round, of those that measure it."""
        return {peer: one.open_energy_j for peer, one in self.members.items() if one.open_energy_j}

    def end_round(self, unix_s: float, energy_j: Mapping[str, float]) -> None:
        """Count the time and the energy of all members in the round that has ended."""
        for peer, member in self.members.items():
            member.count_time(unix_s)
            member.round_s, member.open_s = member.open_s, 0.0
            taken_j = energy_j.get(peer, 0.0)
            member.round_energy_j, member.open_energy_j = taken_j, max(0.0, member.open_energy_j - taken_j)
            member.energy_j = min(member.energy_j + taken_j, _MOST_ENERGY_J)

    def skip_time(self, unix_s: float) -> None:
        """Leave out the time in which no coordinator was here to know of its members."""
        for member in self.live.values():
            member.counted_to_s = max(unix_s, member.counted_to_s)

    def forget_strangers(self, left_traces: Callable[[str], bool]) -> list[str]:
        """Forget and return members that left and did nothing that ``left_traces``, all but the last ones.

        Identities cost nothing, so there may be any number of them. Those that left are looked at once for many of
        them, at a number that is the same for whoever replays the journal."""
        gone = len(self.members) - len(self.live)
        if gone <= _REMEMBERED_STRANGERS or gone % _FORGOTTEN_AT_ONCE:
            return []
        strangers = [peer for peer in self.members if peer not in self.live and not left_traces(peer)]
        forgotten = strangers[: max(0, len(strangers) - _REMEMBERED_STRANGERS)]
        for peer in forgotten:
            del self.members[peer]
        return forgotten

    def advance(self, anchor_version: int) -> None:
        """Note that the run is at a newer version, with which a member may have got credit."""
        self._credits += 1
        for member in self.trainers().values():
            member.seen_version = anchor_version

    def go_back(self, anchor_version: int) -> None:
        """Note that the run is at an earlier version: what members saw or did since counts no more."""
        for member in self.members.values():
            member.joined_version = min(member.joined_version, anchor_version)
            member.seen_version = min(member.seen_version, anchor_version)
            if member.worked_version is not None and member.worked_version >= anchor_version:
                member.worked_version = anchor_version - 1 if anchor_version else None
            member.carried_tokens, member.last_tokens, member.diverged = 0, 0, None
            member.forget_progress()

    def hear(self, peer: str, heartbeat: PeerToCoordinatorHeartbeat, current_round: int, now_s: float) -> bool:
        """Take over a heartbeat. Returns whether it shows progress in the averaging.

        Tokens of a peer that does not know the latest verdict are not counted, as they may be committed already."""
        member = self.members[peer]
        moved = heartbeat.chunks_moved > member.chunks_moved
        if _progress(heartbeat) != _progress(member):
            member.progress_s = now_s
        is_new = (heartbeat.anchor_version, heartbeat.state_digest) != (member.anchor_version, member.state_digest)
        if is_new:
            self._states += 1
            self._note_holder(peer, member, holds=False)
        is_met = heartbeat.unmet == member.unmet
        if not is_met or (heartbeat.anchor_version is None) != (member.anchor_version is None):
            self._meetings += 1
        member.heard_s = now_s
        for name in (
            "activity",
            "anchor_version",
            "state_digest",
            "tokens_per_s",
            "step_s",
            "loss",
            "chunks_moved",
            "bytes_sent",
            "bytes_received",
            "kept",
            "headway",
            "diverged",
            "paths",
            "unmet",
            "phase",
        ):
            setattr(member, name, getattr(heartbeat, name))
        if is_new and member.alive:
            self._note_holder(peer, member, holds=True)
        if not is_met and member.alive:
            self._note_limits(peer, member)
        member.claimed_bps = heartbeat.bandwidth_bps
        if heartbeat.use is not None:
            member.use = heartbeat.use
            member.count_energy(heartbeat.use, now_s)
        if heartbeat.round == current_round + 1:
            member.tokens_ahead = heartbeat.tokens_done
        else:
            member.forget_progress()
            if heartbeat.round == current_round:
                member.tokens_done = heartbeat.tokens_done
        return moved

    def silent(self, now_s: float, dead_s: float) -> list[str]:
        """Return members that have been silent for too long."""
        if now_s < self._quiet_until_s:
            return []
        silent = [peer for peer, member in self.live.items() if now_s - member.heard_s > dead_s]
        # Moments of life only grow, and whoever joins has just been heard.
        first_s = min((member.heard_s for member in self.live.values()), default=now_s)
        self._quiet_until_s = min(first_s, now_s) + dead_s
        return silent

    def excuse(self, seconds: float, now_s: float) -> None:
        """Exclude a time in which the coordinator could hear nobody."""
        for member in self.live.values():
            member.heard_s = min(now_s, member.heard_s + seconds)
            member.progress_s = min(now_s, member.progress_s + seconds)
            member.worked_s = min(now_s, member.worked_s + seconds)

    def kept(self) -> tuple[tuple[MemberKept, ...], tuple[bytes, ...]]:
        """Return all members but observers, and the keys of replaced processes, for a snapshot."""
        names = MemberKept.model_fields
        members = [one for one in self.members.values() if one.entry.role != "observer"]
        return tuple(MemberKept(**{name: getattr(one, name) for name in names}) for one in members), tuple(
            self.replaced
        )

    def note_work(self, peer: str, work: WorkStanding) -> None:
        """Note what validators say of a member's work by now, which costs it its credit where it is doubted."""
        member = self.members[peer]
        member.work = work
        if work.is_doubted:
            self._credits += 1
            forfeit_credit(member)

    def restore(self, members: Iterable[MemberKept], replaced: Iterable[bytes], epoch: int, now_s: float) -> None:
        """Take over a snapshot's members. Those that were alive count as heard now."""
        for kept in members:
            known = {name: getattr(kept, name) for name in MemberKept.model_fields}
            activity = "joining" if kept.alive else "gone"
            member = self.members[kept.entry.peer] = Member(heard_s=now_s, activity=activity, **known)
            if kept.alive:
                self._enter(kept.entry.peer, member)
        self.replaced = dict.fromkeys(replaced)
        self.roster_version = epoch + len(self.members)

    def is_observer(self, peer: str) -> bool:
        return peer in self.members and self.members[peer].entry.role == "observer"

    def places_left(self, role: Role) -> int:
        """Return how many more members of a role the messages have room for."""
        return self.places - sum(one.entry.role == role for one in self.live.values())

    def roster_news(self, version: int) -> tuple[tuple[RosterEntry, ...] | None, RosterDelta | None]:
        """Return the whole roster, or what has changed since ``version``, or nothing if that is the newest."""
        if version == self.roster_version:
            return None, None
        if not 0 < self.roster_version - version <= len(self._changes):  # versions that nobody can have are not kept
            return self.roster(), None
        delta = self._remember("roster", ("delta", version), lambda: self._delta(version))
        return (None, delta) if delta is not None else (self.roster(), None)

    def _delta(self, since: int) -> RosterDelta | None:
        """Return the changes since a version; None if they are not all kept."""
        changed = [peer for _, peer in takewhile(lambda one: one[0] > since, reversed(self._changes))]
        if len(changed) != self.roster_version - since:  # versions were left out when the coordinator started
            return None
        latest = {peer: self.members.get(peer) for peer in reversed(changed)}
        entries = tuple(one.entry for one in latest.values() if one is not None and one.alive)
        removed = tuple(peer for peer, one in latest.items() if one is None or not one.alive)
        return RosterDelta(since=since, changed=entries, removed=removed)

    def roster(self) -> tuple[RosterEntry, ...]:
        return self._remember("roster", "entries", lambda: tuple(member.entry for member in self.live.values()))

    def trainers(self) -> Mapping[str, Member]:
        return self._remember(
            "roster", "trainers", lambda: {peer: member for peer, member in self.live.items() if member.is_trainer}
        )

    def with_credit(self) -> Mapping[str, Member]:
        """Return the live trainers with credit."""
        return self._remember(
            "credit", "members", lambda: {peer: member for peer, member in self.trainers().items() if member.has_credit}
        )

    def forfeit_credit(self, banned: PeerBanned | MemberExpelled) -> None:
        """Take all credit away from members that are banned or expelled: one that is let in again starts anew."""
        network = banned.network if isinstance(banned, PeerBanned) else ""
        for peer, member in self.members.items():
            if peer == banned.peer or (network and member.network == network):
                forfeit_credit(member)
        self._credits += 1

    def credit_shares(self) -> Mapping[str, float]:
        """Return the share of each live trainer with credit in all their credit: of what is decided by credit."""

        def answer() -> Mapping[str, float]:
            total = sum(member.credit for member in self.with_credit().values())
            return {peer: member.credit / total for peer, member in self.with_credit().items()}

        return self._remember("credit", "shares", answer)

    def holder(self, curve_key: bytes) -> str | None:
        """Return the live member whose process holds this key, if any."""
        holders = self._remember(
            "roster",
            "holders",
            lambda: {one.entry.certificate.curve_key: peer for peer, one in self.live.items()},
        )
        return holders.get(curve_key)

    def synced(self, anchor_version: int, digest: bytes | None) -> Mapping[str, Member]:
        """Return the live trainers that hold this anchor version, with this digest unless that is None."""
        by_digest = self._holders.get(anchor_version, {})
        if digest is not None:
            return MappingProxyType(by_digest.get(digest, {}))
        return {peer: member for holders in by_digest.values() for peer, member in holders.items()}

    def common_digest(self, anchor_version: int) -> bytes | None:
        """Return the digest that those that hold this version, and have most of the work, report."""

        def answer() -> bytes | None:
            holders = self.synced(anchor_version, None)
            said = {peer: holders[peer].state_digest for peer in counting(holders, holders)}
            return weightiest(said, holders)

        return self._remember("states", ("digest", anchor_version), answer)

    @property
    def credit_stamp(self) -> tuple[int, int]:
        """Changes whenever somebody joins, leaves, or gets or loses credit."""
        return self.roster_version, self._credits

    def _remember(self, kind: str, question: object, answer: Callable[[], T]) -> T:
        """Return a cached answer, until what its ``kind`` depends on has changed: the ``roster`` alone, the ``credit``
        too, the members' ``states`` too, or instead of these who has ``met`` whom."""
        now: tuple[int, ...] = (self.roster_version,)
        if kind != "roster":
            now += (self._credits, {"credit": 0, "states": self._states, "met": self._meetings}[kind])
        made, answers = self._remembered.get(kind, (None, {}))
        if made != now:
            answers = {}
            self._remembered[kind] = now, answers
        if question not in answers:
            answers[question] = answer()
        known: T = answers[question]
        return known

    def relayed(self) -> set[str]:
        """Return the members to which most of the others have their path over a relay, by their word."""
        all_paths, relayed = Counter[str](), Counter[str]()
        for member in self.live.values():
            for path in member.paths:
                all_paths[path.peer] += 1
                relayed[path.peer] += path.kind == "relayed"
        return {peer for peer, paths in relayed.items() if 2 * paths > all_paths[peer]}

    def walls(self, group_size: int) -> Mapping[str, str]:
        """Return why live trainers cannot take part, by peer: those that can meet none of whom they would have to."""
        if not self._limited:
            return _NO_WALLS
        return self._remember("met", "walls", lambda: walls(self.trainers(), group_size))

    def status(
        self,
        anchor_version: int,
        digest: bytes | None,
        prices: Mapping[str, float],
        unix_s: float,
        current_round: int = 0,
        walls: Mapping[str, str] = _NO_WALLS,
        steady_tokens_per_s: Mapping[str, float] = _NO_SPEEDS,
    ) -> tuple[MemberStatus, ...]:
        """Return the members for a status, live ones first, as many as a message has room for. ``prices``: of devices
        in the run file; ``unix_s``: now; ``walls``: why some members cannot take part; ``steady_tokens_per_s``: speed
        over whole rounds, of those that have one."""
        synced = self.synced(anchor_version, digest)
        total = sum(member.tokens_committed for member in self.members.values())
        credit = self.credit_shares()
        recorded = [(peer, member) for peer, member in self.members.items() if member.entry.role != "observer"]
        recorded.sort(key=lambda one: not one[1].alive)
        told = {peer: member.trouble for peer, member in recorded if member.trouble}
        troubles = dict(islice(told.items(), _TOLD_TROUBLES))

        def time_and_price(member: Member) -> dict[str, Any]:
            present_s = min(member.present_s + member.uncounted_s(unix_s), _MOST_TIME_S)
            price = price_of(member.device, prices)
            energy_j = member.told_energy_j
            return {
                "present_s": present_s,
                "price_per_hour": price,
                "cost": cost_of(price, present_s),
                "energy_j": energy_j,
                "round_energy_j": None if energy_j is None else member.round_energy_j,
            }

        return tuple(
            MemberStatus(
                peer=peer,
                name=member.entry.name,
                device=member.device,
                activity=member.activity,
                alive=member.alive,
                synced=peer in synced,
                reachable=member.entry.reachable,
                relayed=bool(member.entry.relays),
                paths=member.paths[:MAX_TOLD_PATHS],
                tokens_per_s=member.tokens_per_s,
                steady_tokens_per_s=steady_tokens_per_s.get(peer, 0.0) if member.alive else 0.0,
                tokens_committed=member.tokens_committed,
                share=member.tokens_committed / total if total else 0.0,
                credit=credit.get(peer, 0.0),
                loss=member.loss,
                bytes_sent=member.bytes_sent,
                bytes_received=member.bytes_received,
                left=member.left[:64],
                trouble=troubles.get(peer, ""),
                unusual=member.unusual_rounds,
                suspended_rounds=max(0, member.suspended_until - current_round),
                wall=walls.get(peer, "")[:_LONGEST_WALL],
                times=member.times.training if member.times is not None and member.alive else None,
                use=member.use if member.alive else None,
                role=member.entry.role,
                round_s=member.round_s,
                **time_and_price(member),
            )
            for peer, member in recorded[:MAX_STATUSES]
        )


def _progress(of: Member | PeerToCoordinatorHeartbeat) -> tuple[Any, ...]:
    """Return the reported values that change while a member makes progress."""
    state = of.anchor_version, of.state_digest, of.kept, of.headway
    return *state, of.activity, of.chunks_moved, of.bytes_received, of.tokens_done
