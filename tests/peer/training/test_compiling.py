"""Tests of training/compiling: whole models and the layers of stages, without torch's code generator."""

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.peer.layered_models import CPU, GPT, Key, Line, batch_of, gpt, mean_gradient
from torch import Tensor, nn

from shoal.compression.range_reader import whole_vector
from shoal.peer.pipeline import span
from shoal.peer.pipeline.compute import ComputeSettings, HeldStage, StageCompute
from shoal.peer.training import compiling
from shoal.peer.training.algorithms import AccumulatedGradient
from shoal.peer.training.compiling import compile_layers, compiled
from shoal.peer.training.layers import StageModel, layered_from_sequential
from shoal.peer.training.parameters import ParameterVector
from shoal.swarm.protocol.run_file import parse_run_file


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def batch() -> Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(1))


def no_compiler(module: object, given: object) -> object:
    raise RuntimeError("InvalidCxxCompiler: No working C++ compiler found")


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


# Whole models -----------------------------------------------------------------------------------------------


def test_a_compiled_model_has_the_parameters_and_names_of_the_plain_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    model = make_model()
    made = compiled(model, lambda one: one(batch()).square().mean())
    assert made is not model
    assert all(one.grad is None for one in model.parameters())
    vector = ParameterVector(made)
    assert [one.name for one in vector.layout] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert [id(one) for one in vector.parameters] == [id(one) for one in model.parameters()]
    torch.testing.assert_close(made(batch()), model(batch()))


def test_a_machine_without_a_compiler_trains_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=no_compiler))
    model = make_model()
    assert compiled(model, lambda one: one(batch()).square().mean()) is model
    assert "trained without torch.compile" in caplog.text
    assert "No working C++ compiler found" in caplog.text
    assert model(batch()).shape == (6, 1)


# Stages -----------------------------------------------------------------------------------------------------


def use(monkeypatch: pytest.MonkeyPatch, backend: Any) -> list[int]:
    """Compile with ``backend``; returns the number of nodes of each graph that it gets."""
    graphs: list[int] = []

    def count(module: Any, given: Any) -> Any:
        graphs.append(len(list(module.graph.nodes)))
        return backend(module, given)

    monkeypatch.setattr(compiling, "_ALIKE", {"backend": count})
    return graphs


def compile_stages(line: Line, micro_batch: int) -> None:
    """Compile the stages of a line as a member does that is assigned one of them."""
    toml = "algorithm='virtual_batch'\n[run]\nname='r'\n[recipe]\nname='own'\n[round]\ntokens=64\n"
    run = parse_run_file(toml + f"[inner]\ncompile=true\n[pipeline]\nmicro_batch={micro_batch}\n")
    recipe = gpt()
    samples = SimpleNamespace(recipe=recipe, data=recipe.training_data())
    work: Any = SimpleNamespace(run=run, staging=SimpleNamespace(device=CPU), samples=samples)
    for stages in line.peers:
        for stage in stages:
            shape = (GPT["context"], GPT["width"])
            compile_layers(stage.model, partial(span._try_out, work, stage.model, shape, stage=stage.number))


def eager(module: Any, given: Any) -> Any:
    from torch._dynamo.backends.debugging import aot_eager

    return aot_eager(module, given)


@pytest.mark.integration
def test_compiled_stages_have_the_gradient_of_the_whole(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = gpt(layers=2)
    graphs = use(monkeypatch, lambda module, given: module)
    line = Line(recipe, (0, 2, 4), [(0, 0), (1, 1)], recompute=True)
    compile_stages(line, 3)
    assert "without torch.compile" not in caplog.text
    tried = len(graphs)
    assert tried, "all is compiled before there is work"
    given = batch_of(recipe.training_data(), 0, 3)
    loss = line.drive(Key(0, 0, 3), given, (0, 1))
    assert len(graphs) == tried, "and nothing with the first micro-batch"
    line.drive(Key(0, 3, 5), batch_of(recipe.training_data(), 3, 5), (0, 1))  # a shorter one at a lease's end
    model = recipe.build_model(1)
    expected = mean_gradient(recipe, model, batch_of(recipe.training_data(), 0, 5))
    assert loss == pytest.approx(float(recipe.loss(model, given).detach()), rel=1e-5)
    found = torch.cat(line.means())
    assert float((found - expected).norm() / expected.norm()) < 1e-5


def test_stages_train_as_they_are_where_nothing_can_be_compiled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = gpt(layers=2)
    use(monkeypatch, no_compiler)
    line = Line(recipe, (0, 2, 4), [(0, 0), (1, 1)])
    compile_stages(line, 3)
    assert caplog.text.count("No working C++ compiler found") == 2
    line.drive(Key(0, 0, 3), batch_of(recipe.training_data(), 0, 3), (0, 1))


class Noisy(nn.Module):
    """Layer that draws random numbers and has running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))

    def forward(self, given: Tensor) -> Tensor:
        out: Tensor = self.inner(given)
        return out


def try_out(model: nn.Module) -> None:
    model(torch.ones(6, 8)).sum().backward()


def stage_of(model: nn.Sequential) -> StageModel:
    return layered_from_sequential(model).build(0, 1)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_compiled_stage_draws_what_others_draw_and_counts_each_sample_once(
    monkeypatch: pytest.MonkeyPatch, recompute: bool
) -> None:
    """Replicas of a stage are compared, and not all of them have a compiler."""
    use(monkeypatch, eager)
    found: list[list[Tensor]] = []
    for compiles in (False, True):
        torch.manual_seed(3)
        model = stage_of(nn.Sequential(Noisy(), nn.Linear(8, 2)))
        if compiles:
            before = torch.get_rng_state()
            compile_layers(model, partial(try_out, model))
            assert model.parts[0]._compiled_call_impl is not None
            assert torch.equal(torch.get_rng_state(), before)
            assert all(one.grad is None for one in model.parameters())
        work = AccumulatedGradient(ParameterVector(model))
        compute = StageCompute([HeldStage(0, 0, model, work)], ComputeSettings(CPU, recompute=recompute, seed=5), None)
        key: Any = Key(0, 0, 6)
        output = compute.forward(key, batch())
        assert output is not None
        compute.backward(key, torch.ones(6, output.shape[1]), [0])
        gradient = whole_vector(work.contribution(torch.zeros(0)))
        found.append([output, gradient, *model.buffers()])
    for plain, one in zip(*found, strict=True):
        torch.testing.assert_close(one, plain)
