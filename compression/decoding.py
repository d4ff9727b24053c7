"""Decoding many packed vectors at once: a call for each costs more than its bytes do, where they are short."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import groupby
from typing import NamedTuple

from torch import Tensor

from shoal.compression.blockwise import Blockwise
from shoal.compression.codec import Codec, CodecError, Packed


class Piece(NamedTuple):
    """What ``codec`` has packed, and where it goes: ``(n,) float32`` on the CPU."""

    codec: Codec
    packed: Packed
    out: Tensor


def decode_all(pieces: Sequence[Piece]) -> dict[int, CodecError]:
    """Decode each as its codec's ``decode`` does; returns the errors of those that do not decode, by their index: what
    is in their ``out`` then is undefined."""
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
