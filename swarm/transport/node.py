"""A member's end of the network: the control and the data plane together, addressed by peer id.

``Endpoint`` is the interface that averaging uses; ``Node`` implements it on real sockets. ``ScopedEndpoint`` restricts
an endpoint to one scope. Which path leads to a member is chosen here: its address if it can be dialed, a connection
that it has made, being dialed by it, a relay. Only ``Node.fetch`` opens broken links again; all other code treats its
errors as final.
"""

from __future__ import annotations

import asyncio
import logging
import socket as sockets
import statistics
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import Protocol, TypeVar

import zmq.asyncio

from shoal.swarm.errors import (
    BlobUnavailable,
    Busy,
    LinkClosed,
    LinkError,
    MemberGone,
    NotAdmitted,
    ShoalError,
    Unreachable,
    WireError,
    member_error,
)
from shoal.swarm.protocol.addresses import join_host_port, network_of
from shoal.swarm.protocol.identity import CurveKeys
from shoal.swarm.protocol.messages import PeerToPeerLinkOpened, PeerToPeerOpenLink, PeerToPeerPing, PeerToPeerPong
from shoal.swarm.protocol.types import MAX_PATHS, Blob, Message, PathKind, PathReport, RosterEntry
from shoal.swarm.transport.bulk.data_plane import DataPlane
from shoal.swarm.transport.bulk.link import ChunkSink, Link
from shoal.swarm.transport.bulk.pacing import merge_shares
from shoal.swarm.transport.bulk.source import ChunkSource
from shoal.swarm.transport.channel import Channel
from shoal.swarm.transport.control import ControlPlane
from shoal.swarm.transport.limits.download_quota import Reader
from shoal.swarm.transport.limits.traffic_limits import TrafficLimits
from shoal.swarm.transport.limits.traffic_meter import TrafficMeter
from shoal.swarm.transport.paths.failed_dials import FailedDials
from shoal.swarm.transport.paths.punch_pauses import PunchPauses
from shoal.swarm.transport.paths.relay_paths import RelayPaths, punch
from shoal.swarm.transport.paths.unmet_peers import UnmetPeers
from shoal.swarm.transport.relay.client import RelayedSocket
from shoal.swarm.transport.roster import Rosters
from shoal.swarm.transport.tcp.sockets import connect, own_end
from shoal.swarm.transport.zap_auth import Admit, ZapAuthenticator

log = logging.getLogger(__name__)

M = TypeVar("M", bound=Message)
T = TypeVar("T")
Agree = Callable[[PeerToPeerOpenLink], Awaitable[PeerToPeerLinkOpened]]

_LOOPBACK = "127.0.0.1"
_REVERSAL_S, _LOOK_S = 2.0, 0.02
"""Time for a member to dial this one after it was asked to, before the next path is tried."""

_DIRECT_S = 3.0
"""Time for an address that the coordinator could dial, where this machine can be dialed instead."""

_DIAL_BACK_S, _MAX_DIALS = 5.0, 64
_DRAIN_S = 0.5
_BEST_LAST: tuple[PathKind, ...] = ("relayed", "punched", "reversed", "direct")
_ATTEMPTS = 3
_RETRY_S = 0.02
_MAX_RETRY_S = 0.5
_PROBE, _PROBE_BYTES = Blob(kind="probe", number=0), 2**16
_MAX_SOCKETS = 8192
"""A member can take four, with monitors; libzmq's default of 1023 is too few."""


class Endpoint(Protocol):
    """The network as averaging and state transfer use it."""

    def publish(self, blob: Blob, source: ChunkSource) -> None: ...

    def retract(self, blob: Blob) -> None: ...

    def share_uplink(self, shares: Mapping[str, float], scope: int = 0) -> None: ...

    def fetch(
        self, peer: str, blob: Blob, chunks: range, sink: ChunkSink, progress_s: float
    ) -> AsyncGenerator[int, None]: ...


class Node:
    """The endpoint on real sockets; create it with ``Node.open``."""

    def __init__(self, control: ControlPlane, data: DataPlane, tasks: asyncio.TaskGroup) -> None:
        self.control = control
        self.relays = RelayPaths(tasks, control.origins, data.accept)
        self.request_dial: Callable[[str], Awaitable[None]] | None = None
        """Asks the coordinator that a member dials this one; None if this process is no member."""
        self.is_met_by: Callable[[RosterEntry], bool] = lambda entry: True
        """Whether a member that cannot be dialed from here can open a connection to this one."""
        self._data = data
        self._tasks = tasks
        self._dialing_back: set[str] = set()
        self._rosters = Rosters()
        self.control.guard.is_member = self.knows_key
        data.reader_of = self._reader
        self._shares: dict[int, dict[bytes, float]] = {}
        self._link_locks: dict[str, asyncio.Lock] = {}
        self._undialed, self._silent = FailedDials(), FailedDials()
        """Members that could not be dialed from here though others could, and that did not dial when asked to."""
        self._punch_pauses = PunchPauses()
        self.unmet = UnmetPeers()
        """Members of which this node could get nothing, as no connection was possible."""
        self.host_key = b""
        """The coordinator's transport key: it may open links, too, to try whether that is possible."""
        self.control_port = 0
        self.data_port = 0

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        keys: CurveKeys,
        host: str,
        ports: tuple[int, int | None],
        admit: Admit,
        limits: TrafficLimits | None = None,
    ) -> AsyncIterator[Node]:
        """Bind both planes on ``host`` (port 0: any free one); the context's end closes everything.

        With None for the data port, nobody can open links to this node. ``limits``: on the traffic of both planes
        together. Raises ``Unreachable`` when it cannot bind."""
        limits = limits or TrafficLimits()
        context = zmq.asyncio.Context()
        context.max_sockets = _MAX_SOCKETS
        try:
            async with asyncio.TaskGroup() as tasks:
                data = DataPlane(tasks, limits)
                node = cls(ControlPlane(context, keys, tasks, limits), data, tasks)
                authenticator = ZapAuthenticator(context, tasks, admit, node.control.guard)
                try:
                    handle_peers(node.control, data, node.may_open_links)
                    authenticator.start()
                    node.control_port = node.control.start(host, ports[0])
                    node.relays.listens_at = (own_end(host), node.control_port)
                    data.start()
                    node.data_port = 0 if ports[1] is None else data.bind(host, ports[1])
                    yield node
                finally:
                    node.relays.stop()
                    node.control.stop()
                    data.stop()
                    authenticator.stop()
                tasks.create_task(_end())
        except BaseExceptionGroup as group:
            # Raise the body's error itself, not a group: the caller knows nothing of the tasks in here.
            _, others = group.split(_Ended)
            if others is not None:
                raise others.exceptions[0] if len(others.exceptions) == 1 else others from None
        finally:
            context.destroy(linger=0)

    @property
    def meter(self) -> TrafficMeter:
        return self._data.meter

    @property
    def bandwidth_bps(self) -> float:
        """Bits a second that this machine's link carries, within its owner's limits; 0 while that is not known."""
        return self._data.limits.usable_bps(max(self.meter.bandwidth_bps, self.meter.probed_bps))

    @property
    def connections_per_link(self) -> int:
        """TCP connections of each link that will be opened, 1 to 16."""
        return self._data.connections_per_link

    @connections_per_link.setter
    def connections_per_link(self, number: int) -> None:
        self._data.connections_per_link = number

    def update_roster(self, roster: tuple[RosterEntry, ...], scope: int = 0) -> None:
        """Replace a scope's roster; entries with a wrong certificate are left out.

        Members of any scope may connect. Connections with peers that left all rosters, or that have a new address or
        key, are closed."""
        self._disconnect(self._rosters.update(roster, scope))

    def leave(self, scope: int) -> None:
        """Leave a scope: forget its members, handlers and blobs."""
        self.control.leave(scope)
        self._data.leave(scope)
        self.share_uplink({}, scope)
        self._disconnect(self._rosters.leave(scope))

    def _disconnect(self, keys: set[bytes]) -> None:
        for key in keys:
            self.control.forget(key)
            self.relays.forget(key)
            for link in self._data.links_with(key):
                self._data.close_link(link)
        locks = self._link_locks.items()
        self._link_locks = {peer: lock for peer, lock in locks if peer in self._rosters or lock.locked()}
        self._undialed.forget(keys)
        self._silent.forget(keys)
        self._punch_pauses.forget([peer for peer in self._punch_pauses.peers if peer not in self._rosters])
        self.unmet.forget([peer for peer in self.unmet.failed if peer not in self._rosters])

    def knows_key(self, curve_key: bytes) -> bool:
        return self.peer_with(curve_key) is not None

    def may_open_links(self, curve_key: bytes) -> bool:
        return self.knows_key(curve_key) or curve_key == self.host_key

    def peer_with(self, curve_key: bytes) -> str | None:
        """The member of any scope that holds a transport key."""
        return self._rosters.peer_with(curve_key)

    def _reader(self, curve_key: bytes, host: str) -> Reader:
        peer = self.peer_with(curve_key)
        return Reader(peer or curve_key.hex(), network_of(host), peer is None or self._rosters.is_observer(peer))

    def trainers(self, scope: int = 0) -> list[str]:
        """The members that train, in the roster's order: the longest-standing first."""
        return self._rosters.trainers(scope)

    def reachable_owners(self, scope: int = 0) -> list[str]:
        """The trainers that can be dialed and may reduce parts, in the roster's order."""
        return self._rosters.reachable_owners(scope)

    def processes(self, scope: int = 0) -> dict[str, bytes]:
        """The transport key of each member's process."""
        return self._rosters.processes(scope)

    @property
    def round_trip_s(self) -> float:
        """Median over members of the time from a small request to its answer; 0 before any request."""
        channels = [one for one in self.control.channels if self.knows_key(one.remote_key)]
        trips_s = [trip_s for one in channels if (trip_s := one.round_trip_s) is not None]
        return statistics.median(trips_s) if trips_s else 0.0

    def publish(self, blob: Blob, source: ChunkSource) -> None:
        self._data.publish(blob, source)

    def retract(self, blob: Blob) -> None:
        self._data.retract(blob)

    def share_uplink(self, shares: Mapping[str, float], scope: int = 0) -> None:
        """Pace what we send so that each member gets its share of the uplink; empty ends the scope's pacing.

        Rounds of several scopes share the uplink equally."""
        entries = {peer: entry for peer in shares if (entry := self._rosters.entry(peer, scope)) is not None}
        before = self._shares.pop(scope, {})
        if entries:
            self._shares[scope] = {entry.certificate.curve_key: shares[peer] for peer, entry in entries.items()}
        if before == self._shares.get(scope, {}):
            return  # pacing begins anew only if something has changed
        self._data.share_uplink(merge_shares(list(self._shares.values())))

    async def fetch(
        self, peer: str, blob: Blob, chunks: range, sink: ChunkSink, progress_s: float
    ) -> AsyncGenerator[int, None]:
        """Yield the index of each chunk, in order, once it lies in its sink; resume over broken links.

        Raises ``MemberGone`` and ``Busy`` at once, and the last other ``LinkError`` (``Unreachable``,
        ``BlobUnavailable``, …) after ``progress_s`` without a new chunk. After an early close, the sinks are not
        written to any more."""
        following, progress = chunks.start, time.monotonic()
        retry_s, trouble = _RETRY_S, LinkError(f"{peer} sent nothing")
        while following < chunks.stop:
            try:
                rest = range(following, chunks.stop)
                async with aclosing(self._attempt(peer, blob, rest, sink, progress_s / _ATTEMPTS)) as attempt:
                    async for chunk in attempt:
                        self.unmet.note_met(peer)
                        yield chunk
                        # Measured after the yield: the time that our caller took is not the other side's silence.
                        following, progress, retry_s = chunk + 1, time.monotonic(), _RETRY_S
            except (MemberGone, Busy):
                raise
            except LinkError as error:
                trouble = error
            if following < chunks.stop:
                if time.monotonic() - progress > progress_s:
                    if isinstance(trouble, Unreachable):
                        self.unmet.note_failure(peer, time.monotonic())
                    raise trouble
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, _MAX_RETRY_S)

    async def _attempt(
        self, peer: str, blob: Blob, chunks: range, sink: ChunkSink, wait_s: float
    ) -> AsyncGenerator[int, None]:
        entry, channel = await self._channel_to(peer, blob.scope, wait_s)
        link = await self._link(entry, channel, wait_s)
        number, incoming = self._data.open_stream(link, blob, chunks, sink)
        finished = False
        try:
            for expected in chunks:
                chunk = await incoming.next_chunk(wait_s)
                assert chunk == expected
                if chunk == chunks.start:
                    # Now the chunks' size is known. Grant credit already here, as the caller may keep this chunk for
                    # long: its round may have no plan yet.
                    self._data.grant(link, number, incoming, in_use=1)
                yield chunk
                self._data.grant(link, number, incoming)
            finished = True
        except TimeoutError as error:
            self._close_silent_link(entry, link, wait_s)
            raise LinkError(f"{peer} sent no chunk of {blob.kind} {blob.number} for {wait_s:.1f} s") from error
        except LinkClosed:
            self._close_broken_link(peer, link)
            raise
        finally:
            self._data.close_stream(link, number, finished=finished)

    def _close_silent_link(self, entry: RosterEntry, link: Link, silent_s: float) -> None:
        """Close a link over which no frame came at all, if this side can open another one."""
        if (link.is_ours or entry.can_be_met) and time.monotonic() - link.last_frame_s >= silent_s:
            self._close_broken_link(entry.peer, link)

    def _close_broken_link(self, peer: str, link: Link) -> None:
        if link.path == "punched":
            self._punch_pauses.note_broken(peer, time.monotonic())
        self._data.close_link(link)

    async def try_both_ports(self, entry: RosterEntry, wait_s: float) -> str:
        """Dial a peer that is no member yet at both of its ports, and hang up. Returns what does not work, for people;
        empty if both answer. ``wait_s``: for each step.

        That the data port is the peer's own is known once a frame has come back over the link."""
        host, key, channel, link = entry.address.host, entry.certificate.curve_key, None, None
        data_port = entry.address.data_port
        if data_port is None:
            return "it names no address of its own"
        try:
            try:
                channel = self.control.dial(host, entry.address.control_port, key)
                await channel.connected(wait_s)
                await channel.request(PeerToPeerPing(), PeerToPeerPong, wait_s)
            except ShoalError:
                return f"nothing answers at its control port, {join_host_port(host, entry.address.control_port)}"
            agree = partial(channel.request, reply=PeerToPeerLinkOpened, deadline_s=wait_s)
            try:
                async with asyncio.timeout(wait_s):
                    link = await self._data.open_link(key, lambda: connect(host, data_port), agree)
                    await self._await_frame(link, wait_s)
            except (ShoalError, TimeoutError):
                where = join_host_port(host, data_port)
                return f"its control port answers, but its data port, {where}, does not: others need both"
            return ""
        finally:
            if link is not None:
                self._data.close_link(link)
            if channel is not None:
                self.control.hang_up(channel)

    async def _await_frame(self, link: Link, wait_s: float) -> None:
        """Wait for a frame of the other side: the beginning of a probe, or the news that it has none."""
        place = memoryview(bytearray(_PROBE_BYTES))

        def sink(chunk: int, size_bytes: int) -> memoryview:
            if size_bytes > _PROBE_BYTES:
                raise WireError(f"a probe's chunk has at most {_PROBE_BYTES} bytes, not {size_bytes}")
            return place[:size_bytes]

        number, incoming = self._data.open_stream(link, _PROBE, range(1), sink)
        try:
            await incoming.next_chunk(wait_s)
        except BlobUnavailable:
            pass
        finally:
            self._data.close_stream(link, number, finished=False)

    async def ask(self, peer: str, message: Message, reply: type[M], wait_s: float, scope: int = 0) -> M:
        """Send a request to a member. Raises ``MemberGone``, ``Unreachable``, and other ``LinkError``s."""
        entry, channel = await self._channel_to(peer, scope, wait_s)
        try:
            return await _request(channel, message, reply, wait_s, scope)
        except Unreachable:
            self._note_undialed(entry)
            raise

    # Paths ------------------------------------------------------------------------------------------------

    async def _channel_to(self, peer: str, scope: int, wait_s: float) -> tuple[RosterEntry, Channel]:
        """The channel to a member, over the best path there is. Raises ``MemberGone``, ``Unreachable``."""
        entry = self._rosters.entry(peer, scope)
        if entry is None:
            raise MemberGone(f"{peer} is not a member of the run, or has left it")
        return entry, await self._best_channel(entry, wait_s)

    async def _best_channel(self, entry: RosterEntry, wait_s: float, *, asks: bool = True) -> Channel:
        """``asks``: whether a member that cannot be dialed from here may be asked to dial."""
        key = entry.certificate.curve_key
        if self._is_dialed_from_here(entry):
            return self.control.dial(entry.address.host, entry.address.control_port, key)
        channel = self.control.incoming(key) or self.control.dialed_over_relay(key)
        if channel is None and asks:
            channel = await self._asked(entry, lambda: self.control.incoming(key), wait_s)
        if channel is None and entry.relays:
            port = self.relays.forwarder_to(key, entry.relays)
            channel = self.control.dial(_LOOPBACK, port, key, via=entry.relays[0])
        if channel is None and entry.reachable:
            self._undialed.forget([key])  # perhaps it was away for a moment
            channel = self.control.dial(entry.address.host, entry.address.control_port, key)
        if channel is None:
            raise Unreachable(f"{entry.peer} cannot be reached from outside and has not connected to this machine yet")
        return channel

    def _is_dialed_from_here(self, entry: RosterEntry) -> bool:
        return entry.reachable and not self._undialed.has(entry.certificate.curve_key, time.monotonic())

    def _note_undialed(self, entry: RosterEntry) -> None:
        """Note that a member that others can dial cannot be dialed from here, if it can dial this one instead."""
        if self._may_ask(entry) and self._is_dialed_from_here(entry):
            log.debug("%s cannot be dialed from here: it is asked to dial", entry.peer)
            self._undialed.note(entry.certificate.curve_key, time.monotonic())

    async def _link(self, entry: RosterEntry, channel: Channel, wait_s: float, *, asks: bool = True) -> Link:
        """The link with a peer; opened when there is none, over the best path there is."""

        is_agreed = False

        async def agree(ask: PeerToPeerOpenLink) -> PeerToPeerLinkOpened:
            nonlocal is_agreed
            await channel.connected(wait_s)
            answer = await _request(channel, ask, PeerToPeerLinkOpened, wait_s)
            is_agreed = True
            return answer

        key = channel.remote_key
        try:
            # One at a time, otherwise streams that start together would each open a link.
            async with asyncio.timeout(wait_s), self._link_locks.setdefault(entry.peer, asyncio.Lock()):
                if (link := self._attached_link(key)) is not None:
                    return link
                if self._is_dialed_from_here(entry):
                    return await self._direct_link(entry, agree)
                if asks:
                    link = await self._asked(entry, lambda: self._attached_link(key), wait_s)
                    if link is not None:
                        return link
                if entry.relays:
                    return await self._relayed_link(entry, agree)
                raise Unreachable(f"{entry.peer} cannot be reached from outside and has not opened a link yet")
        except TimeoutError as error:
            self._note_undialed(entry)
            if is_agreed:
                raise Unreachable(f"nothing answers at the data port of {entry.peer}") from error
            raise channel.diagnosis(wait_s) from error

    async def _direct_link(self, entry: RosterEntry, agree: Agree) -> Link:
        """Open a link to a member's own address; within a part of the time where there is another way."""
        host, port = entry.address.host, entry.address.data_port
        assert port is not None, "members have one"
        try:
            async with asyncio.timeout(_DIRECT_S if self._may_ask(entry) else None):
                return await self._data.open_link(entry.certificate.curve_key, lambda: connect(host, port), agree)
        except Unreachable:
            self._note_undialed(entry)
            raise

    def is_linked(self, peer: str) -> bool:
        """Whether there is a connection with a member of the run, whoever has opened it."""
        entry = self._rosters.entry(peer, 0)
        if entry is None:
            return False
        key = entry.certificate.curve_key
        return self._attached_link(key) is not None or self.control.incoming(key) is not None

    def _attached_link(self, key: bytes) -> Link | None:
        return next((link for link in self._data.links_with(key) if link.attached.is_set()), None)

    async def _asked(self, entry: RosterEntry, look: Callable[[], T | None], wait_s: float) -> T | None:
        """Ask a member to dial this one; return what is looked for as soon as it is there, or None after a part of the
        time."""
        key = entry.certificate.curve_key
        if self._silent.has(key, time.monotonic()) or not await self._ask_to_be_dialed(entry):
            return None
        give_up_s = time.monotonic() + min(_REVERSAL_S, wait_s / 2)
        while True:
            found = look()
            if found is not None:
                return found
            if time.monotonic() >= give_up_s:
                self._silent.note(key, time.monotonic())
                return None
            await asyncio.sleep(_LOOK_S)

    def _may_ask(self, entry: RosterEntry) -> bool:
        return self.request_dial is not None and self.is_met_by(entry)

    async def _ask_to_be_dialed(self, entry: RosterEntry) -> bool:
        """Ask a member that cannot be dialed from here to dial this one; returns whether it was asked."""
        if self.request_dial is None or not self.is_met_by(entry):
            return False
        try:
            await self.request_dial(entry.peer)
        except LinkError as error:
            log.debug("%s could not be asked to dial this machine: %s", entry.peer, error)
            return False
        return True

    def dial_back(self, peer: str) -> None:
        """Open a link to a member that asks for that, over a relay if it cannot be dialed."""
        entry = self._rosters.entry(peer, 0)
        if entry is None or not entry.can_be_met or peer in self._dialing_back or len(self._dialing_back) >= _MAX_DIALS:
            return
        self._dialing_back.add(peer)
        self._tasks.create_task(self._dial_back(entry))

    async def _dial_back(self, entry: RosterEntry) -> None:
        try:
            channel = await self._best_channel(entry, _DIAL_BACK_S, asks=False)
            await channel.connected(_DIAL_BACK_S)
            await self._link(entry, channel, _DIAL_BACK_S, asks=False)
        except LinkError as error:
            log.debug("could not dial %s, which has asked for it: %s", entry.peer, error)
        finally:
            self._dialing_back.discard(entry.peer)

    async def _relayed_link(self, entry: RosterEntry, agree: Agree) -> Link:
        """Open a link over a relay, and from then on try for a direct one."""
        key, over = entry.certificate.curve_key, list[RelayedSocket]()

        async def dial() -> sockets.socket:
            over.append(await self.relays.call(key, entry.relays, "data"))
            return over[-1].socket

        link = await self._data.open_link(key, dial, agree, path="relayed")
        if self.relays.punches and self._punch_pauses.may_punch(entry.peer, time.monotonic()):
            self._tasks.create_task(self._improve(link, entry, over[0], agree))
        return link

    async def _improve(self, relayed: Link, entry: RosterEntry, over: RelayedSocket, agree: Agree) -> None:
        """Punch through the walls between; new streams then use the direct link, and the relayed one ends when idle."""
        socket = await punch(over)
        if socket is None:
            log.debug("no direct path to %s: the relayed one stays", entry.peer)
            return

        async def dial() -> sockets.socket:
            return socket

        try:
            async with asyncio.timeout(_DIAL_BACK_S):
                await self._data.open_link(entry.certificate.curve_key, dial, agree, path="punched")
        except (LinkError, TimeoutError) as error:
            log.debug("the direct path to %s was not taken: %s", entry.peer, error)
            socket.close()
            return
        log.info("connected to %s directly, through the walls between", entry.peer)
        while True:
            await asyncio.sleep(_DRAIN_S)
            if relayed.is_idle or relayed not in self._data.all_links():
                break
        self._data.close_link(relayed)

    def path_reports(self) -> tuple[PathReport, ...]:
        """The paths to other members, those that are not direct first, as many as a message has room for."""
        reports: dict[str, PathReport] = {}
        for link in self._data.all_links():
            peer = self.peer_with(link.remote_key)
            if peer is None or not link.attached.is_set() or self._attached_link(link.remote_key) is not link:
                continue
            entry = self._rosters.entry(peer, 0)
            is_reversed = link.path == "direct" and entry is not None and not entry.reachable
            reports[peer] = PathReport(
                peer=peer, kind="reversed" if is_reversed else link.path, rtt_s=self._trip_s(link.remote_key)
            )
        return tuple(sorted(reports.values(), key=lambda one: _BEST_LAST.index(one.kind)))[:MAX_PATHS]

    def _trip_s(self, key: bytes) -> float:
        trips_s = [one.round_trip_s for one in self.control.channels if one.remote_key == key]
        return min((trip_s for trip_s in trips_s if trip_s is not None), default=0.0)


class _Ended(Exception):
    """Ends a task group whose tasks run without end."""


async def _end() -> None:
    raise _Ended


def handle_peers(control: ControlPlane, data: DataPlane, is_member: Callable[[bytes], bool]) -> None:
    """Register the handlers of requests between peers. Only members may open links."""

    async def ping(channel: Channel, message: Message) -> Message:
        return PeerToPeerPong()

    async def open_link(channel: Channel, message: Message) -> Message:
        assert isinstance(message, PeerToPeerOpenLink)
        if not is_member(channel.remote_key):
            raise NotAdmitted("only members of the run may open links to this machine")
        return data.accept_link(channel.remote_key, message)

    control.handle(PeerToPeerPing, ping)
    control.handle(PeerToPeerOpenLink, open_link)


class ScopedEndpoint:
    """An endpoint that puts all blobs into one scope, so that averaging need not know which scope it works for."""

    def __init__(self, endpoint: Endpoint, scope: int) -> None:
        self._endpoint = endpoint
        self._scope = scope

    def publish(self, blob: Blob, source: ChunkSource) -> None:
        self._endpoint.publish(self._scoped(blob), source)

    def retract(self, blob: Blob) -> None:
        self._endpoint.retract(self._scoped(blob))

    def share_uplink(self, shares: Mapping[str, float], scope: int = 0) -> None:
        self._endpoint.share_uplink(shares, scope or self._scope)

    def fetch(
        self, peer: str, blob: Blob, chunks: range, sink: ChunkSink, progress_s: float
    ) -> AsyncGenerator[int, None]:
        return self._endpoint.fetch(peer, self._scoped(blob), chunks, sink, progress_s)

    def _scoped(self, blob: Blob) -> Blob:
        return blob.model_copy(update={"scope": self._scope})


async def _request(channel: Channel, message: Message, reply: type[M], wait_s: float, scope: int = 0) -> M:
    try:
        return await channel.request(message, reply, wait_s, scope)
    except ShoalError as error:
        raise member_error(error) from None
