"""Frames in memory that the two ends of a link share."""

import asyncio
import fcntl
import mmap
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.swarm.network import LONG_S, STATE, Member, Sink, Source, fetch, run, swarm, until

from shoal.swarm.errors import LinkError, WireError
from shoal.swarm.protocol.messages import PeerToPeerMemoryOpened, PeerToPeerOfferMemory
from shoal.swarm.protocol.types import Message
from shoal.swarm.protocol.wire import Envelope, encode
from shoal.swarm.transport.bulk import data_plane as bulk
from shoal.swarm.transport.bulk import shared_memory
from shoal.swarm.transport.bulk.data_connection import DataConnection
from shoal.swarm.transport.bulk.frame_crypto import TAG_BYTES, SealedLink
from shoal.swarm.transport.bulk.link import Frame, Link
from shoal.swarm.transport.bulk.shared_memory import (
    OfferedMemory,
    Place,
    RingReader,
    RingWriter,
    SharedMemory,
    open_shared,
)
from shoal.swarm.transport.tcp.sockets import is_on_this_machine

PAGE = 4096
needs_memfd = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="memory without a name is Linux'")


# Rings ------------------------------------------------------------------------------------------------------


def ring(size: int) -> tuple[RingWriter, RingReader, memoryview]:
    memory = memoryview(bytearray(PAGE + size))
    return RingWriter(memory), RingReader(memory), memory


@given(
    units=st.integers(1, 12),
    steps=st.lists(st.one_of(st.integers(1, 800), st.sampled_from(["find", "free"])), max_size=60),
)
@settings(max_examples=300, deadline=None)
def test_what_was_written_is_found_until_it_is_freed(units: int, steps: list[int | str]) -> None:
    """Against a model: places that are not free yet never overlap, and lie in the ring."""
    writer, reader, _ = ring(64 * units)
    written: list[tuple[Place, bytes]] = []
    found: list[tuple[memoryview, bytes]] = []
    for number, step in enumerate(steps):
        if step == "find" and written:
            place, content = written.pop(0)
            found.append((reader.find(place.start, len(content)), content))
        elif step == "free":
            reader.free()
            found.clear()
        elif isinstance(step, int):
            place_or_none = writer.reserve(step)
            if place_or_none is None:
                assert step > 64 * units or written or found, "an empty ring has room"
                continue
            content = bytes([number % 251 + 1]) * step
            place_or_none.memory[:] = content
            written.append((place_or_none, content))
        for view, content in found:
            assert bytes(view) == content
    for place, content in written:
        assert bytes(reader.find(place.start, len(content))) == content


def test_a_ring_is_used_to_its_end_and_from_its_beginning() -> None:
    writer, reader, _ = ring(256)
    places = [writer.reserve(64) for _ in range(5)]
    assert [place is None for place in places] == [False] * 4 + [True]
    for place in places[:2]:
        assert place is not None
        reader.find(place.start, 64)
    assert writer.reserve(64) is None, "found is not free"
    reader.free()
    assert writer.reserve(128) is not None
    assert writer.reserve(1) is None


def test_what_is_empty_begins_at_the_beginning() -> None:
    """So a link that has one small frame at a time touches no more memory than that."""
    writer, reader, memory = ring(2**16)
    for number in range(1, 200):
        place = writer.reserve(100)
        assert place is not None
        place.memory[:] = bytes([number]) * 100
        assert bytes(reader.find(place.start, 100)) == bytes([number]) * 100
        reader.free()
    assert not any(memory[PAGE + 128 :])


def test_the_whole_ring_at_once_time_and_again() -> None:
    writer, reader, _ = ring(192)
    for _ in range(10):
        place = writer.reserve(192)
        assert place is not None
        assert writer.reserve(1) is None
        reader.find(place.start, 192)
        reader.free()
    assert writer.reserve(193) is None


@pytest.mark.parametrize(
    ("start", "size"), [(0, 257), (64, 193), (255, 2), (2**62, 1), (2**64 - 1, 1), (2**63 - 64, 64), (2**62 + 64, 64)]
)
def test_places_that_cannot_be(start: int, size: int) -> None:
    _, reader, _ = ring(256)
    with pytest.raises(WireError):
        reader.find(start, size)
    reader.free()


def test_a_place_before_one_that_was_found() -> None:
    _, reader, _ = ring(256)
    reader.find(64, 64)
    with pytest.raises(WireError):
        reader.find(64, 64)
    with pytest.raises(WireError):
        reader.find(0, 10)
    reader.find(2**62 - 64, 64)
    reader.free()


@pytest.mark.parametrize("counter", [1, 64, 10_000, 2**63, 2**64 - 1])
def test_a_counter_that_the_other_end_has_made_up(counter: int) -> None:
    """It spoils what it reads itself; the writer stays in its memory."""
    writer, _, memory = ring(256)
    for _ in range(20):
        memory[:8] = counter.to_bytes(8, sys.byteorder)
        place = writer.reserve(100)
        if place is not None:
            assert place.memory.nbytes == 100


# Memory -----------------------------------------------------------------------------------------------------


@pytest.fixture
def offered() -> Iterator[OfferedMemory]:
    made = OfferedMemory()
    yield made
    made.close()


def exchange(one: SharedMemory, other: SharedMemory, content: bytes) -> None:
    place = one.writer.reserve(len(content))
    assert place is not None
    place.memory[:] = content
    assert bytes(other.reader.find(place.start, len(content))) == content
    other.reader.free()


@needs_memfd
def test_both_ways(offered: OfferedMemory) -> None:
    theirs = open_shared(offered.process, offered.descriptor, offered.token)
    assert theirs.is_shared
    assert not offered.memory.is_shared, "before the other end has said so"
    for number in range(50):
        exchange(offered.memory, theirs, bytes([number]) * 2**20)
        exchange(theirs, offered.memory, bytes([number + 100]) * 2**20)


@needs_memfd
def test_another_process_finds_it(offered: OfferedMemory) -> None:
    code = (
        "import sys; from shoal.swarm.transport.bulk.shared_memory import open_shared\n"
        "memory = open_shared(int(sys.argv[1]), int(sys.argv[2]), bytes.fromhex(sys.argv[3]))\n"
        "place = memory.writer.reserve(5); place.memory[:] = b'hello'; print(place.start)"
    )
    order = [sys.executable, "-c", code, str(offered.process), str(offered.descriptor), offered.token.hex()]
    start = int(subprocess.run(order, capture_output=True, check=True, text=True).stdout)
    assert bytes(offered.memory.reader.find(start, 5)) == b"hello"


def memory_like_ours(size: int, seals: int, name: str = "shoal-link") -> int:
    descriptor = os.memfd_create(name, os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    os.pwrite(descriptor, bytes(32), 0)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def a_file() -> int:
    with tempfile.TemporaryFile() as file:
        file.truncate(shared_memory._all_bytes())
        return os.dup(file.fileno())


FIXED = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL if hasattr(fcntl, "F_SEAL_SEAL") else 0


@needs_memfd
@pytest.mark.parametrize(
    "make",
    [
        a_file,
        lambda: os.pipe()[0],
        lambda: os.dup(0),
        lambda: memory_like_ours(shared_memory._all_bytes(), FIXED & ~fcntl.F_SEAL_SHRINK),
        lambda: memory_like_ours(shared_memory._all_bytes(), 0),
        lambda: memory_like_ours(shared_memory._all_bytes() - 1, FIXED),
        lambda: memory_like_ours(shared_memory._all_bytes() + PAGE, FIXED),
        lambda: memory_like_ours(0, FIXED),
        lambda: memory_like_ours(shared_memory._all_bytes(), FIXED, name="something"),
    ],
    ids=["file", "pipe", "input", "may shrink", "unsealed", "short", "long", "empty", "another name"],
)
def test_nothing_else_is_opened(make: Callable[[], int]) -> None:
    descriptor = make()
    before = len(os.listdir("/proc/self/fd"))
    try:
        with pytest.raises(LinkError):
            open_shared(os.getpid(), descriptor, bytes(32))
        assert len(os.listdir("/proc/self/fd")) == before
    finally:
        os.close(descriptor)


@needs_memfd
def test_only_who_knows_the_token_has_it(offered: OfferedMemory) -> None:
    with pytest.raises(LinkError, match="another link"):
        open_shared(offered.process, offered.descriptor, bytes(32))
    offered.close()
    with pytest.raises(LinkError, match=r"cannot open|no memory"):
        open_shared(offered.process, offered.descriptor, offered.token)
    with pytest.raises(LinkError, match="cannot open"):
        open_shared(2**31 - 1, 3, offered.token)
    offered.close()  # again


@needs_memfd
def test_its_size_stays(offered: OfferedMemory) -> None:
    for size in (0, PAGE, 2**30):
        with pytest.raises(PermissionError):
            os.ftruncate(offered.descriptor, size)


@needs_memfd
def test_a_python_that_does_not_name_the_seals(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("F_ADD_SEALS", "F_GET_SEALS", "F_SEAL_SEAL", "F_SEAL_SHRINK", "F_SEAL_GROW"):
        monkeypatch.delattr(fcntl, name)
    made = OfferedMemory()
    exchange(made.memory, open_shared(made.process, made.descriptor, made.token), b"hello")
    with pytest.raises(PermissionError):
        os.ftruncate(made.descriptor, 0)
    made.close()


@pytest.mark.parametrize("setting", [None, "0\n", "1\n", "2\n"])
@needs_memfd
def test_not_where_a_first_touch_may_end_the_process(
    setting: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(shared_memory, "_OVERCOMMIT", tmp_path / "overcommit_memory")
    if setting is not None:
        (tmp_path / "overcommit_memory").write_text(setting)
    if setting == "2\n":
        with pytest.raises(OSError, match="first access"):
            OfferedMemory()
    else:
        OfferedMemory().close()


@needs_memfd
def test_no_memory_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, size: int) -> None:
        raise OSError("out of memory")

    before = os.listdir("/proc/self/fd")
    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(OSError, match="out of memory"):
        OfferedMemory()
    assert os.listdir("/proc/self/fd") == before


# Over a link ------------------------------------------------------------------------------------------------


class Watched:
    """Who has put how many frames where."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.placed: dict[bool, int] = {True: 0, False: 0}
        put = DataConnection._seal_in_shared_memory

        def counting(connection: DataConnection, link: Link, header: bytes, payload: memoryview) -> bool:
            is_placed = put(connection, link, header, payload)
            self.placed[is_placed] += 1
            return is_placed

        monkeypatch.setattr(DataConnection, "_seal_in_shared_memory", counting)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch)


async def link_of(member: Member) -> Link:
    await until(lambda: bool(member.node._data._links))
    (link,) = member.node._data._links.values()
    return link


async def shared(a: Member, b: Member) -> tuple[Link, Link]:
    """A link from a to b, once both use its memory."""
    b.node.publish(STATE, Source(1))
    assert await fetch(a, b, Sink(), range(1)) == [0]
    ours, theirs = await link_of(a), await link_of(b)
    await until(lambda: ours.memory is not None and ours.memory.is_shared)
    assert theirs.memory is not None
    return ours, theirs


@needs_memfd
@pytest.mark.parametrize("connections", [1, 4])
@run
async def test_chunks_lie_there_both_ways(watched: Watched, connections: int) -> None:
    async with swarm() as (a, b):
        a.node.connections_per_link = connections
        ours, theirs = await shared(a, b)
        assert ours.offered is None
        source = Source(40, 2**19)
        for one, other in ((a, b), (b, a)):
            watched.placed = {True: 0, False: 0}
            other.node.publish(STATE, source)
            sink = Sink()
            assert await fetch(one, other, sink, range(40)) == list(range(40))
            assert sink.holds(source, range(40))
            if connections == 1:
                assert watched.placed == {True: 40, False: 0}, "eight are under way, and there is room for them"
        assert [await link_of(one) for one in (a, b)] == [ours, theirs], "the link held"


@needs_memfd
@run
async def test_small_frames_go_as_they_are(watched: Watched) -> None:
    async with swarm() as (a, b):
        await shared(a, b)
        b.node.publish(STATE, Source(20, 8000))
        assert await fetch(a, b, Sink(), range(20)) == list(range(20))
        assert watched.placed == {True: 0, False: 0}


@needs_memfd
@pytest.mark.parametrize("frames", [1, 3])
@run
async def test_what_has_no_room_goes_over_the_connection(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, frames: int
) -> None:
    size = 2**18
    monkeypatch.setattr(shared_memory, "RING_BYTES", frames * (size + 64))

    async with swarm() as (a, b):
        await shared(a, b)
        source, sinks = Source(60, size), [Sink() for _ in range(3)]
        b.node.publish(STATE, source)
        is_full = threading.Event()

        def patient(sink: Sink) -> Callable[[int, int], memoryview]:
            def place(chunk: int, size: int) -> memoryview:
                is_full.wait(LONG_S)
                return sink(chunk, size)

            return place

        async with asyncio.TaskGroup() as tasks:
            fetched = [tasks.create_task(fetch(a, b, patient(sink), range(60))) for sink in sinks]  # type: ignore[arg-type]
            await until(lambda: watched.placed[False] > 0)
            is_full.set()
        assert all(task.result() == list(range(60)) for task in fetched)
        assert all(sink.holds(source, range(60)) for sink in sinks)
        assert watched.placed[True] > frames, "there was room again"


@needs_memfd
@run
async def test_what_is_changed_there_costs_the_link_and_no_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    async with swarm() as (a, b):
        ours, _ = await shared(a, b)
        source, sink = Source(20, 2**16), Sink()
        b.node.publish(STATE, source)
        find, damaged = RingReader.find, []

        def damage(reader: RingReader, start: int, size: int) -> memoryview:
            found = find(reader, start, size)
            if start > 3 * 2**16 and not damaged:
                damaged.append(start)
                found[size // 2] ^= 1
            return found

        monkeypatch.setattr(RingReader, "find", damage)
        assert await fetch(a, b, sink, range(20)) == list(range(20))
        assert sink.holds(source, range(20))
        assert damaged
        assert await link_of(a) is not ours


@needs_memfd
@pytest.mark.parametrize("place", [2**40 - 1, 2**63])
@run
async def test_a_place_outside_costs_the_link(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async with swarm() as (a, b):
        ours, _ = await shared(a, b)
        b.node.publish(STATE, Source(5, 2**16))
        reserve, moved = RingWriter.reserve, []

        def elsewhere(writer: RingWriter, size: int) -> Place | None:
            found = reserve(writer, size)
            if found is None or moved:
                return found
            moved.append(place)
            return Place(place, found.memory)

        monkeypatch.setattr(RingWriter, "reserve", elsewhere)
        assert await fetch(a, b, Sink(), range(5)) == list(range(5))
        assert moved
        assert await link_of(a) is not ours


@needs_memfd
@run
async def test_a_place_on_a_link_without_memory_costs_it() -> None:
    async with swarm() as (a, b):
        ours, theirs = await shared(a, b)
        ours.memory = None
        b.node.publish(STATE, Source(5, 2**16))
        assert await fetch(a, b, Sink(), range(5)) == list(range(5))
        assert await link_of(b) is not theirs


def refuse(*_: Any) -> SharedMemory:
    raise LinkError("another system's processes")


@needs_memfd
@pytest.mark.parametrize("where", ["offer", "open", "address", "their address"])
@run
async def test_without_it_all_goes_over_the_connection(
    watched: Watched, where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No such memory here, none that can be opened there (a container), or another machine."""

    def unavailable(*_: Any) -> int:
        raise OSError("no such call")

    def elsewhere(connection: socket.socket) -> bool:
        asked.append(connection)
        return where == "their address" and len(asked) == 1

    asked: list[socket.socket] = []
    caplog.set_level("INFO", logger="shoal")
    if where == "offer":
        monkeypatch.setattr(os, "memfd_create", unavailable, raising=False)
    elif where == "open":
        monkeypatch.setattr(bulk, "open_shared", refuse)
    else:
        monkeypatch.setattr(bulk, "is_on_this_machine", elsewhere)

    async with swarm() as (a, b):
        source, sink = Source(20, 2**19), Sink()
        b.node.publish(STATE, source)
        assert await fetch(a, b, sink, range(20)) == list(range(20))
        assert sink.holds(source, range(20))
        ours, theirs = await link_of(a), await link_of(b)
        await until(lambda: ours.memory is None and ours.offered is None)
        assert theirs.memory is None
        assert watched.placed == {True: 0, False: 20}
    assert ("a link without shared memory" in caplog.text) == (where in ("open", "their address"))


OFFER = PeerToPeerOfferMemory(process=1, descriptor=3, token=bytes(32))


@needs_memfd
@pytest.mark.parametrize("by_opener", [True, False])
@pytest.mark.parametrize("message", [OFFER, PeerToPeerMemoryOpened(is_open=True)])
@run
async def test_a_word_out_of_turn_costs_the_link(
    message: Message, by_opener: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with swarm() as (a, b):
        ours, theirs = await shared(a, b)
        opened: list[int] = []
        monkeypatch.setattr(bulk, "open_shared", lambda *numbers: opened.append(numbers))
        sender, link = (a, ours) if by_opener else (b, theirs)
        sender.node._data._io_thread.send_stream_control(link, encode(Envelope("notice", 0, message)))
        await until(lambda: not a.node._data._links and not b.node._data._links)
        assert not opened
        monkeypatch.setattr(bulk, "open_shared", open_shared)
        b.node.publish(STATE, Source(5))
        assert await fetch(a, b, Sink(), range(5)) == list(range(5))


def shared_now() -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "shoal-link" in line]


@needs_memfd
@run
async def test_memory_is_offered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who offers what cannot be opened does not get to try again."""

    async with swarm() as (a, b):
        monkeypatch.setattr(bulk, "open_shared", refuse)
        b.node.publish(STATE, Source(1))
        assert await fetch(a, b, Sink(), range(1)) == [0]
        ours = await link_of(a)
        await until(lambda: ours.offered is None)
        monkeypatch.setattr(bulk, "open_shared", open_shared)
        a.node._data._offer_memory(ours)
        await until(lambda: not a.node._data._links and not b.node._data._links)


@needs_memfd
@run
async def test_a_link_without_connections_is_of_no_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    async with swarm() as (a, b):
        monkeypatch.setattr(a.node._data, "_offer_memory", lambda link: None)
        b.node.publish(STATE, Source(1))
        assert await fetch(a, b, Sink(), range(1)) == [0]
        theirs, made = await link_of(b), OfferedMemory()
        theirs.connections, kept = [], theirs.connections
        offer = PeerToPeerOfferMemory(process=made.process, descriptor=made.descriptor, token=made.token)
        b.node._data._open_memory(theirs, offer)
        assert theirs.memory is None
        theirs.connections = kept
        made.close()


@needs_memfd
@run
async def test_what_was_read_is_free_at_once() -> None:
    """Also when nothing comes after it."""

    async with swarm() as (a, b):
        ours, theirs = await shared(a, b)
        b.node.publish(STATE, Source(4, 2**16))
        assert await fetch(a, b, Sink(), range(4)) == list(range(4))
        assert ours.memory is not None
        assert theirs.memory is not None
        writer = theirs.memory.writer
        await until(lambda: writer._counter[0] == writer._end > 0)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere loopback has one address")
def test_one_machine_is_one_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for address, is_one in [("127.0.0.1", True), ("127.0.0.2", False)]:
            with socket.create_connection(listener.getsockname(), source_address=(address, 0)) as ours:
                theirs, _ = listener.accept()
                with theirs:
                    assert is_on_this_machine(ours) == is_on_this_machine(theirs) == is_one
            assert not is_on_this_machine(ours), "closed"


@needs_memfd
def test_it_goes_with_the_link() -> None:
    """The mapping and every descriptor, whether the other end has answered or not."""

    async def test() -> None:
        before = len(os.listdir("/proc/self/fd"))
        for answered in (True, False):
            async with swarm() as (a, b):
                if answered:
                    await shared(a, b)
                else:
                    b.node._data._io_thread._receiver._on_stream_control = lambda link: None
                    await a.node._link(*await a.node._channel_to(b.peer, 0, LONG_S), LONG_S)
                    assert (await link_of(a)).offered is not None
                assert shared_now()
        await until(lambda: len(os.listdir("/proc/self/fd")) <= before)

    asyncio.run(test())
    assert not shared_now()


def two_ends() -> tuple[Link, Link]:
    """Of a link with memory that both ends have."""
    made, secrets = OfferedMemory(), bytes(64)
    opener = Link(SealedLink(bytes(8), secrets, "aes-256-gcm", opener=True), b"", is_ours=True)
    acceptor = Link(SealedLink(bytes(8), secrets, "aes-256-gcm", opener=False), b"", is_ours=False)
    opener.memory, opener.memory.is_shared = made.memory, True
    acceptor.memory = open_shared(made.process, made.descriptor, made.token)
    made.close()
    return opener, acceptor


@needs_memfd
def test_a_frame_and_its_place_in_pieces() -> None:
    """A place that comes in parts, among frames that are whole."""
    opener, acceptor = two_ends()
    recorder, other = socket.socketpair()
    ours, theirs = socket.socketpair()
    sizes = [5, 2**16, 2**16, 100, 2**20, 0, 2**15]
    with recorder, other, ours, theirs:
        writer, reader = DataConnection(recorder, opener, 0.0), DataConnection(theirs, acceptor, 0.0)
        opener.connections.append(writer)
        theirs.setblocking(False)
        sent = bytearray()
        for chunk, size in enumerate(sizes):
            writer.seal(opener, Frame(3, chunk, memoryview(bytes([chunk]) * size)))
            sent += writer._unsent
        assert len(sent) < 2000, "the large ones lie in memory"
        got = []
        for byte in sent:
            ours.sendall(bytes([byte]))
            try:
                header, body = reader.receive()
            except BlockingIOError:
                continue
            plain = memoryview(bytearray(body.nbytes - TAG_BYTES))
            acceptor.sealed.open(header, body, plain)
            got.append(bytes(plain))
            reader.release()
        assert got == [bytes([chunk]) * size for chunk, size in enumerate(sizes)]


@needs_memfd
def test_only_one_connection_says_places_and_only_when_both_ends_have_the_memory() -> None:
    """Over two of them one place might overtake another, and be refused."""
    opener, _ = two_ends()
    assert opener.memory is not None
    frame, (recorder, other) = Frame(3, 0, memoryview(bytes(2**16))), socket.socketpair()
    with recorder, other:
        first, second = (DataConnection(recorder, opener, 0.0) for _ in range(2))
        opener.connections += [first, second]
        for connection, is_shared, is_placed in [(first, True, True), (second, True, False), (first, False, False)]:
            opener.memory.is_shared = is_shared
            assert connection.seal(opener, frame) > 2**16
            assert (len(connection._unsent) < 100) == is_placed
