"""Report of a study: a table of its trials for people, the same for programs, a plot, and the run file of the best."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from shoal.peer.trials.ledger import TrialRow
from shoal.peer.trials.study_file import StudyFile
from shoal.swarm import durable
from shoal.swarm.errors import StorageError

log = logging.getLogger(__name__)

TABLE_FILE, RESULTS_FILE, PLOT_FILE, BEST_FILE = "trials.txt", "trials.json", "trials.png", "best.toml"
_WIDTH = 160


def best_of(rows: Sequence[TrialRow]) -> TrialRow | None:
    """Return the trial with the least loss of those that were not ended early."""
    whole = [one for one in rows if one.loss is not None]
    return min(whole, key=lambda one: (one.loss, one.number), default=None)


def trials_table(study: StudyFile, rows: Sequence[TrialRow]) -> Table:
    """Make the table: the best first, then those that were ended early, by their last loss."""
    table = Table(box=None, pad_edge=False)
    for name in ("trial", "held-out loss", "state", "evaluations", *study.space):
        table.add_column(name, justify="left" if name == "state" else "right")

    def order(row: TrialRow) -> tuple[bool, float, int]:
        return row.loss is None, row.loss if row.loss is not None else row.last, row.number

    for row in sorted(rows, key=order):
        loss = f"{row.last:.4f}" if row.losses else ""
        values = (_short(row.values[key]) if key in row.values else "" for key in study.space)
        table.add_row(str(row.number), loss, row.state, str(len(row.losses)), *values)
    return table


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def write_results(study: StudyFile, rows: Sequence[TrialRow], folder: Path) -> None:
    """Write all files of the report but the plot. Raises ``StorageError``."""
    table = io.StringIO()
    Console(file=table, width=_WIDTH).print(trials_table(study, rows))
    found = [
        {"trial": row.number, "state": row.state, "loss": row.loss, "losses": row.losses, "values": row.values}
        for row in rows
    ]
    best = best_of(rows)
    files = {
        TABLE_FILE: table.getvalue(),
        RESULTS_FILE: json.dumps({"study": study.study.name, "hash": study.hash.hex(), "trials": found}, indent=1),
    }
    if best is not None:
        files[BEST_FILE] = (
            f"# Trial {best.number}: held-out loss {best.loss}\n{study.trial(best.number, best.values)[0]}"
        )
    try:
        for name, content in files.items():
            durable.put(folder / name, content.encode())
    except OSError as error:
        raise StorageError(f"{folder}: the results cannot be written: {error}") from error


def write_plot(study: StudyFile, rows: Sequence[TrialRow], folder: Path) -> None:
    """Write the plot of all held-out losses, with the extra ``plot``. Raises ``StorageError``."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        log.info("without the extra `plot` there is no plot of the trials")
        return
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    best = best_of(rows)
    for row in rows:
        if not row.losses:
            continue
        steps = sorted(row.losses)
        line = {"complete": "-", "pruned": ":"}.get(row.state, "--")
        is_best = best is not None and row.number == best.number
        label = f"{row.number}" + (" (best)" if is_best else "")
        axes.plot(
            [study.study.every_rounds * one for one in steps],
            [row.losses[one] for one in steps],
            line,
            marker=".",
            linewidth=2.5 if is_best else 1.0,
            label=label,
        )
    axes.set(xlabel="committed rounds", ylabel="held-out loss, nats a token", title=f"Trials of {study.study.name}")
    if any(row.losses for row in rows):
        axes.legend(title="trial", fontsize="small", ncols=max(1, min(4, len(rows) // 8)))
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=120)
    try:
        durable.put(folder / PLOT_FILE, image.getvalue())
    except OSError as error:
        raise StorageError(f"{folder / PLOT_FILE}: cannot be written: {error}") from error
