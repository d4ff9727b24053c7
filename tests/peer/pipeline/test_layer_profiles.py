"""Tests of pipeline/profile: single layers' exact bytes, and seconds above zero."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from shoal.compression.registry import get_codec
from shoal.peer.pipeline.profile import LayerProfile, ProfileSetup, profile_layers
from shoal.swarm.errors import DeviceError

CPU = torch.device("cpu")


class Scaled(nn.Module):
    """A setting that no shape shows."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, given: Tensor) -> Tensor:
        return given * self.weight * self.factor


def measured(layers: Sequence[nn.Module], given: Tensor, bench: ProfileSetup | None = None) -> tuple[LayerProfile, ...]:
    """Checks that of each kind one layer is built."""
    built: list[int] = []

    def build(number: int) -> nn.Module:
        built.append(number)
        return layers[number]

    found = profile_layers(
        [(one,) for one in layers], build, given, lambda output: output.sum(), bench or ProfileSetup(CPU)
    )
    kinds = [one.kind for one in found]
    assert built == [kinds.index(kind) for kind in dict.fromkeys(kinds)]
    assert len(found) == len(layers)
    assert all(one.seconds > 0 for one in found)
    return found


def test_every_cost_is_counted_in_bytes() -> None:
    layers = [nn.Embedding(10, 8), nn.Sequential(nn.Linear(8, 16), nn.Tanh()), nn.Linear(16, 4)]
    embedding, block, head = (one.cost for one in measured(layers, torch.zeros(3, 5, dtype=torch.int64)))
    assert embedding.parameters_bytes == 4 * 80
    assert embedding.activation_bytes == 4 * 3 * 5 * 8
    assert embedding.kept_bytes == 8 * 15, "the tokens, int64"
    assert block.parameters_bytes == 4 * (8 * 16 + 16)
    assert block.activation_bytes == 4 * 15 * 16
    assert block.kept_bytes == 4 * 15 * (8 + 16), "its input, and what tanh gives"
    assert head.activation_bytes == 4 * 15 * 4, "the output's, not the loss's"


def test_frozen_parameters_are_not_trained() -> None:
    layers = [nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)]
    layers[1].requires_grad_(False)
    costs = [one.cost.parameters_bytes for one in measured(layers, torch.zeros(2, 8))]
    assert costs == [4 * 72, 0, 4 * 72]


def test_layers_of_one_kind_are_measured_once() -> None:
    layers: list[nn.Module] = [nn.Linear(8, 8), *(nn.Linear(8, 8) for _ in range(5)), nn.Linear(8, 8)]
    found = measured(layers, torch.zeros(2, 8))
    assert len({one.kind for one in found}) == 3, "the first needs no gradient of its input, the last has the loss"
    assert len(set(found[1:6])) == 1


@pytest.mark.parametrize(
    "others",
    [
        [Scaled(1.0), Scaled(2.0)],
        [nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Sequential(nn.Linear(8, 8), nn.ReLU())],
        [nn.Linear(8, 8), nn.Linear(8, 8, bias=False)],
        [nn.Linear(8, 16), nn.Linear(16, 8)],
        [nn.Conv1d(8, 8, 3, padding=1), nn.Conv1d(8, 8, 3, padding=2)],
    ],
    ids=["settings", "modules", "parameters", "shapes", "convolutions"],
)
def test_other_layers_are_of_other_kinds(others: list[nn.Module]) -> None:
    given = torch.zeros(2, 8, 8)
    kinds = [one.kind for one in measured([nn.Linear(8, 8), *others, nn.Tanh()], given)]
    assert len(set(kinds)) == 4


def test_a_layer_of_the_same_kind_is_measured_again_at_another_shape() -> None:
    pool = [nn.AvgPool1d(2) for _ in range(4)]
    found = measured([nn.Conv1d(8, 8, 1), *pool], torch.zeros(2, 8, 32))
    assert [one.cost.activation_bytes for one in found] == [4 * 16 * size for size in (32, 16, 8, 4, 2)]
    assert len({one.kind for one in found}) == 5


def test_outputs_count_as_they_are_sent() -> None:
    codec = get_codec("int8")
    bench = ProfileSetup(CPU, sent_bytes=codec.packed_bytes)
    found = measured([nn.Linear(8, 64)], torch.zeros(2, 8), bench)
    assert found[0].cost.activation_bytes == codec.packed_bytes(128) < 4 * 128


def test_bfloat16_keeps_fewer_bytes() -> None:
    layers = [nn.Linear(64, 64), nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), nn.Linear(64, 64)]
    cast = ProfileSetup(CPU, lambda: torch.autocast("cpu", torch.bfloat16))
    plain = measured(layers, torch.ones(256, 64))[1].cost.kept_bytes
    assert measured(layers, torch.ones(256, 64), cast)[1].cost.kept_bytes < plain


def too_large_for_the_cpu() -> None:
    torch.empty(10**15)


def too_large_for_a_gpu() -> None:
    raise torch.OutOfMemoryError("no")


@pytest.mark.parametrize("fails", [too_large_for_the_cpu, too_large_for_a_gpu])
def test_a_device_without_room_is_a_device_error(fails: Callable[[], None]) -> None:
    class Large(nn.Module):
        def forward(self, given: Tensor) -> Tensor:
            fails()
            return given

    with pytest.raises(DeviceError, match="not enough memory"):
        measured([Large()], torch.zeros(2, 8))


def test_the_first_layer_makes_no_gradient_of_its_input_and_the_last_has_the_loss() -> None:
    wanted: list[bool] = []

    class Asks(nn.Linear):
        def forward(self, given: Tensor) -> Tensor:
            if torch.is_grad_enabled():
                wanted.append(given.requires_grad)
            return super().forward(given)

    layers = [Asks(8, 8) for _ in range(2)]
    given = torch.ones(3, 8)
    found = profile_layers(
        [(one,) for one in layers], layers.__getitem__, given, lambda output: output.square().sum(), ProfileSetup(CPU)
    )
    half = len(wanted) // 2
    assert wanted == [False] * half + [True] * half
    assert [one.cost.kept_bytes for one in found] == [4 * 3 * 8, 2 * 4 * 3 * 8], "its input; and what is squared"
