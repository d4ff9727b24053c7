"""Size of a model, found without building it, and refusals of models that do not fit."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.peer.layered_models import gpt
from torch import Tensor, nn

from shoal.peer.recipes import model_memory
from shoal.peer.recipes.gpt import GptRecipe
from shoal.peer.recipes.model_memory import (
    ModelOutline,
    check_layers_fit,
    check_model_fits,
    check_start_fits,
    held_copies,
    outline_of,
)
from shoal.peer.training.parameters import ParameterVector
from shoal.swarm.errors import DeviceError, RecipeError
from shoal.swarm.protocol.run_file import RunFile, parse_run_file

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
RUN = parse_run_file('[run]\nname = "x"\n[recipe]\nname = "gpt"\n[round]\ntokens = 8\n')
PIPELINE = parse_run_file(
    'algorithm = "virtual_batch"\n[run]\nname = "x"\n[recipe]\nname = "gpt"\n[round]\ntokens = 8\n'
    "[pipeline]\nmicro_batch = 1\n"
)


class Ways:
    """A recipe with constructs that recipes use while they build a model."""

    def __init__(self, elements: int = 1000) -> None:
        self.elements = elements

    def build_model(self, seed: int) -> nn.Module:
        generator = torch.Generator().manual_seed(seed)
        with torch.device("cpu"):
            model = nn.Sequential(nn.Linear(self.elements, 1000, bias=False), nn.BatchNorm1d(1000), nn.LSTM(10, 20))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(generator=generator)
            model[0].weight.copy_(torch.randn(1000, self.elements, generator=generator, device="cpu") * 0.1)
        nn.init.trunc_normal_(model[0].weight)
        nn.init.orthogonal_(model[2].weight_ih_l0)  # type: ignore[arg-type]
        model.register_buffer("table", torch.from_numpy(np.ones((7, 5), dtype=np.float32)))
        model.bias = nn.Parameter(torch.tensor([1.0, 2.0]) * torch.randperm(2, generator=generator))
        model[1].bias.requires_grad_(False)
        return model.float()


@pytest.mark.parametrize("recipe", [Ways(), gpt()])
def test_the_outline_is_that_of_the_model(recipe: Any) -> None:
    model = recipe.build_model(1)
    found = outline_of(RUN, recipe, 2**30)
    assert found.trained == ParameterVector(model).elements
    others = [*(one for one in model.parameters() if not one.requires_grad), *model.buffers()]
    assert found.other_bytes == sum(one.numel() * one.element_size() for one in others)
    if isinstance(recipe, GptRecipe):
        layered = recipe.layers(1)
        assert found.layers == tuple(layered.parameters_bytes(number) // 4 for number in range(len(layered)))


def test_a_model_of_any_size_has_one() -> None:
    found = outline_of(RUN, Ways(10**10), 2**30)  # type: ignore[arg-type]
    assert 10**13 < found.trained < 10**13 + 10**5


def test_it_does_not_touch_random_numbers() -> None:
    before = torch.get_rng_state()
    outline_of(RUN, Ways(), 2**30)  # type: ignore[arg-type]
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.ones(2).sum() == 2, "and what is made afterwards has values"


def test_what_a_recipe_refuses_is_its_own_refusal() -> None:
    class Refusing(Ways):
        def build_model(self, seed: int) -> nn.Module:
            raise RecipeError("no such depth")

    with pytest.raises(RecipeError, match="no such depth"):
        outline_of(RUN, Refusing(), 2**30)  # type: ignore[arg-type]


# A recipe that needs values -----------------------------------------------------------------------------------

PACKAGE = """
import torch
from torch import nn

class Recipe:
    tokens_per_sample = 1
    corpus_digest = bytes(32)
    corpus_about = ""

    def __init__(self, settings, data, folders=()):
        self.settings = settings

    def build_model(self, seed):
        width = int(torch.ones(self.settings["width"]).sum().item())
        return nn.Linear(width, 1000, bias=False)
"""


@pytest.fixture
def needs_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An installed recipe, so that another process finds it, too."""
    (tmp_path / "needs_values.py").write_text(PACKAGE)
    about = tmp_path / "needs_values-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: needs_values\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[shoal.recipes]\nneeds-values = needs_values:Recipe\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield lambda width: (
        RUN.model_copy(update={"recipe": RUN.recipe.model_copy(update={"name": "needs-values", "settings": width})}),
        __import__("needs_values").Recipe(width, None),
    )
    sys.modules.pop("needs_values", None)


def test_a_recipe_that_needs_values_is_built_by_another_process(needs_values: Any) -> None:
    run, recipe = needs_values({"width": 50})
    assert outline_of(run, recipe, 2**30) == ModelOutline(50_000, 0)


@pytest.mark.skipif(sys.platform != "linux", reason="there is no such limit")
def test_that_process_takes_no_more_than_is_allowed(needs_values: Any) -> None:
    run, recipe = needs_values({"width": 10**6})  # 4 GB
    with pytest.raises(DeviceError, match=r"cannot be built within 1\.0 GiB of memory: allow more"):
        outline_of(run, recipe, 2**30)
    run, recipe = needs_values({})
    with pytest.raises(DeviceError, match=r"cannot be built here: KeyError: 'width'"):
        outline_of(run, recipe, 2**30)


# The account --------------------------------------------------------------------------------------------------


def test_a_parameter_takes_so_many_values() -> None:
    assert held_copies(RUN, CPU) == pytest.approx(9.2)  # itself, gradient, AdamW's 2, anchor, momentum, averaging 3.2
    assert held_copies(RUN, CUDA) == 4.0
    assert held_copies(PIPELINE, CUDA) < held_copies(PIPELINE, CPU)


class Sized:
    def __init__(self, elements: int) -> None:
        self.build_model = lambda seed: nn.Linear(elements, 1, bias=False)


def fits(run: RunFile, elements: int, device: torch.device, limit_bytes: int | None) -> bool:
    try:
        check_model_fits(run, Sized(elements), device, limit_bytes)  # type: ignore[arg-type]
    except DeviceError:
        return False
    return True


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with 10 MB, of which 8 are free."""
    for name, size in (("memory_bytes", 10_000_000), ("available_bytes", 8_000_000)):
        monkeypatch.setattr(model_memory, name, lambda device, size=size: size)
    monkeypatch.setattr(model_memory, "usable_bytes", lambda device, limit: 7_200_000)


@pytest.mark.usefixtures("machine")
def test_what_does_not_fit_is_refused() -> None:
    of_one = 4 * 9.2
    assert fits(RUN, int(7_200_000 / of_one), CPU, None)
    assert not fits(RUN, int(7_200_000 / of_one) + 2, CPU, None)
    assert fits(RUN, int(1_000_000 / of_one), CPU, 1_000_000)
    assert not fits(RUN, int(1_000_000 / of_one) + 2, CPU, 1_000_000)
    assert fits(RUN, int(9_000_000 / of_one), CPU, 9_000_000), "others may end their programs"
    assert not fits(RUN, int(11_000_000 / of_one), CPU, 20_000_000), "there is no more than there is"


@pytest.mark.usefixtures("machine")
def test_beside_a_gpu_the_machine_needs_memory_too() -> None:
    assert fits(RUN, 300_000, CUDA, 5_000_000)  # 4.8 MB there, 6.2 MB here
    assert not fits(RUN, 300_000, CUDA, 4_000_000)
    assert not fits(RUN, 400_000, CUDA, 9_000_000)  # 8.3 MB here


@pytest.mark.usefixtures("machine")
def test_the_refusal_has_figures_and_says_what_helps() -> None:
    with pytest.raises(DeviceError) as caught:
        check_model_fits(RUN, Sized(10**12), CPU, 2**20)  # type: ignore[arg-type]
    assert str(caught.value) == (
        "the run's model has 1,000,000,000,000 parameters and takes 33.5 TiB here (9.2 float32 values for each "
        "parameter), and --max-memory allows 1.0 MiB: allow more, take a machine with more memory, or give the run a "
        "[pipeline], whose members hold a part of the model each"
    )
    with pytest.raises(DeviceError, match=r"6\.9 MiB of the memory of this machine can be used"):
        check_start_fits(RUN, Sized(10**9))  # type: ignore[arg-type]
    check_start_fits(RUN, Sized(10**6))  # type: ignore[arg-type]


def test_one_layer_with_its_gradients_has_to_fit() -> None:
    recipe: GptRecipe = gpt()
    largest = max(outline_of(RUN, recipe, 2**30).layers)
    check_layers_fit(RUN, recipe, 8 * largest)
    with pytest.raises(DeviceError, match=f"the largest layer of the run's model has {largest:,} parameters"):
        check_layers_fit(RUN, recipe, 8 * largest - 1)


def test_buffers_count(monkeypatch: pytest.MonkeyPatch) -> None:
    class Buffered(Sized):
        def __init__(self) -> None:
            def build(seed: int) -> nn.Module:
                model = nn.Linear(2, 1)
                table: Tensor = torch.zeros(10**6)
                model.register_buffer("table", table)
                return model

            self.build_model = build

    monkeypatch.setattr(model_memory, "memory_bytes", lambda device: 2**40)
    with pytest.raises(DeviceError):
        check_model_fits(RUN, Buffered(), CPU, 4 * 10**6)  # type: ignore[arg-type]
    check_model_fits(RUN, Buffered(), CPU, 4 * 10**6 + 1000)  # type: ignore[arg-type]
