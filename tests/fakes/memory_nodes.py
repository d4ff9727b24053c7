"""Whole nodes in one event loop: the real control plane and rosters over lines that exist only there, and chunks that
``MemoryNetwork`` moves. A node belongs to the process in whose context it was opened."""

import asyncio
import itertools
from collections import Counter, deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.fakes.memory_network import MemoryEndpoint, MemoryNetwork
from tests.fakes.processes import ProcessLoop, context_of, current_process

from shoal.swarm.errors import LinkError, NotAdmitted, Unreachable
from shoal.swarm.protocol.identity import CurveKeys
from shoal.swarm.protocol.messages import PeerToPeerPing, PeerToPeerPong
from shoal.swarm.protocol.types import Address, Blob, Message, RosterEntry
from shoal.swarm.protocol.wire import MAX_REQUEST_BYTES, Envelope, decode, encode
from shoal.swarm.transport.bulk.link import ChunkSink
from shoal.swarm.transport.bulk.source import ChunkSource
from shoal.swarm.transport.channel import Channel
from shoal.swarm.transport.control import ControlPlane
from shoal.swarm.transport.limits.caller_guard import CallerGuard
from shoal.swarm.transport.limits.origins import Origins
from shoal.swarm.transport.limits.receive_backlog import ReceiveBacklog
from shoal.swarm.transport.limits.traffic_limits import TrafficLimits
from shoal.swarm.transport.limits.traffic_meter import TrafficMeter
from shoal.swarm.transport.node import Node
from shoal.swarm.transport.zap_auth import Admit

HOST = "127.0.0.1"
_LATENCY_S = 0.002
_RETRY_S = 0.1

OnMessage = Callable[[str, str, Envelope], None]
"""Sees from which process to which something arrives that is about to be handled; may stop or kill processes."""


class MemoryNodes:
    """All nodes of a test. ``opener`` takes the place of ``Node.open``; ``watch`` sees all messages that arrive."""

    def __init__(self, loop: ProcessLoop) -> None:
        self.loop = loop
        self.chunks = MemoryNetwork()
        self.chunks.is_stopped = loop.is_stopped
        self.watch: list[OnMessage] = []
        self.by_port: dict[int, MemoryNode] = {}
        self._ports = itertools.count(1000)

    @asynccontextmanager
    async def opener(
        self,
        keys: CurveKeys,
        host: str,
        ports: tuple[int, int | None],
        admit: Admit,
        limits: TrafficLimits | None = None,
    ) -> AsyncIterator["MemoryNode"]:
        port = next(self._ports)
        async with asyncio.TaskGroup() as tasks:
            node = MemoryNode(self, keys, tasks, admit, port)
            self.by_port[port] = node
            try:
                yield node
            finally:
                self.shut(node)

    def kill(self, process: str) -> None:
        """Kill a node as by SIGKILL: nothing of it runs any more, and its connections are lost."""
        self.loop.stop_process(process)
        for node in [node for node in self.by_port.values() if node.process == process]:
            self.shut(node)

    def shut(self, node: "MemoryNode") -> None:
        if self.by_port.pop(node.control_port, None) is not None:
            node.plane.lose_all()
            self.chunks.kill(node.process)

    def with_key(self, key: bytes) -> "MemoryNode | None":
        return next((node for node in self.by_port.values() if node.plane.keys.public == key), None)


class _NoSocket:
    closed = True


class _Line(Channel):
    """One end. ``other``: the end on the other side, while there is a connection."""

    def __init__(self, plane: "_Plane", remote_key: bytes, label: str, routing: bytes | None) -> None:
        super().__init__(remote_key, label, _NoSocket(), routing, remote_host=HOST)  # type: ignore[arg-type]
        self.plane = plane
        self.other: _Line | None = None
        self._arriving: deque[bytes] = deque()

    async def send(self, envelope: Envelope, deadline_s: float | None = None) -> None:
        data = encode(envelope)
        async with asyncio.timeout(deadline_s):
            await self._decided.wait()  # a socket that is not connected keeps it back
        if self.other is None:
            raise self.diagnosis(0)
        other = self.other
        other._arriving.append(data)
        asyncio.get_running_loop().call_later(_LATENCY_S, other._arrive, context=context_of(other.plane.process))

    def _arrive(self) -> None:
        """Deliver in the receiver's process."""
        if self._arriving:
            self.plane.take(self, self._arriving.popleft())

    def part(self) -> None:
        """Lose the connection, for both ends."""
        other, self.other = self.other, None
        self._arriving.clear()
        self.mark_away()
        if other is not None and other.other is self:
            other.part()


class _Plane(ControlPlane):
    """A control plane with the real handlers, over lines in memory."""

    def __init__(self, nodes: MemoryNodes, keys: CurveKeys, tasks: asyncio.TaskGroup, process: str) -> None:
        self.keys = keys
        self.process = process
        self._nodes = nodes
        self._tasks = tasks
        self._handlers = {}
        self._handlers_of_run = Counter()
        self.without_handlers = lambda run: None
        self._incoming = {}
        self._dialed = {}
        self._running_handlers = 0
        self._handlers_of = Counter()
        self.origins = Origins()
        self.guard = CallerGuard(MAX_REQUEST_BYTES, lambda key: False, self.origins)
        self._backlog = ReceiveBacklog()

    def take(self, line: _Line, data: bytes) -> None:
        envelope = decode(data)
        for watch in self._nodes.watch:
            watch(line.other.plane.process if line.other else "", self.process, envelope)
        self._tasks.create_task(self._dispatch(line, memoryview(data)))

    def dial(self, host: str, port: int, key: bytes, via: Address | None = None, from_port: int = 0) -> Channel:
        known = self._dialed.get((f"{host}:{port}", key))
        if known is not None:
            return known
        line = _Line(self, key, f"{host}:{port}", None)
        self._dialed[f"{host}:{port}", key] = line
        self._tasks.create_task(self._keep_connected(line, port))
        return line

    async def _keep_connected(self, line: _Line, port: int) -> None:
        while not line.is_broken:
            if line.other is None:
                there = self._nodes.by_port.get(port)
                if there is None or there.plane.keys.public != line.remote_key:
                    line.note_trouble(Unreachable(f"nothing answers at {line.label}"))
                elif await _in_process(there.process, there.admit(self.keys.public)):
                    there.plane.accept(line)
                else:
                    self.hang_up(line)
                    line.note_trouble(NotAdmitted(f"{line.label} does not admit this key"))
            await asyncio.sleep(_RETRY_S)

    def accept(self, line: _Line) -> None:
        """Accept a caller's line; return this end of it."""
        end = _Line(self, line.plane.keys.public, "a caller", b"caller")
        earlier = self._incoming.pop(end.remote_key, None)
        if earlier is not None:
            earlier.mark_broken(Unreachable("it has connected anew"))
        self._incoming[end.remote_key] = end
        end.other, line.other = line, end
        end.mark_connected()
        line.mark_connected()

    def _close(self, channel: Channel, why: LinkError, linger_ms: int = 0) -> None:
        super()._close(channel, why, linger_ms)
        assert isinstance(channel, _Line)
        channel.part()

    def lose_all(self) -> None:
        for line in [*self._dialed.values(), *self._incoming.values()]:
            assert isinstance(line, _Line)
            line.part()
            line.mark_broken(Unreachable("closing down"))

    def stop(self) -> None:
        pass


async def _in_process(process: str, work: Awaitable[bool]) -> bool:
    """Have another process do this when it runs."""

    async def do() -> bool:
        return await work

    return await asyncio.get_running_loop().create_task(do(), context=context_of(process))


@dataclass
class _Bulk:
    """The part of a data plane that a node uses."""

    endpoint: MemoryEndpoint
    meter: TrafficMeter
    connections_per_link: int = 1
    limits: TrafficLimits = field(default_factory=TrafficLimits)

    def publish(self, blob: Blob, source: ChunkSource) -> None:
        self.endpoint.publish(blob, source)

    def retract(self, blob: Blob) -> None:
        self.endpoint.retract(blob)

    def leave(self, scope: int) -> None:
        self.endpoint.leave(scope)

    def share_uplink(self, shares: Any) -> None:
        pass

    def links_with(self, key: bytes) -> tuple[()]:
        return ()

    def all_links(self) -> tuple[()]:
        return ()

    def accept(self, socket: object, host: str, path: str) -> None:
        raise AssertionError("there are no relays here")


class MemoryNode(Node):
    def __init__(self, nodes: MemoryNodes, keys: CurveKeys, tasks: asyncio.TaskGroup, admit: Admit, port: int) -> None:
        self.process = current_process()
        self.plane = _Plane(nodes, keys, tasks, self.process)
        self.admit = admit
        self._nodes = nodes
        self._endpoint = nodes.chunks.endpoint(self.process)
        super().__init__(self.plane, _Bulk(self._endpoint, TrafficMeter()), tasks)  # type: ignore[arg-type]
        self.control_port = self.data_port = port
        self.plane.handle(PeerToPeerPing, _pong)

    def _disconnect(self, keys: set[bytes]) -> None:
        """Fetches from whoever is not known any more end with their attempt."""
        super()._disconnect(keys)
        known = self._nodes.by_port.values()
        self._endpoint.roster = {node.process for node in known if self.knows_key(node.plane.keys.public)}

    async def try_both_ports(self, entry: RosterEntry, wait_s: float) -> str:
        """There is one port for both planes."""
        channel = self.control.dial(entry.address.host, entry.address.control_port, entry.certificate.curve_key)
        try:
            await channel.connected(wait_s)
            await channel.request(PeerToPeerPing(), PeerToPeerPong, wait_s)
        except LinkError as error:
            return str(error)
        finally:
            self.control.hang_up(channel)
        return ""

    async def fetch(
        self, peer: str, blob: Blob, chunks: range, sink: ChunkSink, progress_s: float
    ) -> AsyncGenerator[int, None]:
        entry, _ = await self._channel_to(peer, blob.scope, progress_s)
        there = self._nodes.with_key(entry.certificate.curve_key)
        if there is None:
            raise Unreachable(f"nothing answers at {peer}")
        async with aclosing(self._endpoint.fetch(there.process, blob, chunks, sink, progress_s)) as stream:
            async for chunk in stream:
                yield chunk


async def _pong(channel: Channel, message: Message) -> Message:
    return PeerToPeerPong()
