import struct
import zlib

import numpy as np
import pytest
import torch

from shoal.peer.state_transfer.chunk_format import LOSSLESS, RAW, format_of
from shoal.swarm.errors import WireError


def chunk(values: torch.Tensor) -> memoryview:
    return values.numpy().data.cast("B")


NORMAL = torch.randn(2**18, generator=torch.Generator().manual_seed(1)) * 0.02
CASES = {
    "weights": NORMAL,
    "zeros": torch.zeros(2**18),
    "noise": torch.from_numpy(np.random.default_rng(0).integers(0, 2**32, 2**18, np.uint32).view(np.float32)),
    "half zeros": torch.where(torch.arange(2**18) % 2**15 < 2**14, torch.zeros(()), NORMAL),
    "extremes": torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-45, -3.4e38]).repeat(999),
    "one": torch.ones(1),
}


@pytest.mark.parametrize("case", CASES)
def test_the_bits_come_back(case: str) -> None:
    data = chunk(CASES[case])
    assert format_of("raw") is RAW
    assert format_of("lossless") is LOSSLESS
    for form in (RAW, LOSSLESS):
        packed = form.pack(data)
        assert packed.nbytes <= data.nbytes + 16
        assert bytes(form.unpack(packed, data.nbytes)) == bytes(data)


def test_weights_get_smaller() -> None:
    assert LOSSLESS.pack(chunk(NORMAL)).nbytes < 0.86 * 2**20
    assert LOSSLESS.pack(chunk(CASES["zeros"])).nbytes < 0.01 * 2**20
    assert RAW.blob(3) != LOSSLESS.blob(3)


def test_no_bytes_do_harm() -> None:
    data = chunk(NORMAL[:1000])
    packed = bytes(LOSSLESS.pack(data))
    for length in range(0, len(packed), 7):
        with pytest.raises(WireError):
            LOSSLESS.unpack(memoryview(packed[:length]), data.nbytes)
    with pytest.raises(WireError):
        LOSSLESS.unpack(memoryview(packed + b"x"), data.nbytes)
    for position in range(len(packed)):
        flipped = packed[:position] + bytes([packed[position] ^ 0x11]) + packed[position + 1 :]
        try:
            found = LOSSLESS.unpack(memoryview(flipped), data.nbytes)
        except WireError:
            continue
        assert found.nbytes == data.nbytes  # of which the hash takes care


def test_a_bomb_does_not_go_off() -> None:
    bomb = zlib.compress(bytes(2**28))
    packed = struct.pack("<4I", len(bomb), 0, 0, 0) + bomb
    with pytest.raises(WireError, match="another size"):
        LOSSLESS.unpack(memoryview(packed), 2**20)
