"""Arrays of a collective call as the vector of float32 that a member brings to a round, and back.

Vector, ``(HEADER_VALUES + room,) float32``: a header of whole numbers below 2**16, then the arrays one after the other,
then zeros. Header: 16 values of the call's digest, 1 of the member's part in it (``CallPart``), and 1 for each 16
arrays whose bits say which of them stand in halves. An array of floating type with up to four bytes stands as float32,
a value for each element; other arrays, and those with an infinity or NaN, stand in halves: each two bytes of them
(little-endian, of float32 for the small floating types) as a whole number. What comes from another member is checked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor

from shoal.peer.array_trees import ArrayKind, NumpyArray
from shoal.swarm.errors import UserError
from shoal.swarm.protocol.run_file import HEADER_VALUES

_DIGEST_VALUES, _FLAGS_FROM, _BITS = 16, 17, 16
MAX_ARRAYS = (HEADER_VALUES - _FLAGS_FROM) * _BITS

_CONTEXT = "shoal collective call, version 1"
_SMALL_FLOATS = ("float32", "float16", "bfloat16")


class CallPart(IntEnum):
    """Part of a member in a call: all have an equal one, or some are sources and the others receive."""

    EQUAL = 0
    RECEIVES = 1
    SOURCE = 2


@dataclass(frozen=True)
class PackedCall:
    """A call of this member. ``digest``: the same on all members that make it; ``kinds``: of its arrays."""

    digest: bytes
    kinds: list[ArrayKind]
    part: CallPart


def call_digest(name: str, kinds: Mapping[str, ArrayKind]) -> bytes:
    """Return the digest of a call: of what it does, and the names, shapes and types of its arrays; 32 bytes."""
    about = [name, *(f"{array}\0{kind.dtype}\0{kind.shape}" for array, kind in kinds.items())]
    return blake3("\1".join(about).encode(), derive_key_context=_CONTEXT).digest()


def pack(call: PackedCall, arrays: Sequence[NumpyArray], room: int) -> Tensor:
    """Return the vector for ``room`` values of arrays. Raises ``UserError`` if they do not fit."""
    if len(arrays) > MAX_ARRAYS:
        raise UserError(f"a call takes up to {MAX_ARRAYS} arrays, not {len(arrays)}: join some of them")
    vector = np.zeros(HEADER_VALUES + room, np.float32)
    vector[:_DIGEST_VALUES] = np.frombuffer(call.digest, "<u2")
    vector[_DIGEST_VALUES] = call.part
    at, flags = HEADER_VALUES, np.zeros(HEADER_VALUES - _FLAGS_FROM, np.uint16)
    for number, (kind, array) in enumerate(zip(call.kinds, arrays, strict=True)):
        values = array.astype(np.float32).reshape(-1) if kind.dtype in _SMALL_FLOATS else None
        if values is None or not np.isfinite(values).all():
            flags[number // _BITS] |= 1 << number % _BITS
            values = _halves(values if values is not None else array)
        if at + values.size > vector.size:
            sizes = "an element of a type other than float32, float16 and bfloat16 takes a value for each two bytes"
            raise UserError(
                f"the arrays of this call do not fit into collective.values = {room} of the run file ({sizes}, and so "
                "does every array with an infinity or NaN): bring less, or host the run with more"
            )
        vector[at : at + values.size] = values
        at += values.size
    vector[_FLAGS_FROM:HEADER_VALUES] = flags
    return torch.from_numpy(vector)


def label_of(vector: Tensor) -> tuple[bytes, CallPart] | None:
    """Return the digest of the call that a vector was brought to, and its member's part in it; None if it says none."""
    label = _whole(vector[:_FLAGS_FROM].numpy())
    if label is None or label[_DIGEST_VALUES] > max(CallPart):
        return None
    return label[:_DIGEST_VALUES].astype("<u2").tobytes(), CallPart(int(label[_DIGEST_VALUES]))


def unpack(call: PackedCall, vector: Tensor) -> list[NumpyArray] | None:
    """Return the arrays that a member has brought to this call, of small floating types as float32; None if they are
    not what ``pack`` makes."""
    values = vector.numpy()
    flags, arrays, at = _whole(values[_FLAGS_FROM:HEADER_VALUES]), [], HEADER_VALUES
    if flags is None:
        return None
    for number, kind in enumerate(call.kinds):
        dtype = np.dtype(np.float32 if kind.dtype in _SMALL_FLOATS else kind.dtype)
        elements = math.prod(kind.shape)
        in_halves = bool(flags[number // _BITS] >> number % _BITS & 1)
        size = -(-elements * dtype.itemsize // 2) if in_halves else elements
        part = values[at : at + size]
        at += size
        if part.size != size or not (in_halves or kind.dtype in _SMALL_FLOATS):
            return None
        if in_halves:
            halves = _whole(part)
            if halves is None:
                return None
            data = halves.astype("<u2").tobytes()[: elements * dtype.itemsize]
            if dtype == np.bool_ and (np.frombuffer(data, np.uint8) > 1).any():
                return None
            part = np.frombuffer(data, dtype)
        arrays.append(part.reshape(kind.shape).copy())
    return arrays


def _halves(array: NumpyArray) -> NumpyArray:
    data = np.ascontiguousarray(array).tobytes()
    return np.frombuffer(data + b"\0" * (len(data) % 2), "<u2").astype(np.float32)


def _whole(values: NumpyArray) -> NumpyArray | None:
    """Return whole numbers below 2**16 as uint16; None if some value is none."""
    if not ((values >= 0) & (values < 2**16) & (values == np.floor(values))).all():
        return None
    return values.astype(np.uint16)
