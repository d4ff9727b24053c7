"""Codec formats: names, options, block sizes and packed sizes, without torch and numba.

A run file names a format. To check a run file or to plan a round, this module is enough; ``registry.codec_of`` and
``codec_map.CodecMap`` make the codecs that pack tensors.
"""

from __future__ import annotations

import copy
import math
import re
import sys
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, TypeAlias

Shapes: TypeAlias = Sequence[tuple[str, Sequence[int]]]
"""Names and shapes of the tensors that, flat and one after the other, make a contribution."""

SMALL_VALUES = 4096
"""A tensor with fewer values is small: its bytes do not matter beside a matrix's, its precision may."""

_CHUNK_VALUES, _CHUNK_VALUES_READ_ONCE = 2**20, 2**22
_PACKED_CHUNK_BYTES = 2**22 + 2**15
"""A chunk is 4 MiB of packed bytes; for codecs with temporaries as large as the chunk, 4 MiB of float32."""

_LEAF_VALUES = 64
"""Leaves are multiples of so many values: all codecs pack them into bytes that fill words of four, but for scales."""

# Names of tables of tokens and of output layers in torch, GPT-2, Llama and their relatives.
_TABLE = re.compile(r"(^|\.)(\w*embed\w*|\w*embd|wte|wpe|lm_head|output|head)(\.|$)")


class CodecError(ValueError):
    """Values or packed bytes that cannot be coded, or options that no codec has.

    A peer that sends such bytes is to be dropped."""


class CodecFormat(Protocol):
    """Format of packed bytes: equal formats pack the same values into the same bytes."""

    @property
    def name(self) -> str:
        """The name in run files and messages, options included: ``int8``, ``topk(k=32)``."""
        ...

    def packed_bytes(self, n: int) -> int:
        """The exact size of ``n`` packed values, in bytes."""
        ...


def _check_leaf(leaf: int) -> None:
    assert leaf == sys.maxsize or leaf % _LEAF_VALUES == 0, "leaves begin where scales are aligned"


# Blocks of values -----------------------------------------------------------------------------------------------


class _BlockKind(NamedTuple):
    scale_bytes: int
    """Bytes of the scales of one block."""
    group: int
    """Values whose codes fill whole bytes together; a divisor of each block."""
    group_bytes: int
    default_block: int = 1


_BLOCK_KINDS = {
    "float32": _BlockKind(0, 1, 4),
    "bfloat16": _BlockKind(0, 1, 2),
    "float16": _BlockKind(2, 1, 2, default_block=4096),
    "float8_e4m3": _BlockKind(2, 1, 1, default_block=4096),
    # int8 and int4: chosen by measurement (docs/codecs.md).
    "int8": _BlockKind(4, 1, 1, default_block=1024),
    "int4": _BlockKind(4, 2, 1, default_block=256),
    "int2": _BlockKind(4, 8, 2, default_block=512),
    "sign": _BlockKind(2, 8, 1, default_block=512),
}


@dataclass(frozen=True)
class BlockFormat:
    """Format with a scale a block: the scales of all blocks, then the codes of all groups of values.

    The last block and the last group may be short. Values are packed by leaves of ``leaf`` values, each as if it were
    all there is, one after the other; the last one may be short.

    ``kind``: one of ``_BLOCK_KINDS``. ``block``: values that share scales. ``seed``: of stochastic rounding, None to
    round to nearest; only int8 and int4 have one. Raises CodecError for an option out of range."""

    kind: str
    block: int
    seed: int | None = None
    leaf: int = sys.maxsize

    def __post_init__(self) -> None:
        block = self.block
        _check_leaf(self.leaf)
        if self.kind in ("float16", "float8_e4m3") and not 1 <= block <= 2**20:
            raise CodecError(f"block is the number of values that share a scale, 1 to {2**20}, not {block}")
        if self.kind in ("int8", "int4") and (not 2 <= block <= 2**20 or block % 2):
            raise CodecError(f"block is the number of values that share a scale, even, 2 to 2**20, not {block}")
        # Sums over a block are of |x| * 2**-16, so that none of up to 2**16 values overflows.
        if self.kind in ("int2", "sign") and (not 8 <= block <= 2**16 or block & (block - 1)):
            raise CodecError(f"block is a power of two between 8 and {2**16}, not {block}")
        if self.seed is not None and not 0 <= self.seed < 2**32:
            raise CodecError(f"the seed of stochastic rounding is 0 to 2**32 - 1, not {self.seed}")

    @property
    def name(self) -> str:
        """The kind, with the options that are not the defaults: ``int8(block=64,seed=7)``."""
        options = [] if self.block == _BLOCK_KINDS[self.kind].default_block else [f"block={self.block}"]
        options += [] if self.seed is None else [f"seed={self.seed}"]
        return self.kind + (f"({','.join(options)})" if options else "")

    def packed_bytes(self, n: int) -> int:
        """See ``CodecFormat.packed_bytes``."""
        leaves, rest = divmod(n, self.leaf)
        return leaves * self._leaf_bytes(self.leaf) + self._leaf_bytes(rest)

    def leaves(self, n: int) -> Iterator[tuple[slice, slice]]:
        """Yield each leaf's range of values and of bytes; all of them as one where no scales are between."""
        leaf = min(self.leaf, n) if _BLOCK_KINDS[self.kind].scale_bytes else n
        at = 0
        for start in range(0, n, max(leaf, 1)):
            stop = min(start + leaf, n)
            end = at + self._leaf_bytes(stop - start)
            yield slice(start, stop), slice(at, end)
            at = end

    def blocks(self, n: int) -> int:
        """The number of blocks that hold ``n`` values of one leaf."""
        return -(-n // self.block)

    def scale_bytes(self, n: int) -> int:
        """The size of the scales of ``n`` values of one leaf; their codes begin there."""
        return self.blocks(n) * _BLOCK_KINDS[self.kind].scale_bytes

    def _leaf_bytes(self, n: int) -> int:
        return self.scale_bytes(n) + self.code_bytes(n)

    def code_bytes(self, n: int) -> int:
        """The size of the codes of ``n`` values of one leaf."""
        kind = _BLOCK_KINDS[self.kind]
        return -(-n // kind.group) * kind.group_bytes


# Chunked top-k --------------------------------------------------------------------------------------------------

_MAX_TOPK_CHUNK = 65536
_TOPK_VALUE_BITS = {"2bit": 2, "int8": 8}

TOO_LARGE_BITS = 0x7F800000
"""Infinity's float32 bits; the magnitude bits of whatever is not finite are at least these."""

LARGEST_SCALE_BITS = 0x7C010203
"""The largest float32 scale whose product with 127 is finite, as bits."""

MAX_BFLOAT16_BITS = 0x7F7F
"""The largest finite bfloat16."""

SPLIT_STEPS = 4
"""Steps of Lloyd's iteration that place the two magnitudes of 2-bit values."""

ChunkShape = tuple[int, int, int, int, int, int, int, int]
"""A chunk's format as compiled kernels take it: see ``ChunkFormat.shape``."""


@dataclass(frozen=True)
class ChunkFormat:
    """Format of one top-k chunk: ``size`` values of which ``keep`` are sent, each in ``value_bits``, 2 or 8."""

    size: int
    keep: int
    value_bits: int

    @property
    def low_bits(self) -> int:
        """Elias-Fano's width of the low part of an index: floor(log2(size / keep))."""
        return (self.size // self.keep).bit_length() - 1

    @property
    def upper_bits(self) -> int:
        """Bits of the upper part: a one for each index, a zero for each step of the upper parts' value."""
        return self.keep + ((self.size - 1) >> self.low_bits)

    @property
    def low_at(self) -> int:
        """Offset of the low parts in bytes: after the scales and the upper bits."""
        return 4 + -(-self.upper_bits // 8)

    @property
    def code_at(self) -> int:
        """Offset of the codes in bytes."""
        return self.low_at + -(-self.keep * self.low_bits // 8)

    @property
    def packed_bytes(self) -> int:
        """The size of the packed chunk."""
        return self.code_at + -(-self.keep * self.value_bits // 8)

    @property
    def shape(self) -> ChunkShape:
        """``(size, keep, low_bits, upper_bits, value_bits, low_at, code_at, packed_bytes)``."""
        widths = (self.size, self.keep, self.low_bits, self.upper_bits, self.value_bits)
        return (*widths, self.low_at, self.code_at, self.packed_bytes)


@dataclass(frozen=True)
class TopKFormat:
    """Format of chunked top-k: of every ``chunk`` values the ``k`` of largest magnitude, as ``values``: 2bit or int8.

    The last chunk, of m < ``chunk`` values, keeps ``ceil(k * m / chunk)``. Values are packed by leaves of ``leaf``
    values, each as if it were all there is. Raises CodecError for an option out of range."""

    k: int = 64
    values: str = "2bit"
    chunk: int = 4096
    leaf: int = sys.maxsize

    def __post_init__(self) -> None:
        k, chunk = self.k, self.chunk
        _check_leaf(self.leaf)
        if not 1 <= chunk <= _MAX_TOPK_CHUNK:
            raise CodecError(f"chunk is the number of values that are compared, 1 to {_MAX_TOPK_CHUNK}, not {chunk}")
        if not 1 <= k <= chunk:
            raise CodecError(f"k is how many of the {chunk} values of a chunk are sent, 1 to {chunk}, not {k}")
        if self.values not in _TOPK_VALUE_BITS:
            raise CodecError(f"values is one of {', '.join(_TOPK_VALUE_BITS)}, not {self.values!r}")

    @property
    def name(self) -> str:
        """``topk``, with the options that are not the defaults: ``topk(k=32, values=int8)``."""
        options = [("k", self.k, 64), ("values", self.values, "2bit"), ("chunk", self.chunk, 4096)]
        shown = ", ".join(f"{option}={value}" for option, value, default in options if value != default)
        return f"topk({shown})" if shown else "topk"

    def packed_bytes(self, n: int) -> int:
        """See ``CodecFormat.packed_bytes``; 84 bytes for each 4096 values with the default options."""
        return sum((stop - start) // form.size * form.packed_bytes for start, stop, form in self.parts(n))

    def widened(self, members: int) -> TopKFormat:
        """The format for means of ``members`` contributions: ``k * members``, at most half a chunk, at least ``k``.

        Each member may have chosen other values, so that their mean holds up to ``k * members`` that are not 0."""
        if members < 1:
            raise CodecError(f"members is how many contributions a mean is of, at least 1, not {members}")
        return replace(self, k=max(self.k, min(self.k * members, self.chunk // 2)))

    def parts(self, n: int) -> Iterator[tuple[int, int, ChunkFormat]]:
        """Yield the ranges of full chunks and those of short ones, in their order, with a chunk's format."""
        leaf = min(self.leaf, n) if self.leaf % self.chunk else n
        value_bits = _TOPK_VALUE_BITS[self.values]
        for start in range(0, n, max(leaf, 1)):
            stop = min(start + leaf, n)
            short = (stop - start) % self.chunk
            if stop - start > short:
                yield start, stop - short, ChunkFormat(self.chunk, self.k, value_bits)
            if short:
                yield stop - short, stop, ChunkFormat(short, -(-self.k * short // self.chunk), value_bits)


# Names and options ----------------------------------------------------------------------------------------------

_OPTIONS: dict[str, dict[str, type]] = {
    "float32": {},
    "bfloat16": {},
    "float16": {"block": int},
    "float8_e4m3": {"block": int},
    "int8": {"block": int, "seed": int},
    "int4": {"block": int, "seed": int},
    "int2": {"block": int},
    "sign": {"block": int},
    "topk": {"k": int, "values": str, "chunk": int},
}

CODEC_NAMES: tuple[str, ...] = tuple(_OPTIONS)
"""Every name that ``named_format`` knows."""

FORMAT_MAP_NAMES: tuple[str, ...] = (*CODEC_NAMES, "auto")
"""Every name that ``named_format_map`` knows."""

_AUTO: dict[str, str] = {"matrices": "int4", "tables": "int8", "small": "float16"}


def named_format(name: str, options: Mapping[str, Any] | None = None) -> BlockFormat | TopKFormat:
    """Return the format called ``name``, with these options. Raises CodecError, with the known names, for any other."""
    if name not in _OPTIONS:
        raise _unknown(name, CODEC_NAMES)
    options = _checked(name, options or {}, _OPTIONS[name])
    if name == "topk":
        return TopKFormat(**options)
    return BlockFormat(name, options.get("block", _BLOCK_KINDS[name].default_block), options.get("seed"))


def named_format_map(name: str, options: Mapping[str, Any] | None = None, shapes: Shapes = ()) -> FormatMap:
    """Return the format map called ``name``: one format for everything, or ``auto``, which chooses by ``shapes``.

    The options of ``auto`` are the names of the codecs that it chooses from: ``matrices``, ``tables``, ``small``.
    Raises CodecError, with the known names, for another name or option."""
    if name == "auto":
        chosen = {**_AUTO, **_checked(name, options or {}, dict.fromkeys(_AUTO, str))}
        return _auto(shapes, **{role: named_format(codec) for role, codec in chosen.items()})
    if name not in _OPTIONS:
        raise _unknown(name, FORMAT_MAP_NAMES)
    return FormatMap.uniform(named_format(name, options))


def _unknown(name: str, known: tuple[str, ...]) -> CodecError:
    return CodecError(f"expected one of {', '.join(known)}, not {name!r}")


def _checked(name: str, options: Mapping[str, Any], known: Mapping[str, type]) -> Mapping[str, Any]:
    for option, value in options.items():
        if option not in known:
            has = f"{name} has {', '.join(known)}" if known else f"{name} has none"
            raise CodecError(f"unknown option {option!r} of codec {name}: {has}")
        if type(value) is not known[option]:
            raise CodecError(f"{option} of codec {name}: expected {known[option].__name__}, not {value!r}")
    return options


# Formats of a whole contribution --------------------------------------------------------------------------------


@dataclass(frozen=True)
class SegmentedFormat:
    """Format of several segments: the first ``n_0`` values in the first format, the next ``n_1`` in the second.

    For exactly their sum of values.

    Packed layout: each segment in its own format, one after the other, with nothing between."""

    segments: tuple[tuple[int, CodecFormat], ...]

    @property
    def n(self) -> int:
        """The number of values in all segments."""
        return sum(n for n, _ in self.segments)

    @property
    def name(self) -> str:
        """The segments in their order: ``int4*8192+float16*64``."""
        return "+".join(f"{form.name}*{n}" for n, form in self.segments)

    def packed_bytes(self, n: int) -> int:
        """The sum over the segments. CodecError for another number of values."""
        if n != self.n:
            raise CodecError(f"{n} values where there should be {self.n}")
        return sum(form.packed_bytes(count) for count, form in self.segments)


class FormatMap:
    """The formats of ``(n,) float32`` by range, the same for every member, so that sizes need not be announced.

    Made by ``named_format_map``."""

    def __init__(self, runs: Iterable[tuple[int, BlockFormat | TopKFormat]]) -> None:
        """``runs``: how many values in a row have which format. Where neighbours have the same format object, their
        blocks run on across the border."""
        self.n = 0
        self.formats: list[BlockFormat | TopKFormat] = []
        self._starts: list[int] = []
        self._leaf = sys.maxsize
        for count, form in runs:
            if count and (not self.formats or self.formats[-1] is not form):
                self._starts.append(self.n)
                self.formats.append(form)
            self.n += count

    @classmethod
    def uniform(cls, form: BlockFormat | TopKFormat) -> FormatMap:
        """One format for any number of values."""
        return cls([(sys.maxsize, form)])

    def by_leaf(self, leaf: int) -> FormatMap:
        """The same formats, packed leaf by leaf: a range's bytes are those of its leaves, one after the other.

        Leaves begin at multiples of ``leaf`` values, so the bytes of a leaf do not depend on the range it is in."""
        one = copy.copy(self)
        one._leaf, one.formats = leaf, [replace(form, leaf=leaf) for form in self.formats]
        return one

    @property
    def max_chunk_values(self) -> int:
        """The most values of one chunk: more of int8 and int4, which read each value once and keep none."""
        form, values = self.formats[0] if self.n == sys.maxsize else None, _CHUNK_VALUES
        if isinstance(form, BlockFormat) and form.kind in ("int8", "int4"):
            values = _CHUNK_VALUES_READ_ONCE
            while values > _CHUNK_VALUES and form.packed_bytes(values) > _PACKED_CHUNK_BYTES:
                values //= 2
        return values

    def contribution(self, start: int, stop: int) -> CodecFormat:
        """The format of a member's values [start, stop) on their way to the owner."""
        return self._joined(start, stop, None)

    def result(self, start: int, stop: int, members: int) -> CodecFormat:
        """The format of the mean of up to ``members`` contributions in [start, stop).

        Top-k keeps more values of a mean than of each contribution to it."""
        return self._joined(start, stop, members)

    def _joined(self, start: int, stop: int, members: int | None) -> CodecFormat:
        assert 0 <= start < stop <= self.n, (start, stop, self.n)
        segments = []
        at = bisect_right(self._starts, start) - 1
        while start < stop:
            run_end = self._starts[at + 1] if at + 1 < len(self._starts) else self.n
            # A format's leaves begin with its segment, so what a leaf has of one that began before is a segment.
            end = min(stop, run_end, -(-start // self._leaf) * self._leaf if start % self._leaf else stop)
            form = self.formats[at]
            if isinstance(form, TopKFormat) and members is not None:
                form = form.widened(members)
            segments.append((end - start, form))
            start, at = end, at + (end == run_end)
        return segments[0][1] if len(segments) == 1 else SegmentedFormat(tuple(segments))


def _auto(
    shapes: Shapes,
    matrices: BlockFormat | TopKFormat,
    tables: BlockFormat | TopKFormat,
    small: BlockFormat | TopKFormat,
) -> FormatMap:
    """Choose a format for each tensor by its size and role.

    Small and one-dimensional tensors (norms, biases: few bytes, and a mistake there is a mistake everywhere) take
    ``small``; tables (embeddings and output layers, told by their names: few rows of them have a gradient at a time,
    and those of rare tokens are much smaller than the others) take ``tables``; all other matrices ``matrices``.
    """
    runs = []
    for name, shape in shapes:
        size = math.prod(shape)
        form = tables if _TABLE.search(name) else matrices
        runs.append((size, small if size < SMALL_VALUES or len(shape) < 2 else form))
    return FormatMap(runs)
