"""Random initial values with the same bits on every machine, also of models whose code draws them in its own way.

torch's normal distribution takes logarithms and cosines, which differ in the last bit between processors, and peers
have to start bit-identical. Sums of uniforms are exact."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.peer.training.rng import derived_seed
from shoal.swarm.errors import RecipeError

UNIFORMS = 3
"""Uniform numbers that go into one value of ``bell``."""

_PIECE = 2**20

_ROUNDED_TWICE = frozenset(
    f"aten::{name}{end}"
    for name in (
        *("log", "log2", "log1p", "exp", "exp2", "expm1", "pow", "sqrt", "rsqrt", "erfinv", "sin", "cos", "tanh"),
        *("sigmoid", "softplus", "logit"),
    )
    for end in ("", "_")
)
"""Operations whose last bit is the processor's affair: computed in float64 and rounded, so that it is not."""

_OWN_ORDER = ("aten::linalg_", "aten::_linalg", "aten::geqrf", "aten::qr", "aten::svd")
"""Operations whose results differ between processors by more than the last bit."""


def bell(shape: Sequence[int], std: float, generator: torch.Generator) -> Tensor:
    """Bell-shaped values of mean 0 within 3 ``std``: ``shape`` float64.

    A sum of three uniforms and not torch's normal: these additions are exact."""
    total = torch.full(tuple(shape), -UNIFORMS / 2, dtype=torch.float64, device="cpu")
    for _ in range(UNIFORMS):
        total += torch.rand(tuple(shape), generator=generator, dtype=torch.float32, device="cpu")
    return total * (2.0 * std)


def _uniform(size: int, low: float, high: float, generator: torch.Generator) -> Tensor:
    drawn = torch.rand(size, generator=generator, dtype=torch.float32, device="cpu").double()
    return drawn * (high - low) + low


class ExactDraws(TorchDispatchMode):
    """Mode in which normal and uniform values are drawn exactly, from ``seed`` and the name of the tensor they are for.

    So a parameter has the same values whichever others are drawn; the global generators stay as they are. Tensors on
    the meta device get none. ``named``: the parameters. Raises ``RecipeError`` for random numbers of another kind.
    """

    def __init__(self, seed: int, named: Iterable[tuple[str, Tensor]] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seed = seed
        self._names = {_storage(tensor): name for name, tensor in named if not tensor.is_meta}
        self._drawn: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given, name = dict(kwargs or {}), func._schema.name
        match name:
            case "aten::normal_" | "aten::uniform_":
                first, second = _bounds(func, args, given)
                return self._fill(args[0], name == "aten::normal_", first, second)
            case "aten::rand" | "aten::randn" | "aten::rand_like" | "aten::randn_like":
                given.pop("generator", None)
                empty: Any = torch.empty_like if name.endswith("_like") else torch.empty
                return self._fill(empty(*args, **given), "randn" in name, 0.0, 1.0)
        if torch.Tag.nondeterministic_seeded in func.tags or name.startswith(_OWN_ORDER):
            raise RecipeError(
                f"the initial values of this model come from {name.removeprefix('aten::')}, whose bits differ between "
                "machines; members have to start alike: take another architecture"
            )
        if name in _ROUNDED_TWICE and isinstance(args[0], Tensor) and args[0].dtype == torch.float32:
            precise = func(args[0].double(), *args[1:], **given)
            return args[0].copy_(precise) if name.endswith("_") else precise.float()
        return func(*args, **given)

    def _fill(self, tensor: Tensor, is_normal: bool, first: float, second: float) -> Tensor:
        if tensor.is_meta or not tensor.numel():
            return tensor
        name = self._names.get(_storage(tensor), "")
        self._drawn[name] += 1
        key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little", signed=True)
        generator = torch.Generator(device="cpu").manual_seed(derived_seed(self._seed, key, self._drawn[name]))

        def draw(size: int) -> Tensor:
            if is_normal:
                return bell((size,), second, generator) + first
            return _uniform(size, first, second, generator)

        return _fill_by_pieces(tensor, draw)


def _fill_by_pieces(tensor: Tensor, draw: Callable[[int], Tensor]) -> Tensor:
    flat = tensor.view(-1) if tensor.is_contiguous() else torch.empty_like(tensor).contiguous().view(-1)
    for start in range(0, flat.numel(), _PIECE):
        piece = flat[start : start + _PIECE]
        piece.copy_(draw(piece.numel()))
    return tensor if tensor.is_contiguous() else tensor.copy_(flat.view(tensor.shape))


def _bounds(func: Any, args: Sequence[Any], given: Mapping[str, Any]) -> tuple[float, float]:
    """Return the two numbers of a call of ``normal_`` or ``uniform_``."""
    found = []
    for number, argument in list(enumerate(func._schema.arguments))[1:3]:
        default = argument.default_value
        found.append(float(args[number] if len(args) > number else given.get(argument.name, default)))
    return found[0], found[1]


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
