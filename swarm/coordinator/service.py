"""The coordinator as a program: sockets, a clock and the journal around the pure machine."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Set
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from shoal.swarm.aio import in_thread, task_scope
from shoal.swarm.coordinator.access_trail import AccessTrail
from shoal.swarm.coordinator.events import JournalEvent, verdicts_in
from shoal.swarm.coordinator.evidence_intake import EvidenceIntake, is_whole
from shoal.swarm.coordinator.history_reader import HistoryReader
from shoal.swarm.coordinator.host_commands import HostCommands, read_records
from shoal.swarm.coordinator.journal import Journal
from shoal.swarm.coordinator.membership import Member
from shoal.swarm.coordinator.pipeline_run import PipelineRun
from shoal.swarm.coordinator.placement import Planner, planner_of
from shoal.swarm.coordinator.round_scope import RoundScope
from shoal.swarm.coordinator.run import PlainRun
from shoal.swarm.coordinator.run_relays import RunRelays
from shoal.swarm.coordinator.stale_journal import check_ours, stale_journal_error
from shoal.swarm.errors import (
    DeadlineExceeded,
    LeaseLost,
    LinkError,
    NotAdmitted,
    ShoalError,
    StorageError,
    TryLater,
    UnknownRun,
)
from shoal.swarm.protocol.addresses import may_name, network_of, plain_host
from shoal.swarm.protocol.identity import Identity, verify_certificate
from shoal.swarm.protocol.messages import (
    Acknowledged,
    CoordinatorToPeerAddresses,
    CoordinatorToPeerAddressTried,
    CoordinatorToPeerClaimed,
    CoordinatorToPeerDial,
    CoordinatorToPeerGetSpans,
    CoordinatorToPeerJoinAccepted,
    CoordinatorToPeerLease,
    CoordinatorToPeerModelAccepted,
    CoordinatorToPeerReceipt,
    CoordinatorToPeerRelayOffered,
    CoordinatorToPeerRelays,
    CoordinatorToPeerRun,
    CoordinatorToPeerSpans,
    CoordinatorToPeerStatus,
    CoordinatorToPeerSuperseded,
    CoordinatorToPeerTimings,
    CoordinatorToPeerView,
    HostToCoordinatorCommand,
    ListRecords,
    PeerToCoordinatorAccuseReplica,
    PeerToCoordinatorClaim,
    PeerToCoordinatorDescribeModel,
    PeerToCoordinatorDrive,
    PeerToCoordinatorEvaluated,
    PeerToCoordinatorGetRelays,
    PeerToCoordinatorGetRun,
    PeerToCoordinatorGetSpans,
    PeerToCoordinatorGetStatus,
    PeerToCoordinatorGetTimings,
    PeerToCoordinatorGetVerdicts,
    PeerToCoordinatorGetWork,
    PeerToCoordinatorHeartbeat,
    PeerToCoordinatorJoinRun,
    PeerToCoordinatorLeave,
    PeerToCoordinatorOfferRelay,
    PeerToCoordinatorRelease,
    PeerToCoordinatorRequestDial,
    PeerToCoordinatorRequestLease,
    PeerToCoordinatorRoundReady,
    PeerToCoordinatorRoundReport,
    PeerToCoordinatorScoreWork,
    PeerToCoordinatorSecureStep,
    PeerToCoordinatorShowAddresses,
    PeerToCoordinatorShowCapability,
    PeerToCoordinatorShowEvidence,
    PeerToCoordinatorShowVerdict,
    PeerToCoordinatorSpans,
    PeerToCoordinatorTryAddress,
)
from shoal.swarm.protocol.paths import PASS_S, make_pass, sign_relay
from shoal.swarm.protocol.rounds import RunView, Verdict
from shoal.swarm.protocol.run_file import RunFile
from shoal.swarm.protocol.statements import check_ready, check_report
from shoal.swarm.protocol.types import MAX_TROUBLE, Address, Message, Role, RosterEntry, TensorSpec
from shoal.swarm.sample_ranges import Ranges, to_wire
from shoal.swarm.token_buckets import TokenBuckets
from shoal.swarm.transport.channel import Channel
from shoal.swarm.transport.node import Node
from shoal.swarm.transport.relay.client import measure

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from shoal.swarm.averaging.chunk_judge import Judgement

log = logging.getLogger(__name__)


# Handlers ---------------------------------------------------------------------------------------------------

_DIAL_BACK_S = 2.0
_SPANS_S = 5.0
"""Time for a member to say what it did in a round."""
_SPANS_AT_ONCE = 32
"""Most members that are asked for that at a time: those that do not answer hold a handler for so long."""

Handler = Callable[[Channel, Message], Coroutine[Any, Any, Message]]


class MemberRequest:
    """A member's request, in turn with all others: entered with the member, left when what it causes is journaled.

    A class, as a generator would take longer than what most requests need."""

    def __init__(self, service: CoordinatorService, scope: RoundScope | PipelineRun, channel: Channel) -> None:
        self._service = service
        self._scope = scope
        self._channel = channel

    async def __aenter__(self) -> str:
        await self._service.lock.acquire()
        try:
            return self._scope.admission.require_member(self._channel.remote_key)
        except BaseException:
            self._service.lock.release()
            raise

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is None:
                await self._service.flush()
        finally:
            self._service.lock.release()


@dataclass
class _SentPlan:
    """Plan that a member was sent, and when it is sent again unless the member names it: after ever longer pauses.

    Thousands of plans take longer than a heartbeat to leave, and each repeat would make all others wait for longer."""

    digest: bytes | None
    again_s: float
    pause_s: float

    def repeats(self, now_s: float) -> bool:
        """Whether to send it again now."""
        if now_s < self.again_s:
            return False
        self.pause_s *= 2
        self.again_s = now_s + self.pause_s
        return True


class ScopeHandlers:
    """Answers to what members ask in one scope: a plain run, a pipeline run's own scope, or one of its stages.

    ``rounds``: the scope as one with rounds, else None; ``pipeline``: the run that the scope belongs to, else None."""

    def __init__(self, service: CoordinatorService, scope: RoundScope | PipelineRun) -> None:
        self.service = service
        self.scope = scope
        self.rounds = scope if isinstance(scope, RoundScope) else None
        self.pipeline = service.run if isinstance(service.run, PipelineRun) else None
        self.known: dict[str, tuple[int, bytes | None, bytes | None]] = {}
        """By member, the version of the roster that it has or was sent, the chain of the newest verdict and the digest
        of the newest plan that it reported. What was sent may get lost, so only the member's word counts for these."""
        self._sent_plans: dict[str, _SentPlan] = {}
        """By member, the plan that it was sent last."""
        self._bare: tuple[RunView, RunView] | None = None
        """The view whose plan was left out last, and what was left."""
        self._whole_roster_from_s: dict[str, float] = {}
        """By member, the moment from which it may get a whole roster again, whatever version it claims to have."""
        self._told_from_s: dict[str, float] = {}
        self._told_status: CoordinatorToPeerStatus | None = None
        for kind, handler in self._requests().items():
            service.node.control.handle(kind, service.guarded(handler), scope.number, service.name)

    def _requests(self) -> dict[type[Message], Handler]:
        """Return which method answers which message in this scope."""
        answers: dict[type[Message], Handler] = {
            PeerToCoordinatorGetRun: self._run_file,
            PeerToCoordinatorJoinRun: self._join,
            PeerToCoordinatorHeartbeat: self._heartbeat,
            PeerToCoordinatorLeave: self._leave,
            PeerToCoordinatorGetStatus: self._status,
            PeerToCoordinatorGetSpans: self._spans,
            PeerToCoordinatorGetTimings: self._timings,
            PeerToCoordinatorGetVerdicts: self._history,
        }
        if not self.scope.number:
            answers |= {
                HostToCoordinatorCommand: self._host_command,
                PeerToCoordinatorGetRelays: self._relays,
                PeerToCoordinatorOfferRelay: self._offer_relay,
                PeerToCoordinatorShowAddresses: self._show_addresses,
                PeerToCoordinatorTryAddress: self._try_address,
                PeerToCoordinatorRequestDial: self._request_dial,
            }
        if self.rounds is None:
            return answers | {
                PeerToCoordinatorShowCapability: self._capability,
                PeerToCoordinatorDrive: self._drive,
                PeerToCoordinatorAccuseReplica: self._accuse,
            }
        answers |= {
            PeerToCoordinatorDescribeModel: self._describe,
            PeerToCoordinatorRoundReady: self._ready,
            PeerToCoordinatorRoundReport: self._report,
            PeerToCoordinatorSecureStep: self._secure_step,
            PeerToCoordinatorShowVerdict: self._show_verdict,
            PeerToCoordinatorShowEvidence: self._show_evidence,
        }
        if self.rounds.stage is None:
            return answers | {
                PeerToCoordinatorRequestLease: self._lease,
                PeerToCoordinatorGetWork: self._work,
                PeerToCoordinatorScoreWork: self._score,
                PeerToCoordinatorEvaluated: self._evaluated,
            }
        return answers | {PeerToCoordinatorClaim: self._claim, PeerToCoordinatorRelease: self._release}

    def _request(self, channel: Channel) -> MemberRequest:
        """Yield the member that asks; what it causes is journaled before it is answered. Raises ``NotAdmitted``."""
        return MemberRequest(self.service, self.scope, channel)

    @asynccontextmanager
    async def _frequent_request(self, channel: Channel) -> AsyncIterator[str]:
        """As ``_request``, with one write for all members that ask while one is being answered."""
        async with self.service.lock:
            yield self.scope.admission.require_member(channel.remote_key)
        async with self.service.lock:
            await self.service.flush()

    # What members are told ----------------------------------------------------------------------------------

    def view(self, peer: str) -> CoordinatorToPeerView:
        """Return a member's view, with the roster if it lacks that. A heartbeat makes up for a lost view."""
        roster_version, chain, plan = self.known.get(peer, (-1, None, None))
        now_s = time.monotonic()
        view = self.scope.view(peer, now_s, roster_version, chain, plan)
        if view.plan is not None:
            # What was sent a moment ago is on its way. A member that lacks it does not name it in its next heartbeats.
            sent = self._sent_plans.get(peer)
            if sent is None or sent.digest != view.plan_digest:
                pause_s = self.scope.deadlines.heartbeat_s / 2
                self._sent_plans[peer] = _SentPlan(view.plan_digest, now_s + pause_s, pause_s)
            elif not sent.repeats(now_s):
                view = self._without_plan(view)
        if view.roster is not None:
            if now_s < self._whole_roster_from_s.get(peer, 0.0):
                return CoordinatorToPeerView(view=view.model_copy(update={"roster": None}))
            self._whole_roster_from_s[peer] = now_s + self.scope.deadlines.heartbeat_s
        self.known[peer] = view.roster_version, chain, plan
        return CoordinatorToPeerView(view=view)

    def _without_plan(self, view: RunView) -> RunView:
        if self._bare is None or self._bare[0] is not view:
            self._bare = view, view.model_copy(update={"plan": None})
        return self._bare[1]

    async def _answer(self, channel: Channel, peer: str) -> Message:
        """Return a member's view as the answer to its request, once it has been sent the plan if it lacks that.

        The plan comes as a notice, as one is the same bytes for all members, while each answer is one's own."""
        told = self.view(peer)
        if told.view.plan is None:
            return told
        await self.service.notify(channel, told, self.scope.number)
        return CoordinatorToPeerView(view=self._without_plan(told.view))

    def is_due(self, peer: str, member: Member) -> bool:
        """Whether to tell a member of a change now.

        One that has begun nothing yet is told no more often than its heartbeats are answered: newcomers cost little
        until they work."""
        now_s = time.monotonic()
        if member.has_begun or now_s >= self._told_from_s.get(peer, 0.0):
            self._told_from_s[peer] = now_s + self.scope.deadlines.heartbeat_s
            return True
        return False

    def forget_departed(self) -> None:
        """Forget members that the scope has forgotten."""
        members = self.scope.membership.members
        for kept in (self.known, self._sent_plans, self._whole_roster_from_s, self._told_from_s):
            for peer in kept.keys() - members.keys():
                kept.pop(peer)

    # Members ------------------------------------------------------------------------------------------------

    async def _run_file(self, channel: Channel, message: Message) -> Message:
        """Give the run file to anybody, at no cost: neither the lock nor the journal is needed."""
        assert isinstance(message, PeerToCoordinatorGetRun)
        self._require_name(message.run)
        service = self.service
        return CoordinatorToPeerRun(
            run_toml=service.run_toml, run_hash=self.scope.run.hash, coordinator=service.certificate
        )

    def _checked(self, channel: Channel, claimed: tuple[Address, ...], role: Role) -> tuple[Address, ...]:
        """The ways in which a member can be reached, checked. Raises ``NotAdmitted``."""
        known = set[Address]()
        if any(address.is_relayed for address in claimed):
            known = self.service.relays.known(self._dialable(), time.monotonic())
        return _addresses_of(channel, claimed, role, known)

    def _dialable(self) -> dict[str, bool]:
        """Whether each member is here and can be dialed, in the order in which they joined."""
        members = self.scope.membership.members.items()
        return {peer: one.alive and one.entry.reachable for peer, one in members}

    def _require_name(self, run: str) -> None:
        if run != self.service.name:
            raise UnknownRun(f"the run {run!r} was asked of the run {self.service.name!r}: check the invite")

    async def _join(self, channel: Channel, message: Message) -> Message:
        assert isinstance(message, PeerToCoordinatorJoinRun)
        self._require_name(message.run)
        if message.certificate.curve_key != channel.remote_key:
            raise NotAdmitted("the certificate is for another connection's key")
        if self.scope.number:
            return await self._join_stage(channel, message)
        network = network_of(channel.remote_host)
        host_key, token = self.service.identity.public_key, message.token
        now_s, joiner = time.monotonic(), (message.certificate, message.role, network)
        admission = self.scope.admission
        with admission.counted_refusals(), admission.joining(*joiner, now_s, token, host_key) as peer:
            entry = RosterEntry(
                peer=peer,
                certificate=message.certificate,
                name=message.name,
                role=message.role,
                addresses=self._checked(channel, message.addresses, message.role),
                reachable=False,
            )
            trouble = await self._dial_back(entry)
            entry = entry.model_copy(update={"reachable": not trouble})
            self.scope.admission.refuse_replaced(channel.remote_key)
            await self._retire_earlier(peer, channel.remote_key)
            async with self.service.lock:
                self.scope.admission.join(entry, message.device, time.monotonic(), network, token)
                return await self._accepted(entry, channel, trouble)

    async def _join_stage(self, channel: Channel, message: PeerToCoordinatorJoinRun) -> Message:
        """Admit a member of the run to a stage, as it is known in the run, whose limits it has passed."""
        assert self.pipeline is not None
        peer = verify_certificate(message.certificate)
        member = self.pipeline.membership.members.get(peer)
        if member is None or member.entry.certificate.curve_key != channel.remote_key:
            raise NotAdmitted("not a member of this run (any more): join it before its stages")
        self.scope.admission.refuse_replaced(channel.remote_key)
        await self._retire_earlier(peer, channel.remote_key)
        async with self.service.lock:
            self.pipeline.join_stage(self.scope.number - 1, member.entry, message.device, time.monotonic())
            return await self._accepted(member.entry, channel)

    async def _accepted(self, entry: RosterEntry, channel: Channel, trouble: str = "") -> Message:
        await self.service.flush()
        self.known.pop(entry.peer, None)
        self._sent_plans.pop(entry.peer, None)
        self._whole_roster_from_s.pop(entry.peer, None)  # joins have limits of their own
        return CoordinatorToPeerJoinAccepted(
            peer=entry.peer,
            run_hash=self.scope.run.hash,
            observed_host=plain_host(channel.remote_host),
            observed_port=channel.remote_port,
            reachable=entry.reachable,
            unreachable=trouble,
            view=self.view(entry.peer).view,
        )

    async def _dial_back(self, entry: RosterEntry) -> str:
        """Try whether others can connect to a joiner, at both of its ports. Returns why not; empty if they can."""
        if entry.role == "observer":
            return "guests are not dialed"
        trouble = await self.service.node.try_both_ports(entry, _DIAL_BACK_S)
        if trouble:
            log.info("%s (%s) cannot be reached by others: %s", entry.name, entry.peer, trouble)
        return trouble

    async def _retire_earlier(self, peer: str, new_key: bytes) -> None:
        """Tell the earlier process of this identity, if it is still connected, that another one takes its place."""
        earlier = self.scope.membership.members.get(peer)
        if earlier is not None and earlier.alive and earlier.entry.certificate.curve_key != new_key:
            channel = self.service.node.control.incoming(earlier.entry.certificate.curve_key)
            if channel is not None:
                await self.service.notify(channel, CoordinatorToPeerSuperseded(), self.scope.number)

    async def _heartbeat(self, channel: Channel, message: Message) -> Message:
        assert isinstance(message, PeerToCoordinatorHeartbeat)
        async with self._request(channel) as peer:
            self.scope.heartbeat(peer, message, time.monotonic())
            if self.rounds is not None and self.rounds.stage is not None:
                self.service.look_whether_assembled()
                self._tick_if(self.rounds.stage.is_batch_done())
        self.known[peer] = message.roster_version, message.verdict_chain, message.plan_digest
        return await self._answer(channel, peer)

    async def _leave(self, channel: Channel, message: Message) -> Message:
        assert isinstance(message, PeerToCoordinatorLeave)
        async with self._request(channel) as peer:
            self.scope.admission.leave(peer, message.reason, time.monotonic(), message.trouble)
            self._tick_if(True)
        return Acknowledged()

    def _tick_if(self, is_complete: bool) -> None:
        """Go on at once when no more reports are to come, rather than at the next tick."""
        if is_complete:
            self.service.run.tick(time.monotonic())

    async def _status(self, channel: Channel, message: Message) -> Message:
        """Answer with the status; with the last one that was asked for while the journal takes nothing."""
        if self.service.is_held_up():
            self.scope.admission.require_member(channel.remote_key)
            trouble = self.service.journal.trouble
            if self._told_status is None:
                raise DeadlineExceeded(f"the coordinator waits for its journal: {trouble}")
            return self._told_status.model_copy(update={"journal": trouble[:MAX_TROUBLE]})
        async with self.service.lock:
            self.scope.admission.require_member(channel.remote_key)
            self._told_status = self.status(time.monotonic())
            return self._told_status

    def status(self, now_s: float) -> CoordinatorToPeerStatus:
        """The scope's status, with the relays that run."""
        relays = self.service.relays.statuses(self._dialable(), now_s)
        return self.scope.status(now_s).model_copy(update={"relays": relays})

    async def _timings(self, channel: Channel, message: Message) -> Message:
        assert isinstance(message, PeerToCoordinatorGetTimings)
        async with self.service.lock:
            self.scope.admission.require_member(channel.remote_key)
            return CoordinatorToPeerTimings(rounds=self.scope.timings.since(message.first))

    async def _spans(self, channel: Channel, message: Message) -> Message:
        """Ask a member what it did in a round, and put it on this clock: the member's stood between two of ours."""
        assert isinstance(message, PeerToCoordinatorGetSpans)
        self.service.span_requests.check(self.scope.admission.require_member(channel.remote_key), 1)
        asked = self.scope.membership.live.get(message.peer)
        to = self.service.node.control.incoming(asked.entry.certificate.curve_key) if asked is not None else None
        if to is None or self.service.spans_asked >= _SPANS_AT_ONCE:
            raise TryLater(f"{message.peer} is not here, or too many members are asked, now")
        self.service.span_answers.check(message.peer, 1)
        sent_s = time.monotonic()
        question = CoordinatorToPeerGetSpans(round=message.round)
        self.service.spans_asked += 1
        try:
            told = await to.request(question, PeerToCoordinatorSpans, _SPANS_S, self.scope.number)
        except ShoalError as error:  # passed on as it is, it would be this coordinator's, and who asks waits for ever
            raise LinkError(f"{message.peer} does not say what it did: {error}") from error
        finally:
            self.service.spans_asked -= 1
        took_s = time.monotonic() - sent_s
        spans = told.on_clock_of(sent_s + took_s / 2)
        return CoordinatorToPeerSpans(spans=spans, error_s=took_s / 2)

    async def _history(self, channel: Channel, message: Message) -> Message:
        """Read verdicts from the journal, without the lock: what is in it never changes."""
        assert isinstance(message, PeerToCoordinatorGetVerdicts)
        peer = self.scope.admission.require_member(channel.remote_key)
        is_guest = self.scope.membership.is_observer(peer)
        scope = self.scope.number or None if message.stage is None else message.stage + 1
        return await self.service.history.page(peer, message.first, scope, is_guest=is_guest)

    # Paths --------------------------------------------------------------------------------------------------

    async def _relays(self, channel: Channel, message: Message) -> Message:
        """Name the run's relays, and make a pass for a member that wants to use them."""
        peer = self.scope.admission.require_member(channel.remote_key)
        self.service.path_requests.check(peer, 1)
        relays = self.service.relays.named(self._dialable(), time.monotonic())
        identity, member = self.service.identity, self.scope.membership.members[peer]
        run_hash, expires_s = self.scope.run.hash, int(time.time()) + PASS_S
        # Its CURVE key is that of the channel, so it is known to be its own.
        relay_pass = make_pass(identity.sign, identity.public_key, run_hash, member.entry.certificate, expires_s)
        return CoordinatorToPeerRelays(relays=relays, relay_pass=relay_pass)

    async def _offer_relay(self, channel: Channel, message: Message) -> Message:
        """Name a member's relay to the others, once it has answered here. The member renews its offer."""
        assert isinstance(message, PeerToCoordinatorOfferRelay)
        peer = self.scope.admission.require_member(channel.remote_key)
        self.service.path_requests.check(peer, 4)
        entry, run = self.scope.membership.members[peer].entry, self.scope.run
        if not entry.reachable or entry.role == "observer":
            return CoordinatorToPeerRelayOffered(trouble="other members cannot reach this machine")
        place = entry.address.host, message.port
        relay = sign_relay(self.service.identity.sign, run.hash, message.relay_key, place, of_member=True)
        measured = await measure(relay.address)
        self.scope.admission.require_member(channel.remote_key)  # it may have left meanwhile
        if measured is None:
            self.service.relays.withdraw(peer)
            return CoordinatorToPeerRelayOffered(trouble=f"no relay answers at {relay.address}: open that port, too")
        is_taken = self.service.relays.offer(peer, relay, measured.load, time.monotonic())
        return CoordinatorToPeerRelayOffered(trouble="" if is_taken else "the run has relays enough")

    async def _show_addresses(self, channel: Channel, message: Message) -> Message:
        """Take over how a member is reached from now on; new addresses that can be dialed are tried."""
        assert isinstance(message, PeerToCoordinatorShowAddresses)
        peer = self.scope.admission.require_member(channel.remote_key)
        self.service.path_requests.check(peer, 4)
        entry = self.scope.membership.members[peer].entry
        addresses = self._checked(channel, message.addresses, entry.role)
        moved = entry.model_copy(update={"addresses": addresses})
        if moved.address != entry.address:
            moved = moved.model_copy(update={"reachable": not await self._dial_back(moved)})
        async with self._request(channel):
            self.scope.admission.move(peer, moved)
        return CoordinatorToPeerAddresses(reachable=moved.reachable)

    async def _try_address(self, channel: Channel, message: Message) -> Message:
        """Dial a guest or a member at an address of its own that is not on the roster."""
        assert isinstance(message, PeerToCoordinatorTryAddress)
        peer = self.scope.admission.require_member(channel.remote_key)
        self.service.path_requests.check(peer, 4)
        addresses = _addresses_of(channel, message.addresses, "trainer", set())
        entry = self.scope.membership.members[peer].entry.model_copy(update={"addresses": addresses})
        return CoordinatorToPeerAddressTried(trouble=await self.service.node.try_both_ports(entry, _DIAL_BACK_S))

    async def _request_dial(self, channel: Channel, message: Message) -> Message:
        """Ask a member to dial one that cannot dial it, and can be dialed or has a relay."""
        assert isinstance(message, PeerToCoordinatorRequestDial)
        peer = self.scope.admission.require_member(channel.remote_key)
        self.service.path_requests.check(peer, 1)
        asked = self.scope.membership.members.get(message.peer)
        if asked is None or not asked.alive or not self.scope.membership.members[peer].entry.can_be_met:
            raise NotAdmitted("only a member that can be met may ask to be dialed, and only by another member")
        to = self.service.node.control.incoming(asked.entry.certificate.curve_key)
        if to is not None:
            await self.service.notify(to, CoordinatorToPeerDial(peer=peer), 0)
        return Acknowledged()

    async def _host_command(self, channel: Channel, message: Message) -> Message:
        """Carry out a command of the host; what it changes is journaled before the answer."""
        assert isinstance(message, HostToCoordinatorCommand)
        commands = self.service.host_commands
        commands.check_proof(message.proof, channel.remote_key)
        if isinstance(message.command, ListRecords):  # what is in the journal never changes
            return await in_thread(read_records, self.service.journal, message.command.first)
        async with self.service.lock:
            answer = commands.answer(message.command)
            self._tick_if(True)
            await self.service.flush()
        return answer

    # Rounds -------------------------------------------------------------------------------------------------

    async def _describe(self, channel: Channel, message: Message) -> Message:
        assert isinstance(message, PeerToCoordinatorDescribeModel)
        assert self.rounds is not None
        async with self._request(channel) as peer:
            if self.pipeline is not None:
                self.pipeline.describe_stage(self.scope.number - 1, peer, message)
            else:
                self.rounds.describe_model(peer, message)
        return CoordinatorToPeerModelAccepted()

    async def _ready(self, channel: Channel, message: Message) -> Message:
        assert isinstance(message, PeerToCoordinatorRoundReady)
        assert self.rounds is not None
        async with self._request(channel) as peer:
            certificate = self.rounds.membership.members[peer].entry.certificate
            if message != self.rounds.round.ready.get(peer):  # members repeat it until they hear of the plan
                check_ready(replace(self.rounds.name_of_round, round=message.round), message, certificate)
            self.rounds.ready(peer, message, time.monotonic())
            self._tick_if(self.rounds.is_complete())
        return await self._answer(channel, peer)

    async def _report(self, channel: Channel, message: Message) -> Message:
        assert isinstance(message, PeerToCoordinatorRoundReport)
        assert self.rounds is not None
        async with self.service.lock:
            peer = self.scope.admission.require_member(channel.remote_key)
            plan, certificate = self.rounds.round.plan, self.rounds.membership.members[peer].entry.certificate
            statement = self.rounds.plan_statement(plan) if plan is not None else None
        if plan is not None and statement is not None and message.round == plan.round and message.made:
            # In a worker thread and without the lock: a report may have a signature for each of many parts.
            await in_thread(check_report, statement, plan, message, certificate)
        async with self._request(channel) as peer:
            if plan is self.rounds.round.plan:
                self.rounds.report(peer, message, time.monotonic())
                self._tick_if(self.rounds.is_complete())
        if message.plan_digest is not None:
            roster_version, chain, _ = self.known.get(peer, (-1, None, None))
            self.known[peer] = roster_version, chain, message.plan_digest
        return await self._answer(channel, peer)

    async def _secure_step(self, channel: Channel, message: Message) -> Message:
        assert isinstance(message, PeerToCoordinatorSecureStep)
        assert self.rounds is not None
        async with self.service.lock:
            peer, board = self.scope.admission.require_member(channel.remote_key), self.rounds.round.board
        if board is not None and board.is_of(message) and self.rounds.is_averaging(peer):
            await in_thread(board.check, peer, message)  # signatures, without the lock
        async with self._request(channel) as peer:
            self.rounds.secure_step(peer, message, time.monotonic())
            self._tick_if(self.rounds.round.board is not None)
            return self.rounds.secure_step(peer, message, time.monotonic())

    async def _show_verdict(self, channel: Channel, message: Message) -> Message:
        """Take a verdict that this journal may lack. If it cannot be taken over, the coordinator must not go on."""
        assert isinstance(message, PeerToCoordinatorShowVerdict)
        assert self.rounds is not None
        async with self._request(channel):
            check_ours(message.verdict, self.scope.run.hash, self.service.identity.public_key)
            if not self.rounds.take_over(message.verdict, time.monotonic()):
                self.service.is_outdated(message.verdict)
        return Acknowledged()

    async def _show_evidence(self, channel: Channel, message: Message) -> Message:
        """Take a piece of evidence; of whole evidence that proves a wrong mean, its maker is expelled.

        If the mean is wrong beyond the bound the run goes back, also when a friend of its maker has had it expelled
        for a smaller lie before."""
        assert isinstance(message, PeerToCoordinatorShowEvidence)
        assert self.rounds is not None
        service, rounds = self.service, self.rounds
        async with service.lock:
            peer = self.scope.admission.require_member(channel.remote_key)
            # Where a single member has credit, it would be the only one that could show what it did.
            is_heard = rounds.counts(peer) or len(rounds.membership.with_credit()) == 1
            if self.scope.membership.is_observer(peer) or not is_heard or rounds.model is None:
                raise NotAdmitted("only members with credit show evidence")
            stage = None if rounds.stage is None else rounds.stage.number
            facts = rounds.run, service.identity.public_key, rounds.model.layout, stage
        async with service.judging:  # one at a time; whoever repeats its last piece waits for the judgement
            known = service.evidence.judged(peer, message.evidence)
            if known is not None:
                return CoordinatorToPeerReceipt(evidence=message.evidence, judgement=known)
            data = service.evidence.add(peer, message, time.monotonic())
            if data is None:
                return CoordinatorToPeerReceipt(evidence=message.evidence, judgement="incomplete")
            found = await in_thread(_judged, data, message.evidence, *facts)
            # What else is shown of a member that is banned already is not kept: a liar's friend could fill the disk.
            access_list = service.scope.admission.access_list
            is_new, is_spent = found.maker not in access_list.bans, access_list.is_spent(found.maker, found.round)
            is_kept = (is_new or rounds.undoes(found.round, found.excess)) and not is_spent
            if found.word == "guilty" and is_kept:
                await in_thread(service.journal.keep_evidence, message.evidence.hex(), data)
                async with service.lock:
                    service.scope.admission.expel(found.maker, message.evidence, peer, found.round)
                    rounds.disprove(found.round, found.maker, message.evidence, peer, found.excess)
                    await service.flush()
            service.evidence.conclude(peer, message.evidence, found.word, time.monotonic(), is_news=is_kept)
        return CoordinatorToPeerReceipt(evidence=message.evidence, judgement=found.word)

    # Validators ---------------------------------------------------------------------------------------------

    async def _work(self, channel: Channel, message: Message) -> Message:
        assert isinstance(message, PeerToCoordinatorGetWork)
        assert self.rounds is not None
        async with self.service.lock:
            peer = self.scope.admission.require_member(channel.remote_key)
            return self.rounds.review.samples_of(peer, message)

    async def _score(self, channel: Channel, message: Message) -> Message:
        assert isinstance(message, PeerToCoordinatorScoreWork)
        assert self.rounds is not None
        async with self._request(channel) as peer:
            self.rounds.review.score(peer, message.signed)
        return Acknowledged()

    async def _evaluated(self, channel: Channel, message: Message) -> Message:
        assert isinstance(message, PeerToCoordinatorEvaluated)
        assert self.rounds is not None
        async with self._request(channel) as peer:
            self.rounds.review.evaluated(peer, message.signed)
        return Acknowledged()

    # Samples ------------------------------------------------------------------------------------------------

    async def _lease(self, channel: Channel, message: Message) -> Message:
        assert isinstance(message, PeerToCoordinatorRequestLease)
        assert self.rounds is not None
        async with self._frequent_request(channel) as peer:
            ranges = self.rounds.leasing.request(peer, message, time.monotonic())
        return CoordinatorToPeerLease(ranges=to_wire(ranges))

    async def _claim(self, channel: Channel, message: Message) -> Message:
        assert isinstance(message, PeerToCoordinatorClaim)
        assert self.rounds is not None
        assert self.rounds.stage is not None
        async with self._frequent_request(channel) as peer:
            ranges = self.rounds.stage.claim(peer, message, time.monotonic())
        return CoordinatorToPeerClaimed(ranges=to_wire(ranges))

    async def _release(self, channel: Channel, message: Message) -> Message:
        assert isinstance(message, PeerToCoordinatorRelease)
        assert self.rounds is not None
        assert self.rounds.stage is not None
        async with self._frequent_request(channel) as peer:
            self.rounds.stage.release(peer, message, time.monotonic())
        return Acknowledged()

    # Pipeline -----------------------------------------------------------------------------------------------

    async def _capability(self, channel: Channel, message: Message) -> Message:
        assert isinstance(message, PeerToCoordinatorShowCapability)
        assert self.pipeline is not None
        async with self._request(channel) as peer:
            self.pipeline.show_capability(peer, message, time.monotonic())
        return Acknowledged()

    async def _accuse(self, channel: Channel, message: Message) -> Message:
        assert isinstance(message, PeerToCoordinatorAccuseReplica)
        assert self.pipeline is not None
        async with self._request(channel) as peer:
            log.info("%s says that %s sends wrong values from stage %d", peer, message.accused, message.stage)
            self.pipeline.accuse(peer, message, time.monotonic())
        return Acknowledged()

    async def _drive(self, channel: Channel, message: Message) -> Message:
        """Give micro-batches to drive. An early driver is answered when every stage is held: it would ask too late."""
        assert isinstance(message, PeerToCoordinatorDrive)
        run, assembled = self.pipeline, self.service.assembled
        assert run is not None
        ranges = await self._micro_batches(channel, message)
        if not ranges and message.round == run.round_number and not run.is_assembled():
            assembled.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(run.deadlines.heartbeat_s):
                    await assembled.wait()
            ranges = await self._micro_batches(channel, message)
        return CoordinatorToPeerLease(ranges=to_wire(ranges))

    async def _micro_batches(self, channel: Channel, message: PeerToCoordinatorDrive) -> Ranges:
        assert self.pipeline is not None
        async with self._frequent_request(channel) as peer:
            return self.pipeline.drive(peer, message, time.monotonic())


class RequestLimit:
    """Limit of each member's requests that make others work, as those about paths, which make others dial."""

    def __init__(self, per_s: float, burst: float) -> None:
        self._buckets = TokenBuckets[str](per_s, burst)

    def check(self, peer: str, tokens: float) -> None:
        """Count a request. Raises ``TryLater`` if there were too many."""
        if not self._buckets.take(peer, tokens, time.monotonic()):
            raise TryLater("too many requests of this kind: try again in a minute")


# The program ------------------------------------------------------------------------------------------------

_TICK_S = 0.1
_TOLD_SHARE = 10
"""Changes that are not urgent are told to everybody in one part in so many of the time, until the next heartbeats."""

_ANSWERED_ALWAYS = (PeerToCoordinatorGetRun, PeerToCoordinatorGetStatus, PeerToCoordinatorGetVerdicts)
"""Requests whose answers are in the journal already, or say that it takes nothing."""

_STOPS = "the coordinator cannot go on from its journal, and stops"


class CoordinatorService:
    """Answers the members of one run, on a node that others may share; see ``CoordinatorFront``. ``wait`` raises what
    the run cannot go on from: its journal has failed, or one of its handlers."""

    def __init__(
        self,
        run_toml: str,
        run: RunFile,
        identity: Identity,
        node: Node,
        journal: Journal,
        machine: PlainRun | PipelineRun,
        trail: AccessTrail,
    ) -> None:
        """``machine``, ``trail``: as ``resumed`` returns them for the journal."""
        self.name = run.run.name
        self.identity = identity
        self.node = node
        self.run_toml = run_toml
        self.journal = journal
        self.certificate = identity.certify(node.control.keys)
        self.lock = asyncio.Lock()
        self.history = HistoryReader(journal)
        self.evidence = EvidenceIntake(run.round.patience_s)
        self.judging = asyncio.Lock()
        self.assembled = asyncio.Event()
        """Cleared while drivers of a pipeline wait for a replica in every stage."""
        self.assembled.set()
        self._changed = asyncio.Event()
        self._may_plan = asyncio.Event()
        self._announced = -1
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._observers: list[Callable[[JournalEvent], None]] = []
        self.run = machine
        self.scope: RoundScope | PipelineRun = self.run.scope if isinstance(self.run, PlainRun) else self.run
        """The run's own scope, number 0."""
        self.relays = RunRelays()
        self.path_requests = RequestLimit(2.0, 64.0)
        self.span_requests, self.span_answers = RequestLimit(8.0, 256.0), RequestLimit(2.0, 32.0)
        """By who asks, and by who has to answer: whoever makes many identities must not load a member's link."""
        self.spans_asked = 0
        """Members that are asked now."""
        self.host_commands = HostCommands(self.scope, identity)
        self.handlers = [ScopeHandlers(self, self.scope)]
        """By scope."""
        self._next_index = journal.next_index
        self.journal_writes, self.journal_write_s = 0, 0.0
        """Transactions that this process has written, and how long that took."""
        self._unchecked = ""
        """Warning of stages with one replica that was logged last."""
        self._apart = ""
        """Warning of members that cannot meet that was logged last."""
        self._trail = trail
        self._set_clock()
        self.run.log.start(self.scope)
        self._open_stages()

    def _open_stages(self) -> None:
        """Answer in a pipeline's stages, once they are in the journal."""
        if isinstance(self.run, PipelineRun):
            self.handlers += [ScopeHandlers(self, scope) for scope in self.run.scopes[len(self.handlers) - 1 :]]

    def look_whether_assembled(self) -> None:
        """Answer the waiting drivers once every stage is held."""
        if not self.assembled.is_set() and isinstance(self.run, PipelineRun) and self.run.is_assembled():
            self.assembled.set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Keep the run going until the context ends, and answer nobody afterwards."""
        try:
            async with task_scope() as tasks:
                loops = [tasks.create_task(self._tick()), tasks.create_task(self._push())]
                if isinstance(self.run, PipelineRun):
                    loops.append(tasks.create_task(self._plan(self.run, planner_of(self.scope.run))))
                try:
                    yield
                finally:
                    for task in loops:
                        task.cancel()
        finally:
            self.node.control.leave_run(self.name)

    def knows_key(self, curve_key: bytes) -> bool:
        """Whether the key is that of a member's process."""
        return self.scope.membership.holder(curve_key) is not None

    def guarded(self, handler: Handler) -> Handler:
        """Return a handler whose own failure ends this run's service, and no other's."""

        async def answer(channel: Channel, message: Message) -> Message:
            if self.is_held_up() and not isinstance(message, _ANSWERED_ALWAYS):
                raise DeadlineExceeded(f"the coordinator waits for its journal: {self.journal.trouble}")
            try:
                return await handler(channel, message)
            except (ShoalError, OSError, ValueError):
                raise
            except Exception as error:
                log.exception("a handler of the run %s failed on %s", self.name, type(message).__name__)
                self._break(error)
                raise DeadlineExceeded(_STOPS) from error

        return answer

    def is_held_up(self) -> bool:
        """Whether a write waits for the journal's engine, which takes none at the moment."""
        return bool(self.journal.trouble) and self.lock.locked()

    def _break(self, error: Exception) -> None:
        """Have ``wait`` raise this error, unless there was one before."""
        if not self._broken.done():
            self._broken.set_exception(error)

    async def printed_token(self) -> bytes:
        """The token of the invite that the host prints; empty for an open run. Raises as ``flush``."""
        async with self.lock:
            token = self.host_commands.printed_token()
            await self.flush()
            return token

    async def wait(self, stop: asyncio.Event) -> None:
        """Until ``stop`` is set; raises ``StorageError`` when the journal cannot be written any more, and what a
        handler has failed with."""
        async with task_scope() as tasks:
            stopping = tasks.create_task(stop.wait())
            ends: tuple[asyncio.Future[Any], ...] = (stopping, self._broken)
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
        if self._broken.done():
            await self._broken

    def observe(self, observer: Callable[[JournalEvent], None]) -> None:
        """Call ``observer`` with every event once it is in the journal."""
        self._observers.append(observer)

    # Events, one at a time --------------------------------------------------------------------------------

    async def flush(self) -> None:
        """Journal first, then tell. A coordinator that cannot journal must not go on.

        Members hear ``DeadlineExceeded`` then, as if it were gone already: they go on without it until it is back."""
        self.check_lease()
        events = self.run.log.take()
        events += self._trail.records(events, self.scope.admission.refusals, self.run.log.unix_s)
        if events:
            index, self._next_index = self._next_index, self._next_index + 1
            began_s = time.monotonic()
            try:
                # Never cut short, as the journal is closed next: also when this raises ``CancelledError``, it is there.
                await in_thread(self.journal.append, index, events)
            except (
                Exception
            ) as error:  # whatever it is, as when an engine's password was changed: these events are lost
                self._break(error)
                raise DeadlineExceeded(_STOPS) from error
            self.journal_writes, self.journal_write_s = (
                self.journal_writes + 1,
                self.journal_write_s + time.monotonic() - began_s,
            )
            self.check_lease()  # the write may have taken long: another host may lead by now, and have read it
            for event in events:
                for observer in self._observers:
                    observer(event)
        self._open_stages()
        self._may_plan.set()
        announcements = self.run.log.announcements
        if announcements != self._announced:
            self._announced = announcements
            self._changed.set()
            for one in self.handlers:
                one.forget_departed()
        if verdicts_in(events) and self.journal.wants_snapshot and (snapshot := self.scope.snapshot()) is not None:
            await in_thread(self.journal.compact, snapshot)  # nobody waits for us when a round has just begun

    async def _settle(self) -> None:
        """See to it that all decisions are in the journal, and that this coordinator may tell them. Raises as
        ``flush``."""
        if self.run.log.is_written:
            self.check_lease()
        else:
            await self.flush()

    def check_lease(self) -> None:
        """Raise ``DeadlineExceeded`` unless this coordinator may still say something."""
        if self._broken.done():  # events were lost with it: what the machine says now may not be in the journal
            raise DeadlineExceeded(_STOPS)
        try:
            self.journal.check_lease()
        except StorageError as error:
            self._break(error)
            raise DeadlineExceeded(_STOPS) from error

    def is_outdated(self, shown: Verdict) -> None:
        """A member has a verdict of ours that the journal lacks: nothing may be decided from it any more."""
        if self.journal.is_shared and shown.epoch > self.run.log.epoch:
            self._break(LeaseLost("this host was paused: a member has a verdict of another one that has taken over"))
        else:
            self._break(stale_journal_error(self.journal.location, shown.round, self.scope.round_number))

    async def _tick(self) -> None:
        while not self._broken.done():
            async with self.lock:
                self._set_clock()
                self.run.tick(time.monotonic())
                with suppress(DeadlineExceeded):
                    await self.flush()
                self._warn_of_unchecked_stages()
                self._warn_of_walls()
            await asyncio.sleep(_TICK_S)

    def _warn_of_unchecked_stages(self) -> None:
        """Log which stages of an open run have one replica, whenever that changes."""
        if not isinstance(self.run, PipelineRun) or self.run.run.access.admission != "open":
            return
        unchecked = self.run.say_unchecked()
        if unchecked != self._unchecked:
            self._unchecked = unchecked
            log.warning("%s", unchecked or "every stage has two replicas or more")

    def _warn_of_walls(self) -> None:
        """Log which members cannot meet the others, and what to do, whenever that changes."""
        apart = self.scope.say_apart()
        if apart != self._apart:
            self._apart = apart
            if apart:
                log.warning("%s", apart)
            else:
                log.info("all members can meet those that they have to")

    async def _plan(self, run: PipelineRun, planner: Planner) -> None:
        """Run the planner in a worker thread whenever there is a request, while members are answered."""
        while True:
            await self._may_plan.wait()
            self._may_plan.clear()
            async with self.lock:
                asked = run.plan_request(time.monotonic())
            if asked is None:
                continue
            plan = await in_thread(asked.plan, planner)
            async with self.lock:
                self._set_clock()
                run.take_plan(asked, plan, time.monotonic())
                with suppress(DeadlineExceeded):
                    await self.flush()

    def _set_clock(self) -> None:
        """Again and again: the one clock stands while the machine sleeps, the other one is set by people."""
        self.run.log.unix_offset_s = time.time() - time.monotonic()

    async def _push(self) -> None:
        """Tell everybody, at once when the round goes on.

        Who came or went can wait, so that telling it takes a small share of the time: not each of a thousand joins
        costs a thousand rosters. The answers to heartbeats tell it, too."""
        loop = asyncio.get_running_loop()
        told: list[tuple[int, str, int]] = []
        pause_until_s = 0.0
        while True:
            await self._changed.wait()
            self._changed.clear()
            while self._moments() == told and loop.time() < pause_until_s:
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(pause_until_s):
                        await self._changed.wait()
                self._changed.clear()
            told, start_s = self._moments(), loop.time()
            for one in list(self.handlers):
                for peer, member in list(one.scope.membership.live.items()):
                    channel = self.node.control.incoming(member.entry.certificate.curve_key)
                    if channel is None or not one.is_due(peer, member):
                        continue
                    with suppress(DeadlineExceeded):
                        async with self.lock:  # what others decide meanwhile may not be in the journal yet
                            await self._settle()
                            view = one.view(peer)
                        await self.notify(channel, view, one.scope.number)
            took_s = loop.time() - start_s
            pause_until_s = start_s + min(_TOLD_SHARE * took_s, max(took_s, self.scope.deadlines.heartbeat_s))

    def _moments(self) -> list[tuple[int, str, int]]:
        """Return the urgent state of all scopes."""
        return [one.scope.urgent_state for one in self.handlers]

    async def notify(self, channel: Channel, message: Message, scope: int) -> None:
        try:
            await channel.notify(message, scope)
        except LinkError as error:
            log.debug("could not tell %s: %s", channel.label, error)


def _judged(
    data: bytes, evidence: bytes, run: RunFile, host_key: bytes, layout: tuple[TensorSpec, ...], stage: int | None
) -> Judgement:
    """Judge evidence. For a worker thread."""
    # Imports torch, which nothing else here needs.
    from shoal.swarm.averaging.chunk_judge import Judgement, RunFacts, judge

    if not is_whole(data, evidence):
        return Judgement("void", "not the evidence of that id")
    found = judge(data, RunFacts.of(run, host_key, layout, stage))
    log.warning("evidence %s: %s: %s", evidence.hex()[:16], found.word, found.reason)
    return found


def _addresses_of(
    channel: Channel, claimed: tuple[Address, ...], role: Role, known: Set[Address]
) -> tuple[Address, ...]:
    """The ways in which a member says that it can be reached, each checked. Raises ``NotAdmitted``.

    ``known``: the run's relays; others are left out, also those that it has no more."""
    observed = plain_host(channel.remote_host)
    is_called = role != "observer"
    return tuple(
        address
        if address.is_relayed
        else address.model_copy(update={"host": _host_of(address.host if is_called else "", observed)})
        for address in claimed
        if not address.is_relayed or (is_called and address in known)
    )


def _host_of(named: str, observed: str) -> str:
    """The host that a joiner names, if it may name it, or the one that it comes from. Raises ``NotAdmitted``.

    A name is never looked up here: whoever holds its zone decides how long that takes."""
    if not named:
        return observed
    named = plain_host(named)
    if may_name(named, observed):
        return named
    raise NotAdmitted(
        f"this machine cannot be known as {named}, as it comes from {observed}: that must be an address, and one that "
        "is not public must be the one that it comes from. Leave out --advertise, or give it a public address"
    )
