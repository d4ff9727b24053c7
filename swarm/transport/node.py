"""A member's end of the network: control and data plane together, addressed by peer id.

``Endpoint`` is the interface that averaging and the tests' in-memory network share; ``Node`` is the real one, and
``ScopedEndpoint`` an endpoint's view for one stage of a pipeline. ``Node.fetch`` is the only place where a broken link
is opened again; everybody else treats its errors as final.
"""

from __future__ import annotations

import asyncio
import logging
import statistics
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Protocol, TypeVar

import zmq.asyncio

from shoal.swarm.errors import Busy, LinkClosed, LinkError, MemberGone, NotAdmitted, Unreachable
from shoal.swarm.protocol.identity import CurveKeys
from shoal.swarm.protocol.messages import PeerToPeerLinkOpened, PeerToPeerOpenLink, PeerToPeerPing, PeerToPeerPong
from shoal.swarm.protocol.types import Blob, Message, RosterEntry
from shoal.swarm.transport.channel import Channel
from shoal.swarm.transport.control import ControlPlane
from shoal.swarm.transport.data_plane import DataPlane
from shoal.swarm.transport.link import Link, Meter, Sink
from shoal.swarm.transport.pacing import together
from shoal.swarm.transport.roster import Rosters
from shoal.swarm.transport.source import ChunkSource
from shoal.swarm.transport.zap_auth import Admit, ZapAuthenticator

log = logging.getLogger(__name__)

M = TypeVar("M", bound=Message)

_ATTEMPTS = 3
_RETRY_S = 0.02
_MAX_RETRY_S = 0.5
_MAX_SOCKETS = 8192  # each member can take four, with monitors; libzmq's 1023 would not do


class Endpoint(Protocol):
    """The network as the averaging protocol uses it."""

    def publish(self, blob: Blob, source: ChunkSource) -> None: ...

    def retract(self, blob: Blob) -> None: ...

    def share_uplink(self, shares: Mapping[str, float], scope: int = 0) -> None: ...

    def fetch(
        self, peer: str, blob: Blob, chunks: range, sink: Sink, progress_s: float
    ) -> AsyncGenerator[int, None]: ...


class Node:
    """The real endpoint. Make it with ``Node.open``."""

    def __init__(self, control: ControlPlane, data: DataPlane) -> None:
        self.control = control
        self._data = data
        self._rosters = Rosters()
        self.control.guard.is_member = self.knows_key
        self._shares: dict[int, dict[bytes, float]] = {}
        self._link_locks: dict[str, asyncio.Lock] = {}
        self.control_port = 0
        self.data_port = 0

    @classmethod
    @asynccontextmanager
    async def open(cls, keys: CurveKeys, host: str, ports: tuple[int, int | None], admit: Admit) -> AsyncIterator[Node]:
        """Bind both planes on ``host`` (port 0: any free one); everything ends with the context.

        Without a data port (None) the node takes part in control only. Raises ``Unreachable`` when it cannot
        bind.
        """
        context = zmq.asyncio.Context()
        context.max_sockets = _MAX_SOCKETS
        try:
            async with asyncio.TaskGroup() as tasks:
                data = DataPlane(tasks)
                node = cls(ControlPlane(context, keys, tasks), data)
                gate = ZapAuthenticator(context, tasks, admit, node.control.guard)
                try:
                    answer_members(node.control, data, node.knows_key)
                    gate.start()
                    node.control_port = node.control.start(host, ports[0])
                    data.start()
                    node.data_port = 0 if ports[1] is None else data.bind(host, ports[1])
                    yield node
                finally:
                    node.control.stop()
                    data.stop()
                    gate.stop()
                tasks.create_task(_end())
        except BaseExceptionGroup as group:
            # What the body raised comes out as it was, not wrapped in the group of tasks that it never saw.
            _, others = group.split(_Ended)
            if others is not None:
                raise others.exceptions[0] if len(others.exceptions) == 1 else others from None
        finally:
            context.destroy(linger=0)

    @property
    def meter(self) -> Meter:
        return self._data.meter

    @property
    def connections_per_link(self) -> int:
        """TCP connections of each link that is opened from now on, 1 to 16."""
        return self._data.connections_per_link

    @connections_per_link.setter
    def connections_per_link(self, number: int) -> None:
        self._data.connections_per_link = number

    def update_roster(self, roster: tuple[RosterEntry, ...], scope: int = 0) -> None:
        """Replace the set of a scope's members. Entries whose certificate is wrong are left out.

        Those of all scopes may talk to us. Connections with those that are on no roster any more, or elsewhere or under
        another key, are closed.
        """
        self._part_from(self._rosters.update(roster, scope))

    def leave(self, scope: int) -> None:
        """Take no part in that scope any more: its members, handlers and blobs are forgotten."""
        self.control.leave(scope)
        self._data.leave(scope)
        self.share_uplink({}, scope)
        self._part_from(self._rosters.leave(scope))

    def _part_from(self, keys: set[bytes]) -> None:
        for key in keys:
            self.control.forget(key)
            for link in self._data.links_with(key):
                self._data.close_link(link)
        locks = self._link_locks.items()
        self._link_locks = {peer: lock for peer, lock in locks if peer in self._rosters or lock.locked()}

    def knows_key(self, curve_key: bytes) -> bool:
        return self.peer_with(curve_key) is not None

    def peer_with(self, curve_key: bytes) -> str | None:
        """The member, of any scope, that holds that key."""
        return self._rosters.peer_with(curve_key)

    def trainers(self, scope: int = 0) -> list[str]:
        """The members that train, in the roster's order: who has been here longest first."""
        return self._rosters.trainers(scope)

    def processes(self, scope: int = 0) -> dict[str, bytes]:
        """The key of the process that each of the scope's members is now."""
        return self._rosters.processes(scope)

    @property
    def round_trip_s(self) -> float:
        """From a small request to its answer, of the middle one of the members that we have asked; 0 before any."""
        channels = [one for one in self.control.channels if self.knows_key(one.remote_key)]
        trips_s = [trip_s for one in channels if (trip_s := one.round_trip_s) is not None]
        return statistics.median(trips_s) if trips_s else 0.0

    def publish(self, blob: Blob, source: ChunkSource) -> None:
        self._data.publish(blob, source)

    def retract(self, blob: Blob) -> None:
        self._data.retract(blob)

    def share_uplink(self, shares: Mapping[str, float], scope: int = 0) -> None:
        """Of what we send in that scope's round, each of these members is to get that share from now on; none: as TCP
        sees fit. Of rounds of several scopes each one gets as much."""
        entries = {peer: entry for peer in shares if (entry := self._rosters.entry(peer, scope)) is not None}
        before = self._shares.pop(scope, {})
        if entries:
            self._shares[scope] = {entry.certificate.curve_key: shares[peer] for peer, entry in entries.items()}
        if before == self._shares.get(scope, {}):
            return  # saying it again begins nothing anew
        self._data.share_uplink(together(list(self._shares.values())))

    async def fetch(
        self, peer: str, blob: Blob, chunks: range, sink: Sink, progress_s: float
    ) -> AsyncGenerator[int, None]:
        """Yield the index of each chunk once it lies in its sink, in order, resuming over broken links.

        Raises the last ``LinkError`` (``Unreachable``, ``BlobUnavailable``, …) some time after ``progress_s``
        without a new chunk, and ``MemberGone`` and ``Busy`` at once. When closed early, the sinks are not written to
        any more.
        """
        following, progress = chunks.start, time.monotonic()
        retry_s, trouble = _RETRY_S, LinkError(f"{peer} sent nothing")
        while following < chunks.stop:
            try:
                rest = range(following, chunks.stop)
                async with aclosing(self._attempt(peer, blob, rest, sink, progress_s / _ATTEMPTS)) as attempt:
                    async for chunk in attempt:
                        yield chunk
                        # Only now: the time that our caller took is not the other side's silence.
                        following, progress, retry_s = chunk + 1, time.monotonic(), _RETRY_S
            except (MemberGone, Busy):
                raise
            except LinkError as error:
                trouble = error
            if following < chunks.stop:
                if time.monotonic() - progress > progress_s:
                    raise trouble
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, _MAX_RETRY_S)

    async def _attempt(
        self, peer: str, blob: Blob, chunks: range, sink: Sink, wait_s: float
    ) -> AsyncGenerator[int, None]:
        entry, channel = self._known(peer, blob.scope)
        link = await self._link(entry, channel, wait_s)
        number, incoming = self._data.open_stream(link, blob, chunks, sink)
        finished = False
        try:
            for expected in chunks:
                chunk = await incoming.next(wait_s)
                assert chunk == expected
                if chunk == chunks.start:
                    # Now their size is known. Who takes the first may be long about it: its round may have no plan yet.
                    self._data.grant(link, number, incoming, in_use=1)
                yield chunk
                self._data.grant(link, number, incoming)
            finished = True
        except TimeoutError as error:
            self._suspect(entry, link, wait_s)
            raise LinkError(f"{peer} sent no chunk of {blob.kind} {blob.number} for {wait_s:.1f} s") from error
        except LinkClosed:
            self._data.close_link(link)
            raise
        finally:
            self._data.close_stream(link, number, finished=finished)

    def _suspect(self, entry: RosterEntry, link: Link, silent_s: float) -> None:
        """Give up a link over which nothing came at all, if we can have another one."""
        if (link.is_ours or entry.reachable) and time.monotonic() - link.last_frame_s >= silent_s:
            self._data.close_link(link)

    async def ask(self, peer: str, message: Message, reply: type[M], wait_s: float, scope: int = 0) -> M:
        """Have a member answer a message of that scope. Raises ``MemberGone``, ``Unreachable``, and as
        ``Channel.request``."""
        _, channel = self._known(peer, scope)
        return await channel.request(message, reply, wait_s, scope)

    def _known(self, peer: str, scope: int) -> tuple[RosterEntry, Channel]:
        entry = self._rosters.entry(peer, scope)
        if entry is None:
            raise MemberGone(f"{peer} is not a member of the run (any more)")
        if entry.reachable:
            return entry, self.control.dial(entry.address.host, entry.address.control_port, entry.certificate.curve_key)
        channel = self.control.incoming(entry.certificate.curve_key)
        if channel is None:
            raise Unreachable(f"{peer} cannot be reached from here and has not called yet")
        return entry, channel

    async def _link(self, entry: RosterEntry, channel: Channel, wait_s: float) -> Link:
        """The link with that peer; opens one when there is none and the peer can be reached."""

        async def agree(ask: PeerToPeerOpenLink) -> PeerToPeerLinkOpened:
            await channel.connected(wait_s)
            return await channel.request(ask, PeerToPeerLinkOpened, wait_s)

        try:
            # One at a time, or every stream that starts would open a link of its own.
            async with asyncio.timeout(wait_s), self._link_locks.setdefault(entry.peer, asyncio.Lock()):
                for link in self._data.links_with(channel.remote_key):
                    if link.attached.is_set():
                        return link
                if not entry.reachable:
                    raise Unreachable(f"{entry.peer} has not opened a link yet")
                host, port = entry.address.host, entry.address.data_port
                assert port is not None, "members have one"
                return await self._data.open_link(channel.remote_key, (host, port), agree)
        except TimeoutError as error:
            raise channel.diagnosis(wait_s) from error


class _Ended(Exception):
    """Ends a task group whose tasks would run for ever."""


async def _end() -> None:
    raise _Ended


def answer_members(control: ControlPlane, data: DataPlane, is_member: Callable[[bytes], bool]) -> None:
    """Register the handlers. Links only with members."""

    async def ping(channel: Channel, message: Message) -> Message:
        return PeerToPeerPong()

    async def open_link(channel: Channel, message: Message) -> Message:
        assert isinstance(message, PeerToPeerOpenLink)
        if not is_member(channel.remote_key):
            raise NotAdmitted("only members of the run may open links")
        return data.accept_link(channel.remote_key, message)

    control.handle(PeerToPeerPing, ping)
    control.handle(PeerToPeerOpenLink, open_link)


class ScopedEndpoint:
    """An endpoint whose blobs are those of one scope: averaging names blobs as if it were alone on the node."""

    def __init__(self, endpoint: Endpoint, scope: int) -> None:
        self._endpoint = endpoint
        self._scope = scope

    def publish(self, blob: Blob, source: ChunkSource) -> None:
        self._endpoint.publish(self._own(blob), source)

    def retract(self, blob: Blob) -> None:
        self._endpoint.retract(self._own(blob))

    def share_uplink(self, shares: Mapping[str, float], scope: int = 0) -> None:
        self._endpoint.share_uplink(shares, scope or self._scope)

    def fetch(self, peer: str, blob: Blob, chunks: range, sink: Sink, progress_s: float) -> AsyncGenerator[int, None]:
        """As the endpoint's."""
        return self._endpoint.fetch(peer, self._own(blob), chunks, sink, progress_s)

    def _own(self, blob: Blob) -> Blob:
        return blob.model_copy(update={"scope": self._scope})
