"""Tests of training/parameters: a model's parameters as one vector, and its layout."""

from collections import OrderedDict

import pytest
import torch
from torch import nn

from shoal.compression.range_reader import whole_vector
from shoal.peer.checkpoints.local_state import local_state_tree
from shoal.peer.training import parameters
from shoal.peer.training.parameters import (
    MasterWeights,
    ParameterVector,
    frozen_parameters,
    plain_name,
    split_by_layout,
)
from shoal.swarm.errors import ModelMismatch


def make_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2, bias=False))


def test_reads_and_writes_in_the_order_of_names() -> None:
    model = make_model()
    vector = ParameterVector(model)
    assert [spec.name for spec in vector.layout] == ["0.weight", "0.bias", "1.weight", "1.bias", "2.weight"]
    assert vector.elements == 12 + 4 + 4 + 4 + 8 == sum(spec.elements for spec in vector.layout)
    values = whole_vector(vector)
    assert torch.equal(values[:12], model[0].weight.detach().reshape(-1))  # type: ignore[index, union-attr]
    vector.write(torch.arange(32.0))
    assert torch.equal(whole_vector(vector), torch.arange(32.0))
    assert torch.equal(model[2].weight.detach(), torch.arange(24.0, 32.0).view(2, 4))  # type: ignore[index, union-attr]
    # What was read before is a copy.
    assert not torch.equal(values, whole_vector(vector))


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


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_the_type_is_each_peers_own(dtype: torch.dtype) -> None:
    model = make_model().to(dtype)
    vector = ParameterVector(model)
    assert vector.layout == ParameterVector(make_model()).layout
    assert whole_vector(vector).dtype == torch.float32
    values = torch.linspace(-1.0, 1.0, vector.elements)
    vector.write(values)
    assert torch.equal(model[2].weight.detach(), values[24:].view(2, 4).to(dtype))  # type: ignore[index, union-attr]
    assert torch.equal(whole_vector(vector), values.to(dtype).float())


def test_writing_leaves_no_history_and_keeps_the_tensors() -> None:
    model = make_model()
    before = list(model.parameters())
    vector = ParameterVector(model)
    vector.write(torch.zeros(vector.elements))
    assert all(one is other for one, other in zip(before, model.parameters(), strict=True))
    assert all(one.is_leaf and one.requires_grad for one in model.parameters())


def test_a_model_without_parameters_cannot_take_part() -> None:
    with pytest.raises(ModelMismatch, match="no trainable"):
        ParameterVector(nn.ReLU())


def test_named_tensors_share_the_vector() -> None:
    vector = ParameterVector(make_model())
    values = whole_vector(vector)
    named = split_by_layout(values, vector.layout)
    assert named["2.weight"].shape == (2, 4)
    named["0.bias"].fill_(7.0)
    assert torch.equal(values[12:16], torch.full((4,), 7.0))
    assert list(split_by_layout(values, vector.layout)) == [spec.name for spec in vector.layout]


def test_types_that_cannot_be_trained_are_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.complex64))
    with pytest.raises(ModelMismatch, match=r"parameter 1\.weight is complex64: .* freeze this one or convert it"):
        ParameterVector(model)
    model[1].requires_grad_(False)
    assert ParameterVector(model).elements == 6, "what is not trained is no part of the anchor"


def test_masters_hold_what_low_precision_parameters_round() -> None:
    model = make_model()
    model[2].to(torch.bfloat16)  # type: ignore[operator]
    masters = MasterWeights(model)
    vector = ParameterVector(model, masters)
    assert vector.weights[:4] == vector.parameters[:4], "float32 parameters are their own masters"
    assert vector.weights[4] is masters.of(vector.parameters[4]) is not vector.parameters[4]
    values = torch.linspace(-1.0, 1.0, vector.elements)
    vector.write(values[:30])
    vector.write(values[30:], 30)
    assert torch.equal(whole_vector(vector), values)
    assert vector.rounded(values) is values
    assert torch.equal(vector.parameters[4].detach(), values[24:].view(2, 4).to(torch.bfloat16))


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
    buffers = local_state_tree(None, plain)["buffers"]
    assert local_state_tree(None, Wrapper(plain))["buffers"].keys() == buffers.keys()


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


# Parameters that are not trained ----------------------------------------------------------------------------


def adapted(seed: int = 0, trained: bool = False) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    model[0].requires_grad_(trained)
    return model


def test_frozen_parameters_are_told_apart_by_names_shapes_and_values() -> None:
    found = frozen_parameters(adapted())
    assert found is not None
    assert found.elements == 20
    assert frozen_parameters(adapted()) == found
    others = [adapted(1), adapted(), adapted(), nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2))]
    with torch.no_grad():
        others[1][0].bias[4] += 1e-6  # type: ignore[index,operator,union-attr]
    others[2] = nn.Sequential(OrderedDict(base=others[2][0], head=others[2][1]))  # type: ignore[index,arg-type]
    others[3][0].requires_grad_(False)  # type: ignore[index]
    digests = [frozen_parameters(one) for one in others]
    assert found not in digests
    assert len({one.digest for one in digests if one is not None}) == 4


def test_trained_parameters_are_in_no_digest_of_frozen_ones() -> None:
    assert frozen_parameters(adapted(trained=True)) is None
    model = adapted()
    before = frozen_parameters(model)
    with torch.no_grad():
        model[1].weight.fill_(3.0)  # type: ignore[index,union-attr,operator]
    assert frozen_parameters(model) == before


def test_a_frozen_base_is_the_same_one_in_another_type_or_layout_if_its_values_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    base = adapted().bfloat16()
    expected = frozen_parameters(base.float())
    assert frozen_parameters(base.bfloat16()) == expected
    assert frozen_parameters(nn.Sequential(base[0].double(), base[1])) == expected  # type: ignore[index]
    monkeypatch.setattr(parameters, "_PIECE", 7)
    assert frozen_parameters(base) == expected
    assert frozen_parameters(torch.compile(base, backend="eager")) == expected  # type: ignore[arg-type]


def test_a_quantised_base_counts_by_its_bytes() -> None:
    model = adapted()
    model.codes = nn.Parameter(torch.arange(9, dtype=torch.int8).view(3, 3).t(), requires_grad=False)
    found = frozen_parameters(model)
    model.codes.data[1, 2] = 100
    assert found is not None
    assert found.elements == 29
    assert frozen_parameters(model) != found
