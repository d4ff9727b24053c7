"""Choice of codecs by range of values, and several codecs as one."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.compression.codec_cases import needs_numba, use
from tests.fakes.codec_maps import get_codec_map
from torch import Tensor

from shoal.compression.codec import Codec
from shoal.compression.codec_map import CodecMap, Segmented
from shoal.compression.formats import (
    CODEC_NAMES,
    FORMAT_MAP_NAMES,
    SMALL_VALUES,
    CodecError,
    SegmentedFormat,
    named_format,
)
from shoal.compression.registry import get_codec
from shoal.compression.weighted_mean import WeightedMean

SHAPES = [
    ("token_embedding.weight", (100, 64)),
    ("blocks.0.norm.weight", (64,)),
    ("blocks.0.mlp.up.weight", (64, 256)),
    ("blocks.0.mlp.down.weight", (256, 64)),
    ("blocks.0.mlp.down.bias", (64,)),
    ("head_norm.weight", (5000,)),
    ("lm_head.weight", (100, 64)),
]
N = sum(math.prod(shape) for _, shape in SHAPES)


NUMBA = pytest.param("numba", marks=needs_numba)


def noise(n: int, seed: int = 0) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


# auto -----------------------------------------------------------------------------------------------------


def test_auto_chooses_by_size_and_role() -> None:
    assert get_codec_map("auto", None, SHAPES).contribution(0, N).name == (
        "int8*6400+float16*64+int4*32768+float16*5064+int8*6400"
    )


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("transformer.wte.weight", "int8"),
        ("model.embed_tokens.weight", "int8"),
        ("tok_embeddings.weight", "int8"),
        ("gpt_neox.embed_out.weight", "int8"),
        ("output.weight", "int8"),
        ("head.weight", "int8"),
        ("layers.0.attention.output_gate.weight", "int4"),
        ("layers.0.overhead.weight", "int4"),
        ("layers.0.heads.weight", "int4"),
        ("conv.weight", "int4"),
    ],
)
def test_tables_are_told_by_their_names(name: str, role: str) -> None:
    shape = (64, 64, 3, 3) if name.startswith("conv") else (64, 64)
    assert get_codec_map("auto", None, [(name, shape)]).contribution(0, 64).name == role


@pytest.mark.parametrize(("rows", "name"), [(63, "float16"), (64, "int4")])
def test_a_small_matrix_stays_at_16_bits(rows: int, name: str) -> None:
    assert SMALL_VALUES == 64 * 64
    assert get_codec_map("auto", None, [("w", (rows, 64))]).contribution(0, rows * 64).name == name


def test_auto_chooses_from_the_codecs_that_it_is_given() -> None:
    options = {"matrices": "sign", "tables": "bfloat16", "small": "float32"}
    codec_map = get_codec_map("auto", options, SHAPES)
    assert codec_map.contribution(6400 - 8, 6464 + 8).name == "bfloat16*8+float32*64+sign*8"


@given(bounds=st.tuples(st.integers(0, N - 1), st.integers(1, N)).map(sorted).filter(lambda b: b[0] < b[1]))
def test_auto_covers_every_range(bounds: list[int]) -> None:
    """What a range is packed with is what the whole says of its values."""
    codec_map = get_codec_map("auto", None, SHAPES)
    start, stop = bounds
    of_each = [name for n, name in spelled(codec_map.contribution(0, N), N) for _ in range(n)]
    assert [name for n, name in spelled(codec_map.contribution(start, stop), stop - start) for _ in range(n)] == (
        of_each[start:stop]
    )


def spelled(codec: Codec, n: int) -> list[tuple[int, str]]:
    pieces = [piece.split("*") for piece in codec.name.split("+")]
    return [(int(piece[1]) if len(piece) > 1 else n, piece[0]) for piece in pieces]


def test_tensors_without_values_count_for_nothing() -> None:
    codec_map = get_codec_map("auto", None, [("a", (0, 8)), ("w", (64, 64)), ("b", (0,)), ("v", (64, 64))])
    assert codec_map.contribution(0, 8192).name == "int4"


# Results and kernels --------------------------------------------------------------------------------------


def test_a_mean_keeps_more_values_than_a_contribution() -> None:
    codec_map = get_codec_map("topk", {"k": 32})
    assert codec_map.contribution(0, 9).name == "topk(k=32)"
    assert [codec_map.result(0, 9, members).name for members in (1, 3, 64, 1000)] == [
        "topk(k=32)",
        "topk(k=96)",
        "topk(k=2048)",
        "topk(k=2048)",
    ]
    auto = get_codec_map("auto", {"matrices": "topk"}, SHAPES)
    assert auto.result(6464, 6464 + 4096, 2).name == "topk(k=128)"


@pytest.mark.parametrize("name", [name for name in CODEC_NAMES if name != "topk"])
def test_others_pack_a_mean_like_a_contribution(name: str) -> None:
    codec_map = get_codec_map(name)
    assert codec_map.result(0, 10, 8) is codec_map.contribution(0, 10)


def test_kernels_are_those_of_the_codecs_in_use() -> None:
    assert list(get_codec_map("float16").kernels) == []
    assert list(get_codec_map("int4").kernels) == ["blockwise"]
    assert list(get_codec_map("topk").kernels) == ["topk"]
    assert list(get_codec_map("auto", {"tables": "topk"}, SHAPES).kernels) == ["blockwise", "topk"]
    assert list(get_codec_map("auto", None, [("norm", (64,))]).kernels) == []


def test_unknown_codec_maps_are_refused_with_the_known_ones() -> None:
    assert set(FORMAT_MAP_NAMES) - set(CODEC_NAMES) == {"auto"}
    with pytest.raises(CodecError, match=r"expected one of float32, .*topk, auto, not 'zip'"):
        get_codec_map("zip")
    with pytest.raises(CodecError, match=r"unknown option 'k' of codec auto: auto has matrices, tables, small"):
        get_codec_map("auto", {"k": 3})
    with pytest.raises(CodecError, match=r"not 'auto'"):
        get_codec_map("auto", {"small": "auto"})


# Segmented ------------------------------------------------------------------------------------------------

PIECES = [(300, "int8"), (7, "float16"), (5000, "topk"), (1, "sign"), (4097, "int4")]


def segmented() -> Segmented:
    return Segmented(SegmentedFormat(tuple((n, named_format(name)) for n, name in PIECES)))


def test_segments_are_packed_one_after_the_other() -> None:
    codec, values = segmented(), noise(9405)
    packed, expected, at = codec.encode(values), [], 0
    for n, name in PIECES:
        expected.append(get_codec(name).encode(values[at : at + n]))
        at += n
    assert torch.equal(packed, torch.cat(expected))
    assert packed.numel() == codec.packed_bytes(9405)
    decoded = torch.cat([get_codec(name).decode(piece, n) for (n, name), piece in zip(PIECES, expected, strict=True)])
    assert torch.equal(codec.decode(packed, 9405), decoded)
    out = torch.full((9407,), 7.0)
    codec.decode(packed.numpy().tobytes(), 9405, out[1:-1])
    assert torch.equal(out[1:-1], decoded)
    assert (out[0], out[-1]) == (7.0, 7.0)


def test_segments_with_residual_and_sum() -> None:
    codec, values, residual = segmented(), noise(9405), noise(9405, 1)
    packed = codec.encode(values + residual)
    kept = residual.clone()
    assert torch.equal(codec.encode_residual(values, kept), packed)
    decoded = codec.decode(packed, 9405)
    assert torch.equal(kept, (values + residual) - decoded)
    place = residual.clone()
    assert torch.equal(codec.encode_residual(values, place, place.view(-1)), packed)
    assert torch.equal(place, kept)
    left, room, before = noise(9405), torch.zeros_like(packed), residual.clone()
    assert codec.encode_residual(values, residual, left, room).data_ptr() == room.data_ptr()
    assert torch.equal(room, packed)
    assert torch.equal(left, kept)
    assert torch.equal(residual, before)
    total = noise(9405, 2)
    expected = total + decoded * 3.0
    codec.accumulate(packed, total, 3.0)
    assert torch.equal(total, expected)


def test_a_bad_segment_changes_nothing() -> None:
    codec, values, residual = segmented(), noise(9405), noise(9405, 1)
    packed = codec.encode(values)
    packed[codec.packed_bytes(9405) - 2049 - 4 * 17 : -2049] = 255  # the scales of the last segment
    total = noise(9405, 2)
    with pytest.raises(CodecError, match="scale"):
        codec.accumulate(packed, total, 1.0)
    assert torch.equal(total, noise(9405, 2))
    values[9000] = math.nan
    with pytest.raises(CodecError, match=r"from value 5308 on: .* nan at 3692 "):
        codec.encode_residual(values, residual)
    assert torch.equal(residual, noise(9405, 1))


def test_segments_are_for_their_number_of_values() -> None:
    codec = segmented()
    for n in (0, 9404, 9406):
        with pytest.raises(CodecError, match="9405"):
            codec.encode(noise(n))
        with pytest.raises(CodecError, match="9405"):
            codec.decode(b"", n)
    with pytest.raises(CodecError):
        codec.decode(codec.encode(noise(9405))[:-1], 9405)


# chunks ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "values"),
    [
        ("float32", {}, 2**20),
        ("float16", {}, 2**20),
        ("int8", {}, 2**22),
        ("int8", {"block": 64}, 2**21),
        ("int8", {"block": 2}, 2**20),
        ("int4", {}, 2**22),
        ("topk", {}, 2**20),
        ("auto", {}, 2**20),
    ],
)
def test_a_chunk_is_four_mebibytes_as_packed_where_a_codec_reads_block_by_block(
    name: str, options: dict[str, int], values: int
) -> None:
    codec_map = get_codec_map(name, options)
    assert codec_map.formats.max_chunk_values == values
    if name != "auto":
        assert codec_map.result(0, values, 1000).packed_bytes(values) <= 2**22 + 2**15, (
            "as a frame holds, with its header"
        )


BY_LEAF: list[tuple[str, dict[str, object]]] = [
    ("int8", {}),
    ("int8", {"block": 100}),
    ("int8", {"seed": 3}),
    ("int4", {}),
    ("int4", {"block": 66}),
    ("int2", {}),
    ("sign", {"block": 8192}),
    ("float16", {}),
    ("float8_e4m3", {"block": 100}),
    ("float32", {}),
    ("bfloat16", {}),
    ("topk", {}),
    ("topk", {"chunk": 1000, "k": 10}),
    ("auto", {}),
]
"""Blocks that leaves cut short, and codecs whose bytes leaves leave as they are, among them."""


@pytest.mark.parametrize("path", ["torch", NUMBA])
@pytest.mark.parametrize(("name", "options"), BY_LEAF)
def test_a_range_by_leaf_is_its_leaves_one_after_the_other(name: str, options: dict[str, object], path: str) -> None:
    n, leaf = 3 * 4096 + 100, 4096
    plain = get_codec_map(name, options, [("w", (100, 100)), ("b", (n - 10_000,))])
    codec_map, values = plain.by_leaf(leaf), torch.randn(n, generator=torch.Generator().manual_seed(3))
    leaves = [slice(at, min(at + leaf, n)) for at in range(0, n, leaf)]
    with use(path):
        codec = codec_map.contribution(0, n)
        packed = [plain_of(plain, one).encode(values[one]) for one in leaves]
        whole = codec.encode(values)
        assert torch.equal(whole, torch.cat(packed)), "so the bytes do not depend on where chunks begin"
        decoded = torch.cat(
            [plain_of(plain, one).decode(b, one.stop - one.start) for b, one in zip(packed, leaves, strict=True)]
        )
        assert torch.equal(codec.decode(whole, n), decoded)
        assert codec.squared_norm(whole, n) == pytest.approx(float(decoded.double().square().sum()), rel=1e-5)
        total, expected = torch.ones(n), torch.ones(n)
        codec.accumulate(whole, total, 0.5)
        residual, left = torch.ones(n), torch.ones(n)
        again = codec.encode_residual(values - residual, residual, left)
        for b, one in zip(packed, leaves, strict=True):
            plain_of(plain, one).accumulate(b, expected[one], 0.5)
            plain_of(plain, one).encode_residual(values[one] - 1.0, residual[one])
        assert torch.equal(total, expected)
        assert torch.equal(left, residual)
        assert torch.equal(again, codec.encode((values - 1.0) + 1.0))


def plain_of(codec_map: CodecMap, span: slice) -> Codec:
    """The codec of a leaf that knows nothing of leaves."""
    return codec_map.contribution(span.start, span.stop)


@pytest.mark.parametrize("path", ["torch", NUMBA])
@pytest.mark.parametrize("name", ["int8", "int2", "sign", "float16", "topk"])
def test_a_value_in_a_later_leaf_that_is_not_finite_leaves_the_residual_as_it_was(name: str, path: str) -> None:
    n, leaf = 3 * 4096, 4096
    values, residual = torch.zeros(n), torch.ones(n)
    values[-1] = math.inf
    with use(path), pytest.raises(CodecError):
        get_codec_map(name).by_leaf(leaf).contribution(0, n).encode_residual(values, residual)
    assert torch.equal(residual, torch.ones(n))


def test_leaves_of_one_format_are_one_codec_for_a_whole_chunk() -> None:
    codec_map = get_codec_map("int8").by_leaf(4096)
    assert not isinstance(codec_map.contribution(4096, 10 * 4096), Segmented), "a call for each leaf costs too much"


@pytest.mark.parametrize("path", ["torch", NUMBA])
@pytest.mark.parametrize("name", ["int8", "int4", "float32", "topk"])
def test_a_mean_by_leaf_is_the_mean_of_each_leaf(name: str, path: str) -> None:
    n, leaf = 2 * 4096 + 64, 4096
    codec_map = get_codec_map(name).by_leaf(leaf)
    vectors = [torch.randn(n, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]

    def mean(start: int, stop: int) -> Tensor:
        one, codec = WeightedMean(stop - start), codec_map.contribution(start, stop)
        for weight, vector in enumerate(vectors, 1):
            one.add_packed(codec, codec.encode(vector[start:stop]), weight)
        result = codec_map.result(start, stop, 3)
        packed = torch.empty(result.packed_bytes(stop - start), dtype=torch.uint8)
        one.encode(result, 6.0, torch.empty(stop - start), packed)
        return packed

    with use(path):
        assert torch.equal(mean(0, n), torch.cat([mean(at, min(at + leaf, n)) for at in range(0, n, leaf)]))
