"""Memory of a pipeline's peers in whole rounds: two stages of a model with next to no activations, of a given width."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import await_invite
from usage import status_bytes

from shoal.peer.demo.processes import Child
from shoal.peer.recipes import layered_recipe, load_recipe
from shoal.swarm.memory_account import account_of
from shoal.swarm.protocol.run_file import parse_run_file

PEERS = 3
"""Two stages, so that one of them is averaged by two replicas."""
_LIMIT_S = 400.0

STAGES_TOML = """
algorithm = "virtual_batch"
averaging.codec = "int8"
[run]
name = "stages"
rounds = 4
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
optimizer = "adamw"
[round]
tokens = 256
max_s = 120
patience_s = 10
"""


@dataclass(frozen=True)
class StagePeer:
    """A pipeline's peer: the size of its stages' parameters, and the most memory that it had, of its whole process."""

    width: int
    parameters_bytes: int
    peak_bytes: int

    def row(self) -> dict[str, Any]:
        return {
            "case": f"stages, width {self.width}",
            "parameters MB": self.parameters_bytes / 1e6,
            "peak MB": self.peak_bytes / 1e6,
        }


def measure_stages(width: int, folder: Path) -> list[StagePeer]:
    """Peers of one run, each in one of its two stages. Raises ``RuntimeError`` if the run fails."""
    folder.mkdir(parents=True)
    toml = STAGES_TOML.format(width=width)
    (folder / "run.toml").write_text(toml)
    run = parse_run_file(toml)
    layered = layered_recipe(load_recipe(run), run).layers(run.run.seed)
    whole = sum(layered.parameters_bytes(number) for number in range(len(layered)))
    cap = int(0.75 * account_of(run).demand().shared * whole + 2e6)  # no peer holds both stages
    host = Child(
        "host",
        folder / "host",
        ["host", str(folder / "run.toml"), "--bind", "127.0.0.1:0", "--no-supervisor", "--no-keep-model"],
    )
    members: list[Child] = []
    deadline_s = time.monotonic() + _LIMIT_S
    peaks = [0] * PEERS
    try:
        invite = await_invite(host, time.monotonic() + 60)
        for number in range(PEERS):
            arguments = ["join", invite, "--bind", "127.0.0.1", "--threads", "1", "--device", "cpu"]
            members.append(Child(f"peer-{number}", folder / f"peer-{number}", [*arguments, "--max-memory", str(cap)]))
        while any(member.is_running for member in members):
            if time.monotonic() > deadline_s:
                raise RuntimeError(
                    f"the run did not end within {_LIMIT_S:.0f} s:\n{members[0].log.read_text()[-2000:]}"
                )
            peaks = [max(peak, _peak_bytes(member)) for peak, member in zip(peaks, members, strict=True)]
            time.sleep(0.05)
    finally:
        for child in [*members, host]:
            child.ask_to_end()
            child.end()
    spans = [next(event for event in one.take_events() if event["event"] == "span") for one in members]
    return [StagePeer(width, span["parameters_bytes"], peak) for span, peak in zip(spans, peaks, strict=True)]


def _peak_bytes(child: Child) -> int:
    """Of resident memory so far; 0 of a process that has ended."""
    try:
        return status_bytes(Path(f"/proc/{child.process.pid}/status").read_text(), "VmHWM")
    except (OSError, ValueError):
        return 0
