"""Base class of the float and the low-bit codecs, which work on tiles that stay in the cache."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.compression.codec import (
    Codec,
    Packed,
    checked_out,
    checked_values,
    in_place,
    not_finite_error,
    packed_buffer,
    packed_tensor,
    rounded_weight,
)
from shoal.compression.formats import BlockFormat
from shoal.compression.norms import squared_norm
from shoal.compression.scratch import scratch

_TILE_VALUES = 1 << 18
"""1 MiB of float32. Half of it is a fifth to a third slower: calls cost time."""


@dataclass(frozen=True)
class _Tile:
    """Values [start, stop) of a packed tensor: views of their scales, ``(rows, k)``, and their codes, bytes."""

    start: int
    stop: int
    scales: Tensor
    codes: Tensor


class TiledCodec(Codec):
    """A codec in terms of four operations on rows: ``rows`` is ``(r, block) float32``, a row being a block.

    A short last block is filled up with zeros, a short last group with codes that nobody reads.
    """

    format: BlockFormat

    def __init__(self, form: BlockFormat, scale_dtype: torch.dtype = torch.uint8, scales_a_block: int = 0) -> None:
        super().__init__(form)
        self._scale_dtype = scale_dtype
        self._scales_a_block = scales_a_block

    @abstractmethod
    def _measure(self, rows: Tensor, n: int, scales: Tensor) -> Tensor:
        """Store the scales of ``rows``, of whose values the first ``n`` count, in ``scales``, ``(r, k)``.

        Returns any tensor that holds NaN or infinity just when ``rows`` does.
        """

    @abstractmethod
    def _pack(self, rows: Tensor, scales: Tensor, codes: Tensor) -> None:
        """Store the codes of ``rows``, under ``scales`` as stored, in ``codes``, bytes."""

    @abstractmethod
    def _unpack(self, codes: Tensor, scales: Tensor, rows: Tensor) -> None:
        """Fill ``rows`` from ``codes`` and ``scales``, which ``_check`` has passed."""

    @abstractmethod
    def _check(self, scales: Tensor, codes: Tensor) -> None:
        """Raise CodecError when ``scales`` or ``codes`` stand for a value that is not finite."""

    def encode(self, values: Tensor) -> Tensor:
        """See ``Codec.encode``."""
        values = checked_values(values)
        packed = self._room(values)
        for tile in self._tiles(packed, values.numel()):
            rows = self._rows(values, None, tile)
            if not self._measure_tile(rows, tile):
                raise not_finite_error(values)
            self._pack_tile(rows, tile)
        return packed

    def encode_residual(
        self, values: Tensor, residual: Tensor, left: Tensor | None = None, packed: Tensor | None = None
    ) -> Tensor:
        """See ``Codec.encode_residual``."""
        values = checked_values(values)
        residual = in_place(checked_out(residual, values.numel(), values.device), left)
        packed = self._room(values, packed)
        # Two turns over the values, as nothing of the residual may change until all is checked: the sum is made twice,
        # but for a single tile.
        tiles = list(self._tiles(packed, values.numel()))
        rows = packed
        for tile in tiles:
            rows = self._rows(values, residual, tile)
            if not self._measure_tile(rows, tile):
                raise not_finite_error(values + residual)
        for tile in tiles:
            rows = rows if len(tiles) == 1 else self._rows(values, residual, tile)
            self._pack_tile(rows, tile)
            left = residual[tile.start : tile.stop]
            self._unpack_tile(tile, left)
            torch.sub(rows.view(-1)[: left.numel()], left, out=left)
        return packed

    def decode(self, packed: Packed, n: int, out: Tensor | None = None) -> Tensor:
        """See ``Codec.decode``."""
        packed = packed_tensor(packed, self.packed_bytes(n))
        out = torch.empty(n, dtype=torch.float32, device=packed.device) if out is None else out
        values = checked_out(out, n, packed.device)
        for tile in self._tiles(packed, n):
            self._check(tile.scales, tile.codes)
            self._unpack_tile(tile, values[tile.start : tile.stop])
        return out

    def checked(self, packed: Packed, n: int) -> Tensor:
        """See ``Codec.checked``."""
        tensor = packed_tensor(packed, self.packed_bytes(n))
        for tile in self._tiles(tensor, n):
            self._check(tile.scales, tile.codes)
        return tensor

    def accumulate(self, packed: Packed, total: Tensor, weight: float) -> None:
        """See ``Codec.accumulate``."""
        n, weight = total.numel(), rounded_weight(weight)
        packed = packed_tensor(packed, self.packed_bytes(n))
        total = checked_out(total, n, packed.device)
        for tile in self._tiles(packed, n):
            self._check(tile.scales, tile.codes)
        for tile in self._tiles(packed, n):
            decoded = scratch("tile_decoded", tile.stop - tile.start, total.device)
            self._unpack_tile(tile, decoded)
            total[tile.start : tile.stop].add_(decoded.mul_(weight))

    def squared_norm(self, packed: Packed, n: int) -> float:
        """See ``Codec.squared_norm``."""
        packed, total = packed_tensor(packed, self.packed_bytes(n)), 0.0
        for tile in self._tiles(packed, n):
            self._check(tile.scales, tile.codes)
            decoded = scratch("tile_decoded", tile.stop - tile.start, packed.device)
            self._unpack_tile(tile, decoded)
            total += squared_norm(decoded)
        return total

    def _room(self, values: Tensor, packed: Tensor | None = None) -> Tensor:
        return packed_buffer(self.packed_bytes(values.numel()), values.device, packed)

    def _tiles(self, packed: Tensor, n: int) -> Iterator[_Tile]:
        layout = self.format
        step = max(1, _TILE_VALUES // layout.block) * layout.block
        for span, scales, codes in self._leaves(packed, n):
            count = span.stop - span.start
            for start in range(0, count, step):
                stop = min(start + step, count)
                yield _Tile(
                    span.start + start,
                    span.start + stop,
                    scales[start // layout.block : layout.blocks(stop)],
                    codes[layout.code_bytes(start) : layout.code_bytes(stop)],
                )

    def _leaves(self, packed: Tensor, n: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield each leaf's range of values, its scales ``(blocks, k)`` and its codes, bytes: views of ``packed``."""
        for span, room in self.format.leaves(n):
            count, data = span.stop - span.start, packed[room]
            codes = self.format.scale_bytes(count)
            scales = data[:codes].view(self._scale_dtype).view(self.format.blocks(count), self._scales_a_block)
            yield span, scales, data[codes:]

    def _rows(self, values: Tensor, residual: Tensor | None, tile: _Tile) -> Tensor:
        """Return ``values`` (+ ``residual``) of a tile as ``(r, block)``: a view where nothing has to be computed."""
        block, count = self.format.block, tile.stop - tile.start
        part = values[tile.start : tile.stop]
        padded = self.format.blocks(count) * block
        if residual is None and padded == count:
            return part.view(-1, block)
        rows = scratch("tile_rows", padded, values.device)
        rows[count:] = 0.0
        if residual is None:
            rows[:count] = part
        else:
            torch.add(part, residual[tile.start : tile.stop], out=rows[:count])
        return rows.view(-1, block)

    def _measure_tile(self, rows: Tensor, tile: _Tile) -> bool:
        """Store the scales of a tile; False when a value of ``rows`` is not finite."""
        measured = self._measure(rows, tile.stop - tile.start, tile.scales)
        low, high = torch.aminmax(measured)
        return math.isfinite(float(low)) and math.isfinite(float(high))

    def _pack_tile(self, rows: Tensor, tile: _Tile) -> None:
        whole = self.format.code_bytes(rows.numel())
        if whole == tile.codes.numel():
            self._pack(rows, tile.scales, tile.codes)
            return
        codes = torch.empty(whole, dtype=torch.uint8, device=rows.device)
        self._pack(rows, tile.scales, codes)
        tile.codes.copy_(codes[: tile.codes.numel()])

    def _unpack_tile(self, tile: _Tile, out: Tensor) -> None:
        """Fill ``out``, ``(stop - start,)``, with the decoded values of a tile."""
        count, block = tile.stop - tile.start, self.format.block
        padded = self.format.blocks(count) * block
        if padded == count:
            self._unpack(tile.codes, tile.scales, out.view(-1, block))
            return
        rows = scratch("tile_padded", padded, out.device)
        codes = tile.codes
        if codes.numel() < self.format.code_bytes(padded):
            codes = torch.zeros(self.format.code_bytes(padded), dtype=torch.uint8, device=rows.device)
            codes[: tile.codes.numel()] = tile.codes
        self._unpack(codes, tile.scales, rows.view(-1, block))
        out.copy_(rows[:count])
