"""What is asked of routers, what of their answers is believed, and what becomes of two ports. Real routers:
``tests/integration/test_port_mapping.py``."""

from __future__ import annotations

import asyncio
import functools
import struct
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from shoal.swarm.transport.paths.port_mapping import (
    LEASE_S,
    MappedPort,
    NatPmp,
    NoMapping,
    Pcp,
    PortMapper,
    default_gateway,
)


def on_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(*arguments: Any, **more: Any) -> None:
        asyncio.run(test(*arguments, **more))

    return run


PUBLIC, EXTERNAL = "44.128.7.1", 7000
MAPPED = bytes(10) + b"\xff\xff" + bytes([44, 128, 7, 1])

Answers = Callable[[bytes], list[bytes]]


@asynccontextmanager
async def server(answers: Answers) -> AsyncIterator[tuple[int, list[bytes]]]:
    """A gateway's server on loopback; yields its port and the requests that it got."""
    asked: list[bytes] = []

    class Answering(asyncio.DatagramProtocol):
        def connection_made(self, transport: asyncio.DatagramTransport) -> None:  # type: ignore[override]
            self.transport = transport

        def datagram_received(self, data: bytes, caller: tuple[str, int]) -> None:
            asked.append(data)
            for answer in answers(data):
                self.transport.sendto(answer, caller)

    loop = asyncio.get_running_loop()
    transport, _ = await loop.create_datagram_endpoint(Answering, local_addr=("127.0.0.1", 0))
    try:
        yield transport.get_extra_info("sockname")[1], asked
    finally:
        transport.close()


def pcp_answer(request: bytes, result: int = 0, nonce: bytes | None = None) -> bytes:
    head = struct.pack(">BBBBII12x", 2, 0x81, 0, result, 120, 1)
    internal = request[40:42]
    return head + (nonce or request[24:36]) + b"\x06\0\0\0" + internal + struct.pack(">H", EXTERNAL) + MAPPED


@on_a_loop
async def test_pcp() -> None:
    async with server(lambda request: [pcp_answer(request)]) as (port, asked):
        router = Pcp("127.0.0.1", port)
        mapped = await router.map_port(7800, 7801, 3600)
        assert mapped == MappedPort(PUBLIC, EXTERNAL, 120)
        await router.delete(7800, mapped)
        first, last = asked
    assert first[:2] == b"\x02\x01"
    assert struct.unpack(">I", first[4:8]) == (3600,)
    assert first[8:24] == bytes(10) + b"\xff\xff\x7f\0\0\1"
    assert struct.unpack(">B3xHH", first[36:44]) == (6, 7800, 7801)
    assert struct.unpack(">I", last[4:8]) == (0,)
    assert last[24:36] == first[24:36], "only who knows the nonce may delete"


@on_a_loop
async def test_an_answer_to_somebody_else_is_not_believed() -> None:
    def answers(request: bytes) -> list[bytes]:
        return [b"", b"\x02", pcp_answer(request, nonce=bytes(12)), pcp_answer(request)[:40], pcp_answer(request)]

    async with server(answers) as (port, _):
        assert (await Pcp("127.0.0.1", port).map_port(7800, 7800, 60)).port == EXTERNAL


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda request: pcp_answer(request, result=2), "refuses: not authorised"),
        (lambda request: pcp_answer(request, result=77), "refuses: error 77"),
        (lambda request: b"\x00\x81\x00\x01" + bytes(4), "does not speak it"),
    ],
)
@on_a_loop
async def test_pcp_refusals(answer: Callable[[bytes], bytes], words: str) -> None:
    async with server(lambda request: [answer(request)]) as (port, _):
        with pytest.raises(NoMapping, match=words):
            await Pcp("127.0.0.1", port).map_port(7800, 7800, 60)


def pmp_answer(request: bytes) -> list[bytes]:
    if request == b"\0\0":
        return [b"\0\x80\0\0" + bytes(4) + bytes([44, 128, 7, 1])]
    internal, _, lease_s = struct.unpack(">HHI", request[4:])
    return [b"\0\x82\0\0" + bytes(4) + struct.pack(">HHI", internal, EXTERNAL if lease_s else 0, lease_s)]


@on_a_loop
async def test_nat_pmp() -> None:
    async with server(pmp_answer) as (port, asked):
        router = NatPmp("127.0.0.1", port)
        mapped = await router.map_port(7800, 7801, 600)
        assert mapped == MappedPort(PUBLIC, EXTERNAL, 600)
        await router.delete(7800, mapped)
    assert asked == [
        b"\0\0",
        struct.pack(">BBHHHI", 0, 2, 0, 7800, 7801, 600),
        struct.pack(">BBHHHI", 0, 2, 0, 7800, 0, 0),
    ]


@pytest.mark.parametrize(
    ("answer", "words"), [(b"\0\x80\0\2" + bytes(8), "refuses: error 2"), (b"\0\x80\0\0" + bytes(6), "too short")]
)
@on_a_loop
async def test_nat_pmp_refusals(answer: bytes, words: str) -> None:
    async with server(lambda request: [answer]) as (port, _):
        with pytest.raises(NoMapping, match=words):
            await NatPmp("127.0.0.1", port).map_port(7800, 7800, 60)


@on_a_loop
async def test_no_server_refuses_at_once() -> None:
    async with server(lambda request: []) as (port, _):
        pass
    with pytest.raises(NoMapping, match="refuses"):
        await NatPmp("127.0.0.1", port).map_port(7800, 7800, 60)


def test_the_default_gateway_is_read_from_the_kernels_table() -> None:
    head = "Iface\tDestination\tGateway\tFlags\n"
    local, default = "eth0\t0001A8C0\t00000000\t0001\n", "eth0\t00000000\t0101A8C0\t0003\n"
    assert default_gateway(head + local + default) == "192.168.1.1"
    assert default_gateway(head + local) == ""
    assert default_gateway("") == ""


@dataclass
class Home:
    """A router of a test. ``refuses``: ports that it maps not."""

    name: str = "test"
    host: str = PUBLIC
    refuses: tuple[int, ...] = ()
    shift: int = 0
    lease_s: float = 100.0
    mapped: dict[int, int] = field(default_factory=dict)

    async def map_port(self, port: int, wanted: int, lease_s: int) -> MappedPort:
        if port in self.refuses:
            raise NoMapping("the router refuses: error 2")
        assert lease_s == LEASE_S
        self.mapped[port] = wanted + self.shift
        return MappedPort(self.host, self.mapped[port], self.lease_s)

    async def delete(self, port: int, mapped: MappedPort) -> None:
        assert self.mapped.pop(port) == mapped.port


@on_a_loop
async def test_both_ports_or_none_in_the_first_way_that_works() -> None:
    half, good, other = Home("half", refuses=(7801,)), Home("good"), Home("other")
    mapper = PortMapper((7800, 7801), [half, good, other])
    mapping = await mapper.open()
    assert mapping is not None
    assert (mapping.method, mapping.host, mapping.control.port, mapping.data.port) == ("good", PUBLIC, 7800, 7801)
    assert not half.mapped, "the first port alone is of no use"
    assert mapper.attempts.keys() == {"half", "good"}
    assert mapper.renew_after_s == 50.0
    assert not await mapper.renew()
    good.shift = 5
    assert await mapper.renew(), "the ports are others now"
    assert mapper.mapping is not None
    assert mapper.mapping.data.port == 7806
    await mapper.close()
    assert not good.mapped


@pytest.mark.parametrize("host", ["192.168.0.7", "100.64.1.1", "10.0.0.2"])
@on_a_loop
async def test_a_mapping_behind_another_nat_is_of_no_use(host: str) -> None:
    router = Home(host=host)
    mapper = PortMapper((7800, 7801), [router])
    assert await mapper.open() is None
    assert "another NAT" in mapper.attempts["test"]
    assert not router.mapped


@on_a_loop
async def test_a_lease_for_ever_is_renewed_nonetheless() -> None:
    mapper = PortMapper((7800, 7801), [Home(lease_s=0.0)])
    await mapper.open()
    assert mapper.renew_after_s == LEASE_S / 2
