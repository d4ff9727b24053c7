"""The float codecs: bounds, layouts, and refused bytes. The contract of all codecs: test_codecs."""

import struct

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.compression.codec_cases import int2, sign
from torch import Tensor

from shoal.compression import tiled as tiles
from shoal.compression.floats import FloatCodec, ScaledFloatCodec
from shoal.compression.formats import BlockFormat, CodecError
from shoal.compression.tiled import TiledCodec

FLOAT_MAX = torch.finfo(torch.float32).max
F8 = torch.float8_e4m3fn


def float16(block: int = 4096) -> ScaledFloatCodec:
    return ScaledFloatCodec(BlockFormat("float16", block))


def float8(block: int = 4096) -> ScaledFloatCodec:
    return ScaledFloatCodec(BlockFormat("float8_e4m3", block))


PLAIN = [FloatCodec(BlockFormat("float32", 1)), FloatCodec(BlockFormat("bfloat16", 1))]
SCALED = [float16(), float8(), float16(5), float8(8)]
TILED: list[TiledCodec] = [*PLAIN, *SCALED, sign(), int2(), sign(block=8), int2(block=16)]
every_tiled = pytest.mark.parametrize("codec", TILED, ids=[codec.name for codec in TILED])
every_scaled = pytest.mark.parametrize("codec", SCALED, ids=[codec.name for codec in SCALED])

floats = st.one_of(
    st.floats(width=32, allow_nan=False, allow_infinity=False),
    st.floats(-10, 10, width=32),
    st.sampled_from([0.0, -0.0, FLOAT_MAX, -FLOAT_MAX, 2.0**-126, 1.4e-45, 448.0, 449.0, 65504.0, 65505.0, 2.97e38]),
)
vectors = st.lists(floats, max_size=40).map(lambda xs: torch.tensor(xs, dtype=torch.float32))


def noise(n: int, seed: int = 0) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


@every_tiled
@pytest.mark.parametrize("n", [0, 1, 7, 8, 63, 64, 65, 500, 4097, 9001])
def test_tiles_leave_no_trace(codec: TiledCodec, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    values = noise(n)
    packed = codec.encode(values)
    assert packed.shape == (codec.packed_bytes(n),)
    decoded = codec.decode(packed, n)
    monkeypatch.setattr(tiles, "_TILE_VALUES", 64)
    assert torch.equal(codec.encode(values), packed)
    assert same_bits(codec.decode(packed, n), decoded)


def test_sizes_and_names() -> None:
    assert [float16().packed_bytes(n) for n in (0, 1, 4096, 4097)] == [0, 4, 8194, 8198]
    assert [float8().packed_bytes(n) for n in (0, 1, 4096, 4097)] == [0, 3, 4098, 4101]
    assert [codec.name for codec in SCALED] == ["float16", "float8_e4m3", "float16(block=5)", "float8_e4m3(block=8)"]


GOLDEN_VALUES = [1.0, -2.5, 0.1, 1000.0, -0.0, 3e-5, 65504.0, -7.0, 0.3, -3e38]
GOLDEN = [
    (PLAIN[0], "0000803f000020c0cdcccc3d00007a440000008082a8fb3700e07f470000e0c09a99993ee6b161ff"),
    (PLAIN[1], "803f20c0cd3d7a440080fc378047e0c09a3e62ff"),
    (float16(4), "faff0000700000" "5400d96646d07b0080f701ff7b00c700000efb"),
    (float8(4), "020008007700" "28b20d788000788e00fe"),
]  # fmt: skip


@pytest.mark.parametrize(("codec", "golden"), GOLDEN, ids=[codec.name for codec, _ in GOLDEN])
def test_layout_is_the_golden_one(codec: TiledCodec, golden: str) -> None:
    assert codec.encode(torch.tensor(GOLDEN_VALUES)).numpy().tobytes().hex() == golden
    codec.decode(bytes.fromhex(golden), 10)


def test_golden_decoded() -> None:
    # By hand: exponents 2, 8 and 119; 0x28 is 1.0 * 2**-2, 0xb2 is -1.25 * 2**-1, 0xfe is -448.
    decoded = float8(4).decode(bytes.fromhex(GOLDEN[3][1]), 10).tolist()
    assert decoded == [1.0, -2.5, 0.1015625, 1024.0, -0.0, 0.0, 65536.0, -7.0, 0.0, -448 * 2.0**119]
    decoded = float16(4).decode(bytes.fromhex(GOLDEN[2][1]), 10).tolist()
    assert decoded[:2] == [1.0, -2.5]
    assert decoded[6:9] == [65504.0, -7.0, 0.0]


def test_every_code_decodes_to_its_value() -> None:
    def value(code: int) -> float:
        exponent, mantissa = code >> 3 & 15, code & 7
        size = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
        return -size if code & 0x80 else size

    codes = [code for code in range(256) if code & 0x7F != 0x7F]
    for e in (-117, -1, 0, 7, 119):
        decoded = float8().decode(struct.pack("<h", e) + bytes(codes), 254)
        expected = torch.tensor([value(code) * 2.0**e for code in codes])
        assert same_bits(decoded, expected)
        assert same_bits(decoded, torch.tensor(codes, dtype=torch.uint8).view(F8).float() * 2.0**e)
    bits = np.arange(0x7C00, dtype="<u2")
    for e in (-102, 0, 112):
        decoded = float16(1 << 20).decode(struct.pack("<h", e) + bits.tobytes(), len(bits))
        assert np.array_equal(decoded.numpy(), bits.view("<f2").astype(np.float64) * 2.0**e)
        assert bool((decoded[1:] >= 2.0**-126).all())


@every_scaled
@given(values=vectors, size=st.sampled_from([1.0, 1e-30, 1e-38]))
@example(values=torch.tensor([2.0**-24, 65505.0]), size=1.0)
@example(values=torch.tensor([2.0**-9, 449.0]), size=1.0)
@settings(deadline=None, max_examples=200)
def test_errs_by_half_a_bit(codec: ScaledFloatCodec, values: Tensor, size: float) -> None:
    values = values * size
    half, p, lowest, highest = (True, 11, -102, 112) if "16" in codec.name else (False, 4, -117, 119)
    # Half of the smallest code, under a power of two that is less than twice what the largest value needs.
    share = 2.0**-24 / 65504 if half else 2.0**-9 / 448
    saturated = values.double().clamp(*[s * (65504 if half else 448) * 2.0**highest for s in (-1, 1)])
    decoded = codec.decode(codec.encode(values), values.numel()).double()
    block = codec.format.block
    for start in range(0, values.numel(), block):
        part, back = saturated[start : start + block], decoded[start : start + block]
        least = 2.0 ** (lowest - (25 if half else 10))
        bound = (part.abs() * 2.0**-p).clamp(min=max(float(part.abs().max()) * share, least))
        assert bool(((back - part).abs() <= bound).all())


@every_scaled
def test_nothing_is_lost_for_its_size_alone(codec: ScaledFloatCodec) -> None:
    pattern = codec.decode(codec.encode(noise(500)), 500)
    for size in (2.0**-80, 2.0**-30, 1.0, 2.0**60, 2.0**120):
        assert same_bits(codec.decode(codec.encode(pattern * size), 500), pattern * size)


def test_rounds_ties_to_even() -> None:
    values = torch.tensor([448.0, 17.0, 19.0, 2.0**-10, 3 * 2.0**-10, 2.0**-9])
    decoded = float8().decode(float8().encode(values), 6)
    assert decoded.tolist() == [448.0, 16.0, 20.0, 0.0, 2.0**-8, 2.0**-9]


@every_scaled
@pytest.mark.parametrize("beyond", [-1, 1])
def test_exponents_outside_the_range_are_refused(codec: ScaledFloatCodec, beyond: int) -> None:
    lowest, highest = (-102, 112) if "16" in codec.name else (-117, 119)
    codes = bytes(codec.packed_bytes(3) - 2)
    edge = lowest if beyond < 0 else highest
    assert codec.decode(struct.pack("<h", edge) + codes, 3).tolist() == [0.0] * 3
    with pytest.raises(CodecError, match="exponent"):
        codec.decode(struct.pack("<h", edge + beyond) + codes, 3)


@pytest.mark.parametrize("bad", [b"\x00\x7c", b"\x00\xfc", b"\x01\x7c", b"\xff\xff"])
def test_float16_codes_that_are_not_finite_are_refused(bad: bytes) -> None:
    for at in range(40):
        codes = bytes(2 * at) + bad + bytes(2 * (39 - at))
        with pytest.raises(CodecError):
            float16().decode(b"\0\0" + codes, 40)


@pytest.mark.parametrize("bad", [0x7F, 0xFF])
def test_float8_nan_codes_are_refused(bad: int) -> None:
    for at in range(40):
        with pytest.raises(CodecError, match="NaN"):
            float8().decode(b"\0\0" + bytes(at) + bytes([bad]) + bytes(39 - at), 40)
