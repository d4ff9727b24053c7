"""Codecs of a whole contribution by range of values, for contributions and for means."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.compression.blockwise import Blockwise
from shoal.compression.codec import (
    Codec,
    Packed,
    checked_out,
    checked_values,
    packed_tensor,
)
from shoal.compression.formats import (
    BlockFormat,
    CodecError,
    CodecFormat,
    FormatMap,
    SegmentedFormat,
    TopKFormat,
)
from shoal.compression.registry import codec_of

_KEPT_CODECS = 1024


class CodecMap:
    """The codecs of ``(n,) float32`` by range of values, given by a map of formats."""

    def __init__(self, formats: FormatMap) -> None:
        self.formats = formats
        # Each chunk's codec is asked for in every step of a round.
        self._made = lru_cache(_KEPT_CODECS)(self._make)

    def by_leaf(self, leaf: int) -> CodecMap:
        """See ``FormatMap.by_leaf``."""
        return CodecMap(self.formats.by_leaf(leaf))

    @property
    def kernels(self) -> Collection[str]:
        """Names of the compiled kernels that speed its codecs up, for ``loader.compile_ahead``."""
        return sorted({name for form in self.formats.formats if (name := _codec(form).kernels) is not None})

    def contribution(self, start: int, stop: int) -> Codec:
        """The codec of a member's values [start, stop) on their way to the owner."""
        return self._made(start, stop, None)

    def result(self, start: int, stop: int, members: int) -> Codec:
        """The codec of the mean of up to ``members`` contributions in [start, stop)."""
        return self._made(start, stop, members)

    def _make(self, start: int, stop: int, members: int | None) -> Codec:
        formats = self.formats
        return _codec(formats.contribution(start, stop) if members is None else formats.result(start, stop, members))


def _codec(form: CodecFormat) -> Codec:
    if isinstance(form, SegmentedFormat):
        return Segmented(form)
    assert isinstance(form, BlockFormat | TopKFormat)
    return codec_of(form)


class Span(NamedTuple):
    """Range of values that one codec packs into one range of bytes."""

    values: slice
    packed: slice
    codec: Codec


class Segmented(Codec):
    """Several codecs, one after another, as one: for a range of values that more than one tensor has a part in."""

    format: SegmentedFormat

    def __init__(self, form: SegmentedFormat) -> None:
        super().__init__(form)
        self.spans: list[Span] = []
        at = byte = 0
        for n, one in form.segments:
            size = one.packed_bytes(n)
            self.spans.append(Span(slice(at, at + n), slice(byte, byte + size), _codec(one)))
            at, byte = at + n, byte + size

    @property
    def growth(self) -> float:
        """See ``Codec.growth``: the largest of the segments'."""
        return max(codec.growth for _, _, codec in self.spans)

    def encode(self, values: Tensor) -> Tensor:
        """See ``Codec.encode``."""
        values = checked_values(values)
        packed = torch.empty(self.packed_bytes(values.numel()), dtype=torch.uint8, device=values.device)
        for span, room, codec in self.spans:
            try:
                packed[room] = codec.encode(values[span])
            except CodecError as error:
                raise CodecError(f"from value {span.start} on: {error}") from error
        return packed

    def decode(self, packed: Packed, n: int, out: Tensor | None = None) -> Tensor:
        """See ``Codec.decode``."""
        packed = packed_tensor(packed, self.packed_bytes(n))
        out = torch.empty(n, device=packed.device) if out is None else checked_out(out, n, packed.device)
        for span, room, codec in self.spans:
            codec.decode(packed[room], span.stop - span.start, out[span])
        return out

    def accumulate(self, packed: Packed, total: Tensor, weight: float) -> None:
        """See ``Codec.accumulate``."""
        packed = self.checked(packed, total.numel())  # of all segments, before the first is added
        for span, room, codec in self.spans:
            codec.accumulate(packed[room], total[span], weight)

    def checked(self, packed: Packed, n: int) -> Tensor:
        """See ``Codec.checked``."""
        tensor = packed_tensor(packed, self.packed_bytes(n))
        for span, room, codec in self.spans:
            codec.checked(tensor[room], span.stop - span.start)
        return tensor

    def squared_norm(self, packed: Packed, n: int) -> float:
        """See ``Codec.squared_norm``."""
        packed = packed_tensor(packed, self.packed_bytes(n))
        return sum(codec.squared_norm(packed[room], span.stop - span.start) for span, room, codec in self.spans)


def spans(codec: Codec, n: int) -> list[Span]:
    """Return the segments of ``codec``; it is one if it has none."""
    return codec.spans if isinstance(codec, Segmented) else [Span(slice(0, n), slice(0, codec.packed_bytes(n)), codec)]


def leaf_spans(codec: Codec, n: int) -> Iterator[Span]:
    """Yield the leaves of each segment of ``codec``."""
    for values, packed, one in spans(codec, n):
        assert isinstance(one.format, BlockFormat | TopKFormat)
        start, byte, leaf = values.start, packed.start, one.format.leaf
        while start < values.stop:
            stop = min(start + leaf, values.stop)
            size = one.packed_bytes(stop - start)
            yield Span(slice(start, stop), slice(byte, byte + size), one)
            start, byte = stop, byte + size


class Piece(NamedTuple):
    """A packed vector, its codec, and the output buffer, ``(n,) float32`` on the CPU."""

    codec: Codec
    packed: Packed
    out: Tensor


def decode_all(pieces: Sequence[Piece]) -> dict[int, CodecError]:
    """Decode many pieces at once: a call for each costs more than its bytes do, where they are short.

    Returns the errors of the pieces that do not decode, by their index; what is in their ``out`` then is undefined."""
    errors: dict[int, CodecError] = {}
    for codec, run in groupby(range(len(pieces)), key=lambda index: pieces[index].codec):
        left = list(run)
        if isinstance(codec, Blockwise):
            with suppress(CodecError):  # one has another length: which, is seen below
                left = [left[at] for at in codec.decode_all(*_columns(pieces[left[0] : left[-1] + 1]))]
        for index in left:
            _, packed, out = pieces[index]
            try:
                codec.decode(packed, out.numel(), out)
            except CodecError as error:
                errors[index] = error
    return errors


def _columns(pieces: Sequence[Piece]) -> tuple[list[Packed], list[Tensor]]:
    return [piece.packed for piece in pieces], [piece.out for piece in pieces]
