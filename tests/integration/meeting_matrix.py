"""Members behind every kind of wall, and how each of them gets something from each other one.

The members are real ones without training: node, memberships, relays, port mapping. All of them live in this process,
each on a thread in the namespace of its machine. The host and the relay, which listens on port 443, are processes.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, ExitStack, aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.integration.harness import SHOAL, START_S, Process, Swarm, eventually, run_toml
from tests.integration.mapping_router import mapping_router
from tests.integration.nat_lab import Kind, NatLab
from tests.integration.test_relays import relay_url

from shoal.peer.network_thread import NetworkThread
from shoal.swarm.aio import task_scope
from shoal.swarm.client.coordinator_client import CoordinatorClient, MemberInfo
from shoal.swarm.client.mapped_ports import keep_mapped
from shoal.swarm.client.observer import keep_place
from shoal.swarm.client.relay_access import RelayAccess
from shoal.swarm.errors import ShoalError
from shoal.swarm.protocol.identity import CurveKeys, Identity
from shoal.swarm.protocol.invite import Invite
from shoal.swarm.protocol.types import Blob, DeviceInfo
from shoal.swarm.transport.node import Node
from shoal.swarm.transport.paths.port_mapping import NatPmp, PortMapper, default_gateway

MAPPED = "mapped"
"""A port-restricted NAT whose router maps ports; the other sites are named by their ``Kind``."""

SITES: Mapping[str, Kind] = {MAPPED: Kind.PORT_RESTRICTED} | {str(kind): kind for kind in Kind}

NOTHING, DIRECT, REVERSED, PUNCHED, RELAYED = "none", "direct", "reversed", "punched", "relayed"
STEPS = (DIRECT, MAPPED, REVERSED, PUNCHED, RELAYED, NOTHING)

RATE_MBIT = 20.0
"""Of each machine's line, both ways."""

_BLOB, _CHUNK_BYTES, _CHUNKS = Blob(kind="state", number=1), 2**16, 32
_PORT, _FETCH_S, _PUNCH_S = 7800, 20.0, 3.0
_DEVICE = DeviceInfo(kind="cpu", name="matrix", memory_bytes=0)


class _Source:
    """The same random bytes again and again (a ``ChunkSource``)."""

    chunks = 2**16

    def __init__(self) -> None:
        self._bytes = memoryview(os.urandom(_CHUNK_BYTES))

    async def chunk(self, index: int) -> memoryview:
        return self._bytes


class Site:
    """One member: its node and its membership. Used on its network thread alone."""

    def __init__(self, client: CoordinatorClient, keys: CurveKeys) -> None:
        self.client, self.node, self.key = client, client.node, keys.public

    @classmethod
    @asynccontextmanager
    async def open(cls, invite: Invite, name: str, *, maps_ports: bool) -> AsyncIterator[Site]:
        keys, identity = CurveKeys.fresh(), Identity.generate()
        client: CoordinatorClient | None = None

        async def admit(key: bytes) -> bool:
            return client is not None and await client.admit(key)

        async with Node.open(keys, "0.0.0.0", (_PORT, _PORT + 1), admit) as node:
            node.publish(_BLOB, _Source())
            client = CoordinatorClient(node, identity, keys, invite, MemberInfo(name, "trainer", _DEVICE))
            await client.join_in_time()
            access = RelayAccess(client)
            node.relays.credentials = access.credentials
            async with task_scope() as tasks:
                background = [tasks.create_task(one) for one in (access.run(), keep_place(client))]
                if maps_ports:
                    mapper = PortMapper((node.control_port, node.data_port), [NatPmp(default_gateway())])
                    background.append(tasks.create_task(keep_mapped(client, mapper)))
                try:
                    yield cls(client, keys)
                finally:
                    for task in background:
                        task.cancel()
                    await client.leave("done")

    @property
    def is_settled(self) -> bool:
        """Whether others can meet this member, in the best way that there is for it."""
        return self.client.reachable or bool(self.client.relays)

    def knows(self, peers: Collection[str]) -> bool:
        """Whether the roster says how these members are met."""
        entries = [self.node._rosters.entry(peer, 0) for peer in peers]
        return all(entry is not None and entry.can_be_met for entry in entries)

    async def forget(self, key: bytes) -> None:
        """End all connections with a member."""
        for link in self.node._data.links_with(key):
            self.node._data.close_link(link)
        self.node.control.forget(key)
        self.node.relays.forget(key)
        for failed in (self.node._undialed, self.node._silent):
            failed.forget([key])

    async def get(self, peer: str, chunks: int) -> tuple[float, float]:
        """Fetch from a member; return the seconds to the first chunk, and from then on the bits a second."""
        place = memoryview(bytearray(_CHUNK_BYTES))
        began_s = time.monotonic()
        first_s = last_s = began_s
        stream = self.node.fetch(peer, _BLOB, range(chunks), lambda chunk, size: place[:size], _FETCH_S)
        async with aclosing(stream):
            async for chunk in stream:
                last_s = time.monotonic()
                first_s = first_s if chunk else last_s
        rate_bps = 8 * _CHUNK_BYTES * (chunks - 1) / (last_s - first_s) if last_s > first_s else 0.0
        return first_s - began_s, rate_bps

    async def path_to(self, peer: str) -> str:
        """Return the step by which a member is met now."""
        kind = next((one.kind for one in self.node.path_reports() if one.peer == peer), NOTHING)
        entry = self.node._rosters.entry(peer, 0)
        if kind == DIRECT and entry is not None and entry.address.kind == MAPPED:
            return MAPPED
        return kind


@dataclass(frozen=True)
class Meeting:
    """One site getting something from another one. ``first``: the step by which the first bytes came, after
    ``first_byte_s``; ``step``: that in use in the end, at ``rate_bps``."""

    site: str
    other: str
    first: str
    step: str
    first_byte_s: float
    rate_bps: float


class Matrix:
    """Two machines of each site, so that each meets its like, too. Make it with ``meeting_matrix``."""

    def __init__(self, threads: Mapping[str, NetworkThread[Site]], relay_pid: int) -> None:
        self._threads = threads
        self.relay_pid = relay_pid

    def meet(self, site: str, other: str) -> Meeting:
        """Have a machine of ``site`` get something from one of ``other``, to which it has no connection."""
        thread, theirs = self._threads[f"{site}-a"], self._threads[f"{other}-b"]
        mine, peer = thread.resource, theirs.resource.client.peer
        thread.call(mine.forget(theirs.resource.key))
        theirs.call(theirs.resource.forget(mine.key))
        try:
            first_byte_s, _ = thread.call(mine.get(peer, 1))
            first = thread.call(mine.path_to(peer))
            step = self._best_path(thread, peer)
            _, rate_bps = thread.call(mine.get(peer, _CHUNKS))
        except ShoalError:
            return Meeting(site, other, NOTHING, NOTHING, 0.0, 0.0)
        return Meeting(site, other, first, step, first_byte_s, rate_bps)

    def rate_bps(self, site: str, other: str, size_bytes: int) -> float:
        """Return the rate at which a machine of ``site`` gets so many bytes from one of ``other``, when they have
        met."""
        thread, peer = self._threads[f"{site}-a"], self._threads[f"{other}-b"].resource.client.peer
        thread.call(thread.resource.get(peer, 16))
        return thread.call(thread.resource.get(peer, size_bytes // _CHUNK_BYTES))[1]

    def _best_path(self, thread: NetworkThread[Site], peer: str) -> str:
        """Return the step by which a member is met once that gets no better."""
        give_up_s = time.monotonic() + _PUNCH_S
        while (step := thread.call(thread.resource.path_to(peer))) == RELAYED and time.monotonic() < give_up_s:
            time.sleep(0.02)
        return step


@contextmanager
def meeting_matrix(
    folder: Path, sites: Collection[str] = tuple(SITES), rate_mbit: float | None = RATE_MBIT
) -> Iterator[Matrix]:
    """A lab with a relay, a host that is reached over it alone, and the members, with lines of this rate each.

    Raises ``NoNamespaces``."""
    machines = {f"{site}-{letter}": SITES[site] for site in sites for letter in "ab"}
    with ExitStack() as stack:
        lab = stack.enter_context(NatLab({"relay": Kind.PUBLIC, "host": Kind.PUBLIC} | machines))
        swarm = Swarm(folder)
        stack.callback(swarm.close)
        relay, invite = host_over_relay(swarm, lab)
        threads: dict[str, NetworkThread[Site]] = {}
        for name in machines:
            is_mapped = name.startswith(MAPPED)
            if is_mapped:
                log = stack.enter_context(mapping_router(lab, name, folder))
                eventually("the router is up", _says(log, "HTTP listening"), START_S)
            if rate_mbit is not None:
                lab.shape(name, rate_mbit)
            threads[name] = NetworkThread(_opening(invite, name, maps_ports=is_mapped))
        stack.callback(_stop, threads)
        with ThreadPoolExecutor(len(threads)) as starting:
            list(starting.map(lambda name: lab.spaces.call(name, threads[name].start), threads))
        members = [thread.resource for thread in threads.values()]
        eventually("all can be met", lambda: all(one.is_settled for one in members), START_S, swarm.tails)
        peers = [one.client.peer for one in members]
        eventually("all know that", lambda: all(one.knows(peers) for one in members), START_S, swarm.tails)
        yield Matrix(threads, relay.pid)


def all_meetings(matrix: Matrix, sites: Collection[str] = tuple(SITES)) -> Iterator[Meeting]:
    """Each site and each other one, in both directions, one after the other."""
    for site, other in itertools.product(sites, repeat=2):
        yield matrix.meet(site, other)


def host_over_relay(swarm: Swarm, lab: NatLab) -> tuple[Process, Invite]:
    """Start a relay on port 443, and a host that is reached over it alone."""
    place = ("--bind", f"{lab.address('relay')}:443", "--identity", str(swarm.folder / "relay-key"))
    relay = swarm.command("relay", *lab.inside("relay"), *SHOAL, "relay", *place)
    launcher, via = (*lab.inside("host"), *SHOAL), ("--via", relay_url(relay))
    host = swarm.host(run_toml(patience_s=20.0), launcher=launcher, bind=f"{lab.address('host')}:0", extra=via)
    return relay, Invite.parse(host.invite)


def _opening(invite: Invite, name: str, *, maps_ports: bool) -> Callable[[], AbstractAsyncContextManager[Site]]:
    return lambda: Site.open(invite, name, maps_ports=maps_ports)


def _stop(threads: Mapping[str, NetworkThread[Site]]) -> None:
    with ThreadPoolExecutor(len(threads)) as stopping:
        list(stopping.map(lambda thread: thread.stop(), threads.values()))


def _says(log: Path, words: str) -> Callable[[], bool]:
    return lambda: words in log.read_text(errors="replace")
