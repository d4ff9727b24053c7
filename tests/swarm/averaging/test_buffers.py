import gc
from concurrent.futures import ThreadPoolExecutor

import torch

from shoal.swarm.averaging.buffers import Buffers, same_bytes


def address(view: memoryview) -> int:
    return torch.frombuffer(view, dtype=torch.uint8).data_ptr()


def test_what_follows_the_header_is_aligned() -> None:
    buffers = Buffers()
    for header in (0, 1, 3, 5, 129):
        taken = buffers.take(header + 100, header)
        assert len(taken) == header + 100
        assert address(taken[header:]) % 16 == 0


def test_memory_comes_back_with_its_last_view_and_not_before() -> None:
    buffers = Buffers()
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
    buffers = Buffers()
    held = buffers.take(10)
    del held
    large = buffers.floats(10**6)
    del large
    buffers.trim()
    assert buffers.free_bytes > 4 * 10**6
    again = buffers.take(10)
    del again
    buffers.trim()
    assert 0 < buffers.free_bytes < 10**6
    buffers.trim()
    assert buffers.free_bytes == 0
    assert buffers.floats(0).numel() == 0


def test_threads_never_share_a_buffer() -> None:
    buffers = Buffers()

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
    assert buffers.free_bytes <= 16 * 2**16


def test_the_same_bytes_wherever_they_are() -> None:
    one = memoryview(bytearray(b"some bytes"))
    assert same_bytes(one, one)
    assert same_bytes(one, memoryview(b"some bytes"))
    assert not same_bytes(one, memoryview(b"same bytes"))
    assert not same_bytes(one, one[:-1])
