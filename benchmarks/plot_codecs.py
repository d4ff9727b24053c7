"""Plot of the output of ``codecs.py --json``: each codec's error on a real gradient against bytes a parameter."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")
from matplotlib import pyplot

OURS, THEIRS = "#1f5fa8", "#b0603c"


def points(rows: list[dict[str, Any]]) -> list[tuple[str, float, float, str]]:
    """Label, bytes, error and colour. Ours once each: both paths give the same bytes."""
    found = {}
    for row in rows:
        if not row["error_gradient"]:
            continue
        if row["path"] in ("torch", "compiled"):
            found[row["codec"]] = (row["codec"], row["bytes_per_param"], row["error_gradient"], OURS)
        elif row["path"] in ("bitsandbytes", "hivemind") or (row["path"], row["codec"]) == (
            "torch cast",
            "float8_e4m3",
        ):
            label = f"{row['path']} {row['codec']}"
            found[label] = (label, row["bytes_per_param"], row["error_gradient"], THEIRS)
    return list(found.values())


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for label, size, error, colour in points(rows):
        axes.scatter(size, error, color=colour, s=22, zorder=3)
        side, offset = ("right", -6) if label.startswith(("bitsandbytes", "hivemind")) else ("left", 6)
        axes.annotate(
            label,
            (size, error),
            (offset, 0),
            textcoords="offset points",
            ha=side,
            va="center",
            fontsize=7,
            color=colour,
        )
    axes.set(xscale="log", yscale="log", xlabel="bytes a parameter", ylabel="relative L2 error on a gradient")
    axes.set_xticks([0.02, 0.05, 0.125, 0.25, 0.5, 1, 2], ["0.02", "0.05", "0.125", "0.25", "0.5", "1", "2"])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.set_xlim(0.015, 6)
    figure.savefig(path, dpi=110)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("json", type=Path, help="what codecs.py --json wrote")
    arguments.add_argument("picture", type=Path, help="a .png or .svg to write")
    options = arguments.parse_args()
    draw(json.loads(options.json.read_text())["rows"], options.picture)


if __name__ == "__main__":
    main()
