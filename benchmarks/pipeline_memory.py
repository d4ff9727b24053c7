"""Memory of a pipeline's peers in whole rounds: as the system counts it, and as the plan predicts it."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import await_invite, comma, end_on_sigterm, parser, publish

from shoal.peer.demo.processes import Child
from shoal.peer.recipes import layered_recipe, load_recipe
from shoal.swarm.pipeline.planner.model import state_copies
from shoal.swarm.protocol.run_file import RunFile, parse_run_file

PEERS, ROUNDS = 3, 4
"""Two stages, so that one of them is averaged by two replicas."""
TINY = 256
"""Width of a model whose peak is taken from the others', with what the plan says of it: it has Python's, torch's and
the compiler's own memory, and the data's. Smaller ones are coded without compiled kernels."""
LIMIT_S = 400.0


def toml(width: int, optimizer: str, codec: str) -> str:
    """Much more state than activations."""
    return f"""
algorithm = "virtual_batch"
averaging.codec = "{codec}"
[run]
name = "memory"
rounds = {ROUNDS}
[recipe]
name = "gpt"
[recipe.settings]
layers = 4
heads = 4
width = {width}
context = 16
tie_embedding = false
[data]
source = "stdlib"
[pipeline]
stages = 2
micro_batch = 2
[inner]
precision = "float32"
[outer]
optimizer = "{optimizer}"
[round]
tokens = {16 * 16}
max_s = 120
patience_s = 10
"""


def planned_bytes(run: RunFile, spans: Sequence[tuple[int, int]], boundaries: Sequence[int]) -> list[float]:
    """Return the bytes that the plan counts for each span besides activations, which are next to nothing here."""
    layered = layered_recipe(load_recipe(run), run).layers(run.run.seed)
    parameters = [layered.parameters_bytes(number) for number in range(len(layered))]
    copies = state_copies(run.outer.slots, holds_all=True)
    return [copies * sum(parameters[boundaries[first] : boundaries[last + 1]]) for first, last in spans]


def peak_bytes(child: Child) -> int:
    """Of resident memory so far."""
    try:
        text = Path(f"/proc/{child.process.pid}/status").read_text()
    except (OSError, ProcessLookupError):
        return 0
    line = next((one for one in text.splitlines() if one.startswith("VmHWM:")), "VmHWM: 0 kB")
    return int(line.split()[1]) * 1024


def measured(width: int, optimizer: str, codec: str, folder: Path) -> list[dict[str, Any]]:
    """Make a row for each peer: its span, peak memory, and the plan's. Raises ``RuntimeError`` if the run fails."""
    folder.mkdir(parents=True)
    (folder / "run.toml").write_text(toml(width, optimizer, codec))
    run = parse_run_file(toml(width, optimizer, codec))
    host = Child(
        "host", folder / "host", ["host", str(folder / "run.toml"), "--bind", "127.0.0.1:0", "--no-supervisor"]
    )
    members: list[Child] = []
    deadline_s = time.monotonic() + LIMIT_S
    peaks = [0] * PEERS
    layered = layered_recipe(load_recipe(run), run).layers(run.run.seed)
    whole = planned_bytes(run, [(0, 0)], (0, len(layered)))[0]
    try:
        invite = await_invite(host, time.monotonic() + 60)
        for number in range(PEERS):
            place = folder / f"peer-{number}"
            cap = ["--max-memory", str(int(0.75 * whole + 2e6))]  # no peer holds both stages
            arguments = ["join", invite, "--bind", "127.0.0.1", "--threads", "1", "--device", "cpu", *cap]
            members.append(Child(f"peer-{number}", place, arguments))
        while any(member.is_running for member in members):
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"the run did not end within {LIMIT_S:.0f} s:\n{members[0].log.read_text()[-2000:]}")
            peaks = [max(peak, peak_bytes(member)) for peak, member in zip(peaks, members, strict=True)]
            time.sleep(0.05)
    finally:
        for child in [*members, host]:
            child.ask_to_end()
            child.end()
    host.take_events()
    (boundaries,) = [event["boundaries"] for event in host.events if event["event"] == "stages_cut"]
    spans = [next(e for e in one.take_events() if e["event"] == "span") for one in members]
    found = [(event["first"], event["last"]) for event in spans]
    return [
        {
            "width": width,
            "optimizer": optimizer,
            "codec": codec,
            "stages": f"{span[0]} to {span[1]}",
            "peak": peak,
            "plan": plan,
        }
        for span, peak, plan in zip(found, peaks, planned_bytes(run, found, boundaries), strict=True)
    ]


def beyond(row: dict[str, Any], empty: dict[str, Any]) -> dict[str, Any]:
    """Return how much more the larger model takes, in MB, and by the plan."""
    peak, plan = row["peak"] - empty["peak"], row["plan"] - empty["plan"]
    return row | {"peak": peak / 1e6, "plan": plan / 1e6, "peak_vs_plan": peak / plan}


def main() -> None:
    end_on_sigterm()
    options = parser(__doc__)
    options.add_argument("--widths", type=comma(int), default=[384, 768])
    options.add_argument("--optimizers", type=comma(str), default=["adamw"])
    options.add_argument("--codecs", type=comma(str), default=["int8"])
    given = options.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for optimizer in given.optimizers:
            for codec in given.codecs:
                place = Path(folder) / f"{optimizer}-{codec}"
                empty = measured(TINY, optimizer, codec, place / "tiny")
                for width in given.widths:
                    for row in measured(width, optimizer, codec, place / str(width)):
                        rows.append(beyond(row, max(empty, key=lambda one: one["peak"])))
    ratios = {"memory_vs_plan": max(row["peak_vs_plan"] for row in rows)}
    publish(f"peak memory of a pipeline's peers beyond that with a model of width {TINY}, MB", rows, ratios, given.json)


if __name__ == "__main__":
    main()
