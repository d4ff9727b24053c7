"""A member that costs almost nothing: it speaks the coordinator's protocol over CURVE and does no work.

No model and no averaging: it leases samples, says that it trains on them, and reports the digests as if it had
averaged. Of a view it reads the first few fields and skips the rest, so that a thousand of these fit beside the
coordinator that is measured.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import msgpack
import zmq
import zmq.asyncio
from light_view import Glance, Record, glance
from zmq.utils import z85

from shoal.swarm.averaging.norm_claims import pack, ranges
from shoal.swarm.client.bandwidth_probe import PROBE, ProbeSource
from shoal.swarm.errors import REMOTE_ERRORS, DeadlineExceeded, LinkError, TryLater
from shoal.swarm.protocol.identity import CurveKeys, Identity
from shoal.swarm.protocol.invite import Invite
from shoal.swarm.protocol.messages import (
    CoordinatorToPeerJoinAccepted,
    CoordinatorToPeerLease,
    CoordinatorToPeerView,
    PeerToCoordinatorDescribeModel,
    PeerToCoordinatorHeartbeat,
    PeerToCoordinatorJoinRun,
    PeerToCoordinatorRequestLease,
    PeerToCoordinatorRoundReady,
    PeerToCoordinatorRoundReport,
    RequestFailed,
)
from shoal.swarm.protocol.statements import ContributionStatement, RoundName
from shoal.swarm.protocol.types import Address, DeviceInfo, Message, SampleRange, TensorSpec
from shoal.swarm.protocol.wire import MAX_MESSAGE_BYTES, Assembly, Envelope, cut, decode, encode
from shoal.swarm.transport.node import Node
from shoal.swarm.transport.tcp.sockets import tune

TOKENS_PER_SAMPLE = 1024
SAMPLES_PER_LEASE = 16
LEASES_PER_ROUND = 2
_TOKENS_PER_ROUND = LEASES_PER_ROUND * SAMPLES_PER_LEASE * TOKENS_PER_SAMPLE
_GIVE_UP_S = 120.0
_WITH_VIEW = (CoordinatorToPeerView.__name__, CoordinatorToPeerJoinAccepted.__name__)


@dataclass(frozen=True)
class Habits:
    """Behaviour of all light peers: ``work_s`` of pretended training a round, then ``exchange_s`` of averaging."""

    elements: int
    work_s: float
    exchange_s: float
    heartbeat_s: float
    request_s: float


def state_digest(version: int) -> bytes:
    """Stands for the state that all light peers hold at this anchor version."""
    return hashlib.sha256(b"state %d" % version).digest()


class LightPeer:
    """``live`` is its whole life: from the join to the end of the run."""

    def __init__(self, context: zmq.asyncio.Context, invite: Invite, habits: Habits) -> None:
        self.record = Record()
        self._context = context
        self._invite = invite
        self._habits = habits
        self._claim = pack([1.0] * len(ranges(habits.elements)))
        self._keys = CurveKeys.fresh()
        self._identity = Identity.generate()
        self._socket = self._open(zmq.DEALER)
        self._view = Glance()
        self._changed = asyncio.Event()
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._ranges: tuple[SampleRange, ...] = ()
        self._tokens_done = 0
        self._roster_version = 0
        self._plan: tuple[bytes | None, int] = None, 0
        """Digest of the newest plan, and the number of its parts."""
        self._anchor_version: int | None = None

    async def live(self, joining: asyncio.Semaphore, here: asyncio.Semaphore, everybody: asyncio.Event) -> None:
        """``here`` is released once it has joined; it trains when ``everybody`` has.

        Raises ``LinkError`` where the coordinator refuses or is silent for minutes."""
        async with asyncio.TaskGroup() as tasks:
            receiving = tasks.create_task(self._receive())
            async with joining:
                await self._join()
            self._anchor_version = self._view.anchor_version
            beating = tasks.create_task(self._beat())
            here.release()
            await everybody.wait()
            while self._view.phase != "ended":
                await self._take_part(self._view.round)
            beating.cancel()
            receiving.cancel()
        self._socket.close(linger=0)

    async def _join(self) -> None:
        self._socket.curve_serverkey = z85.encode(self._invite.key)
        self._socket.connect(f"tcp://{self._invite.addresses[0]}")

        async def admit(key: bytes) -> bool:
            return key == self._invite.key

        # The coordinator dials both ports back; nobody else ever does, so they are closed again.
        async with Node.open(self._keys, "127.0.0.1", (0, 0), admit) as node:
            node.host_key = self._invite.key
            node.publish(PROBE, ProbeSource())
            await self._request(
                PeerToCoordinatorJoinRun(
                    run=self._invite.run,
                    certificate=self._identity.certify(self._keys),
                    name="light",
                    role="trainer",
                    device=DeviceInfo(kind="cpu", name="none", memory_bytes=0),
                    addresses=(Address(host="127.0.0.1", control_port=node.control_port, data_port=node.data_port),),
                    token=self._invite.token,
                )
            )
        layout = (TensorSpec(name="weight", shape=(self._habits.elements,)),)
        await self._request(
            PeerToCoordinatorDescribeModel(layout=layout, corpus_digest=bytes(32), tokens_per_sample=TOKENS_PER_SAMPLE)
        )

    # Rounds -------------------------------------------------------------------------------------------------

    async def _take_part(self, number: int) -> None:
        times = self.record.rounds[number]
        await self._until(lambda view: view.round != number or view.phase not in ("", "waiting"))
        await self._work(number)
        await self._until(lambda view: view.round != number or view.phase in ("closing", "averaging"))
        times.closes_s = self._view.closes_at_s
        await asyncio.sleep(times.closes_s - time.monotonic())
        while self._view.round == number and self._view.phase == "closing":
            await self._request(self._ready(number))
            await self._until(lambda view: view.round != number or view.phase != "closing", self._habits.heartbeat_s)
        if self._view.round == number and self._view.phase == "averaging":
            times.plan_s = time.monotonic()
            digests = (bytes(32),) * self._view.parts
            await asyncio.sleep(self._habits.exchange_s)
            report = PeerToCoordinatorRoundReport(
                round=number, digests=digests, dropped=(), plan_digest=self._plan[0], trouble=""
            )
            await self._request(report)
        await self._until(lambda view: view.round != number or view.phase == "training")
        if self._view.round != number:
            times.verdict_s = time.monotonic()
        if self._view.anchor_version != self._anchor_version:
            self._anchor_version, self._ranges, self._tokens_done = self._view.anchor_version, (), 0
            await self._tell()  # before any lease: who has not told the new state gets none

    async def _work(self, number: int) -> None:
        """Lease after lease, as long as the round trains."""
        for _ in range(LEASES_PER_ROUND):
            while not (ranges := await self._lease(number)):
                # A round without this work would miss its goal, and go on until its limit in time.
                await self._until(lambda view: not _trains(view, number), self._habits.heartbeat_s)
                if not _trains(self._view, number):
                    return
            self._ranges += ranges
            await asyncio.sleep(self._habits.work_s / LEASES_PER_ROUND)
            self._tokens_done = self._leased_tokens

    async def _lease(self, number: int) -> tuple[SampleRange, ...]:
        if not _trains(self._view, number):
            return ()
        ask = PeerToCoordinatorRequestLease(round=number, samples=SAMPLES_PER_LEASE, tokens_done=self._tokens_done)
        answer = decode(await self._request(ask)).message
        assert isinstance(answer, CoordinatorToPeerLease)
        return answer.ranges

    @property
    def _leased_tokens(self) -> int:
        return sum(one.stop - one.start for one in self._ranges) * TOKENS_PER_SAMPLE

    def _ready(self, number: int) -> PeerToCoordinatorRoundReady:
        assert self._anchor_version is not None
        ready = PeerToCoordinatorRoundReady(
            round=number,
            anchor_version=self._anchor_version,
            state_digest=state_digest(self._anchor_version),
            weight_tokens=self._leased_tokens,
            ranges=self._ranges,
            loss=1.0,
            norms=self._claim,
        )
        statement = ContributionStatement.of_ready(RoundName(self._invite.run_hash, None, number), ready)
        return ready.model_copy(update={"signature": self._identity.sign(statement.bytes_to_sign())})

    async def _beat(self) -> None:
        while True:
            await self._tell()
            await asyncio.sleep(self._habits.heartbeat_s)

    async def _tell(self) -> None:
        """One heartbeat."""
        version = self._anchor_version
        assert version is not None
        heartbeat = PeerToCoordinatorHeartbeat(
            round=self._view.round,
            activity="training",
            anchor_version=version,
            state_digest=state_digest(version),
            tokens_done=self._tokens_done,
            tokens_per_s=_TOKENS_PER_ROUND / self._habits.work_s,
            step_s=0.1,
            loss=1.0,
            chunks_moved=0,
            bytes_sent=0,
            bytes_received=0,
            bandwidth_bps=1e8,
            roster_version=self._roster_version,
            verdict_chain=self._view.verdict_chain,
            plan_digest=self._plan[0],
        )
        await self._request(heartbeat)
        self.record.count()

    # Messages -----------------------------------------------------------------------------------------------

    async def _request(self, message: Message) -> bytes:
        """Send a request until it is answered, as members do; returns the answer. A view in it is read on arrival."""
        name, start = type(message).__name__.removeprefix("PeerToCoordinator"), time.monotonic()
        while time.monotonic() < start + _GIVE_UP_S:
            number = next(self._numbers)
            future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
            self._waiting[number] = future
            data = encode(Envelope("request", number, message, run=self._invite.run))
            self.record.sent_bytes += len(data)
            for frame in cut(data):
                await self._socket.send(frame)
            try:
                async with asyncio.timeout(self._habits.request_s):
                    answer = await future
            except TimeoutError:
                self.record.repeats += 1
                continue
            self.record.answers_s[name].append(time.monotonic() - start)
            return answer
        raise DeadlineExceeded(f"no answer to {name}")

    async def _until(self, predicate: Callable[[Glance], bool], timeout_s: float | None = None) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._view.phase != "ended" and not predicate(self._view):
                    self._changed.clear()
                    await self._changed.wait()

    async def _receive(self) -> None:
        assembly = Assembly(MAX_MESSAGE_BYTES)
        while True:
            frame = await self._socket.recv()
            self.record.received_bytes += len(frame)
            if (whole := assembly.add(memoryview(frame))) is None:
                continue
            data = bytes(whole)
            unpacker = msgpack.Unpacker(max_buffer_size=MAX_MESSAGE_BYTES)
            unpacker.feed(data)
            unpacker.read_array_header()
            _, _, number, _, _, name = (unpacker.unpack() for _ in range(6))
            if name == RequestFailed.__name__:
                failed = decode(data).message
                assert isinstance(failed, RequestFailed)
                if failed.code == TryLater.__name__:  # the first of two equal requests is still being answered
                    continue
                raise REMOTE_ERRORS.get(failed.code, LinkError)(failed.message)
            if name in _WITH_VIEW:
                for _ in range(unpacker.read_map_header()):
                    if unpacker.unpack() == "view":
                        self._take(glance(unpacker))
                    else:
                        unpacker.skip()
                self.record.views += 1
                self.record.view_bytes += len(data)
            waiting = self._waiting.pop(number, None)
            if waiting is not None and not waiting.done():
                waiting.set_result(data)

    def _take(self, view: Glance) -> None:
        if view.has_roster:
            self._roster_version = view.roster_version
        if view.plan_digest is not None:
            if view.parts:
                self._plan = view.plan_digest, view.parts
            elif self._plan[0] == view.plan_digest:
                view.parts = self._plan[1]
            else:
                return  # the next heartbeat says that the plan is not known here
        if (view.epoch, view.sequence) >= (self._view.epoch, self._view.sequence):
            self._view = view
            self._changed.set()

    def _open(self, kind: int) -> zmq.asyncio.Socket:
        socket = self._context.socket(kind)
        socket.curve_publickey, socket.curve_secretkey = z85.encode(self._keys.public), z85.encode(self._keys.secret)
        tune(socket)
        return socket


def _trains(view: Glance, number: int) -> bool:
    return view.round == number and view.phase == "training"
