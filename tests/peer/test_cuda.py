"""Tests of peer/ on CUDA; skipped on other machines."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tests.fakes.gradients import take_gradients
from tests.peer.checkpoints.making import MemorySource
from tests.peer.layered_models import Key, Line, SquaredError, batch_of, gpt
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.compression.range_reader import whole_vector
from shoal.peer.checkpoints.local_state import LocalStateContent, SavedLocalState, local_state_tree
from shoal.peer.pipeline.compute import ComputeSettings, HeldStage, StageCompute
from shoal.peer.training.algorithms import AccumulatedGradient, OverlappedPseudoGradient, PseudoGradient
from shoal.peer.training.device import (
    MemoryLimits,
    autocast,
    choose_device,
    describe_device,
    free_bytes,
)
from shoal.peer.training.device_streams import streams_of
from shoal.peer.training.inner_loop import InnerLoop, LossScale
from shoal.peer.training.inner_optimizer import make_inner
from shoal.peer.training.layers import layered_from_sequential
from shoal.peer.training.parameters import ParameterVector
from shoal.peer.training.step_memory import plan_micro_batch
from shoal.peer.training.tensor_sequence import TensorSequence
from shoal.swarm.memory_account import MemoryDemand
from shoal.swarm.protocol.run_file import InnerSection

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def make_model(device: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 64)).to(device)


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    logits = model(batch[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())


def make_batch() -> Tensor:
    return torch.randint(0, 64, (8, 17), generator=torch.Generator().manual_seed(1))


def test_parameters_go_to_the_device_and_back_bit_for_bit() -> None:
    vector = ParameterVector(make_model("cuda"))
    values = torch.randn(vector.elements)
    vector.write(values)
    assert torch.equal(whole_vector(vector), values)


def test_micro_batches_give_the_gradient_of_the_batch() -> None:
    whole, parts = make_model("cuda"), make_model("cuda")
    batch = make_batch()
    expected = InnerLoop(whole, loss_of, autocast(torch.device("cuda"), "float32"), 8).backward(batch)
    found = InnerLoop(parts, loss_of, autocast(torch.device("cuda"), "float32"), 3).backward(batch)
    assert float(found) == pytest.approx(float(expected), rel=1e-5)
    torch.testing.assert_close(
        take_gradients(ParameterVector(parts)), take_gradients(ParameterVector(whole)), rtol=1e-4, atol=1e-6
    )


def test_gradients_on_cuda_agree_with_the_cpu() -> None:
    contributions = []
    for device in ("cpu", "cuda"):
        model = make_model("cpu").to(device)
        work = AccumulatedGradient(ParameterVector(model))
        InnerLoop(model, loss_of, autocast(torch.device(device), "float32"), 8).backward(make_batch())
        work.step(8, 1.0)
        contributions.append(whole_vector(work.contribution(torch.zeros(0))))
    assert contributions[1].device.type == "cpu"
    torch.testing.assert_close(contributions[1], contributions[0], rtol=1e-3, atol=1e-5)


def test_bfloat16_training_moves_the_parameters_down_the_loss() -> None:
    device = choose_device("auto")
    assert device.type == "cuda"
    model = make_model("cuda")
    vector = ParameterVector(model)
    anchor = whole_vector(vector)
    work = PseudoGradient(vector, make_inner(model, InnerSection(lr=1e-2)), 1.0)
    loop = InnerLoop(model, loss_of, autocast(device, "auto"), 8)
    losses = []
    for _ in range(20):
        losses.append(float(loop.backward(make_batch())))
        work.step(8, 1.0)
    assert losses[-1] < losses[0]
    contribution = whole_vector(work.contribution(anchor))
    assert contribution.device.type == "cpu"
    assert torch.isfinite(contribution).all()
    assert contribution.abs().max() > 0
    work.restart_from(anchor)
    assert torch.equal(whole_vector(vector), anchor)


def test_float16_trains_with_a_scaled_loss() -> None:
    device, model = torch.device("cuda"), make_model("cuda")
    optimizer = make_inner(model, InnerSection(lr=1e-2))
    assert optimizer.defaults["fused"]
    work = PseudoGradient(ParameterVector(model), optimizer, 1.0)
    loop = InnerLoop(model, loss_of, autocast(device, "float16"), 4, LossScale(model.parameters()))
    losses = []
    for _ in range(20):
        losses.append(float(loop.backward(make_batch())))
        work.step(8, 1.0)
    assert losses[-1] < losses[0]


def test_overlapped_rounds_are_exact_without_work_and_keep_it_otherwise() -> None:
    model = nn.Sequential(nn.Linear(1500, 1500), nn.Linear(1500, 3).to(torch.float64)).to("cuda")  # several pieces
    vector = ParameterVector(model)
    work = OverlappedPseudoGradient(vector, make_inner(model, InnerSection()), 1.0)
    anchor, following = whole_vector(vector), torch.randn(vector.elements)
    reader = work.contribution(anchor)
    with ThreadPoolExecutor(4) as pool:
        parts = [(at, min(at + 100_000, reader.elements)) for at in range(0, reader.elements, 100_000)]
        found = torch.ones(reader.elements)
        list(pool.map(lambda one: reader.read(*one, found[slice(*one)]), parts))
    assert torch.equal(found, torch.zeros(reader.elements))
    work.continue_from(following)
    assert torch.equal(whole_vector(vector), following)
    work.contribution(following)
    vector.write(following + 1)
    work.continue_from(anchor)
    torch.testing.assert_close(whole_vector(vector), anchor + 1)


def test_a_contribution_is_read_beside_later_work() -> None:
    """A reader waits for its own moment, not for what the training thread has queued since."""
    weights = [torch.ones(1000, 1000, device="cuda")]
    reader, out = TensorSequence(weights).settled(), torch.zeros(10)
    torch.cuda._sleep(2_000_000_000)  # about a second
    later = streams_of(torch.device("cuda")).mark()
    reader.read(0, 10, out)
    assert not later.is_reached()
    assert torch.equal(out, torch.ones(10))
    later.wait()


def test_marks_tell_the_devices_time() -> None:
    streams = streams_of(torch.device("cuda"))
    began = streams.mark()
    torch.cuda._sleep(100_000_000)
    ended = streams.mark()
    ended.wait()
    assert 0.02 < ended.seconds_since(began) < 1.0


def test_memory_is_measured() -> None:
    device = torch.device("cuda")
    model = make_model("cuda")
    room = free_bytes(device, model, MemoryLimits(), MemoryDemand(2.0, 2.0, 4.0))
    assert 0 < room < torch.cuda.get_device_properties(device).total_memory
    batch = make_batch().to(device)
    assert plan_micro_batch(model, lambda samples: loss_of(model, batch[:samples]), 8, room) == 8
    assert describe_device("cuda").memory_bytes > 0


def test_an_optimizers_state_is_written_and_read_where_it_is() -> None:
    model = make_model("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step() -> None:
        loss_of(model, make_batch().cuda()).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    def moments() -> list[Tensor]:
        return [one for state in optimizer.state.values() for one in state.values()]

    step()
    for copies in (False, True):
        content = LocalStateContent.of(local_state_tree(optimizer, model))
        content.wait_for_device()
        expected, held = [one.cpu().clone() for one in moments()], [one.data_ptr() for one in moments()]
        if copies:
            content = content.copy()
            assert content.copying is not None
            loss_of(model, make_batch().cuda()).backward()  # type: ignore[no-untyped-call]
            content.copying.complete()
            step()
        data = b"".join(map(bytes, content.pieces()))
        step()
        saved = SavedLocalState(MemorySource({"peer.safetensors": data}))
        saved.restore(optimizer, model)
        assert all(torch.equal(one.cpu(), two) for one, two in zip(moments(), expected, strict=True))
        assert [one.data_ptr() for one in moments()] == held


# Pipeline stages ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_stages_on_cuda_have_the_gradient_of_the_whole(precision: str) -> None:
    recipe, device = gpt(), torch.device("cuda")
    batch = batch_of(recipe.training_data(), 0, 4)
    model = recipe.build_model(1).to(device)
    InnerLoop(model, recipe.loss, autocast(device, precision), 4).backward(batch)
    expected = take_gradients(ParameterVector(model)).cpu()
    for recompute in (False, True):
        line = Line(
            recipe,
            (0, 2, 4, 6),
            [(0, 0), (1, 1), (2, 2)],
            device=device,
            recompute=recompute,
            autocast=autocast(device, precision),
        )
        line.drive(Key(0, 0, 4), batch, (0, 1, 2))
        difference = torch.linalg.vector_norm(torch.cat(line.means()) - expected)
        assert float(difference / torch.linalg.vector_norm(expected)) < (1e-5 if precision == "float32" else 1e-2)


def test_what_layers_draw_on_cuda_is_drawn_again() -> None:
    device = torch.device("cuda")
    contributions = []
    for recompute in (False, True):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Linear(8, 2))
        layered = layered_from_sequential(model)
        stages = [layered.build(0, 2).to(device), layered.build(2, 3).to(device)]
        works = [AccumulatedGradient(ParameterVector(one)) for one in stages]
        settings = ComputeSettings(device, recompute=recompute, seed=5)
        first = StageCompute([HeldStage(0, 0, stages[0], works[0])], settings, None)
        last = StageCompute([HeldStage(1, 2, stages[1], works[1])], settings, SquaredError())
        key = Key(0, 0, 4)
        torch.rand(3, device=device)
        state = torch.cuda.get_rng_state(device)
        output = first.forward(key, torch.ones(4, 8))
        assert output is not None
        assert last.forward(key, output) is None
        gradient = last.backward(key, torch.zeros(4, 2), {1}).input_gradient
        assert gradient is not None
        first.backward(key, gradient, {0})
        assert torch.equal(torch.cuda.get_rng_state(device), state)
        contributions.append([whole_vector(one.contribution(torch.zeros(0))) for one in works])
    for one, other in zip(*contributions, strict=True):
        torch.testing.assert_close(one, other)
