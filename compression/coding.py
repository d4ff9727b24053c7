"""How a whole contribution travels: which codec packs which of its values, to the owners and back to everybody."""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Collection, Iterable, Sequence
from typing import Protocol, TypeAlias

from shoal.compression.blockwise import Blockwise
from shoal.compression.codec import Codec
from shoal.compression.lowbit import Int2, Sign
from shoal.compression.segmented import Segmented
from shoal.compression.topk import TopK

Shapes: TypeAlias = Sequence[tuple[str, Sequence[int]]]
"""Names and shapes of the tensors that, flat and one after the other, make a contribution."""

SMALL_VALUES = 4096
"""A tensor with fewer values is small: its bytes do not count beside a matrix's, its precision may."""

_CHUNK_VALUES, _CHUNK_VALUES_BY_BLOCK = 2**20, 2**22
_PACKED_CHUNK_BYTES = 2**22 + 2**15
"""A chunk is 4 MiB, as packed; of codecs that have temporaries as large as it, 4 MiB of float32."""

# What tables of tokens and output layers are called in torch, GPT-2, Llama and their relatives.
_TABLE = re.compile(r"(^|\.)(\w*embed\w*|\w*embd|wte|wpe|lm_head|output|head)(\.|$)")


class Coding(Protocol):
    """The codecs of ``(n,) float32`` by range: every member has the same, so sizes need not be announced."""

    @property
    def kernels(self) -> Collection[str]:
        """The modules of compiled kernels that its codecs run faster with (``fast.compile_ahead``)."""
        ...

    @property
    def most_in_a_chunk(self) -> int:
        """Values that are packed, and sent, as one at most."""
        ...

    def contribution(self, start: int, stop: int) -> Codec:
        """What a member's values [start, stop) are packed with on their way to the owner."""
        ...

    def result(self, start: int, stop: int, members: int) -> Codec:
        """What the mean of up to ``members`` contributions in [start, stop) is packed with."""
        ...


class Uniform:
    """One codec for everything; a sparse one keeps more values of a mean than of each contribution to it."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec

    @property
    def kernels(self) -> Collection[str]:
        """See ``Coding.kernels``."""
        return _kernels([self._codec])

    @property
    def most_in_a_chunk(self) -> int:
        """See ``Coding.most_in_a_chunk``. Block-wise codecs read each value once, and keep none."""
        values = _CHUNK_VALUES_BY_BLOCK if isinstance(self._codec, Blockwise) else _CHUNK_VALUES
        while values > _CHUNK_VALUES and self._codec.packed_bytes(values) > _PACKED_CHUNK_BYTES:
            values //= 2
        return values

    def contribution(self, start: int, stop: int) -> Codec:
        """See ``Coding.contribution``."""
        return self._codec

    def result(self, start: int, stop: int, members: int) -> Codec:
        """See ``Coding.result``."""
        return _for_results(self._codec, members)


class Auto:
    """A codec for each tensor by its size and role.

    Small and one-dimensional tensors (norms, biases: few bytes, and a mistake there is a mistake everywhere) take
    ``small``; tables (embeddings and output layers, told by their names: few rows of them have a gradient at a time,
    and those of rare tokens are much smaller than the others) take ``tables``; all other matrices ``matrices``.
    Where adjacent tensors take the same codec, their blocks run on across the border.
    """

    def __init__(self, shapes: Shapes, matrices: Codec, tables: Codec, small: Codec) -> None:
        self._starts: list[int] = []
        self._codecs: list[Codec] = []
        self.n = 0
        for name, shape in shapes:
            size = math.prod(shape)
            codec = tables if _TABLE.search(name) else matrices
            if size < SMALL_VALUES or len(shape) < 2:
                codec = small
            if size and (not self._codecs or self._codecs[-1] is not codec):
                self._starts.append(self.n)
                self._codecs.append(codec)
            self.n += size

    @property
    def kernels(self) -> Collection[str]:
        """See ``Coding.kernels``."""
        return _kernels(self._codecs)

    @property
    def most_in_a_chunk(self) -> int:
        """See ``Coding.most_in_a_chunk``."""
        return _CHUNK_VALUES

    def contribution(self, start: int, stop: int) -> Codec:
        """See ``Coding.contribution``."""
        return self._joined(start, stop, None)

    def result(self, start: int, stop: int, members: int) -> Codec:
        """See ``Coding.result``."""
        return self._joined(start, stop, members)

    def _joined(self, start: int, stop: int, members: int | None) -> Codec:
        assert 0 <= start < stop <= self.n, (start, stop, self.n)
        segments = []
        at = bisect_right(self._starts, start) - 1
        while start < stop:
            end = min(stop, self._starts[at + 1] if at + 1 < len(self._starts) else self.n)
            codec = self._codecs[at]
            segments.append((end - start, codec if members is None else _for_results(codec, members)))
            start, at = end, at + 1
        return segments[0][1] if len(segments) == 1 else Segmented(segments)


def _kernels(codecs: Iterable[Codec]) -> Collection[str]:
    modules = {
        Blockwise: "blockwise_kernels",
        Int2: "lowbit_kernels",
        Sign: "lowbit_kernels",
        TopK: "sparse_kernels",
    }
    return sorted({modules[type(codec)] for codec in codecs if type(codec) in modules})


def _for_results(codec: Codec, members: int) -> Codec:
    return codec.widened(members) if isinstance(codec, TopK) else codec
