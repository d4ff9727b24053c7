"""Report of a demo: a table of its peers, lines that say what came of it or what is wrong, JSON, and a loss curve."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich import box, filesize
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from shoal.peer.demo.run_files import STAGE_MEMORY
from shoal.peer.demo.run_log import Anchor, PeerLog, RunLog
from shoal.peer.exports.model_file import read_model
from shoal.peer.machine_memory import parse_memory
from shoal.peer.offline.export import export_model
from shoal.peer.offline.whole_model import WholeModel, use_newest
from shoal.peer.pipeline.profile import profile_model
from shoal.peer.recipes.gpt import Gpt, GptRecipe, generate
from shoal.peer.terminal.events import count_text, duration_text, printable, span_text
from shoal.swarm.errors import StorageError
from shoal.swarm.memory_account import account_of
from shoal.swarm.pipeline.planner.model import PeerCapability, PlanningProblem
from shoal.swarm.protocol.run_file import RunFile

MODEL_FILE = "model.safetensors"
_HELD_OUT_SAMPLES = 128
_RED, _GREEN = "#c1121f", "#2a9d5c"


@dataclass(frozen=True)
class StageMemory:
    """Bytes that training takes at least: each stage, and the whole model in one peer; and what a peer may use."""

    stages: tuple[int, ...]
    model: int
    peer: int


@dataclass(frozen=True)
class Report:
    """Results of a demo. ``losses``: held out, before and after; ``peers``: how many there were at the start;
    ``step_tokens``: of a peer's inner step; ``saved``: the newest anchor of each stage in the checkpoints; ``memory``:
    None for whole models."""

    log: RunLog
    losses: tuple[float, float]
    parameters: int
    peers: int
    step_tokens: int
    saved: Sequence[Anchor]
    memory: StageMemory | None = None

    @property
    def stages(self) -> range:
        """Numbers of the stages; a whole model is stage 0."""
        return range(len(self.memory.stages) if self.memory else 1)

    @property
    def seconds(self) -> float:
        """From the coordinator's start to the last event of any peer."""
        return max((peer.last_at for peer in self.log.peers.values()), default=self.log.started) - self.log.started

    def float32_bytes(self, peer: PeerLog) -> int:
        """Bytes that float32 data-parallel would have sent for the same work."""
        return round(float32_ddp_bytes(self.peers, self.parameters, peer.tokens / self.step_tokens))

    def mean(self, of: Callable[[PeerLog], int]) -> int:
        """The mean over those peers that were there from the start to the end."""
        values = [of(peer) for peer in self.log.peers.values() if peer.part == "all along"]
        return round(sum(values) / max(1, len(values)))

    @property
    def bytes_sent(self) -> int:
        return self.mean(lambda peer: peer.bytes_sent)

    @property
    def ratio(self) -> float:
        """Ratio of the bytes that float32 data-parallel would have sent to those sent."""
        return self.mean(self.float32_bytes) / max(1, self.bytes_sent)

    def anchors(self, stage: int) -> dict[str, Anchor]:
        """Anchors that the live replicas of a stage hold in the end, by name."""
        live = {name: peer.anchors for name, peer in self.log.peers.items() if peer.is_live}
        return {name: anchors[stage] for name, anchors in live.items() if stage in anchors}

    def is_equal(self, stage: int) -> bool:
        """Whether every live replica of the stage holds the same anchor, and there is one."""
        return len(set(self.anchors(stage).values())) == 1

    @property
    def together(self) -> str | None:
        """The hash over all stages' verdicts of the last committed round; None where they do not have the same."""
        hashes = {self.log.together.get(stage) for stage in self.stages}
        return hashes.pop() if len(hashes) == 1 else None

    @property
    def parity(self) -> bool:
        """Whether the live replicas agree in all stages, at the same version, under one hash."""
        versions = {version for stage in self.stages for version, _ in self.anchors(stage).values()}
        is_tied = self.memory is None or self.together is not None
        return all(map(self.is_equal, self.stages)) and len(versions) == 1 and is_tied

    @property
    def moves(self) -> int:
        return sum(peer.moves for peer in self.log.peers.values())

    def as_json(self) -> dict[str, Any]:
        """The figures for programs; null where the demo is not one in stages, or only such a one."""
        log, memory = self.log, self.memory
        deaths = [
            {"peer": one.peer, "stage": one.stage, "replicas": one.replicas, "next_round_s": log.next_commit_s(one)}
            for one in log.deaths
        ]
        return {
            "initial_loss": self.losses[0],
            "final_loss": self.losses[1],
            "tokens": log.tokens,
            "rounds_committed": len(log.commits),
            "rounds_aborted": log.rounds_aborted,
            "rounds_undone": log.rounds_undone,
            "round_s": log.round_s,
            "bytes_sent_per_peer": self.bytes_sent,
            "bytes_float32_ddp_per_peer": None if memory else self.mean(self.float32_bytes),
            "memory": asdict(memory) if memory else None,
            "moves": self.moves,
            "deaths": deaths,
            "joined": [name for name, peer in log.peers.items() if peer.late_at],
            "parity": self.parity,
            "together": self.together,
            "seconds": self.seconds,
        }


def float32_ddp_bytes(peers: int, parameters: int, steps: float) -> float:
    """Bytes that one of ``peers`` sends in ``steps`` ring all-reduces of float32 gradients: 2·(N-1)/N of them each."""
    return 2 * (peers - 1) / peers * 4 * parameters * steps


def make_report(folder: Path, run: RunFile, recipe: GptRecipe, log: RunLog) -> tuple[Report, Gpt]:
    """Write the trained model to ``folder`` and measure it. Raises ``StateFileError`` where there is none."""

    def anchors(model: WholeModel) -> list[Anchor]:
        return [(model.version, stage.load().digest.hex()) for stage in model.stages]

    export_model(folder, folder / MODEL_FILE)
    saved = use_newest(folder, None, anchors)
    start, model = recipe.build_model(run.run.seed), read_model(folder / MODEL_FILE)
    assert isinstance(model, Gpt)
    before, after = (recipe.held_out_loss(one, "cpu", _HELD_OUT_SAMPLES) for one in (start, model))
    parameters = sum(parameter.numel() for parameter in start.parameters())
    peers = sum(peer.late_at is None for peer in log.peers.values())
    memory = measure_memory(run, recipe, log.boundaries, folder / "measured.json") if log.boundaries else None
    step_tokens = run.inner.batch_samples * recipe.tokens_per_sample
    return Report(log, (before, after), parameters, peers, step_tokens, saved, memory), model


def measure_memory(run: RunFile, recipe: GptRecipe, boundaries: Sequence[int], cache: Path) -> StageMemory:
    """The memory of these stages as the coordinator's plan counts it; ``cache`` keeps what is measured."""
    assert run.pipeline is not None
    costs = [layer.cost for layer in profile_model(run, recipe, torch.device("cpu"), time.time(), cache).layers]
    peer = PeerCapability("peer", 0, (0.0,) * len(costs), 1.0)
    problem = PlanningProblem(costs, [peer], run.pipeline.in_flight, account_of(run).demand())
    cut = np.array(boundaries)
    stages, whole = (problem.least_memory(*span).host for span in ((cut[:-1], cut[1:]), (cut[:1], cut[-1:])))
    return StageMemory(tuple(int(one) for one in stages), int(whole[0]), parse_memory(STAGE_MEMORY))


# What came of it --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """A line of the report. ``trouble``: why the demo has failed by it, in a sentence; empty where all is well."""

    label: str
    words: str
    trouble: str = ""
    style: str = ""


def make_lines(report: Report) -> list[Line]:
    """The lines below the table."""
    log, memory = report.log, report.memory
    before, after = report.losses
    lines = []
    if memory is not None:
        takes = (
            f"to train it takes {filesize.decimal(memory.model)}, and a peer may use {filesize.decimal(memory.peer)}"
        )
        lines.append(Line("model", f"{count_text(report.parameters)} parameters; {takes}"))
    is_worse = log.commits and after >= before
    trouble = f"the loss did not fall: {before:.3f} before, {after:.3f} after" if is_worse else ""
    lines.append(Line("held-out loss", f"{before:.3f} → {after:.3f} nats a byte", trouble, "bold"))
    lines.append(Line("tokens", f"{count_text(log.tokens)} in {duration_text(report.seconds)}"))
    undone = f", {log.rounds_undone} undone" if log.rounds_undone else ""
    usual = f"; one takes {log.round_s:.1f} s" if log.round_s else ""
    rounds = f"{len(log.commits)} committed, {log.rounds_aborted} aborted{undone}{usual}"
    lines.append(Line("rounds", rounds, "" if log.commits else "no round was committed"))
    lines += [Line("", printable(reason)) for reason in log.abort_reasons]
    for death in log.deaths:
        after_s, who = log.next_commit_s(death), f"{death.peer}{death.about}"
        if after_s is None:
            lines.append(Line("death", f"{who}: no round after it", f"no round was committed after the death of {who}"))
        else:
            lines.append(Line("death", f"{who}: the next round {after_s:.1f} s later"))
    late = ", ".join(name for name, peer in log.peers.items() if peer.is_live and not peer.synced_at)
    if late:
        trouble = f"the run was over before {late} held a state: give it more --minutes"
        lines.append(Line("too late", late, trouble))
    if memory is None:
        ddp = f"float32 data-parallel {filesize.decimal(report.mean(report.float32_bytes))}: {report.ratio:.0f}× more"
        lines.append(Line("sent", f"{filesize.decimal(report.bytes_sent)} a peer; {ddp}", style="bold"))
    else:
        lines.append(Line("moves", f"{report.moves} of peers to another stage"))
    lines += [_agreement(report, stage) for stage in report.stages]
    if memory is not None:
        lines.append(_last_round(report))
    version = report.saved[0][0]
    if [set(report.anchors(stage).values()) for stage in report.stages] == [{anchor} for anchor in report.saved]:
        lines.append(Line("saved", f"version {version}, which the peers held last", style="green"))
    else:
        words = f"version {version}, and not what the peers held last"
        lines.append(Line("saved", words, f"the checkpoints have {words}" if report.parity else "", "bold red"))
    return lines


def _agreement(report: Report, stage: int) -> Line:
    label, about = (f"stage {stage}", f"replicas of stage {stage}") if report.memory else ("anchor", "peers")
    anchors = report.anchors(stage)
    names = ", ".join(anchors)
    if not anchors:
        return Line(label, "held by nobody", f"nobody holds {'an ' * (not report.memory)}{label} in the end")
    if not report.is_equal(stage):
        return Line(label, f"NOT equal on {names}", f"the live {about} do not hold the same anchor")
    version, digest = next(iter(anchors.values()))
    who = f"on {names} alone" if len(anchors) == 1 else f"equal on {names}"
    return Line(label, f"v{version} {digest[:8]}, {who}", style="green")


def _last_round(report: Report) -> Line:
    if report.parity:
        return Line("last round", f"one hash over all stages' verdicts: {(report.together or '')[:16]}", style="green")
    all_equal = all(map(report.is_equal, report.stages))
    trouble = "the stages do not stand at the same round" if all_equal else ""
    return Line("last round", "the stages do NOT agree", trouble, "bold red")


# For people -------------------------------------------------------------------------------------------------


def render(report: Report, lines: Sequence[Line]) -> RenderableType:
    """The table of peers, and the lines below it."""
    peers = Table(box=box.SIMPLE_HEAD, padding=(0, 1), collapse_padding=True, pad_edge=False)
    peers.add_column("peer", style="bold", no_wrap=True)
    peers.add_column("was there" if report.memory is None else "held stage")
    for name in ("takes",) if report.memory else ("tok/s", "float32 DDP", "ratio"):
        peers.add_column(name, justify="right", no_wrap=True)
    for name in ("tokens", "sent"):
        peers.add_column(name, justify="right", no_wrap=True)
    peers.add_column("anchor", no_wrap=True)
    for name, peer in report.log.peers.items():
        anchors = ", ".join(f"v{version} {digest[:8]}" for version, digest in peer.anchors.values()) or "–"
        ends = (count_text(peer.tokens), filesize.decimal(peer.bytes_sent), anchors)
        cells = _cells(report, peer) if report.memory is None else _stage_cells(report.memory, report.log, name)
        peers.add_row(name, *cells, *ends, style="" if peer.is_live else "dim")
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column()
    for line in lines:
        grid.add_row(line.label, Text(line.words, "bold red" if line.trouble else line.style))
    return Group(peers, grid)


def _cells(report: Report, peer: PeerLog) -> tuple[str, ...]:
    ddp = report.float32_bytes(peer)
    ratio = f"{ddp / peer.bytes_sent:.0f}×" if peer.bytes_sent else "–"
    return peer.part, count_text(peer.tokens_per_s), filesize.decimal(ddp), ratio


def _stage_cells(memory: StageMemory, log: RunLog, name: str) -> tuple[str, ...]:
    """The stages that it held and when it was killed; the memory that those which it held last take of it."""
    spans = log.peers[name].spans
    moments = [(at - log.started, f"{span_text(first, last)} from ") for at, first, last in spans]
    moments += [(death.killed_at - log.started, "killed ") for death in log.deaths if death.peer == name]
    history = ", ".join(f"{words}{duration_text(at_s)}" for at_s, words in sorted(moments))
    if not spans:
        return history or "none", "–"
    _, first, last = spans[-1]
    return history, filesize.decimal(sum(memory.stages[first : last + 1]))


def marks(log: RunLog) -> list[tuple[float, str, str]]:
    """Deaths and arrivals in their order: seconds after the start, words, colour."""
    found = [(death.killed_at, f"{death.peer} killed{death.about}", _RED) for death in log.deaths]
    found += [(death.back_at, f"{death.peer} comes back", _GREEN) for death in log.deaths if death.back_at]
    found += [(peer.late_at, f"{name} joins", _GREEN) for name, peer in log.peers.items() if peer.late_at]
    return sorted((moment - log.started, words, color) for moment, words, color in found)


def loss_curve(log: RunLog) -> tuple[list[float], list[float]]:
    """Seconds since the start, and training loss, of every committed round whose loss is known."""
    known = [event for event in log.commits if event["loss"] is not None]
    return [event["time"] - log.started for event in known], [event["loss"] for event in known]


def plot_loss(path: Path, report: Report) -> bool:
    """Draw the loss over time; False where matplotlib is not installed.

    Raises ``StorageError`` when ``path`` cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    line: dict[str, Any] = {"marker": "o", "markersize": 4, "linewidth": 1.8, "color": "#1f6f8b"}
    axes.plot(*loss_curve(report.log), label="training, each round", **line)
    ends = [0.0, report.seconds]
    axes.plot(ends, report.losses, "D", color="#e07a5f", markersize=6, label="held out, start and end", zorder=3)
    for number, (at_s, words, color) in enumerate(marks(report.log)):
        axes.axvline(at_s, color=color, linestyle="--", linewidth=1.2)
        # One below the other: they may be close together.
        place = (at_s, 0.99 - 0.06 * number)
        axes.text(*place, f" {words}", transform=axes.get_xaxis_transform(), color=color, va="top", fontsize=9)
    axes.set_xlabel("seconds")
    axes.set_ylabel("loss, nats a byte")
    done = f"{len(report.log.commits)} rounds, {count_text(report.log.tokens)} tokens"
    stages = f"{len(report.stages)} stages, " if report.memory else ""
    axes.set_title(f"{report.peers} peers, {stages}{done}", fontsize=10)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper right", bbox_to_anchor=(1.0, 0.8))
    try:
        figure.savefig(path)
    except OSError as error:
        raise StorageError(f"{path}: the curve cannot be written: {error}") from error
    return True


def conclude(
    report: Report, model: Gpt, troubles: Sequence[str], folder: Path, json_path: Path | None, console: Console
) -> int:
    """Print and write everything; returns the exit code. ``troubles``: of the runner. Raises ``StorageError``."""
    lines = make_lines(report)
    console.print(render(report, lines))
    prompt = b"def "
    text = (prompt + generate(model, prompt, 300, 0.7, 50, 0)).decode(errors="replace")
    written = Text("\n".join(printable(line) for line in text.split("\n")))
    console.print(Panel(written, title="what it writes after `def `", title_align="left"))
    console.print(Text.assemble("Model   ", (str(folder / MODEL_FILE), "cyan")))
    if plot_loss(folder / "loss.png", report):
        console.print(Text.assemble("Curve   ", (str(folder / "loss.png"), "cyan")))
    else:
        console.print(Text("Curve   needs matplotlib: pip install 'shoal[plot]'", "yellow"))
    if json_path is not None:
        write_json(json_path, report.as_json())
        console.print(Text.assemble("Figures ", (str(json_path), "cyan")))
    all_troubles = [*(line.trouble for line in lines if line.trouble), *troubles]
    for trouble in all_troubles:
        console.print(Text(f"The demo failed: {trouble}", "bold red"))
    return 1 if all_troubles else 0


def write_json(path: Path, figures: Mapping[str, Any]) -> None:
    """Write the figures. Raises ``StorageError``."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(figures, indent=2) + "\n")
    except OSError as error:
        raise StorageError(f"{path}: the figures cannot be written: {error}") from error
