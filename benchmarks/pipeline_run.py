"""Processes of ``pipeline.py``: the host and the peers of one pipeline, which report by notes."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from pipeline_recipe import NAME
from recovery_run import Event, NotRecovered, Running
from shaped_links import Site as Place

from shoal.peer.demo.processes import EventFile
from shoal.swarm.memory_account import account_of
from shoal.swarm.protocol.run_file import RunFile, parse_run_file

PATIENCE_S = 6.0
LAYERS = 12
MICRO_BATCH = 4
_PROCESS = Path(__file__).parent / "pipeline_process.py"
_LOOK_S = 0.02


@dataclass(frozen=True)
class Case:
    """One pipeline. ``slowness``: of every peer; ``layer_ms``: at a slowness of 1; ``batch``: micro-batches a round;
    ``tokens``: that each sample has between layers, of ``width`` values; ``ballast``: parameters of a layer besides;
    ``room``: a peer's memory, in stages' states."""

    name: str
    stages: int
    slowness: tuple[float, ...]
    layer_ms: float
    batch: int
    rounds: int
    activations: str = "int8"
    tokens: int = 4
    width: int = 64
    max_in_flight: int | None = None
    ballast: int = 50_000
    room: float = 1.5

    @property
    def run_toml(self) -> str:
        in_flight = f"max_in_flight = {self.max_in_flight}" if self.max_in_flight else ""
        return f"""
algorithm = "virtual_batch"
averaging.codec = "int8"
[run]
name = "pipeline"
seed = 1
[recipe]
name = "{NAME}"
[recipe.settings]
layers = {LAYERS}
width = {self.width}
context = {self.tokens}
ballast = {self.ballast}
layer_ms = {self.layer_ms}
[data]
source = "own"
[pipeline]
stages = {self.stages}
micro_batch = {MICRO_BATCH}
activations = "{self.activations}"
{in_flight}
[inner]
precision = "float32"
[outer]
optimizer = "adamw"
[round]
tokens = {self.batch * MICRO_BATCH}
max_s = 600
patience_s = {PATIENCE_S}
"""

    @property
    def run_file(self) -> RunFile:
        return parse_run_file(self.run_toml)

    @property
    def memory_bytes(self) -> int:
        """Nobody can hold two stages."""
        values = account_of(self.run_file).demand().shared
        state = values * 4 * (self.ballast + self.width * (self.width + 1))
        return int(self.room * LAYERS / self.stages * state)


class Peer(Running):
    """A peer's process and its notes."""

    def __init__(self, name: str, slowness: float, command: list[str], folder: Path, deadline_s: float) -> None:
        self.slowness = slowness
        self.notes: list[Event] = []
        super().__init__(name, command, folder, deadline_s, cwd=folder)
        self._notes = EventFile(folder / "notes.jsonl")

    def read(self) -> list[Event]:
        """All notes so far."""
        self.notes += self._notes.new()
        return self.notes

    @property
    def span(self) -> tuple[int, int] | None:
        """Stages that the peer holds, or held last."""
        spans = [one for one in self.look() if one["event"] == "span"]
        return (spans[-1]["first"], spans[-1]["last"]) if spans else None


class Pipeline:
    """A case's host and peers; all of them are killed at the end. ``places``: of the peers, then of the host."""

    def __init__(self, folder: Path, case: Case, limit_s: float, places: Sequence[Place] = ()) -> None:
        self.case = case
        self.deadline_s = time.monotonic() + limit_s
        self._folder = folder
        self._places = places
        self._all: list[Running] = []
        self.peers: list[Peer] = []

    def start(self) -> None:
        place = self._made("host")
        (place / "run.toml").write_text(self.case.run_toml)
        where = ["--state", str(place / "state"), "--identity", str(place / "identity")]
        own = ["host", str(place / "run.toml"), "--no-pins", "--bind", f"{self._address(-1)}:0", *where]
        self.host = self._host(place, own)
        self.host.until("the invite", lambda: "shoal join" in self.host.text())
        self.invite = next((place / "state").glob("*/invite.txt")).read_text().strip()
        for slowness in self.case.slowness:
            self.join(slowness)

    def _host(self, place: Path, own: list[str]) -> Running:
        command = [sys.executable, str(_PROCESS), "host", str(len(self.case.slowness)), self._namespace(-1), *own]
        self._all.append(Running("host", [*command, "--log-json", str(place / "events.jsonl")], place, self.deadline_s))
        return self._all[-1]

    def join(self, slowness: float) -> Peer:
        number = len(self.peers)
        place = self._made(f"peer-{number}")
        where = ["--state", str(place / "state"), "--identity", str(place / "identity"), "--name", place.name]
        memory = ["--max-memory", str(self.case.memory_bytes), "--threads", "1", "--device", "cpu"]
        log = ["--bind", self._address(number), "--log-json", str(place / "events.jsonl")]
        task = [str(_PROCESS), "peer", str(slowness), self._namespace(number), "join", self.invite]
        peer = Peer(place.name, slowness, [sys.executable, *task, *where, *memory, *log], place, self.deadline_s)
        self._all.append(peer)
        self.peers.append(peer)
        return peer

    def committed(self) -> list[Event]:
        """The committed rounds so far, each once. Raises ``NotRecovered`` when a process has ended."""
        for one in self._all:
            if one.process.poll() not in (None, -9):
                raise NotRecovered(f"{one.name} ended with {one.process.returncode}:\n{one.text()[-2000:]}")
        verdicts = [one for one in self.host.look() if one["event"] == "verdict" and one["committed"]]
        return list({one["round"]: one for one in verdicts}.values())

    def wait_for_rounds(self, rounds: int) -> list[Event]:
        """Wait until that many rounds are committed."""
        while len(found := self.committed()) < rounds:
            if time.monotonic() > self.deadline_s:
                logs = "\n".join(f"{one.name}:\n{one.text()[-1500:]}" for one in self._all)
                raise NotRecovered(f"{self.case.name}: {len(found)} rounds of {rounds} in time\n{logs}")
            time.sleep(_LOOK_S)
        return found

    def _made(self, name: str) -> Path:
        place = self._folder / name
        place.mkdir(parents=True)
        return place

    def _namespace(self, number: int) -> str:
        return self._places[number].namespace if self._places else "-"

    def _address(self, number: int) -> str:
        return self._places[number].address if self._places else "127.0.0.1"

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        for one in self._all:
            one.kill()
