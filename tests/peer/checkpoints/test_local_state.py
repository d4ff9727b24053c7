"""A peer's own state: encoded, written, read and restored, it goes on with the same bits."""

import math
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.peer.checkpoints.local_state import (
    LocalStateSnapshot,
    NotPlain,
    SnapshotBuffers,
    carried_residual,
    from_plain,
    local_state_tree,
    parse_local_state,
    restore_local_state,
    to_plain,
)
from shoal.peer.checkpoints.tensors import file_pieces
from shoal.swarm.averaging.outcome import CarriedResidual
from shoal.swarm.errors import StateFileError

Make = Callable[[Iterable[Tensor]], Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adamw-lr-tensor": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), foreach=False),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "adafactor": lambda p: torch.optim.Adafactor(p),
    "adamax": lambda p: torch.optim.Adamax(p),
    "asgd": lambda p: torch.optim.ASGD(p),
    "nadam": lambda p: torch.optim.NAdam(p),
    "radam": lambda p: torch.optim.RAdam(p),
    "rmsprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "rprop": lambda p: torch.optim.Rprop(p),
    "lbfgs": lambda p: torch.optim.LBFGS(p, max_iter=3),
}


class Noisy(nn.Module):
    """Model that uses every generator and has running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = x + float(np.random.standard_normal()) + random.gauss(0.0, 1.0)
        return self.layers(x)  # type: ignore[no-any-return]


class Loop:
    def __init__(self, make: Make, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = Noisy()
        self.optimizer = make(self.model.parameters())

    def train(self, steps: int = 5) -> None:
        for _ in range(steps):
            x = torch.randn(8, 4)

            def closure() -> float:
                self.optimizer.zero_grad()
                loss = (self.model(x) - x.sum(1, keepdim=True)).square().mean()  # noqa: B023
                loss.backward()
                return float(loss.detach())

            self.optimizer.step(closure)

    def tree(self) -> dict[str, Any]:
        return local_state_tree(self.optimizer, self.model, CarriedResidual(torch.ones(3), 12))

    def bits(self) -> list[bytes]:
        return [one.numpy().tobytes() for one in self.model.state_dict().values()]


def written(own: LocalStateSnapshot) -> dict[str, Any]:
    """The tree after a way through the bytes of a file."""
    return parse_local_state(b"".join(bytes(piece) for piece in file_pieces(own.file())), "peer.safetensors")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_as_if_it_had_not_stopped(name: str) -> None:
    loop = Loop(OPTIMIZERS[name])
    random.seed(1)
    np.random.seed(1)
    loop.train()
    tree = written(SnapshotBuffers().copy(loop.tree()))
    parameters = [one.detach().clone() for one in loop.model.parameters()]
    loop.train()

    other = Loop(OPTIMIZERS[name], seed=9)
    random.seed(2)
    np.random.seed(2)
    other.train(1)
    with torch.no_grad():
        for parameter, values in zip(other.model.parameters(), parameters, strict=True):
            parameter.copy_(values)
    restore_local_state(tree, other.optimizer, other.model)
    other.train()
    assert other.bits() == loop.bits()


def test_the_residual_comes_back() -> None:
    tree = written(SnapshotBuffers().copy(Loop(OPTIMIZERS["sgd"]).tree()))
    carried = carried_residual(tree, 3)
    assert carried is not None
    assert torch.equal(carried.residual, torch.ones(3))
    assert carried.weight_tokens == 12
    assert carried_residual(tree, 4) is None
    assert carried_residual({**tree, "residual": torch.ones(3).double()}, 3) is None
    assert carried_residual({**tree, "residual_weight_tokens": -1}, 3) is None
    assert carried_residual({}, 3) is None


def test_a_snapshot_does_not_change_with_the_training() -> None:
    loop, snapshots = Loop(OPTIMIZERS["adamw"]), SnapshotBuffers()
    loop.train()
    own = snapshots.copy(loop.tree())
    before = [one.clone() for one in own.tensors.values()]
    loop.train()
    assert all(torch.equal(one, other) for one, other in zip(own.tensors.values(), before, strict=True))


@pytest.mark.parametrize("prepared", [False, True])
def test_snapshots_take_no_new_memory(prepared: bool) -> None:
    loop, snapshots = Loop(OPTIMIZERS["adamw"]), SnapshotBuffers()
    loop.train()
    if prepared:
        snapshots.prepare(loop.tree())
    first = snapshots._kept if prepared else snapshots.copy(loop.tree()).tensors
    memory = {name: one.data_ptr() for name, one in first.items() if one.numel() > 1}
    assert any(name.startswith("optimizer") for name in memory)
    loop.train()
    again = {name: one.data_ptr() for name, one in snapshots.copy(loop.tree()).tensors.items() if one.numel() > 1}
    for name in memory:
        if name.startswith(("optimizer", "buffers", "residual")):
            assert again[name] == memory[name], name


def test_what_cannot_be_saved_is_left_out_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    own = SnapshotBuffers().copy({"optimizer": {"state": {0: {"a": torch.ones(2), "hook": print}}}, "steps": 3})
    assert "optimizer/state/0/hook: builtin_function_or_method has no plain form" in caplog.text
    assert written(own) == {"steps": 3}
    assert own.tensors == {}, "nothing of it"
    own = SnapshotBuffers().copy({"twice": {"a/b": torch.ones(1), "a": {"b": torch.ones(1)}}})
    assert "two tensors have this name" in caplog.text
    assert written(own) == {}


def test_what_does_not_fit_any_more_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop(OPTIMIZERS["adamw"])
    loop.train()
    tree = written(SnapshotBuffers().copy(loop.tree()))
    other = nn.Linear(4, 1)
    before = other.weight.clone()
    restore_local_state({**tree, "random": {"torch": 3}}, torch.optim.AdamW(other.parameters()), other)
    assert torch.equal(other.weight, before)
    for what in ("optimizer", "buffers", "random"):
        assert f"going on without the {what} of the checkpoint" in caplog.text


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text("abc", max_size=2) | st.integers(0, 9), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(PLAIN)
def test_trees_come_back_as_they_were(tree: Any) -> None:
    found = written(SnapshotBuffers().copy({"tree": tree}))
    assert repr(found) == repr({"tree": tree})


@pytest.mark.parametrize(
    "dtype",
    ["float64", "float32", "bfloat16", "float16", "int64", "int32", "int16", "int8", "uint8", "bool"],
)
def test_every_type_of_tensor_comes_back(dtype: str) -> None:
    tensors = [torch.ones(shape, dtype=getattr(torch, dtype)) for shape in ((), (3,), (2, 0), (2, 3))]
    tensors.append(torch.arange(6).view(2, 3).t().to(getattr(torch, dtype)))  # not contiguous
    found = written(SnapshotBuffers().copy({"all": tensors}))["all"]
    assert [one.dtype for one in found] == [one.dtype for one in tensors]
    assert all(torch.equal(one, other) for one, other in zip(found, tensors, strict=True))


@pytest.mark.parametrize(
    "value",
    [object(), {1.5: 2}, {True: 1}, {(1,): 2}, 1j, b"x", {1, 2}, torch.ones(2).to_sparse(), np.ones(2)],
    ids=lambda value: type(value).__name__,
)
def test_what_has_no_plain_form_is_named(value: Any) -> None:
    with pytest.raises(NotPlain, match="a/0"):
        to_plain({"a": [value]}, lambda *_: None)


def test_a_tree_without_an_end_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(NotPlain, match="more than 64 levels"):
        to_plain(loop, lambda *_: None)


@pytest.mark.parametrize(
    "plain",
    [
        {"tensor": "missing"},
        {"tensor": 3},
        {"float": "1.5"},
        {"array": "t", "dtype": "O"},
        {"array": "t", "dtype": "nonsense"},
        {"dict": [["a"]]},
        {"dict": [[[], 1]]},
        {"tuple": [], "more": 1},
        {"unknown": 1},
        {},
    ],
    ids=str,
)
def test_forms_that_nobody_writes_are_refused(plain: Any) -> None:
    with pytest.raises((ValueError, KeyError, TypeError)):
        from_plain(plain, {"t": torch.ones(1, dtype=torch.int64)})
    text = torch.frombuffer(bytearray(repr(plain).replace("'", '"').encode()), dtype=torch.uint8)
    data = b"".join(bytes(piece) for piece in file_pieces({"content": text, "t": torch.ones(1)}))
    with pytest.raises(StateFileError, match=r"peer\.safetensors: its content: expected"):
        parse_local_state(data, "peer.safetensors")


def test_numbers_that_json_does_not_know() -> None:
    found = written(SnapshotBuffers().copy({"a": [math.nan, math.inf, -math.inf, np.float64(0.1), np.int32(3)]}))["a"]
    assert math.isnan(found[0])
    assert found[1:] == [math.inf, -math.inf, 0.1, 3]


def test_a_file_without_content_is_refused(tmp_path: Path) -> None:
    data = b"".join(bytes(piece) for piece in file_pieces({"a": torch.ones(1)}))
    with pytest.raises(StateFileError, match="a peer's own state"):
        parse_local_state(data, "peer.safetensors")
