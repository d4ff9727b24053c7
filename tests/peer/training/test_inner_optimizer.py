"""Tests of training/inner_optimizer: which optimizer steps what, its memory, and that checkpoints restore it."""

import sys
from typing import Literal

import pytest
import torch
from tests.peer.checkpoints.making import MemorySource
from torch import Tensor, nn

from shoal.compression.range_reader import whole_vector
from shoal.peer.checkpoints.local_state import LocalStateContent, SavedLocalState, local_state_tree
from shoal.peer.training.algorithms import PseudoGradient
from shoal.peer.training.inner_optimizer import make_inner, muon_matrices
from shoal.peer.training.parameters import MasterWeights, ParameterVector
from shoal.swarm.errors import DeviceError
from shoal.swarm.protocol.run_file import InnerSection

STATES: tuple[Literal["float32", "int8"], ...] = ("float32", "int8")
NAMES: tuple[Literal["adamw", "sgd", "muon", "adafactor"], ...] = ("adamw", "sgd", "muon", "adafactor")


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def mean_of_squares(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).float().square().mean()


class SmallLanguageModel(nn.Module):
    """An embedding, a block with a matrix, a vector and a kernel, and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 8)
        self.mix = nn.Linear(8, 8)
        self.kernel = nn.Parameter(torch.randn(2, 2, 2))
        self.head = nn.Linear(8, 11, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.mix(self.embedding(tokens)) + self.kernel.sum())  # type: ignore[no-any-return]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    work = PseudoGradient(ParameterVector(model), optimizer, clip_norm=None)
    tokens = torch.arange(11)
    for _ in range(steps):
        nn.functional.cross_entropy(model(tokens), tokens.roll(1)).backward()  # type: ignore[no-untyped-call]
        work.step(1, 1.0)


def saved_and_restored(optimizer: torch.optim.Optimizer, model: nn.Module, into: torch.optim.Optimizer) -> None:
    content = LocalStateContent.of(local_state_tree(optimizer, model))
    saved = SavedLocalState(MemorySource({"peer.safetensors": b"".join(map(bytes, content.pieces()))}))
    saved.restore(into, model)


@pytest.mark.parametrize("name", NAMES)
def test_what_was_restored_goes_on_as_if_it_had_not_stopped(name: Literal["adamw", "sgd", "muon", "adafactor"]) -> None:
    inner = InnerSection(optimizer=name, lr=1e-2) if name != "sgd" else InnerSection(optimizer=name, momentum=0.9)
    model = SmallLanguageModel()
    before, optimizer = whole_vector(ParameterVector(model)), make_inner(model, inner)
    train(model, optimizer, 3)
    at_rest = whole_vector(ParameterVector(model))
    assert not torch.equal(at_rest, before)
    again = SmallLanguageModel()
    again.load_state_dict(model.state_dict())
    restored, fresh = make_inner(again, inner), make_inner(again, inner)
    saved_and_restored(optimizer, model, restored)
    train(model, optimizer, 2)
    train(again, restored, 2)
    expected = whole_vector(ParameterVector(model))
    assert torch.equal(whole_vector(ParameterVector(again)), expected)
    ParameterVector(again).write(at_rest)
    train(again, fresh, 2)
    assert not torch.equal(whole_vector(ParameterVector(again)), expected), "the state makes a difference"


def test_muon_steps_matrices_and_adamw_the_rest_each_as_torch_does() -> None:
    model, theirs = SmallLanguageModel(), SmallLanguageModel()
    assert muon_matrices(model) == {model.mix.weight}
    inner = InnerSection(optimizer="muon", lr=0.01, weight_decay=0.1)
    optimizer = make_inner(model, inner)
    muon = torch.optim.Muon(
        [theirs.mix.weight], lr=0.01, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    groups = [
        {"params": [theirs.embedding.weight, theirs.kernel, theirs.head.weight], "weight_decay": 0.1},
        {"params": [theirs.mix.bias], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), eps=1e-8)
    train(model, optimizer, 5)
    tokens = torch.arange(11)
    for _ in range(5):
        nn.functional.cross_entropy(theirs(tokens), tokens.roll(1)).backward()  # type: ignore[no-untyped-call]
        for one in (muon, adamw):
            one.step()
            one.zero_grad()
    assert torch.equal(whole_vector(ParameterVector(model)), whole_vector(ParameterVector(theirs)))


def test_the_learning_rate_is_set_for_muon_and_adamw_alike() -> None:
    model = SmallLanguageModel()
    optimizer = make_inner(model, InnerSection(optimizer="muon", lr=0.01, weight_decay=0.0))
    train(model, optimizer, 1)
    work = PseudoGradient(ParameterVector(model), optimizer, clip_norm=None)
    before = whole_vector(ParameterVector(model))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    work.step(1, 0.0)
    assert torch.equal(whole_vector(ParameterVector(model)), before)


def test_an_optimizer_that_is_reset_begins_anew() -> None:
    model = SmallLanguageModel()
    optimizer = make_inner(model, InnerSection(optimizer="muon"))
    train(model, optimizer, 2)
    assert optimizer.state
    PseudoGradient(ParameterVector(model), optimizer, clip_norm=None).reset_optimizer()
    assert not any(part.state for part in optimizer._parts)  # type: ignore[attr-defined]


def test_masters_are_what_muon_steps() -> None:
    model = SmallLanguageModel().bfloat16()
    masters = MasterWeights(model)
    optimizer = make_inner(model, InnerSection(optimizer="muon"), masters)
    stepped = {one for group in optimizer.param_groups for one in group["params"]}
    assert stepped == {masters.of(one) for one in model.parameters()}
    assert all(one.dtype == torch.float32 for one in stepped)


def test_a_pytorch_without_muon_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(DeviceError, match=r"Muon, which PyTorch .* does not have: pip install 'torch>=2\.9'"):
        make_inner(make_model(), InnerSection(optimizer="muon"))


@pytest.mark.parametrize("name", NAMES)
def test_the_state_takes_no_more_than_the_account_says(name: Literal["adamw", "sgd", "muon", "adafactor"]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512, bias=False), nn.Linear(512, 128, bias=False))
    inner = InnerSection(optimizer=name)
    optimizer = make_inner(model, inner)
    mean_of_squares(model, torch.randn(4, 256)).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    taken = sum(one.numel() for state in optimizer.state.values() for one in state.values() if isinstance(one, Tensor))
    counters = 2
    assert taken <= inner.state_values * sum(one.numel() for one in model.parameters()) + counters


def test_moments_in_int8_need_their_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)
    with pytest.raises(DeviceError, match=r"pip install 'shoal\[lowmem\]'"):
        make_inner(make_model(), InnerSection(state="int8"))


def test_moments_in_int8_step_nearly_as_in_float32_and_are_in_checkpoints() -> None:
    pytest.importorskip("bitsandbytes")
    models = [nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 1)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    before = whole_vector(ParameterVector(models[0]))
    optimizers = [
        make_inner(one, InnerSection(lr=1e-3, state=state)) for one, state in zip(models, STATES, strict=True)
    ]
    given = torch.randn(16, 64, generator=torch.Generator().manual_seed(1))
    for _ in range(10):
        for model, optimizer in zip(models, optimizers, strict=True):
            mean_of_squares(model, given).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
    exact, found = (whole_vector(ParameterVector(one)) for one in models)
    assert float((found - exact).norm() / (exact - before).norm()) < 0.1
    state = optimizers[1].state[models[1][0].weight]
    taken = sum(state[name].nbytes for name in ("state1", "state2", "absmax1", "absmax2"))
    assert taken == 4 * InnerSection(state="int8").state_values * models[1][0].weight.numel()
    content = LocalStateContent.of(local_state_tree(optimizers[1], models[1]))
    saved = SavedLocalState(MemorySource({"peer.safetensors": b"".join(map(bytes, content.pieces()))}))
    again = make_inner(models[1], InnerSection(state="int8"))
    saved.restore(again, models[1])
    restored = again.state[models[1][0].weight]
    assert torch.equal(restored["state1"], state["state1"])
    assert torch.equal(restored["absmax2"], state["absmax2"])
    mean_of_squares(models[1], given).backward()  # type: ignore[no-untyped-call]
    again.step()
