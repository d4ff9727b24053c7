import gc
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from random import Random

import torch

from shoal.swarm.averaging.buffer_pool import _SEGMENT_BYTES, MOST_FREE_BYTES, BufferPool, RoundBuffers, same_bytes


def address(view: memoryview) -> int:
    return torch.frombuffer(view, dtype=torch.uint8).data_ptr()


def test_what_follows_the_header_begins_a_cache_line() -> None:
    buffers = BufferPool()
    for header in (0, 1, 3, 5, 129):
        taken = buffers.take(header + 100, header)
        assert len(taken) == header + 100
        assert address(taken[header:]) % 64 == 0
    for n in (1000, _SEGMENT_BYTES):
        assert buffers.floats(n).data_ptr() % 64 == 0


def test_memory_comes_back_with_its_last_view_and_not_before() -> None:
    buffers = BufferPool()
    whole = buffers.take(1000)
    first = address(whole)
    part, tensor = whole[10:20], torch.frombuffer(whole[100:200], dtype=torch.uint8)
    del whole
    assert address(buffers.take(1000)) != first
    del part
    gc.collect()
    assert first not in {address(one) for one in [buffers.take(1000) for _ in range(5)]}
    tensor[0] = 1
    del tensor
    assert first in {address(one) for one in [buffers.take(1000) for _ in range(8)]}


def test_what_nobody_asks_for_is_let_go() -> None:
    buffers = BufferPool()
    held = buffers.take(10)
    del held
    large = buffers.floats(10**7)
    del large
    buffers.trim()
    assert buffers.free_bytes > 4 * 10**7
    again = buffers.take(10)
    del again
    buffers.trim()
    assert 0 < buffers.free_bytes < 4 * 10**7
    buffers.trim()
    assert buffers.free_bytes == buffers.held_bytes == 0
    assert buffers.floats(0).numel() == 0


def test_chunks_of_another_size_use_the_memory_of_those_before() -> None:
    """As in rounds over links that are seen to be slower or faster each time."""
    buffers, whole_bytes = RoundBuffers(), 5 * 10**7
    kept: list[memoryview] = []
    for size in [520_000, 130_000, 70_000, 210_000, 320_000, 65_000, 400_000, 260_000] * 3:
        ours, theirs, results, errors = [], deque[memoryview](maxlen=16), [], []
        for number in range(whole_bytes // size):
            ours.append(buffers.passing.take(size))
            theirs.append(buffers.passing.take(size))
            results.append(buffers.results.take(size, 1))
            if number % 4 == 0:
                errors.append(buffers.passing.floats(size))
        assert buffers.held_bytes < 1.1 * (4 * whole_bytes + 16 * 520_000)
        kept[:] = results  # until the next round's are there; what came for them is not
        del ours, theirs, results, errors
        buffers.trim()


def test_memory_that_every_round_needs_is_never_let_go() -> None:
    """Chunks that leave a quarter of each segment unused."""
    buffers, places = BufferPool(), []
    kept: list[memoryview] = []
    for _ in range(8):
        results = [buffers.take(3_137_536) for _ in range(8)]
        places.append({address(one) for one in (*kept, *results)})
        kept[:] = results  # until the next round's are there
        del results
        before = buffers.held_bytes
        buffers.trim()
        assert buffers.held_bytes == before
    assert places[2] == places[3] == places[7]


def test_a_round_that_needs_a_little_less_leaves_the_memory_of_the_one_before() -> None:
    buffers = BufferPool()
    for count in (40, 34, 40, 34):
        chunks = [buffers.take(2**20) for _ in range(count)]
        del chunks
        buffers.trim()
        assert buffers.free_bytes >= 40 * 2**20


def test_what_is_taken_never_overlaps() -> None:
    buffers, generator = BufferPool(), Random(5)
    held: list[memoryview] = []
    for number in range(3000):
        if held and generator.random() < 0.45:
            held.pop(generator.randrange(len(held)))
        size = generator.choice([10, 5000, 70_000, 2**21, _SEGMENT_BYTES, _SEGMENT_BYTES + 1])
        held.append(buffers.take(size if len(held) < 40 else 100))
        if number % 100:
            continue
        buffers.trim()
        spans = sorted((address(one), address(one) + len(one)) for one in held)
        assert all(stop <= start for (_, stop), (start, _) in pairwise(spans))
    del held[:]
    assert buffers.free_bytes == buffers.held_bytes
    buffers.trim()
    buffers.trim()
    assert buffers.held_bytes == 0


def test_threads_never_share_a_buffer() -> None:
    buffers = BufferPool()

    def work(number: int) -> bool:
        for _ in range(300):
            mine = buffers.take(64)
            mine[:] = bytes([number]) * 64
            other = buffers.take(64)
            other[:] = bytes([255]) * 64
            if bytes(mine) != bytes([number]) * 64:
                return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))
    assert buffers.free_bytes == buffers.held_bytes == _SEGMENT_BYTES


def test_the_same_bytes_wherever_they_are() -> None:
    one = memoryview(bytearray(b"some bytes"))
    assert same_bytes(one, one)
    assert same_bytes(one, memoryview(b"some bytes"))
    assert not same_bytes(one, memoryview(b"same bytes"))
    assert not same_bytes(one, one[:-1])


def test_little_free_memory_is_kept_between_rounds() -> None:
    """However much a round needed."""
    buffers = RoundBuffers()
    for _ in range(3):
        passing = [buffers.passing.take(2**20) for _ in range(100)]
        results = [buffers.results.take(2**20) for _ in range(100)]
        assert buffers.held_bytes > 190 * 2**20
        del passing, results
        buffers.trim()
        assert MOST_FREE_BYTES - 2 * _SEGMENT_BYTES < buffers.held_bytes <= MOST_FREE_BYTES
