"""Two stages on one device, from two threads each with others that carry their tensors, have the unsplit gradient."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from tests.peer.devices import devices
from tests.peer.layered_models import batch_of, gpt

from shoal.compression.formats import CodecError
from shoal.compression.registry import get_codec

MICRO_BATCHES, IN_FLIGHT = 12, 3


def batches() -> list[torch.Tensor]:
    """Of unequal sizes, so that weights matter."""
    stops = [0]
    for number in range(MICRO_BATCHES):
        stops.append(stops[-1] + 1 + number % 3)
    data = gpt().training_data()
    return [batch_of(data, start, stop) for start, stop in pairwise(stops)]


def two_stages(device: torch.device, precision: str, codec: str = "float32") -> Any:
    from pipeline_gpu import TwoStages

    return TwoStages(gpt(), device, precision, get_codec(codec), IN_FLIGHT)


@devices
@pytest.mark.parametrize(
    ("precision", "codec", "within"),
    [("float32", "float32", 1e-5), ("bfloat16", "float32", 1e-2), ("float32", "int8", 2e-2)],
)
def test_two_stages_on_one_device_have_the_gradient_of_the_unsplit_model(
    device: torch.device, precision: str, codec: str, within: float
) -> None:
    from pipeline_gpu import Unsplit, apart

    stages, unsplit = two_stages(device, precision, codec), Unsplit(gpt(), device, precision)
    for _ in range(2):  # the second time streams, memory and pinned memory are used again
        stages.train(batches())
        unsplit.train(batches())
        assert apart(stages.gradient(), unsplit.gradient()) < within


@devices
def test_bfloat16_is_close_to_float32(device: torch.device) -> None:
    from pipeline_gpu import apart

    exact, cast = two_stages(device, "float32"), two_stages(device, "bfloat16")
    for one in (exact, cast):
        one.train(batches())
    assert 1e-4 < apart(cast.gradient(), exact.gradient()) < 5e-2


@pytest.mark.timeout(60)
@devices
@pytest.mark.parametrize("broken", [0, 1])
def test_what_one_stage_cannot_pack_ends_both(device: torch.device, broken: int) -> None:
    stages = two_stages(device, "float32")
    side = stages._sides[broken]
    side.vector.write(torch.full((side.vector.elements,), torch.nan))
    with pytest.raises(CodecError):
        stages.train(batches())


def test_the_ratio_is_of_what_runs_have_by_default() -> None:
    from pipeline_gpu import ratios_of

    rows = [
        {"precision": precision, "activations": codec, "stages / unsplit": ratio}
        for precision, codec, ratio in (
            ("bfloat16", "int8", 0.5),
            ("bfloat16", "float32", 0.4),
            ("float32", "float32", 0.3),
        )
    ]
    assert ratios_of(rows) == {"stages_vs_unsplit_tokens_s": 0.5, "stages_vs_unsplit_tokens_s_float32": 0.3}
    assert set(ratios_of([]).values()) == {None}
