"""Size of a model, found without building it, and refusals of models that do not fit."""

import math
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
    outline_of,
)
from shoal.peer.training.device import MemoryLimits
from shoal.peer.training.parameters import ParameterVector
from shoal.swarm.errors import DeviceError, RecipeError
from shoal.swarm.memory_account import account_of
from shoal.swarm.protocol.run_file import parse_run_file

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
RUN = parse_run_file('[run]\nname = "x"\n[recipe]\nname = "gpt"\n[round]\ntokens = 8\n')


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
    assert found.value_bytes == 4
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
    assert outline_of(run, recipe, 2**30) == ModelOutline(50_000, 200_000, 0)


@pytest.mark.skipif(sys.platform != "linux", reason="there is no such limit")
def test_that_process_takes_no_more_than_is_allowed(needs_values: Any) -> None:
    run, recipe = needs_values({"width": 10**6})  # 4 GB
    with pytest.raises(DeviceError, match=r"cannot be built within 1\.0 GiB of memory: allow more"):
        outline_of(run, recipe, 2**30)
    run, recipe = needs_values({})
    with pytest.raises(DeviceError, match=r"cannot be built here: KeyError: 'width'"):
        outline_of(run, recipe, 2**30)


# The account --------------------------------------------------------------------------------------------------


DEMAND = account_of(RUN).demand()


class Sized:
    def __init__(self, elements: int, dtype: torch.dtype = torch.float32) -> None:
        self.build_model = lambda seed: nn.Linear(elements, 1, bias=False, dtype=dtype)


def fits(recipe: Sized, device: torch.device, host_bytes: int | None = None, device_bytes: int | None = None) -> bool:
    try:
        check_model_fits(RUN, recipe, device, MemoryLimits(host_bytes, device_bytes))  # type: ignore[arg-type]
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
    of_one = 4 * DEMAND.shared

    def most(limit_bytes: int) -> tuple[Sized, Sized]:
        return Sized(int(limit_bytes / of_one)), Sized(int(limit_bytes / of_one) + 2)

    for usable, given in ((7_200_000, None), (1_000_000, 1_000_000), (9_000_000, 9_000_000), (10_000_000, 20_000_000)):
        enough, more = most(usable)  # others may end their programs, and there is no more than there is
        assert fits(enough, CPU, given)
        assert not fits(more, CPU, given)


@pytest.mark.usefixtures("machine")
def test_a_gpu_and_the_machine_beside_it_have_limits_of_their_own() -> None:
    recipe = Sized(100_000)
    device, host = int(400_000 * DEMAND.device), int(400_000 * DEMAND.host)
    assert device < int(400_000 * DEMAND.shared) > host
    assert fits(recipe, CUDA, host + 1, device + 1)
    assert not fits(recipe, CUDA, host + 1, device - 1)
    assert not fits(recipe, CUDA, host - 1, device + 1)


@pytest.mark.usefixtures("machine")
def test_parameters_of_low_precision_have_masters_beside_them() -> None:
    device = int(400_000 * (0.5 + 1.0 + 1.0 + 2.0))
    recipe = Sized(100_000, torch.bfloat16)
    assert fits(recipe, CUDA, None, device + 1)
    assert not fits(recipe, CUDA, None, device - 1)


@pytest.mark.usefixtures("machine")
def test_a_limit_of_a_gpu_is_refused_where_there_is_none() -> None:
    with pytest.raises(DeviceError, match="limit that with --max-memory"):
        check_model_fits(RUN, Sized(1), CPU, MemoryLimits(None, 1000))  # type: ignore[arg-type]


@pytest.mark.usefixtures("machine")
def test_the_refusal_has_figures_and_says_what_helps() -> None:
    values = DEMAND.shared
    with pytest.raises(DeviceError) as caught:
        check_model_fits(RUN, Sized(2**28), CPU, MemoryLimits(2**20))  # type: ignore[arg-type]
    assert str(caught.value) == (
        f"the run's model has 268,435,456 parameters and takes {values:.1f} GiB of the memory of this machine "
        f"({values:.1f} float32 values for each parameter), and --max-memory allows 1.0 MiB: allow more with "
        f"--max-memory, take a machine with more memory, or give the run a [pipeline], whose members hold a part of "
        f"the model each: {math.ceil(1024 * values):,} stages or more would fit"
    )
    with pytest.raises(DeviceError, match=r"of the memory of cuda .*, and --max-device-memory allows 1\.0 MiB"):
        check_model_fits(RUN, Sized(10**6), CUDA, MemoryLimits(None, 2**20))  # type: ignore[arg-type]
    with pytest.raises(DeviceError, match=r"of this machine .*, and 6\.9 MiB of it can be used: end other programs"):
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
        check_model_fits(RUN, Buffered(), CPU, MemoryLimits(4 * 10**6))  # type: ignore[arg-type]
    check_model_fits(RUN, Buffered(), CPU, MemoryLimits(4 * 10**6 + 1000))  # type: ignore[arg-type]
