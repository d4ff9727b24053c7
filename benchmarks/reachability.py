"""Members behind NATs: who meets whom and how, what a relay costs, how much later a machine behind a NAT takes part.

The lab is that of the tests (``tests/integration/nat_lab.py``): network namespaces with NATs of every kind. The members
of the matrix are real ones without training; those of the joins are whole ``shoal join`` processes.
"""

from __future__ import annotations

import asyncio
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import psutil
from common import console, end_on_sigterm, over, parser, publish

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.integration.harness import CALM, FRESH, ROUNDS_S, SHOAL, START_S, Host, Swarm, run_toml
from tests.integration.mapping_router import missing
from tests.integration.meeting_matrix import MAPPED, NOTHING, RELAYED, SITES, all_meetings, meeting_matrix
from tests.integration.namespaces import NoNamespaces
from tests.integration.nat_lab import Kind, NatLab
from tests.integration.test_relays import relay_url

from shoal.swarm.protocol.identity import CurveKeys, Identity, key_text
from shoal.swarm.protocol.paths import make_pass
from shoal.swarm.protocol.relay_url import RelayUrl
from shoal.swarm.protocol.types import Address
from shoal.swarm.transport.relay.client import Registration, RelayCredentials, RelayedSocket, call
from shoal.swarm.transport.tcp.sockets import pace

Rows = list[dict[str, Any]]
Ratios = dict[str, float | None]

MIB = 2**20
_TARGETS, _AT_ONCE = 10, 50
_SETTLE_S = 1.0


def matrix(folder: Path, sites: Collection[str]) -> tuple[Rows, Ratios]:
    """Each site gets something from each other one."""
    with meeting_matrix(folder, sites) as made:
        found = list(all_meetings(made, sites))
    direct_bps = next((one.rate_bps for one in found if one.site == one.other == Kind.PUBLIC), 0.0)
    rows = [
        {
            "from": one.other,
            "to": one.site,
            "first": one.first,
            "step": one.step,
            "first byte s": one.first_byte_s,
            "rate / direct": over(one.rate_bps, direct_bps),
        }
        for one in found
    ]
    met = sum(one.step != NOTHING for one in found)
    direct = sum(one.step not in (NOTHING, RELAYED) for one in found)
    return rows, {"pairs_met": met / len(found), "pairs_direct": direct / len(found)}


def relayed_rate(folder: Path, rate_mbit: float, size_mib: int) -> tuple[Rows, Ratios]:
    """A stream over the relay beside a direct one, where every machine but the relay has a line of this rate."""
    sites, rates = (Kind.PUBLIC, Kind.SYMMETRIC), dict[str, float]()
    with meeting_matrix(folder, sites, rate_mbit) as made:
        for site in sites:
            assert made.meet(site, site).step == (RELAYED if site == Kind.SYMMETRIC else "direct")
            rates[site] = statistics.median(made.rate_bps(site, site, size_mib * MIB) for _ in range(3))
    rows = [
        {"line Mbit/s": rate_mbit, "path": "relayed" if site == Kind.SYMMETRIC else "direct", "Mbit/s": rate / 1e6}
        for site, rate in rates.items()
    ]
    return rows, {"relayed_rate_vs_direct": over(rates[Kind.SYMMETRIC], rates[Kind.PUBLIC])}


def relay_cost(folder: Path, size_mib: int, rate_mbit: float) -> tuple[Rows, Ratios]:
    """Processor time of the relay's process for one stream over it, on loopback: as fast as it goes, and at a rate.

    Not in the lab: there the kernel counts the work of all bridges and NATs as that of whoever sends."""
    with _relay(folder) as (address, host, process):
        fast = asyncio.run(_one_stream(address, host, process, size_mib, None))
        slow = asyncio.run(_one_stream(address, host, process, size_mib // 16, rate_mbit))
    cost = "relay CPU-s a GB"
    return [fast, slow], {"relay_cpu_s_per_gb": fast[cost], f"relay_cpu_s_per_gb_at_{rate_mbit:g}_mbit": slow[cost]}


async def _one_stream(
    relay: Address, host: Identity, process: psutil.Process, size_mib: int, rate_mbit: float | None
) -> dict[str, Any]:
    mine, key = _credentials(host)
    is_registered, is_over = asyncio.Event(), asyncio.Event()

    async def drain(caller: RelayedSocket) -> None:
        await asyncio.to_thread(_drained, caller)
        is_over.set()

    registering = asyncio.create_task(Registration(relay, lambda: mine, drain, is_registered.set).run())
    async with asyncio.timeout(START_S):
        await is_registered.wait()
    caller = await call(relay, key, "data", _credentials(host)[0])
    before, began_s = process.cpu_times(), time.monotonic()
    await asyncio.to_thread(_sent, caller, size_mib, rate_mbit)
    await is_over.wait()
    seconds, after = time.monotonic() - began_s, process.cpu_times()
    registering.cancel()
    await asyncio.wait([registering])
    gigabytes = size_mib * MIB / 1e9
    user, system = (after.user - before.user) / gigabytes, (after.system - before.system) / gigabytes
    rate = 1e3 * gigabytes / seconds
    return {"carried MiB": size_mib, "MB/s": rate, "of it in the kernel": system, "relay CPU-s a GB": user + system}


def _sent(over_relay: RelayedSocket, size_mib: int, rate_mbit: float | None) -> None:
    with over_relay.socket as socket:
        socket.setblocking(True)
        pace(socket, rate_mbit and rate_mbit * 1e6)
        piece = bytes(MIB)
        for _ in range(size_mib):
            socket.sendall(piece)


def _drained(over_relay: RelayedSocket) -> None:
    with over_relay.socket as socket:
        socket.setblocking(True)
        place = bytearray(MIB)
        while socket.recv_into(place):
            pass


# Many links on one relay --------------------------------------------------------------------------------------


def many_links(folder: Path, links: int, size_mib: int) -> tuple[Rows, Ratios]:
    """So many connections over one relay at once: its memory and descriptors idle and while all of them carry."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    with _relay(folder) as (address, host, process):
        return asyncio.run(_many_links(address, host, process, links, size_mib))


@contextmanager
def _relay(folder: Path) -> Iterator[tuple[Address, Identity, psutil.Process]]:
    """A ``shoal relay`` on loopback for the runs of one host."""
    host, swarm = Identity.generate(), Swarm(folder)
    place = ("--bind", "127.0.0.1:0", "--identity", str(folder / "relay-key"), "--host", key_text(host.public_key))
    try:
        relay = swarm.command("relay", *FRESH, "relay", *place)
        yield RelayUrl.parse(relay_url(relay)).address, host, psutil.Process(relay.pid)
    finally:
        swarm.close()


async def _many_links(
    relay: Address, host: Identity, process: psutil.Process, links: int, size_mib: int
) -> tuple[Rows, Ratios]:
    def used(state: str) -> dict[str, Any]:
        memory, descriptors = process.memory_info().rss / 1e6, process.num_fds()
        return {"relay": state, "memory MB": memory, "descriptors": descriptors, "CPU s": sum(process.cpu_times()[:2])}

    async with AsyncExitStack() as stack:
        targets = [await stack.enter_async_context(_echoing(relay, host)) for _ in range(_TARGETS)]
        rows = [used("no link")]
        callers = [_credentials(host)[0] for _ in range(_TARGETS)]
        opened: list[RelayedSocket] = []
        while len(opened) < links:
            batch = range(len(opened), min(len(opened) + _AT_ONCE, links))
            calls = [call(relay, targets[one % _TARGETS], "data", callers[one // _TARGETS % _TARGETS]) for one in batch]
            opened += await asyncio.gather(*calls)
        rows.append(used(f"{links} links, idle"))
        began_s = time.monotonic()
        echoing = asyncio.gather(*(_echoed(one, size_mib * MIB) for one in opened))
        peak = used("")
        while not echoing.done():
            await asyncio.sleep(0.2)
            now = used(f"{links} links, each carries {size_mib} MiB both ways")
            peak = {key: max(now[key], peak[key]) for key in now}
        await echoing
        rows.append(peak)
        seconds = time.monotonic() - began_s
        for one in opened:
            one.socket.close()
        await asyncio.sleep(_SETTLE_S)
        rows.append(used("all closed"))
    each_kb = 1e3 * (rows[2]["memory MB"] - rows[0]["memory MB"]) / links
    print(f"{links} links carried {2 * size_mib * links * MIB / 1e6 / seconds:,.0f} MB/s together")
    descriptors = (rows[2]["descriptors"] - rows[0]["descriptors"]) / links
    return rows, {"relay_kb_per_link": each_kb, "relay_descriptors_per_link": descriptors}


def _credentials(host: Identity) -> tuple[RelayCredentials, bytes]:
    member, keys = Identity.generate(), CurveKeys.fresh()
    certificate = member.certify(keys)
    shown = make_pass(host.sign, host.public_key, bytes(32), certificate, int(time.time()) + 3600)
    return RelayCredentials(member, keys, certificate, shown), keys.public


@asynccontextmanager
async def _echoing(relay: Address, host: Identity) -> AsyncIterator[bytes]:
    """A registered client that sends back what it gets; yields its key."""
    mine, key = _credentials(host)
    loop, is_registered = asyncio.get_running_loop(), asyncio.Event()

    async def echo(caller: RelayedSocket) -> None:
        with caller.socket as socket:
            while data := await loop.sock_recv(socket, 2**18):
                await loop.sock_sendall(socket, data)

    registering = asyncio.create_task(Registration(relay, lambda: mine, echo, is_registered.set).run())
    try:
        async with asyncio.timeout(START_S):
            await is_registered.wait()
        yield key
    finally:
        registering.cancel()
        await asyncio.wait([registering])


async def _echoed(over_relay: RelayedSocket, size_bytes: int) -> None:
    loop, piece = asyncio.get_running_loop(), bytes(2**16)

    async def send() -> None:
        for _ in range(size_bytes // len(piece)):
            await loop.sock_sendall(over_relay.socket, piece)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(send())
        left = size_bytes
        while left:
            left -= len(await loop.sock_recv(over_relay.socket, min(left, 2**18)))


# Joining --------------------------------------------------------------------------------------------------------


def joins(folder: Path, times: int) -> tuple[Rows, Ratios]:
    """Seconds from ``shoal join`` to the first round with the joiner's work, in turns, beside a member that trains."""
    places = {"public": Kind.PUBLIC, "nat": Kind.SYMMETRIC}
    seconds: dict[str, list[float]] = {place: [] for place in places}
    with NatLab({"host": Kind.PUBLIC, "member": Kind.PUBLIC} | places) as lab:
        swarm = Swarm(folder)
        try:
            launcher, bind = (*lab.inside("host"), *SHOAL), f"{lab.address('host')}:0"
            host = swarm.host(run_toml(max_s=0.5, patience_s=6.0), launcher=launcher, bind=bind)
            first = swarm.member(host.invite, "member", (*lab.inside("member"), *CALM), extra=("--bind", "0.0.0.0:0"))
            first.committed(after=1, within_s=START_S + ROUNDS_S)
            for number in range(times):
                for place in places if number % 2 else reversed(places):
                    seconds[place].append(_join(swarm, lab, host, place, number))
        finally:
            swarm.close()
    rows = [
        {"joiner": place, "seconds": statistics.median(took), "each": " ".join(f"{one:.1f}" for one in took)}
        for place, took in seconds.items()
    ]
    return rows, {"nat_join_vs_public_join": over(*(statistics.median(seconds[place]) for place in ("nat", "public")))}


def _join(swarm: Swarm, lab: NatLab, host: Host, place: str, number: int) -> float:
    began_s = time.monotonic()
    launcher = (*lab.inside(place), *CALM)
    member = swarm.member(host.invite, f"{place}-{number}", launcher, extra=("--bind", "0.0.0.0:0"))
    member.committed(within_s=START_S + ROUNDS_S)
    took_s = time.monotonic() - began_s
    member.leave()
    return took_s


def main() -> None:
    end_on_sigterm()
    arguments = parser(__doc__)
    arguments.add_argument("--rate-mbit", type=float, default=100.0, help="of the lines of the relayed stream")
    arguments.add_argument("--links", type=int, default=500)
    arguments.add_argument("--joins", type=int, default=5)
    arguments.add_argument("--only", help="one part: matrix, rate, cost, links or joins")
    options = arguments.parse_args()
    sites = [site for site in SITES if site != MAPPED or not missing()]
    parts: Mapping[str, Callable[[Path], tuple[Rows, Ratios]]] = {
        "matrix": lambda folder: matrix(folder, sites),
        "rate": lambda folder: relayed_rate(folder, options.rate_mbit, 16),
        "cost": lambda folder: relay_cost(folder, 2048, options.rate_mbit),
        "links": lambda folder: many_links(folder, options.links, 1),
        "joins": lambda folder: joins(folder, options.joins),
    }
    rows: Rows = []
    ratios: Ratios = {}
    for name, part in parts.items():
        if options.only in (None, name):
            with tempfile.TemporaryDirectory() as folder:
                try:
                    found, measured = part(Path(folder))
                except NoNamespaces as error:
                    console.print(f"{name} is not measured: {error}")
                else:
                    rows += found
                    ratios |= measured
    publish("Reachability", rows, ratios, options.json)


if __name__ == "__main__":
    main()
