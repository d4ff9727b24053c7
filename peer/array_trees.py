"""Nested arrays of any framework: taken apart into arrays, read as NumPy's or torch's, and put together again.

A tree is an array, or a dict, list or tuple of trees; ``None`` in it stays ``None``. The arrays of a dict come in the
order of its keys' names, as JAX has it, not in that in which they were put into it. No framework is imported: arrays
are known by what they offer (``__array__``, DLPack, ``__array_namespace__``), and made again by the module that made
them, which is loaded then.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shoal.swarm.errors import UserError

NumpyArray = npt.NDArray[Any]


def named_arrays(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the arrays of a tree with their names: keys and positions, joined by slashes."""
    match tree:
        case None:
            pass
        case Mapping():
            for key, inner in sorted(tree.items(), key=_key_name):
                yield from named_arrays(inner, f"{name}/{key}" if name else str(key))
        case list() | tuple():
            for place, inner in enumerate(tree):
                yield from named_arrays(inner, f"{name}/{place}" if name else str(place))
        case _:
            yield name or "array", tree


def replaced(tree: Any, arrays: Iterator[Any]) -> Any:
    """Return a tree like this one with the next of ``arrays`` in each array's place."""
    match tree:
        case None:
            return None
        case Mapping():
            made = {key: replaced(inner, arrays) for key, inner in sorted(tree.items(), key=_key_name)}
            return {key: made[key] for key in tree}
        case tuple() if hasattr(tree, "_fields"):
            return type(tree)(*(replaced(inner, arrays) for inner in tree))
        case list() | tuple():
            return type(tree)(replaced(inner, arrays) for inner in tree)
    return next(arrays)


def _key_name(item: tuple[Any, Any]) -> str:
    return str(item[0])


def as_tensor(array: Any) -> Tensor:
    """Return an array as a tensor, which shares its memory where it can. Raises ``UserError`` for what is none."""
    if isinstance(array, Tensor):
        return array.detach()
    values = as_numpy(array)
    if values.dtype.name == "bfloat16":  # of ml_dtypes, as JAX has it
        return torch.from_numpy(values.view(np.int16).copy()).view(torch.bfloat16)
    if not values.flags.writeable or any(stride < 0 for stride in values.strides):
        values = values.copy()
    try:
        return torch.from_numpy(values)
    except TypeError as error:
        raise UserError(f"an array of {values.dtype}: expected numbers") from error


def as_numpy(array: Any) -> NumpyArray:
    """Return an array as NumPy's. Raises ``UserError`` for what is none."""
    if isinstance(array, Tensor):
        tensor = array.detach().cpu()
        found: NumpyArray = (tensor if tensor.dtype != torch.bfloat16 else tensor.float()).numpy()
        return found
    if not hasattr(array, "__array__") and hasattr(array, "__dlpack__"):
        return np.asarray(np.from_dlpack(array))
    if callable(to_numpy := getattr(array, "numpy", None)):  # TensorFlow's and Keras's, wherever they are
        array = to_numpy()
    values = np.asarray(array)
    if values.dtype.hasobject or values.dtype.kind in "USMm":
        raise UserError(f"expected arrays of numbers, not {type(array).__name__} of {values.dtype}")
    # Of files in the other byte order: names of types, by which they are made again, do not tell it.
    return values if values.dtype.isnative else values.astype(values.dtype.newbyteorder("="))


@dataclass(frozen=True)
class ArrayKind:
    """Kind of an array: its framework, type and device, without its values.

    ``framework``: name of the top-level module; ``dtype``: its type as NumPy's or torch's name; ``place``: device, or
    JAX's sharding; ``scalar``: Python's type of a plain number."""

    framework: str
    dtype: str
    shape: tuple[int, ...]
    place: Any = None
    scalar: type | None = None

    @classmethod
    def of(cls, array: Any) -> ArrayKind:
        """Describe an array. Raises ``UserError`` for what is none."""
        if isinstance(array, Tensor):
            return cls("torch", str(array.dtype).removeprefix("torch."), tuple(array.shape), array.device)
        if isinstance(array, bool | int | float):
            return cls("numpy", np.asarray(array).dtype.name, (), None, type(array))
        framework = type(array).__module__.partition(".")[0]
        shape, dtype = getattr(array, "shape", None), getattr(array, "dtype", None)
        if shape is None or dtype is None:
            values = as_numpy(array)
            return cls("numpy", values.dtype.name, values.shape)
        if "jax" in sys.modules and isinstance(array, sys.modules["jax"].Array):
            return cls("jax", np.dtype(dtype).name, tuple(shape), array.sharding)
        name = dtype if isinstance(dtype, str) else getattr(dtype, "name", str(dtype))
        place = getattr(array, "device", None) if framework == "tensorflow" else None
        return cls(framework, name, tuple(shape), place)

    @property
    def is_floating(self) -> bool:
        return "float" in self.dtype

    def make(self, values: Tensor | NumpyArray, *, keep_dtype: bool = True) -> Any:
        """Return values as an array of this kind and device. ``keep_dtype``: rounded to its type; for types that are
        not floating, only if asked for."""
        dtype = self.dtype if keep_dtype else None
        if self.framework == "torch":
            tensor = values if isinstance(values, Tensor) else as_tensor(values)
            return tensor.to(self.place, getattr(torch, dtype) if dtype else None)
        array = values.numpy() if isinstance(values, Tensor) else np.asarray(values)
        if self.framework == "jax":
            jax = sys.modules["jax"]
            made = sys.modules["jax.numpy"].asarray(array, dtype=dtype)
            return jax.device_put(made, self.place)
        if self.framework == "tensorflow":
            tensorflow = sys.modules["tensorflow"]
            with tensorflow.device(self.place):
                return tensorflow.convert_to_tensor(array, dtype=dtype)
        if self.framework == "keras":
            return sys.modules["keras"].ops.convert_to_tensor(array, dtype=dtype)
        array = array.astype(dtype) if dtype else array
        return self.scalar(array.item()) if self.scalar and keep_dtype else array
