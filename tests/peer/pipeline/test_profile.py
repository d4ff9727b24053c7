"""Tests of the cache of pipeline/profile: used again, measured again when stale or damaged."""

from pathlib import Path

import pytest
import torch

from shoal.peer.pipeline import profile
from shoal.peer.pipeline.profile import LayerProfile, cached_profile, profile_model
from shoal.peer.recipes import layered_recipe, load_recipe
from shoal.peer.training.device import MemoryBytes
from shoal.swarm.errors import RecipeError
from shoal.swarm.pipeline.planner.model import LayerCost
from shoal.swarm.protocol.run_file import RunFile, parse_run_file

CPU = torch.device("cpu")
DAY_S = 86400.0
LAYERS = (LayerProfile("a", LayerCost(4, 5, 6), 0.1 + 0.2), LayerProfile("b", LayerCost(0, 8, 0), 0.5))

RUN = """
algorithm = "virtual_batch"
[run]
name = "tiny"
[recipe]
name = "gpt"
settings = {{ layers = 3, width = 16, heads = 2, context = 8, tie_embedding = {tied} }}
[data]
source = "stdlib"
[round]
tokens = 3200
{pipeline}
"""


def run_file(tied: bool = False, pipeline: str = "[pipeline]\nmicro_batch = 2") -> RunFile:
    return parse_run_file(RUN.format(tied=str(tied).lower(), pipeline=pipeline))


class Counted:
    def __init__(self) -> None:
        self.times = 0

    def __call__(self) -> tuple[LayerProfile, ...]:
        self.times += 1
        return LAYERS


def test_a_measurement_is_used_again_for_some_days(tmp_path: Path) -> None:
    path, measure = tmp_path / "home" / "measured.json", Counted()
    for now_s in (100.0, 100.0 + 6 * DAY_S):
        assert cached_profile(path, "key", now_s, 2, measure) == LAYERS
    assert measure.times == 1
    assert cached_profile(path, "key", 100.0 + 7 * DAY_S, 2, measure) == LAYERS
    assert measure.times == 2
    assert cached_profile(path, "key", 100.0, 2, measure) == LAYERS
    assert measure.times == 3, "from the future: the clock was wrong"
    assert cached_profile(path, "other", 100.0, 2, measure) == LAYERS
    assert measure.times == 4
    assert cached_profile(path, "key", 100.0, 2, measure) == LAYERS
    assert measure.times == 4, "one beside the other"


def test_a_file_that_is_none_is_measured_anew_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "measured.json"
    cached_profile(path, "key", 100.0, 2, Counted())
    good = path.read_text()
    damaged = [
        "",
        "{",
        "[]",
        "null",
        good[: len(good) // 2],
        good.replace('"seconds"', '"second"'),
        good.replace("0.5", "-0.5"),
        good.replace("0.5", '"0.5"'),
        good.replace("0.5", "1e999"),
        good.replace('"parameters_bytes": 4', '"parameters_bytes": -4'),
        '{"entries": {"key": {"measured_s": 100.0, "layers": []}}}',
    ]
    for text in damaged:
        assert text != good
        path.write_text(text)
        measure = Counted()
        assert cached_profile(path, "key", 100.0, 2, measure) == LAYERS
        assert measure.times == 1, text
        assert cached_profile(path, "key", 100.0, 2, measure) == LAYERS
        assert measure.times == 1
    path.write_bytes(b"\xff\xfe\x00")
    assert cached_profile(path, "key", 100.0, 2, Counted()) == LAYERS


def test_one_of_another_number_of_layers_does_not_count(tmp_path: Path) -> None:
    path, measure = tmp_path / "measured.json", Counted()
    cached_profile(path, "key", 100.0, 2, measure)
    cached_profile(path, "key", 100.0, 3, measure)
    assert measure.times == 2


def test_a_disk_that_refuses_is_no_error(tmp_path: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    assert cached_profile(in_the_way / "measured.json", "key", 100.0, 2, Counted()) == LAYERS


def test_the_oldest_are_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "measured.json"
    for number in range(70):
        cached_profile(path, f"key {number}", float(number), 2, Counted())
    assert sorted(profile._read(path)) == sorted(f"key {number}" for number in range(6, 70))


def test_a_model_in_layers_is_measured_by_layers(tmp_path: Path) -> None:
    run = run_file()
    found = profile_model(run, load_recipe(run), CPU, 0.0, tmp_path / "measured.json")
    assert found.names == ("embedding", "blocks.0", "blocks.1", "blocks.2", "head")
    assert len({one.kind for one in found.layers}) == 3
    layered = layered_recipe(load_recipe(run), run).layers(run.run.seed)
    assert [one.cost.parameters_bytes for one in found.layers] == [layered.parameters_bytes(i) for i in range(5)]
    assert run.pipeline is not None
    assert found.layers[0].cost.activation_bytes == run.pipeline.activation_format.packed_bytes(2 * 8 * 16)
    assert found.micro_batch == 2
    told = found.capability("me", MemoryBytes(1000, 500), 1e6, 0.01)
    assert told.layer_s == tuple(one.seconds for one in found.layers)
    assert sum(told.layer_s) == found.seconds
    assert (told.peer, told.host_bytes, told.device_bytes, told.bandwidth_bps) == ("me", 1000, 500, 1e6)
    assert told.rtt_s == 0.01


def test_the_second_time_nothing_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, run = tmp_path / "measured.json", run_file()
    first = profile_model(run, load_recipe(run), CPU, 0.0, path)
    asked: list[object] = []
    real = profile.profile_layers
    monkeypatch.setattr(profile, "profile_layers", lambda *given: asked.append(given) or real(*given))  # type: ignore[func-returns-value]
    assert profile_model(run, load_recipe(run), CPU, 1.0, path) == first
    assert not asked
    others = [
        run_file(pipeline="[pipeline]\nmicro_batch = 4"),
        run_file(pipeline='[pipeline]\nmicro_batch = 2\nactivations = "float32"'),
        run_file(pipeline='[pipeline]\nmicro_batch = 2\n[inner]\nprecision = "bfloat16"'),
    ]
    for number, other in enumerate(others, 1):
        profile_model(other, load_recipe(other), CPU, 1.0, path)
        assert len(asked) == number


def test_a_model_that_cannot_be_cut_is_measured_whole_where_no_pipeline_needs_it(tmp_path: Path) -> None:
    run = run_file(tied=True, pipeline="")
    found = profile_model(run, load_recipe(run), CPU, 0.0, tmp_path / "measured.json")
    assert found.names == ("the whole model",)
    assert "tie_embedding" in found.whole
    assert found.layers[0].cost.parameters_bytes == 4 * sum(
        one.numel() for one in load_recipe(run).build_model(0).parameters()
    )
    tied = run_file(tied=True)
    with pytest.raises(RecipeError, match="tie_embedding"):
        profile_model(tied, load_recipe(run), CPU, 0.0, tmp_path / "measured.json")
