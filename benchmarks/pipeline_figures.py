"""Figures of ``pipeline.py``, computed from the notes of its processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from common import over

Event = Mapping[str, Any]
Row = dict[str, Any]

RECOVERED = 0.9
"""Of the rate before: so much counts as recovered."""


def bound_of(boundaries: Sequence[int], spans: Sequence[tuple[int, int]], layer_s: Sequence[float]) -> float:
    """Micro-batches a second of the slowest stage, were all its replicas always busy: of peers with these ``spans``
    (first and last stage), each of whose layers takes so many seconds."""
    rates = [0.0] * (len(boundaries) - 1)
    for (first, last), seconds in zip(spans, layer_s, strict=True):
        for stage in range(first, last + 1):
            rates[stage] += 1 / ((boundaries[last + 1] - boundaries[first]) * seconds)
    return min(rates)


def whole_rounds(verdicts: Sequence[Event], micro_batches: int) -> tuple[float, int]:
    """Micro-batches a second from the end of the first committed round, in which links open, to that of the last; and
    how many rounds that is."""
    ends = [one["time"] for one in verdicts]
    return (len(ends) - 1) * micro_batches / (ends[-1] - ends[0]), len(ends) - 1


def while_training(notes: Sequence[Sequence[Event]], verdicts: Sequence[Event], micro_batches: int) -> float:
    """The same, of the time between a round's first computation anywhere and its last one."""
    spent_s = 0.0
    for verdict in verdicts[1:]:
        computed = [one for peer in notes for one in peer if _is_of(one, verdict["round"])]
        spent_s += max(one["time"] for one in computed) - min(one["began_s"] for one in computed)
    return (len(verdicts) - 1) * micro_batches / spent_s


def _is_of(note: Event, number: int) -> bool:
    return note["event"] in ("forward", "backward") and note["round"] == number


def completions(notes: Sequence[Sequence[Event]], stage: int) -> list[float]:
    """Return when each micro-batch's gradient counted in ``stage``; of one lost with its replica, again."""
    return sorted(
        one["time"] for peer in notes for one in peer if one["event"] == "backward" and stage in one["stages"]
    )


def rates_over_time(moments: Sequence[float], start_s: float, stop_s: float, every_s: float) -> list[float]:
    """A second, in steps of ``every_s`` from ``start_s`` on."""
    steps = int((stop_s - start_s) / every_s)
    counts = [0] * steps
    for moment_s in moments:
        step = int((moment_s - start_s) // every_s)
        if 0 <= step < steps:
            counts[step] += 1
    return [count / every_s for count in counts]


def rate_in(moments: Sequence[float], start_s: float, window_s: float) -> float:
    return sum(start_s <= one < start_s + window_s for one in moments) / window_s


def recovered_s(moments: Sequence[float], killed_s: float, before: float, window_s: float) -> float | None:
    """From the kill until a window of ``window_s`` begins with ``RECOVERED`` of the rate ``before``; None if there was
    none. Windows begin at completions: in between nothing begins."""
    for moment_s in moments:
        if moment_s < killed_s or moment_s + window_s > moments[-1]:
            continue
        if rate_in(moments, moment_s, window_s) >= RECOVERED * before:
            return moment_s - killed_s
    return None


def ratios_of(rows: Sequence[Row]) -> dict[str, float | None]:
    """Figures for the goals: of several rows the worst; None without a row."""

    def of(what: str, column: str) -> list[float]:
        return [row[column] for row in rows if row["what"] == what and row.get(column) is not None]

    losses = {row["activations"]: row["loss"] for row in rows if row["what"] == "loss"}
    sent = {row["activations"]: row.get("mb/s") for row in rows if row["what"] == "slow link"}
    return {
        "equal_peers_vs_bound": min(of("equal", "vs bound"), default=None),
        "unequal_peers_vs_bound": min(of("unequal", "vs bound"), default=None),
        "int8_activations_loss_vs_float32": over(losses.get("int8"), losses.get("float32")),
        "int8_activations_rate_vs_float32": over(sent.get("int8"), sent.get("float32")),
        "refill_s_vs_patience": max(of("refill", "vs patience"), default=None),
    }
