"""What `shoal doctor` finds and says."""

import io
import socket
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from shoal.peer.cli import doctor
from shoal.peer.cli.doctor import Diagnosis, advice, examine, largest_span, report
from shoal.peer.cli.main import app
from shoal.peer.pipeline.profile import LayerProfile, ModelProfile
from shoal.peer.training import device as capability
from shoal.peer.training.device import MemoryBytes, MemoryLimits
from shoal.swarm.errors import DeviceError, RecipeError, RunFileError
from shoal.swarm.memory_account import account_of
from shoal.swarm.pipeline.planner.model import LayerCost
from shoal.swarm.protocol.types import DeviceInfo

RUN = """
algorithm = "virtual_batch"
[run]
name = "tiny"
[recipe]
name = "gpt"
settings = { layers = 3, width = 16, heads = 2, context = 8, tie_embedding = false }
[data]
source = "stdlib"
[round]
tokens = 3200
[pipeline]
micro_batch = 2
"""


def diagnosis(
    span: tuple[int, int] = (0, 3),
    limits: MemoryLimits = MemoryLimits(),  # noqa: B008
    usable: MemoryBytes = MemoryBytes(9 * 2**30, None),  # noqa: B008
    layer: MemoryBytes = MemoryBytes(2**26, None),  # noqa: B008
    **changes: bool,
) -> Diagnosis:
    layers = tuple(LayerProfile(kind, LayerCost(2**22, 2**20, 2**24), 0.25) for kind in "abb")
    return Diagnosis(
        run="run",
        device=DeviceInfo(kind="cpu", name="x86_64 CPU, 2 threads", memory_bytes=10 * 2**30),
        usable=usable,
        limits=limits,
        precision="float32",
        model=ModelProfile(8, ("embedding", "blocks.0", "blocks.1"), layers),
        layer_bytes=(layer,) * 3,
        span=span,
        has_numba=changes.get("has_numba", True),
        has_idle_gpu=changes.get("has_idle_gpu", False),
        port_is_free=changes.get("port_is_free", True),
    )


def text_of(found: Diagnosis, width: int = 80) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(report(found))
    return out.getvalue()


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20), st.integers(0, 20)), max_size=8),
    st.integers(0, 60),
    st.none() | st.integers(0, 60),
)
def test_the_largest_span_is_the_largest(layers: list[tuple[int, int, int]], host: int, device: int | None) -> None:
    costs = [LayerCost(parameters, 0, 0) for parameters, *_ in layers]
    sizes = [MemoryBytes(size, None if device is None else other) for _, size, other in layers]
    first, stop = largest_span(costs, sizes, MemoryBytes(host, device))
    spans = [
        (i, j)
        for i in range(len(layers))
        for j in range(i + 1, len(layers) + 1)
        if sum(one.host for one in sizes[i:j]) <= host
        and (device is None or sum(one.device or 0 for one in sizes[i:j]) <= device)
    ]
    if not spans:
        assert (first, stop) == (0, 0)
        return
    assert (first, stop) in spans
    held = sum(one.parameters_bytes for one in costs[first:stop])
    assert held == max(sum(one.parameters_bytes for one in costs[i:j]) for i, j in spans)


def test_a_machine_that_holds_everything_is_told_so() -> None:
    assert list(advice(diagnosis())) == [
        "The whole model fits: this machine can train alone, or hold any stage of a pipeline."
    ]


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (diagnosis((1, 3)), "2 of 3 layers, 67% of the parameters"),
        (diagnosis((0, 0)), "the smallest takes 64.0 MiB: end other programs"),
        (diagnosis((0, 0), MemoryLimits(2**20), MemoryBytes(2**20, None)), "allow a larger --max-memory"),
        (
            diagnosis((0, 0), MemoryLimits(None, 2**20), MemoryBytes(2**30, 2**20), MemoryBytes(2**25, 2**26)),
            "the smallest takes 64.0 MiB on the GPU and 32.0 MiB of the machine's memory: allow a larger "
            "--max-device-memory",
        ),
        (
            diagnosis(usable=MemoryBytes(2**32, None), limits=MemoryLimits(2**33)),
            "Of the 8.0 GiB of --max-memory only 4.0 GiB are free now",
        ),
        (diagnosis(usable=MemoryBytes(2**32, None)), "More than half of the memory is in use"),
        (diagnosis(has_idle_gpu=True), "leave --device out"),
        (diagnosis(has_numba=False), "pip install 'shoal[fast]'"),
        (diagnosis(port_is_free=False), "--bind 0.0.0.0:PORT"),
    ],
    ids=["a stage", "nothing", "capped", "capped on the gpu", "above", "busy", "gpu", "numba", "port"],
)
def test_advice_is_given_where_there_is_any(found: Diagnosis, says: str) -> None:
    assert says in " ".join(text_of(found).split())
    assert says not in " ".join(text_of(diagnosis()).split())


def test_a_limit_of_ones_own_is_not_the_other_programs_fault() -> None:
    assert "other programs" not in text_of(diagnosis(usable=MemoryBytes(2**30, None), limits=MemoryLimits(2**30)))


def test_eighty_columns_are_enough() -> None:
    lines = text_of(diagnosis()).splitlines()
    assert all(len(line) <= 80 for line in lines)
    row = next(line for line in lines if line.strip().startswith("blocks.0"))
    assert row.split() == [
        "blocks.0",
        "…",
        "blocks.1",
        "2",
        "1,048,576",
        "250.0",
        "ms",
        "1.0",
        "MiB",
        "16.0",
        "MiB",
        "64.0",
        "MiB",
    ]
    assert any("1.33 micro-batches of 8 samples a second" in line for line in lines)
    assert any("9.0 GiB usable of 10.0 GiB" in line for line in lines)


def test_with_a_gpu_both_memories_have_a_column() -> None:
    text = text_of(diagnosis(usable=MemoryBytes(2**30, 2**29), layer=MemoryBytes(2**27, 2**26)), 100)
    assert "512.0 MiB usable of 10.0 GiB, and 1.0 GiB of the machine's" in text
    row = next(line for line in text.splitlines() if line.strip().startswith("blocks.0"))
    assert row.split()[-4:] == ["64.0", "MiB", "128.0", "MiB"]
    assert all(
        len(line) <= 80 for line in text_of(diagnosis(usable=MemoryBytes(1, 1), layer=MemoryBytes(1, 1))).splitlines()
    )


def test_this_machine_is_examined(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    found = examine(path, "cpu", MemoryLimits(), tmp_path / "measured.json")
    assert found.is_whole
    assert found.share == 1
    assert found.precision == "float32"
    smallest, largest = (pick(one.host for one in found.layer_bytes) for pick in (min, max))
    assert smallest < largest
    capped = examine(path, "cpu", MemoryLimits(largest), tmp_path / "measured.json")
    assert not capped.is_whole
    assert 0 < capped.share < 1
    assert examine(path, "cpu", MemoryLimits(smallest - 1), tmp_path / "measured.json").span == (0, 0)


def test_a_layers_state_counts_as_the_plan_has_it() -> None:
    cost = LayerCost(10**6, 1000, 1000)
    run = doctor.parse_run_file(RUN + '[outer]\noptimizer = "adamw"\n')
    assert run.pipeline is not None
    waiting = 1000 * run.pipeline.in_flight
    demand = account_of(run).demand()
    assert doctor.held_bytes(cost, run, torch.device("cpu")).host == int(demand.shared * 10**6) + waiting
    beside = doctor.held_bytes(cost, run, torch.device("cuda"))
    assert beside == MemoryBytes(int(demand.host * 10**6), int(demand.device * 10**6) + waiting)


def test_a_machine_without_memory_is_a_device_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    monkeypatch.setattr(capability, "available_bytes", lambda device: 0)
    with pytest.raises(DeviceError, match="end other programs"):
        examine(path, "cpu", MemoryLimits(), tmp_path / "measured.json")


def test_what_cannot_be_examined_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunFileError):
        examine(tmp_path / "none.toml", "cpu", MemoryLimits(), tmp_path / "measured.json")
    path = tmp_path / "own.toml"
    path.write_text('[run]\nname = "x"\n[recipe]\nname = "own"\n[data]\nsource = "own"\n[round]\ntokens = 1\n')
    with pytest.raises(RecipeError, match="their own model"):
        examine(path, "cpu", MemoryLimits(), tmp_path / "measured.json")


def test_the_usual_model_is_the_example_in_layers() -> None:
    run = doctor.parse_run_file(doctor._USUAL)
    example = doctor.load_run_file(Path(__file__).parents[3] / "examples" / "stdlib.toml")[1]
    assert run.recipe.settings == {**example.recipe.settings, "tie_embedding": False}


def test_a_port_that_somebody_has_is_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        assert not doctor._is_free(taken.getsockname()[1])


def test_the_command_prints_and_ends_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.examine, "__defaults__", (tmp_path / "measured.json",))
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    alone = ["--bind", "127.0.0.1", "--no-port-mapping"]
    done = CliRunner().invoke(app, ["doctor", str(path), "--device", "cpu", "--max-memory", "2G", *alone])
    assert done.exit_code == 0, done.output
    assert "tiny" in done.output
    assert "micro-batches of 2 samples a second" in done.output
    assert "nobody has tried from outside" in done.output
    refused = CliRunner().invoke(app, ["doctor", str(path), "--device", "tpu"])
    assert isinstance(refused.exception, DeviceError)
    assert torch.get_num_threads() >= 1
