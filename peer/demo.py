"""``shoal demo``: a coordinator and peers as processes on this machine; one peer is killed, one comes late."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from shoal.peer.demo_child import Child, fresh_folder
from shoal.peer.demo_report import Figures, Plan, make_figures, plot_loss, report, write_json
from shoal.peer.demo_run_file import BATCH, CONTEXT, demo_run_toml
from shoal.peer.demo_view import Board
from shoal.peer.events import printable
from shoal.peer.export import export_model, read_model
from shoal.peer.recipes import load_recipe
from shoal.peer.recipes.gpt import Gpt, generate
from shoal.swarm.errors import StateFileError, UserError
from shoal.swarm.run_file import RunFile, parse_run_file

_START_S = 90.0
_POLL_S = 0.25
_AFTERWARDS_S = 90.0


@dataclass(frozen=True)
class DemoOptions:
    """``preset``: ``diloco`` or ``sparseloco``, with their published codecs and outer optimizers; ``json``: where to
    write the figures; ``out``: each demo makes a folder in it."""

    peers: int = 4
    minutes: float = 3.0
    preset: str = "diloco"
    json: Path | None = None
    out: Path = Path("shoal-demo")


class _DemoFailed(Exception):
    """A process of the demo did not do its part; ``args`` are a sentence and that process."""


def run_demo(options: DemoOptions, console: Console) -> int:
    """The whole demo; returns the exit code, 0 when a model was trained and all peers agree on it."""
    if options.peers < 2:
        raise UserError("--peers: expected 2 or more: one of them is killed")
    toml = demo_run_toml(options.preset, options.peers, options.minutes)
    try:
        with _signals_interrupt(), _Demo(options, toml, console) as demo:
            leftover = demo.run()
        return demo.conclude(leftover)
    except _DemoFailed as failure:
        console.print(Text(f"The demo failed: {failure.args[0]}", "bold red"))
        console.print(failure.args[1].last_words())
        return 1


@contextlib.contextmanager
def _signals_interrupt() -> Iterator[None]:
    """SIGTERM ends the demo like Ctrl-C, so that its processes are ended too."""
    earlier = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, earlier)


class _Demo:
    """The processes of one demo and what happens to them; the context ends them all."""

    def __init__(self, options: DemoOptions, toml: str, console: Console) -> None:
        self._options = options
        self._console = console
        self._run_s = 60.0 * options.minutes
        self._folder = fresh_folder(options.out)
        self._toml = toml
        self._run: RunFile = parse_run_file(self._toml)
        self._board = Board(console, self._run_s)
        self._host: Child | None = None
        self._peers: dict[str, Child] = {}
        self._victim = f"peer-{options.peers}"
        self._newcomer = f"peer-{options.peers + 1}"
        self._started = time.time()
        self._killed_at: float | None = None
        self._joined_at: float | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Peers first: they say goodbye to the coordinator.
        for group in (list(self._peers.values()), [self._host] if self._host else []):
            for child in group:
                child.ask_to_end()
            for child in group:
                child.end()

    # While it runs ------------------------------------------------------------------------------------------

    def run(self) -> list[str]:
        """Until every peer has ended by itself; returns the names of those that did not, in bounded time."""
        self._console.print(Text.assemble("Everything goes to ", (str(self._folder), "cyan")))
        (self._folder / "run.toml").write_text(self._toml)
        with self._board:
            invite = self._start_host()
            for number in range(1, self._options.peers + 1):
                self._start_peer(f"peer-{number}", invite)
            deadline = self._started + self._run_s + _AFTERWARDS_S
            while time.time() < deadline and any(child.is_running for child in self._peers.values()):
                passed_s = time.time() - self._started
                if self._killed_at is None and passed_s >= self._run_s / 3 and self._all_train():
                    self._kill()
                if self._joined_at is None and passed_s >= self._run_s / 2 and self._killed_at is not None:
                    self._joined_at = time.time()
                    self._start_peer(self._newcomer, invite, "joined half way")
                self._look()
                time.sleep(_POLL_S)
            self._look()
        return [child.name for child in self._peers.values() if child.is_running]

    def _start_host(self) -> str:
        folder = self._folder / "host"
        arguments = ["host", str(self._folder / "run.toml"), "--bind", "127.0.0.1:0"]
        self._board.say("the coordinator starts")
        self._host = Child("host", folder, arguments)
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            self._look()
            for path in (folder / "state").glob("**/invite.txt"):
                text = path.read_text()
                if text.endswith("\n"):
                    self._started = time.time()
                    self._board.start_clock()
                    return text.strip()
            time.sleep(_POLL_S)
        raise _DemoFailed(f"the coordinator gave no invite within {_START_S:.0f} s", self._host)

    def _start_peer(self, name: str, invite: str, mark: str = "") -> None:
        self._board.add(name, mark)
        self._board.say(f"{name} starts{f' ({mark})' if mark else ''}")
        arguments = ["join", invite, "--name", name, "--bind", "127.0.0.1", "--threads", "1", "--device", "cpu"]
        self._peers[name] = Child(name, self._folder / name, arguments)

    def _all_train(self) -> bool:
        return all(any(event["event"] == "synced" for event in child.events) for child in self._peers.values())

    def _kill(self) -> None:
        victim = self._peers[self._victim]
        self._killed_at = time.time()
        victim.kill()
        self._board.mark(self._victim, "killed", "SIGKILL")
        self._board.say(f"{self._victim} is killed (SIGKILL to process {victim.process.pid})")

    def _look(self) -> None:
        """Take in what was logged, and notice who died. Raises ``_DemoFailed``."""
        for child in self._peers.values():
            for event in child.take_events():
                if not child.killed:
                    self._board.feed_peer(child.name, event)
        if self._host is not None:
            for event in self._host.take_events():
                self._board.feed_host(event)
        self._board.refresh()
        for child in [*self._peers.values(), *([self._host] if self._host else [])]:
            code = child.process.poll()
            # The coordinator serves until it is told to stop; a peer may end with 0 only.
            if code is not None and not child.killed and (code or child is self._host):
                raise _DemoFailed(f"{child.name} ended with exit code {code}", child)

    # Afterwards ---------------------------------------------------------------------------------------------

    def conclude(self, leftover: list[str]) -> int:
        """Measure, print and write everything; returns the exit code."""
        assert self._host is not None
        for child in [self._host, *self._peers.values()]:
            child.take_events()
        survivor = self._folder / "peer-1" / "state"
        model_path = self._folder / "model.safetensors"
        try:
            export_model(survivor, model_path)
            model = read_model(model_path)
        except StateFileError as error:
            raise _DemoFailed(f"peer-1 saved no model: {error}", self._peers["peer-1"]) from error
        recipe = load_recipe(self._run)
        start = recipe.build_model(self._run.run.seed)
        losses = recipe.held_out_loss(start, "cpu"), recipe.held_out_loss(model, "cpu")
        plan = self._plan(sum(parameter.numel() for parameter in start.parameters()))
        peers = {name: child.events for name, child in self._peers.items()}
        figures = make_figures(plan, self._host.events, peers, losses)
        self._console.print(report(figures))
        assert isinstance(model, Gpt)
        self._print_sample(model)
        self._write(plan, figures, model_path)
        return self._judge(figures, leftover)

    def _plan(self, parameters: int) -> Plan:
        return Plan(
            peers=self._options.peers,
            parameters=parameters,
            tokens_per_step=BATCH * CONTEXT,
            killed=self._victim if self._killed_at else "",
            joined=self._newcomer if self._joined_at else "",
            started=self._started,
            killed_at=self._killed_at,
            joined_at=self._joined_at,
        )

    def _print_sample(self, model: Gpt) -> None:
        prompt = b"def "
        text = (prompt + generate(model, prompt, 300, 0.7, 50, 0)).decode(errors="replace")
        lines = [printable(line) for line in text.split("\n")]
        self._console.print(Panel(Text("\n".join(lines)), title="what it writes after `def `", title_align="left"))

    def _write(self, plan: Plan, figures: Figures, model_path: Path) -> None:
        assert self._host is not None
        curve = self._folder / "loss.png"
        self._console.print(Text.assemble("Model   ", (str(model_path), "cyan")))
        if plot_loss(curve, plan, figures, self._host.events):
            self._console.print(Text.assemble("Curve   ", (str(curve), "cyan")))
        else:
            self._console.print(Text("Curve   needs matplotlib: pip install 'shoal[plot]'", "yellow"))
        if self._options.json is not None:
            write_json(self._options.json, figures)
            self._console.print(Text.assemble("Figures ", (str(self._options.json), "cyan")))

    def _judge(self, figures: Figures, leftover: list[str]) -> int:
        troubles = []
        if not figures.rounds_committed:
            troubles.append("no round was committed")
        if not figures.parity:
            troubles.append("the live peers do not hold the same anchor")
        if leftover:
            troubles.append(f"{', '.join(leftover)} did not end with the run and had to be stopped")
        for trouble in troubles:
            self._console.print(Text(f"The demo failed: {trouble}", "bold red"))
        return 1 if troubles else 0
