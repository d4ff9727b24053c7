"""Nested dicts, lists, tuples, scalars and tensors as JSON and named tensors, and back; never pickled.

Optimizers' ``state_dict`` and random generators' states are such trees, whatever optimizer it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.peer.checkpoints.tensors import can_be_saved

_MAX_DEPTH = 64
_NON_FINITE = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


class NotPlain(ValueError):
    """Something in the tree has no plain form; the message says where it is."""


def to_plain(tree: Any, keep: Callable[[str, Tensor], None], where: str = "") -> Any:
    """``tree`` as JSON values; ``keep`` is called with a name (the way to it) and each tensor in it, in order.

    Raises ``NotPlain`` for anything but None, booleans, numbers, texts, tensors, arrays, and dicts, lists and tuples
    of them.
    """
    if where.count("/") > _MAX_DEPTH:
        raise NotPlain(f"{where[:100]}: more than {_MAX_DEPTH} levels")
    match tree:
        case None | bool() | str():
            return tree
        case np.integer():
            return int(tree)
        case int():
            return int(tree)
        case float():
            return float(tree) if math.isfinite(tree) else {"float": str(float(tree))}
        case Tensor() if can_be_saved(tree):
            keep(where, tree)
            return {"tensor": where}
        case np.ndarray() if tree.dtype.kind in "iu" and tree.dtype.itemsize <= 4:
            keep(where, torch.from_numpy(tree.astype(np.int64)))
            return {"array": where, "dtype": str(tree.dtype)}
        case list():
            return [to_plain(one, keep, f"{where}/{at}") for at, one in enumerate(tree)]
        case tuple():
            return {"tuple": [to_plain(one, keep, f"{where}/{at}") for at, one in enumerate(tree)]}
        case Mapping():
            pairs = [[_key(key, where), to_plain(one, keep, f"{where}/{key}")] for key, one in tree.items()]
            return {"dict": pairs}
    raise NotPlain(f"{where or 'it'}: {type(tree).__name__} has no plain form")


def from_plain(plain: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The tree that ``to_plain`` took apart. Raises ``ValueError`` or ``KeyError`` for what it never makes."""
    match plain:
        case None | bool() | int() | float() | str():
            return plain
        case list():
            return [from_plain(one, tensors) for one in plain]
        case {"tuple": list(items), **rest} if not rest:
            return tuple(from_plain(one, tensors) for one in items)
        case {"dict": list(pairs), **rest} if not rest:
            return {_key(key, "a dict"): from_plain(one, tensors) for key, one in pairs}
        case {"tensor": str(name), **rest} if not rest:
            return tensors[name]
        case {"array": str(name), "dtype": str(dtype), **rest} if not rest:
            kind = np.dtype(dtype)
            if kind.kind not in "iu":
                raise ValueError(f"array of {dtype}")
            return tensors[name].numpy().astype(kind)
        case {"float": str(text), **rest} if not rest and text in _NON_FINITE:
            return _NON_FINITE[text]
    raise ValueError(f"unknown form: {str(plain)[:100]}")


def _key(key: Any, where: str) -> str | int:
    if isinstance(key, bool) or not isinstance(key, str | int):
        raise NotPlain(f"{where}: a key of type {type(key).__name__}")
    return key
