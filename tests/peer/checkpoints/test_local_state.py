"""A peer's own state: encoded, written, read and restored, it goes on with the same bits."""

import math
import random
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.peer.checkpoints.making import MemoryContent, MemorySource
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.peer.checkpoints.checkpoint import OwnContents
from shoal.peer.checkpoints.local_state import (
    LocalStateContent,
    NotPlain,
    SavedLocalState,
    _SavedTensors,
    from_plain,
    local_state_tree,
    to_plain,
)
from shoal.peer.checkpoints.tensor_file import read_entries, read_tensor
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
        return local_state_tree(self.optimizer, self.model)

    def bits(self) -> list[bytes]:
        return [one.numpy().tobytes() for one in self.model.state_dict().values()]


CARRIED = CarriedResidual(torch.ones(3), 12)


def own_of(tree: dict[str, Any], carried: CarriedResidual = CARRIED) -> OwnContents:
    return OwnContents(LocalStateContent.of(tree), carried)


def saved(own: OwnContents) -> SavedLocalState:
    """The files in memory."""
    return SavedLocalState(MemorySource({name: b"".join(map(bytes, pieces)) for name, pieces in own.files()}))


def read_tree(data: bytes) -> dict[str, Any]:
    tensors = _SavedTensors(MemoryContent("peer.safetensors", data), "peer.safetensors")
    return {name: from_plain(branch, tensors) for name, branch in tensors.branches()}


def written(own: OwnContents) -> dict[str, Any]:
    """The tree after a way through the bytes of a file."""
    source: Any = saved(own).source
    return read_tree(source.files["peer.safetensors"])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_as_if_it_had_not_stopped(name: str) -> None:
    loop = Loop(OPTIMIZERS[name])
    random.seed(1)
    np.random.seed(1)
    loop.train()
    own = saved(own_of(loop.tree()))
    parameters = [one.detach().clone() for one in loop.model.parameters()]
    loop.train()

    other = Loop(OPTIMIZERS[name], seed=9)
    random.seed(2)
    np.random.seed(2)
    other.train(1)
    with torch.no_grad():
        for parameter, values in zip(other.model.parameters(), parameters, strict=True):
            parameter.copy_(values)
    assert own.restore(other.optimizer, other.model) == {}
    other.train()
    assert other.bits() == loop.bits()


def test_a_resumed_loop_keeps_the_learning_rates_that_it_sets_now() -> None:
    """Its scheduler begins again, and its owner may have changed the script."""
    loop, other = Loop(OPTIMIZERS["sgd"]), Loop(OPTIMIZERS["sgd"])
    loop.train(1)
    loop.optimizer.param_groups[0]["lr"] = 0.125
    own = saved(own_of(loop.tree()))
    torch.optim.lr_scheduler.ConstantLR(other.optimizer, 0.5)
    rates = {name: other.optimizer.param_groups[0][name] for name in ("lr", "initial_lr")}
    own.restore(other.optimizer, other.model)
    assert {name: other.optimizer.param_groups[0][name] for name in rates} == rates


def test_the_residual_comes_back() -> None:
    memory = torch.zeros(3)
    assert saved(own_of({})).restore_residual(memory) == 12
    assert torch.equal(memory, torch.ones(3))
    low, memory = CarriedResidual(torch.tensor([0.5, 1.5, -2.0]).bfloat16(), 7), torch.zeros(3).bfloat16()
    assert saved(own_of({}, low)).restore_residual(memory) == 7
    assert torch.equal(memory, low.residual), "in its own type"


@pytest.mark.parametrize(
    ("memory", "carried"),
    [
        (torch.zeros(4), CARRIED),
        (torch.zeros(3).double(), CARRIED),
        (torch.zeros(3).bfloat16(), CARRIED),
        (torch.zeros(3), CarriedResidual(torch.ones(3), -1)),
    ],
)
def test_a_residual_that_does_not_fit_is_not_read(memory: Tensor, carried: CarriedResidual) -> None:
    assert saved(own_of({}, carried)).restore_residual(memory) is None
    assert not memory.any()


@pytest.mark.parametrize("name", ["momentum", "adamw", "adam"])
def test_the_optimizers_tensors_are_read_into_those_that_it_has(name: str) -> None:
    loop = Loop(OPTIMIZERS[name])
    loop.train()
    own, other = saved(own_of(loop.tree())), Loop(OPTIMIZERS[name], seed=9)
    own.restore(other.optimizer, other.model)

    def tensors(of: Loop) -> list[Tensor]:
        return [one for state in of.optimizer.state.values() for one in state.values() if isinstance(one, Tensor)]

    assert all(torch.equal(one, two) for one, two in zip(tensors(other), tensors(loop), strict=True)), "new ones"
    held = tensors(other)
    other.train()
    own.restore(other.optimizer, other.model)
    assert [one.data_ptr() for one in tensors(other)] == [one.data_ptr() for one in held]
    assert all(torch.equal(one, two) for one, two in zip(tensors(other), tensors(loop), strict=True))


def test_an_optimizer_is_reset_when_its_file_cannot_be_read_to_its_end() -> None:
    loop = Loop(OPTIMIZERS["adamw"])
    loop.train()
    own = saved(own_of(loop.tree()))
    source: Any = own.source
    loop.train()
    before = [one.clone() for one in loop.model.parameters()]
    real, reads = MemoryContent.read_into, 0

    class Failing(MemoryContent):
        def read_into(self, at: int, out: memoryview) -> None:
            nonlocal reads
            reads += 1
            if reads == 9:
                raise StateFileError("the disk fails")
            real(self, at, out)

    source.open = lambda name: nullcontext(Failing(name, source.files[name]))
    with pytest.raises(StateFileError, match="the disk fails"):
        own.restore(loop.optimizer, loop.model)
    assert not loop.optimizer.state, "some of it would be of the file, and some not"
    assert all(torch.equal(one, two) for one, two in zip(loop.model.parameters(), before, strict=True))


def test_tensors_that_lie_otherwise_in_memory_come_back() -> None:
    values = torch.arange(24.0).view(1, 2, 3, 4)
    memory = torch.zeros(1, 2, 3, 4).to(memory_format=torch.channels_last)
    content = MemoryContent("f", b"".join(map(bytes, file_pieces({"a": values}))))
    (entry,) = read_entries(content, "f")
    read_tensor(content, entry, memory)
    assert torch.equal(memory, values)
    assert memory.is_contiguous(memory_format=torch.channels_last)


def test_a_copy_does_not_change_with_the_training() -> None:
    loop = Loop(OPTIMIZERS["adamw"])
    loop.train()
    content = LocalStateContent.of(loop.tree())
    copy, before = content.copy(), b"".join(map(bytes, content.pieces()))
    assert copy.copying is not None
    loop.model(torch.randn(8, 4))  # running statistics change before the optimizer steps
    copy.copying.complete()
    loop.train()
    assert b"".join(map(bytes, copy.pieces())) == before
    assert b"".join(map(bytes, content.pieces())) != before, "it refers to what is in use"


def test_what_cannot_be_saved_is_left_out_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    own = own_of({"optimizer": {"state": {0: {"a": torch.ones(2), "hook": print}}}, "steps": 3})
    assert "optimizer/state/0/hook: builtin_function_or_method has no plain form" in caplog.text
    assert written(own) == {"steps": 3}
    assert own.content.tensors == {}, "nothing of it"
    own = own_of({"twice": {"a/b": torch.ones(1), "a": {"b": torch.ones(1)}}})
    assert "two tensors have this name" in caplog.text
    assert written(own) == {}


def test_what_does_not_fit_any_more_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop(OPTIMIZERS["adamw"])
    loop.train()
    own = saved(own_of({**loop.tree(), "random": {"torch": 3}}))
    other = nn.Linear(4, 1)
    before = other.weight.clone()
    own.restore(torch.optim.AdamW(other.parameters()), other)
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
    found = written(own_of({"tree": tree}))
    assert repr(found) == repr({"tree": tree})


@pytest.mark.parametrize(
    "dtype",
    ["float64", "float32", "bfloat16", "float16", "int64", "int32", "int16", "int8", "uint8", "bool"],
)
def test_every_type_of_tensor_comes_back(dtype: str) -> None:
    tensors = [torch.ones(shape, dtype=getattr(torch, dtype)) for shape in ((), (3,), (2, 0), (2, 3))]
    tensors.append(torch.arange(6).view(2, 3).t().to(getattr(torch, dtype)))  # not contiguous
    found = written(own_of({"all": tensors}))["all"]
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
    with pytest.raises((StateFileError, ValueError, KeyError, TypeError)):
        read_tree(data)


def test_numbers_that_json_does_not_know() -> None:
    found = written(own_of({"a": [math.nan, math.inf, -math.inf, np.float64(0.1), np.int32(3)]}))["a"]
    assert math.isnan(found[0])
    assert found[1:] == [math.inf, -math.inf, 0.1, 3]


def test_a_file_without_content_is_refused(tmp_path: Path) -> None:
    data = b"".join(bytes(piece) for piece in file_pieces({"a": torch.ones(1)}))
    with pytest.raises(StateFileError, match="a peer's own state"):
        read_tree(data)
