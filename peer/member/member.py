"""Membership of this process in the run or in one of its stages: heartbeats, leases, state, records, rounds.

It lives on the event loop; the training thread awaits its coroutines through ``NetworkThread``. ``Memberships`` holds
one for the run and one for each stage."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from shoal.compression.codec_map import CodecMap
from shoal.compression.fixed_point import KERNELS
from shoal.compression.kernels import loader
from shoal.peer.history.catch_up import RoundApplier, RoundCatchUp
from shoal.peer.history.fork_watch import ForkWatch
from shoal.peer.history.history_sync import HistorySync, fetch_verdicts
from shoal.peer.history.record_archive import RecordArchive
from shoal.peer.history.round_records import RecordOwner, RoundRecords
from shoal.peer.machine_memory import return_freed_memory
from shoal.peer.relay.offer import RelayOffer
from shoal.peer.state_transfer.acquire import CatchUp, CurrentDownload, LocalCandidates, acquire_state
from shoal.peer.state_transfer.chunk_format import format_of
from shoal.peer.state_transfer.donor import StateDonor
from shoal.peer.state_transfer.download import Report
from shoal.peer.state_transfer.start import RunStart, StartState
from shoal.peer.training.anchor import AnchorState
from shoal.swarm.aio import in_thread, task_scope
from shoal.swarm.averaging.auditor import Auditor
from shoal.swarm.averaging.averager import Averager
from shoal.swarm.averaging.committed_contribution import PartialContribution, fetch_contribution
from shoal.swarm.averaging.leaf_grid import LeafGrid
from shoal.swarm.averaging.outcome import Committed, RoundOffer, RoundOutcome
from shoal.swarm.averaging.phase_clock import PhaseClock
from shoal.swarm.client.bandwidth_probe import PROBE, ProbeSource, probe_link, witnesses
from shoal.swarm.client.coordinator_client import CoordinatorClient, MemberInfo
from shoal.swarm.client.mapped_ports import keep_mapped
from shoal.swarm.client.meeting_probe import keep_meeting
from shoal.swarm.client.relay_access import RelayAccess
from shoal.swarm.errors import FINAL_ERRORS, LinkError, NotAdmitted, RunEnded
from shoal.swarm.protocol.evaluations import Evaluation
from shoal.swarm.protocol.identity import CurveKeys, Identity
from shoal.swarm.protocol.invite import Invite
from shoal.swarm.protocol.messages import (
    Acknowledged,
    CoordinatorToPeerGetSpans,
    CoordinatorToPeerLease,
    CoordinatorToPeerModelAccepted,
    CoordinatorToPeerWork,
    PeerToCoordinatorDescribeModel,
    PeerToCoordinatorEvaluated,
    PeerToCoordinatorGetWork,
    PeerToCoordinatorHeartbeat,
    PeerToCoordinatorRequestLease,
    PeerToCoordinatorScoreWork,
    PeerToCoordinatorSpans,
)
from shoal.swarm.protocol.rounds import PlanMember, RunView, Verdict
from shoal.swarm.protocol.types import (
    MAX_UNDONE_RANGES,
    DeviceUse,
    DivergenceWord,
    Headway,
    KeptState,
    Message,
    SampleRange,
    TensorSpec,
)
from shoal.swarm.protocol.work_scores import WorkScore
from shoal.swarm.sample_ranges import Ranges, to_wire
from shoal.swarm.secure.reveal_record import RevealRecord
from shoal.swarm.transport.channel import Channel
from shoal.swarm.transport.limits.traffic_limits import TrafficLimits
from shoal.swarm.transport.node import Endpoint, Node, ScopedEndpoint
from shoal.swarm.transport.paths.port_mapping import PortMapper

log = logging.getLogger(__name__)

T = TypeVar("T")


class StageMembership:
    """Right of this peer to a stage; work for the stage is cancelled when the plan gives it to another peer."""

    def __init__(self, client: CoordinatorClient, is_ours: Callable[[RunView], bool], what: str) -> None:
        """``client``: the run's, which receives its views; ``is_ours``: returns whether a view's plan assigns the stage
        to this peer; ``what``: name of the stage for messages."""
        self._client = client
        self._is_ours = is_ours
        self._what = what

    async def guard(self, work: Coroutine[Any, Any, T]) -> T:
        """Await ``work`` and return its result; if the membership ends first, cancel it and raise ``NotAdmitted``."""
        async with task_scope() as tasks:
            working = tasks.create_task(work)
            working.add_done_callback(lambda _: self._client.wake())
            await self._client.wait_for(lambda view: working.done() or not self._is_ours(view))
            if working.done():
                return working.result()
            working.cancel()
        raise NotAdmitted(f"the plan has given {self._what} to another peer")


LAST_STATE_S = 120.0
"""Longest time that a member stays after the run's end for those who fetch the last state."""

_SPOOLS = "serving"
"""Folder of states that are kept for joiners, in files without names."""

_USE_EVERY_S = 10.0
"""Time between two looks at the use of the machine."""

_SECURE_ROUNDS = "secure-rounds"
"""File with the sets that were signed under secure averaging."""

_COMPILED_ELEMENTS = 2**19
"""Elements from which it pays to compile the codecs; coding a smaller model takes milliseconds anyway."""


@dataclass
class Progress:
    """Progress that the training thread writes and heartbeats report.

    ``tokens_done``: of the open round; ``tokens_trained``: of all rounds, also before a restart from a checkpoint;
    ``prepared``: share of the way to the first computation, 0 to 1; ``computed``: number of computations done;
    ``has_work``: whether a computation is under way or could begin.
    """

    activity: str = "joining"
    round: int = 0
    tokens_done: int = 0
    tokens_trained: int = 0
    tokens_per_s: float = 0.0
    step_s: float = 0.0
    loss: float | None = None
    prepared: float = 0.0
    computed: int = 0
    has_work: bool = False


class LocalMember:
    """Membership in the run or in one of its stages, made with ``open`` or ``joined``.

    ``state``: state held and offered to other peers, if any; ``compression``: ratio of a contribution's float32 bytes
    to its sent bytes; ``rejoined``: the coordinator had removed this peer, which has joined again and lost its leases;
    ``start``: checkpoint that the run starts from, if any.
    """

    def __init__(
        self, node: Node, client: CoordinatorClient, tasks: asyncio.TaskGroup, stage: StageMembership | None = None
    ) -> None:
        """``stage``: the right to the stage, whose end raises ``NotAdmitted`` in all waits; None for the run."""
        self.node = node
        self.client = client
        self.endpoint: Endpoint = ScopedEndpoint(node, client.scope) if client.scope else node
        self.progress = Progress()
        self.clock = PhaseClock()
        """What the training thread and the averaging spend their time on."""
        self.state: AnchorState | None = None
        self.compression = 1.0
        self._keeper: RecordArchive | None = None
        self._averager: Averager | None = None
        self.history: HistorySync | None = None
        self._tasks = tasks
        self._stage = stage
        self._background: list[asyncio.Task[None]] = []
        self._beat_now = asyncio.Event()
        self._format = format_of(client.run_file.checkpoints.transfer)
        self._donor = StateDonor(self.endpoint, client.deadlines.patience_s, self._format)
        self._download: CurrentDownload | None = None
        self._earlier: AnchorState | None = None
        self._kept: tuple[KeptState, ...] = ()
        self.kept_states: Callable[[], tuple[KeptState, ...]] = tuple
        """Returns the states of the checkpoints here, newest first, without reading the disk."""
        self._diverged: KeptState | None = None
        self.read_use: Callable[[], DeviceUse] | None = None
        """Looks at the use of this machine; None where nobody is told."""
        self.use: DeviceUse | None = None
        """As last read for a heartbeat."""
        self._use_from_s = 0.0
        self._stays = self._is_dismissed = False
        """Whether this peer has all that it wants of the run and stays for others, and whether the coordinator has
        removed it since, so that nobody finds it any more."""
        self.rejoined = False
        self.start: RunStart | None = None

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        invite: Invite,
        identity: Identity,
        bind: tuple[str, int],
        describe: Callable[[], MemberInfo],
        limits: TrafficLimits | None = None,
        *,
        maps_ports: bool = False,
        offer: RelayOffer | None = None,
    ) -> AsyncIterator[LocalMember]:
        """Listen at ``bind``, join the run and send heartbeats; leave the run when the context ends.

        ``describe``: returns what other members see of this one; ``limits``: on this process's traffic; ``maps_ports``:
        whether to ask the router to forward the ports, if nobody can connect otherwise; ``offer``: of a relay for
        others. Raises the errors of ``CoordinatorClient.join``.
        """
        keys = CurveKeys.fresh()
        client: CoordinatorClient | None = None

        async def admit(key: bytes) -> bool:
            return client is not None and await client.admit(key)

        ports = (bind[1], bind[1] + 1 if bind[1] else 0)
        async with Node.open(keys, bind[0], ports, admit, limits) as node:
            node.publish(PROBE, ProbeSource())  # the coordinator dials back with it
            client = CoordinatorClient(node, identity, keys, invite, describe())
            async with cls.joined(client) as member:
                node.connections_per_link = client.run_file.averaging.streams
                access = RelayAccess(client)
                node.relays.credentials, node.relays.held_credentials = access.credentials, access.held_credentials
                background = (
                    access.run(),
                    probe_link(client, member.endpoint, member._probed),
                    keep_meeting(client, member.endpoint, member.request_heartbeat),
                )
                member._background += [member._tasks.create_task(one) for one in background]
                if maps_ports:
                    mapper = PortMapper((node.control_port, node.data_port))
                    member._background.append(member._tasks.create_task(keep_mapped(client, mapper)))
                if offer is not None:
                    port = client.me.ports[1] + 1 if client.me.ports else None
                    member._background.append(member._tasks.create_task(offer.run(client, port)))
                yield member

    @classmethod
    @asynccontextmanager
    async def joined(
        cls, client: CoordinatorClient, stage: StageMembership | None = None
    ) -> AsyncIterator[LocalMember]:
        """Join the client's scope on its node and send heartbeats; leave the scope when the context ends."""
        await client.join_in_time()
        async with task_scope() as tasks:
            member = cls(client.node, client, tasks, stage)
            client.node.control.handle(CoordinatorToPeerGetSpans, member._on_get_spans, client.scope)
            member._background.append(tasks.create_task(member._send_heartbeats()))
            try:
                yield member
            finally:
                for task in member._background:
                    task.cancel()
                member._donor.close()
                await client.leave(*client.farewell)

    # Heartbeats ---------------------------------------------------------------------------------------------

    async def _send_heartbeats(self) -> None:
        while True:
            self._beat_now.clear()
            try:
                await self.send_heartbeat()
            except FINAL_ERRORS:
                raise
            except LinkError as error:
                log.warning("the heartbeat did not reach the coordinator, and is sent again: %s", error)
            with suppress(TimeoutError):
                async with asyncio.timeout(self.client.deadlines.heartbeat_s):
                    await self._beat_now.wait()

    def _probed(self, probed_bps: float) -> None:
        self.node.meter.probed_bps = probed_bps
        if probed_bps:
            self._beat_now.set()
            log.info("this machine's link carries about %.0f Mbit/s", probed_bps / 1e6)

    def _others(self) -> list[str]:
        return witnesses(self.node.trainers(self.client.scope), self.client.peer)

    @property
    def activity(self) -> str:
        """Present activity of this peer, in a word or two, for people."""
        done = self._download.share_done if self._download else None
        if done is not None:
            return f"{self.progress.activity} {done:.0%}"
        return (self._averager.activity if self._averager else "") or self.progress.activity

    def request_heartbeat(self) -> None:
        """Send the next heartbeat at once, because the coordinator waits for something in it."""
        self._beat_now.set()

    async def send_heartbeat(self) -> None:
        """Send a heartbeat now. If the coordinator has removed this peer, join again, without its leases and work."""
        progress, state, averager, meter = self.progress, self.state, self._averager, self.node.meter
        sent_bytes, received_bytes = meter.totals(self.client.scope)
        heartbeat = PeerToCoordinatorHeartbeat(
            round=progress.round,
            activity=self.activity,
            anchor_version=state.version if state else None,
            state_digest=state.digest if state else None,
            tokens_done=progress.tokens_done,
            tokens_per_s=progress.tokens_per_s,
            step_s=progress.step_s,
            loss=progress.loss,
            chunks_moved=averager.chunks_moved if averager else 0,
            bytes_sent=sent_bytes,
            bytes_received=received_bytes,
            bandwidth_bps=self.node.bandwidth_bps,
            roster_version=0,
            kept=self._kept if state is None else self._asked_for_kept(),
            diverged=self._diverged,
            headway=self._headway(),
            paths=() if self.client.scope else self.node.path_reports(),
            phase=self.clock.phase,
            use=await self._look_at_use(),
        )
        try:
            await self.client.heartbeat(heartbeat)
        except NotAdmitted:
            log.warning("the coordinator had removed this peer, whose work since the anchor is lost: joining again")
            await self._come_back()

    async def _look_at_use(self) -> DeviceUse | None:
        """Look at the machine now and then; None in between, and in a stage's scope."""
        now_s = asyncio.get_running_loop().time()
        if self.read_use is None or now_s < self._use_from_s:
            return None
        self._use_from_s = now_s + _USE_EVERY_S
        self.use = await in_thread(self.read_use)
        return self.use

    def _asked_for_kept(self) -> tuple[KeptState, ...]:
        """Return the states that this peer keeps beside the one it holds, if the coordinator asks for them."""
        return self.kept_states() if self.client.view.wants_kept else ()

    def _headway(self) -> Headway:
        """Return the headway: of this process in the run, of the state's download in a stage."""
        one, done = self.progress, self._download.share_done if self._download else None
        if self.client.scope:
            return Headway(prepared=1.0 if self.state else done or 0.0)
        return Headway(prepared=one.prepared, computed=one.computed, has_work=one.has_work)

    async def _come_back(self) -> None:
        try:
            await self.client.come_back()
        except NotAdmitted as error:
            if not self.client.scope:
                raise
            # The stage may belong to another peer, or the run has to be joined first: the next heartbeat tries again.
            log.info("stage %d could not be joined again: %s", self.client.scope - 1, error)
        except RunEnded:
            if not self._stays:
                raise
            self._is_dismissed = True
            self.client.wake()
        else:
            self.rejoined = True

    # Joining ------------------------------------------------------------------------------------------------

    def keep_history(self, path: Path) -> None:
        """Keep the history of verdicts in the file at ``path``, and compare them with those of other members, in the
        background."""
        self.history = HistorySync(self.client, path)
        watch = ForkWatch(self.client, self.node, path.parent)
        self._background += [self._tasks.create_task(one.run()) for one in (self.history, watch)]

    async def describe(self, model: PeerToCoordinatorDescribeModel) -> None:
        """Describe model and data to the coordinator.

        Raises ``ModelMismatch`` or ``CorpusError``, which name the difference, if they are not the run's.
        """
        await self._guarded(self._describe(model))

    async def _describe(self, model: PeerToCoordinatorDescribeModel) -> None:
        while True:
            try:
                await self.client.ask(model, CoordinatorToPeerModelAccepted)
            except NotAdmitted:  # the coordinator has restarted from a journal without this member
                await self.send_heartbeat()
            else:
                return

    def hold_state(self, state: AnchorState) -> None:
        """Hold ``state`` from now on: offer it to joiners and report it to the coordinator."""
        self._take_possession(state)
        self._beat_now.set()

    def _take_possession(self, state: AnchorState) -> None:
        self._donor.offer(state)
        self.state, self._earlier = state, None

    async def agreed_state(
        self,
        candidates: LocalCandidates,
        shape: tuple[int, int],
        folder: Path | None,
        report: Report,
        catch_up: CatchUp | None = None,
        start: StartState | None = None,
    ) -> AnchorState:
        """Obtain the run's current state: from local candidates, by catching up, or from other peers.

        Waits for a donor, or until the run goes back to a state that some peer has. ``shape``: (1 + slots, n);
        ``folder``: keeps an unfinished download for the next process; ``report``: emits events; ``start``: state of
        version 0 if the run starts from a checkpoint.
        """
        candidates.earlier = self._earlier
        silent_s = self.client.deadlines.patience_s / 2
        self._download = CurrentDownload(self.endpoint, self._others, silent_s, folder, report, self._format, start)
        try:
            return await self._guarded(acquire_state(self, candidates, shape, self._download, catch_up))
        finally:
            self._download.close()
            self._download = None

    def drop_state(self) -> None:
        """Hold no state any more, because the one held is not the run's."""
        self.state = None

    async def report_kept(self, kept: tuple[KeptState, ...]) -> None:
        """Report the earlier states that this peer has kept, in case the run has to go back to one of them."""
        self._kept = kept
        await self.send_heartbeat()

    async def ask_about_divergence(self, bad: KeptState, kept: Callable[[], tuple[KeptState, ...]]) -> DivergenceWord:
        """Report that local work from the state ``bad`` diverged, and wait for the coordinator's answer.

        ``kept``: returns the earlier states that this peer has kept; it reads and hashes them. Call after
        ``rejoin_without_work``, so that no round waits for this peer.
        """
        self._kept = tuple(one for one in await in_thread(kept) if one.anchor_version < bad.anchor_version)
        self._diverged = bad
        try:
            while True:
                await self.send_heartbeat()
                if self.client.view.divergence:
                    return self.client.view.divergence
                await self.client.wait_for(lambda view: view.divergence != "", self.client.deadlines.heartbeat_s)
        finally:
            self._diverged = None

    async def rejoin_without_work(self) -> None:
        """Give all leases back and join again.

        The state stays a candidate for ``agreed_state``: perhaps no peer has it but those that rejoin.
        """
        self._earlier, self.state = self.state or self._earlier, None
        await self.client.rejoin()
        self.rejoined = False

    # Work ---------------------------------------------------------------------------------------------------

    async def lease(self, samples: int, undone: Ranges) -> tuple[SampleRange, ...]:
        """Lease about so many samples to train on; empty if there are none now. Waits for the coordinator.

        ``undone``: samples leased before that were not trained on yet."""
        ask = PeerToCoordinatorRequestLease(
            round=self.progress.round,
            samples=samples,
            tokens_done=self.progress.tokens_done,
            undone=to_wire(undone[-MAX_UNDONE_RANGES:]),
        )
        try:
            return (await self.client.ask(ask, CoordinatorToPeerLease)).ranges
        except NotAdmitted:
            return ()  # the next heartbeat joins again

    async def wait_for_change(self, timeout_s: float) -> None:
        """Wait until the round or its phase changes, at most ``timeout_s``."""
        before = self.client.view
        await self.client.wait_for(lambda view: (view.round, view.phase) != (before.round, before.phase), timeout_s)

    async def serve_after_end(self) -> None:
        """Stay after the run's end while the host fetches the last state, at most ``LAST_STATE_S``.

        A host that is gone is not waited for, nor one that has removed this peer meanwhile."""
        client, loop = self.client, asyncio.get_running_loop()
        if not client.view.stays:
            return
        self._stays, self.progress.activity = True, "serving the model"
        began_s = answered_s = loop.time()
        while client.view.stays and not self._is_dismissed:
            await client.wait_for(lambda view: not view.stays or self._is_dismissed, client.deadlines.heartbeat_s)
            now_s = loop.time()
            answered_s = answered_s if client.coordinator_is_away else now_s
            if now_s - answered_s > client.deadlines.dead_s or now_s - began_s > LAST_STATE_S:
                log.info("the run's last state is not waited for any longer")
                return

    # Records of rounds --------------------------------------------------------------------------------------

    async def keep_records(self, folder: Path, needed_since: Callable[[], int | None]) -> None:
        """Keep the records of committed rounds in ``folder`` and offer them; call before ``prepare_averaging``.

        States that are downloaded when the next step comes are kept beside them.

        ``needed_since``: returns the version of the oldest state that the records must lead on from, if any.
        """
        owner = RecordOwner(self.client.run_file.hash, self.client.coordinator_key)
        vectors = 1 + self.client.run_file.outer.slots
        self._keeper = RecordArchive(RoundRecords(folder, owner), self.endpoint, self._tasks, vectors, needed_since)
        await self._keeper.start()
        self._donor.folder = folder.with_name(_SPOOLS)
        self._background.append(self._tasks.create_task(self._donor.run()))

    @property
    def records(self) -> RoundRecords:
        """Records of committed rounds on the disk; from any thread."""
        assert self._keeper is not None, "keep_records comes first"
        return self._keeper.records

    def missed_rounds(self, steps: RoundApplier) -> RoundCatchUp:
        """Make the object that brings an earlier state up to the run's by applying the rounds that it missed."""
        assert self._keeper is not None, "keep_records comes first"
        client, donors = self.client, self._others

        async def verdicts_from(first: int) -> list[Verdict]:
            return await (self.history.since(first) if self.history else fetch_verdicts(client, first))

        progress_s = client.deadlines.request_s
        return RoundCatchUp(steps, self.endpoint, self._keeper, verdicts_from, donors, lambda: client.view, progress_s)

    # Validation ---------------------------------------------------------------------------------------------

    async def samples_of(self, round_number: int, peer: str) -> CoordinatorToPeerWork:
        """Ask for the samples of a member's contribution, as a validator."""
        return await self.client.ask(PeerToCoordinatorGetWork(round=round_number, peer=peer), CoordinatorToPeerWork)

    def begin_contribution(self, layout: tuple[TensorSpec, ...]) -> PartialContribution:
        """Return room for a contribution, of which nothing has come yet."""
        codec_map = CodecMap(self.client.run_file.format_map([(spec.name, spec.shape) for spec in layout]))
        return PartialContribution(LeafGrid(sum(spec.elements for spec in layout), codec_map))

    async def contribution_of(
        self, round_number: int, planned: PlanMember, partial: PartialContribution, limit_s: float
    ) -> Tensor:
        """Fetch the rest of a member's contribution to a committed round, in ``limit_s``; returns all of it, (n,)
        float32. Raises ``LinkError``."""
        progress_s = self.client.deadlines.contribution_s
        peer, root = planned.peer, planned.root
        return await fetch_contribution(self.endpoint, peer, round_number, root, partial, progress_s, limit_s)

    async def report_score(self, score: WorkScore) -> None:
        """Report a score, signed as this member's."""
        await self.client.ask(PeerToCoordinatorScoreWork(signed=self.client.sign_score(score)), Acknowledged)

    async def report_evaluation(self, evaluation: Evaluation) -> None:
        """Report an evaluation, signed as this member's. Raises ``LinkError``."""
        await self.client.ask(PeerToCoordinatorEvaluated(signed=self.client.sign_evaluation(evaluation)), Acknowledged)

    # Rounds -------------------------------------------------------------------------------------------------

    def prepare_averaging(self, layout: tuple[TensorSpec, ...]) -> None:
        """Make the averager of a model with this layout; once."""
        codec_map = CodecMap(self.client.run_file.format_map([(spec.name, spec.shape) for spec in layout]))
        elements = sum(spec.elements for spec in layout)
        self.compression = 4 * elements / codec_map.contribution(0, elements).packed_bytes(elements)
        if elements >= _COMPILED_ELEMENTS:
            loader.compile_ahead([*codec_map.kernels, *(KERNELS if self.client.run_file.averaging.secure else ())])
        self._averager = Averager(self.client, self.endpoint, codec_map, elements, self._keeper)
        self._averager.clock = self.clock
        self._averager.on_exchange = self._donor.pause
        self._averager.inclusions_folder = self._donor.folder
        if self.client.run_file.averaging.secure:
            if self._donor.folder is not None:
                self._averager.reveal_record = RevealRecord(self._donor.folder.with_name(_SECURE_ROUNDS))
            else:
                log.warning("without a folder, this member forgets at its end which secure work has left it")
        if share := self.client.run_file.audit.share:
            client, rng = self.client, secrets.SystemRandom()
            auditor = Auditor(self.endpoint, client.peer, share, client.deadlines, client.show_evidence, rng)
            self._averager.auditor = auditor
            self._background.append(self._tasks.create_task(auditor.run()))
        self._background.append(self._tasks.create_task(self._averager.prefetch_manager.run()))

    @property
    def averager(self) -> Averager:
        assert self._averager is not None, "prepare_averaging comes first"
        return self._averager

    async def average(
        self, offer: RoundOffer, step: Callable[[Committed], Coroutine[Any, Any, AnchorState]]
    ) -> RoundOutcome:
        """Take part in a round, see ``Averager.average``. Of a committed one ``step`` makes the state, which is held
        from then on; the next heartbeat reports it.

        The values of the offer are not read any more when ``step`` begins."""
        return await self._guarded(self._average(offer, step))

    async def _average(
        self, offer: RoundOffer, step: Callable[[Committed], Coroutine[Any, Any, AnchorState]]
    ) -> RoundOutcome:
        await in_thread(return_freed_memory)  # what the local work has left behind
        outcome = await self.averager.average(offer)
        if isinstance(outcome, Committed):
            self.clock.exchange("applying")
            try:
                self._take_possession(await step(outcome))
            finally:
                self.clock.exchange(None)
            await in_thread(return_freed_memory)  # what the round has
        return outcome

    async def _on_get_spans(self, channel: Channel, message: Message) -> Message:
        assert isinstance(message, CoordinatorToPeerGetSpans)
        if not self.client.is_coordinator(channel):
            raise NotAdmitted("only the coordinator asks for the spans of a round")
        spans, now_s = self.clock.spans(message.round)
        return PeerToCoordinatorSpans(spans=spans, now_s=now_s)

    async def _guarded(self, work: Coroutine[Any, Any, T]) -> T:
        return await (work if self._stage is None else self._stage.guard(work))
