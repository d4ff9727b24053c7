"""Tests of training/parameters: a model's parameters as one vector, and its layout."""

import pytest
import torch
from torch import nn

from shoal.peer.checkpoints.local_state import local_state_tree
from shoal.peer.training.parameters import ParameterVector, plain_name, split_by_layout
from shoal.swarm.averaging.outcome import CarriedResidual
from shoal.swarm.errors import ModelMismatch


def make_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2, bias=False))


def test_reads_and_writes_in_the_order_of_names() -> None:
    model = make_model()
    vector = ParameterVector(model)
    assert [spec.name for spec in vector.layout] == ["0.weight", "0.bias", "1.weight", "1.bias", "2.weight"]
    assert vector.elements == 12 + 4 + 4 + 4 + 8 == sum(spec.elements for spec in vector.layout)
    values = vector.read()
    assert torch.equal(values[:12], model[0].weight.detach().reshape(-1))  # type: ignore[index, union-attr]
    vector.write(torch.arange(32.0))
    assert torch.equal(vector.read(), torch.arange(32.0))
    assert torch.equal(model[2].weight.detach(), torch.arange(24.0, 32.0).view(2, 4))  # type: ignore[index, union-attr]
    # What was read before is a copy.
    assert not torch.equal(values, vector.read())


def test_buffers_and_frozen_parameters_stay_local() -> None:
    model = make_model()
    model[0].weight.requires_grad_(False)  # type: ignore[index, union-attr]
    vector = ParameterVector(model)
    frozen = model[0].weight.clone()  # type: ignore[index, union-attr, operator]
    running = model[1].running_var.clone()  # type: ignore[index, union-attr, operator]
    vector.write(torch.full((vector.elements,), 9.0))
    assert vector.elements == 20
    assert torch.equal(model[0].weight, frozen)  # type: ignore[index, union-attr, arg-type]
    assert torch.equal(model[1].running_var, running)  # type: ignore[index, union-attr, arg-type]


def test_tied_parameters_count_once() -> None:
    model = nn.ModuleList([nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)])
    model[1].weight = model[0].weight
    assert ParameterVector(model).elements == 9


def test_other_types_are_told_and_converted() -> None:
    model = nn.Linear(2, 2).to(torch.float64)
    vector = ParameterVector(model)
    assert vector.layout[0].dtype == "float64"
    assert vector.read().dtype == torch.float32
    vector.write(torch.ones(6))
    assert torch.equal(model.bias.detach(), torch.ones(2, dtype=torch.float64))


def test_writing_leaves_no_history_and_keeps_the_tensors() -> None:
    model = make_model()
    before = list(model.parameters())
    vector = ParameterVector(model)
    vector.write(torch.zeros(vector.elements))
    assert all(one is other for one, other in zip(before, model.parameters(), strict=True))
    assert all(one.is_leaf and one.requires_grad for one in model.parameters())


def test_takes_gradients_once() -> None:
    model = nn.Linear(2, 3)
    vector = ParameterVector(model)
    model(torch.ones(1, 2)).sum().backward()
    model.bias.grad = None
    assert torch.equal(vector.take_gradients(), torch.tensor([1.0] * 6 + [0.0] * 3))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not bool(vector.take_gradients().any())


def test_gradients_of_any_layout() -> None:
    model = nn.Linear(2, 3, bias=False)
    vector = ParameterVector(model)
    model.weight.grad = torch.arange(6.0).view(2, 3).t()
    assert torch.equal(vector.take_gradients(), torch.tensor([0.0, 3, 1, 4, 2, 5]))


def test_a_model_without_parameters_cannot_take_part() -> None:
    with pytest.raises(ModelMismatch, match="no trainable"):
        ParameterVector(nn.ReLU())


def test_named_tensors_share_the_vector() -> None:
    vector = ParameterVector(make_model())
    values = vector.read()
    named = vector.named(values)
    assert named["2.weight"].shape == (2, 4)
    named["0.bias"].fill_(7.0)
    assert torch.equal(values[12:16], torch.full((4,), 7.0))
    assert list(split_by_layout(values, vector.layout)) == [spec.name for spec in vector.layout]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_types_that_do_not_hold_the_anchor_are_refused(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).to(dtype))
    with pytest.raises(ModelMismatch, match=r"parameter 1\.weight is b?float16, .*inner\.precision = \"bfloat16\""):
        ParameterVector(model)
    model[1].requires_grad_(False)
    assert ParameterVector(model).elements == 6, "what is not trained is no part of the anchor"


class Wrapper(nn.Module):
    """As ``DistributedDataParallel`` is one."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = model


def test_wrapped_models_are_the_same_run() -> None:
    plain = make_model()
    expected = ParameterVector(plain).layout
    inside = make_model()
    inside[2] = torch.compile(inside[2])  # type: ignore[index, operator]
    for model in (torch.compile(plain), Wrapper(plain), Wrapper(torch.compile(plain)), inside):  # type: ignore[arg-type]
        assert ParameterVector(model).layout == expected  # type: ignore[arg-type]
    buffers = local_state_tree(None, plain, CarriedResidual(None, 0))["buffers"]
    assert local_state_tree(None, Wrapper(plain), CarriedResidual(None, 0))["buffers"].keys() == buffers.keys()


@pytest.mark.parametrize(
    ("name", "plain"),
    [("_orig_mod.a.b", "a.b"), ("module._orig_mod.a", "a"), ("a._orig_mod.b", "a.b"), ("a.module", "a.module")],
)
def test_names_without_wrappers(name: str, plain: str) -> None:
    assert plain_name(name) == plain


def test_names_that_become_the_same_are_refused() -> None:
    model = Wrapper(nn.Linear(2, 2))
    model.weight = nn.Parameter(torch.ones(2))
    with pytest.raises(ModelMismatch, match="two parameters are called weight"):
        ParameterVector(model)
