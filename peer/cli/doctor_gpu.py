"""``shoal doctor --gpu-memory``: what GPUs of a given memory could train of a run, predicted without any.

The model's tensors have shapes and no values, so it may be of any size. A step's memory is that of its operations, as
on a CPU; kernels of a GPU take some more inside, and ranks of an island one layer's gathered parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich import box
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from shoal.peer.data_places import NOWHERE, DataPlaces
from shoal.peer.machine_memory import memory_text
from shoal.peer.recipes import Recipe, load_recipe
from shoal.peer.training.device import autocast
from shoal.peer.training.step_memory import LossOf, StepMemory, recompute_activations, step_peak
from shoal.swarm.errors import RecipeError
from shoal.swarm.memory_account import account_of
from shoal.swarm.protocol.run_file import RunFile, load_run_file

_CPU = torch.device("cpu")
_RANKS = (1, 8)
_USABLE = 0.9
"""Share of a GPU's memory that a member takes; see ``usable_bytes``."""

_NO_LIMIT = 2**62


@dataclass(frozen=True)
class PredictedMember:
    """A member on ``ranks`` GPUs of ``gpu_bytes`` each.

    ``state_bytes``: on each GPU, beside activations; ``host_bytes``: of the machine; ``samples``: at once on each GPU,
    0 if not one fits; ``recomputes``: whether blocks compute their activations again for that."""

    gpu_bytes: int
    ranks: int
    state_bytes: int
    host_bytes: int
    samples: int
    recomputes: bool


@dataclass(frozen=True)
class PredictedModel:
    """Sizes of a run's model. ``other_bytes``: of frozen parameters and buffers; ``steps``: the memory of a step as it
    is, then with blocks that compute their activations again, None for a model without blocks."""

    run: RunFile
    trained: int
    value_bytes: float
    other_bytes: int
    steps: tuple[StepMemory, StepMemory | None]

    def member(self, gpu_bytes: int, ranks: int) -> PredictedMember:
        """Predict what a member can do with these GPUs."""
        demand = account_of(self.run, value_bytes=self.value_bytes, ranks=ranks).demand()
        state = int(4 * demand.device * self.trained) + self.other_bytes // ranks
        host = int(4 * demand.host * self.trained)
        most = -(-self.run.inner.batch_samples // ranks)
        for recomputes, step in enumerate(self.steps):
            samples = 0 if step is None else min(most, step.samples_in(int(_USABLE * gpu_bytes) - state))
            if samples:
                return PredictedMember(gpu_bytes, ranks, state, host, samples, bool(recomputes))
        return PredictedMember(gpu_bytes, ranks, state, host, 0, recomputes=False)


def predict(run_path: Path, data: DataPlaces = NOWHERE) -> PredictedModel:
    """Predict the memory of a run's whole model. Raises ``RunFileError``, ``RecipeError`` or ``CorpusError``."""
    run = load_run_file(run_path)[1]
    if run.recipe.name == "own":
        raise RecipeError(f"{run_path}: the members of this run bring their own model, which is not known here")
    if run.pipeline is not None:
        raise RecipeError(
            f"{run_path}: --gpu-memory is for whole models, and this run has a [pipeline]: leave the option out, and "
            "its layers are measured on this machine"
        )
    return predicted_model(run, load_recipe(run, data))


def predicted_model(run: RunFile, recipe: Recipe) -> PredictedModel:
    """Predict the memory of a recipe's model. Raises ``RecipeError`` for one whose code needs values."""
    batches = [recipe.training_data().batch([0] * samples) for samples in (1, 2)]
    cast = autocast(_CPU, "bfloat16" if run.inner.precision == "auto" else run.inner.precision)
    try:
        with torch.device("meta"):
            model = recipe.model_from_config(recipe.config())
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            batches = [mode.from_tensor(one) for one in batches]
            _make_weightless(model)

            def loss_of(samples: int) -> Tensor:
                with cast():
                    return recipe.loss(model, batches[samples - 1])

            plain = _step_memory(model, loss_of)
            again = _step_memory(model, loss_of) if recompute_activations(model) else None
    except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        raise RecipeError(
            f"recipe {run.recipe.name!r}: its code needs the model's values, so its memory cannot be predicted: "
            f"{str(error)[:300]}"
        ) from error
    trained = [one for one in model.parameters() if one.requires_grad]
    elements, trained_bytes = sum(one.numel() for one in trained), sum(one.nbytes for one in trained)
    other = sum(one.nbytes for one in (*model.parameters(), *model.buffers())) - trained_bytes
    return PredictedModel(run, elements, trained_bytes / max(1, elements), other, (plain, again))


def _make_weightless(model: nn.Module) -> None:
    """Replace parameters and buffers by tensors on the CPU that have no values; ties between them stay."""
    made: dict[Tensor, Tensor] = {}

    def weightless(one: Tensor) -> Tensor:
        if one not in made:
            empty = torch.empty(one.shape, dtype=one.dtype, device=_CPU)
            is_parameter = isinstance(one, nn.Parameter)
            made[one] = nn.Parameter(empty, requires_grad=one.requires_grad) if is_parameter else empty
        return made[one]

    for part in model.modules():
        for held in (part._parameters, part._buffers):
            for name, one in held.items():
                if one is not None:
                    held[name] = weightless(one)  # type: ignore[assignment]


def _step_memory(model: nn.Module, loss_of: LossOf) -> StepMemory:
    one, two = (step_peak(model, loss_of, samples, _NO_LIMIT) for samples in (1, 2))
    return StepMemory.of(one, two)


def prediction_report(model: PredictedModel, sizes: Sequence[int]) -> RenderableType:
    """Render what members on one and on eight GPUs of each size could do, for a terminal of 80 columns or more."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), collapse_padding=True, pad_edge=False)
    for title in ("GPUs", "state on each", "host memory", "samples at once", "activations"):
        table.add_column(title, justify="left" if title == "activations" else "right", no_wrap=True)
    for size in sizes:
        for ranks in _RANKS:
            one = model.member(size, ranks)
            how = "computed again" if one.recomputes else "kept"
            table.add_row(
                f"{ranks} x {memory_text(size)}",
                memory_text(one.state_bytes),
                memory_text(one.host_bytes),
                str(one.samples) if one.samples else "none fits",
                how if one.samples else "",
            )
    return Group(*(escape(line) for line in _about(model)), table)


def _about(model: PredictedModel) -> Iterator[str]:
    name, (plain, again) = model.run.run.name, model.steps
    yield f"{name}: {model.trained:,} trained parameters; a step takes {_text(plain)}"
    if again is not None:
        yield f"with activations computed again {_text(again)}"


def _text(step: StepMemory) -> str:
    return f"{memory_text(step.once)}, and {memory_text(step.sample)} a sample"
