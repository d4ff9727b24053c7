"""What every demo ends with, whatever it has shown: a table, a sample, a loss curve, figures, and what went wrong."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from shoal.peer.recipes.gpt import Gpt, generate
from shoal.peer.terminal.events import Event, printable
from shoal.swarm.errors import StorageError

KILLED, BACK = "#c1121f", "#2a9d5c"
"""The colours of deaths and arrivals."""


@dataclass(frozen=True)
class Mark:
    """Something that happened ``at_s`` after the start."""

    at_s: float
    words: str
    color: str


@dataclass(frozen=True)
class Curve:
    """``moments_s``, since the start, and ``losses`` of the committed rounds; ``held_out``: at the start and, after
    ``end_s``, at the end."""

    title: str
    moments_s: Sequence[float]
    losses: Sequence[float]
    held_out: tuple[float, float]
    end_s: float
    marks: Sequence[Mark]


@dataclass(frozen=True)
class Ending:
    """``troubles``: why the demo failed, if it did, a sentence each; ``figures``: for programs."""

    model: Gpt
    model_path: Path
    report: RenderableType
    curve: Curve
    figures: dict[str, Any]
    troubles: tuple[str, ...]


def conclude(ending: Ending, folder: Path, json_path: Path | None, console: Console) -> int:
    """Print and write it all; returns the exit code. Raises ``StorageError``."""
    console.print(ending.report)
    console.print(_sample(ending.model))
    console.print(Text.assemble("Model   ", (str(ending.model_path), "cyan")))
    if plot_loss(folder / "loss.png", ending.curve):
        console.print(Text.assemble("Curve   ", (str(folder / "loss.png"), "cyan")))
    else:
        console.print(Text("Curve   needs matplotlib: pip install 'shoal[plot]'", "yellow"))
    if json_path is not None:
        write_json(json_path, ending.figures)
        console.print(Text.assemble("Figures ", (str(json_path), "cyan")))
    for trouble in ending.troubles:
        console.print(Text(f"The demo failed: {trouble}", "bold red"))
    return 1 if ending.troubles else 0


def _sample(model: Gpt) -> Panel:
    prompt = b"def "
    text = (prompt + generate(model, prompt, 300, 0.7, 50, 0)).decode(errors="replace")
    lines = [printable(line) for line in text.split("\n")]
    return Panel(Text("\n".join(lines)), title="what it writes after `def `", title_align="left")


def summary_grid() -> Table:
    """Rows of a name and what there is to say of it."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column()
    return grid


def loss_words(before: float, after: float) -> Text:
    """Held out."""
    return Text.assemble(f"{before:.3f} → ", (f"{after:.3f}", "bold"), " nats a byte")


def write_json(path: Path, figures: dict[str, Any]) -> None:
    """Raises ``StorageError``."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(figures, indent=2) + "\n")
    except OSError as error:
        raise StorageError(f"{path}: the figures cannot be written: {error}") from error


def loss_curve(host: Sequence[Event], started: float) -> tuple[list[float], list[float]]:
    """Seconds since ``started`` and training loss of every committed round; ``host``: events of the whole run."""
    rounds = [event for event in host if event["event"] == "verdict" and event["committed"]]
    known = [event for event in rounds if event["loss"] is not None]
    return [event["time"] - started for event in known], [event["loss"] for event in known]


def plot_loss(path: Path, curve: Curve) -> bool:
    """Draw the curve with its marks; False where matplotlib is not installed.

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
    axes.plot(curve.moments_s, curve.losses, label="training, each round", **line)
    ends = [0.0, curve.end_s]
    axes.plot(ends, curve.held_out, "D", color="#e07a5f", markersize=6, label="held out, start and end", zorder=3)
    for number, mark in enumerate(curve.marks):
        axes.axvline(mark.at_s, color=mark.color, linestyle="--", linewidth=1.2)
        # One below the other: they may be close together.
        place = (mark.at_s, 0.99 - 0.06 * number)
        axes.text(
            *place, f" {mark.words}", transform=axes.get_xaxis_transform(), color=mark.color, va="top", fontsize=9
        )
    axes.set_xlabel("seconds")
    axes.set_ylabel("loss, nats a byte")
    axes.set_title(curve.title, fontsize=10)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper right", bbox_to_anchor=(1.0, 0.8))
    try:
        figure.savefig(path)
    except OSError as error:
        raise StorageError(f"{path}: the curve cannot be written: {error}") from error
    return True
