"""Bars, curves and amounts in characters: they read the same without colour."""

from __future__ import annotations

from collections.abc import Sequence

from rich import filesize
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.text import Text

from shoal.peer.terminal.events import duration_text
from shoal.swarm.protocol.progress import RunProgress

_DOT = " · "
_HEIGHTS = "▁▂▃▄▅▆▇█"


class Bar:
    """A bar that is filled to ``share``, as wide as there is room."""

    def __init__(self, share: float, style: str = "cyan") -> None:
        self._share = min(1.0, max(0.0, share))
        self._style = style

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        full = round(options.max_width * self._share)
        yield Text.assemble(("█" * full, self._style), ("░" * (options.max_width - full), "dim"))

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(4, options.max_width)


class Lines:
    """Lines of parts between dots, each cut between two parts: half a number or a digest would tell nothing."""

    def __init__(self, lines: Sequence[str], style: str = "dim") -> None:
        self._lines = lines
        self._style = style

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in self._lines:
            parts = line.split(_DOT)
            while len(parts) > 1 and cell_len(_DOT.join(parts)) > options.max_width:
                parts.pop()
            yield Text(_DOT.join(parts), self._style, no_wrap=True, overflow="ellipsis")


class Sparkline:
    """The latest values as a curve of bars, as many as there is room for."""

    def __init__(self, values: Sequence[float], style: str = "green") -> None:
        self._values = values
        self._style = style

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(sparkline(self._values, options.max_width), style=self._style)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(min(1, len(self._values)), min(len(self._values), options.max_width))


def sparkline(values: Sequence[float], width: int) -> str:
    """The last ``width`` values as bars, the lowest of them the shortest."""
    shown = list(values)[-width:] if width > 0 else []
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    scale = (len(_HEIGHTS) - 1) / (high - low) if high > low else 0.0
    return "".join(_HEIGHTS[round((value - low) * scale)] for value in shown)


def amount_text(number: float) -> str:
    """``4.05M``, ``20M``, ``999``: three digits, none of them a zero at the end."""
    whole = round(number)
    unit, suffix = filesize.pick_unit_and_suffix(whole, ["", "k", "M", "G", "T", "P"], 1000)
    return f"{whole / unit:.3g}{suffix}" if whole < 1000 * unit - unit / 2 else f"{whole / unit:.0f}{suffix}"


def of_goal(progress: RunProgress, tokens: int, rounds: int) -> str:
    """``4.05M of 20M tokens``, or rounds where the run ends after those, or only what there is."""
    if progress.goal_tokens is None and progress.goal_rounds is not None:
        return f"{rounds:,} of {progress.goal_rounds:,} rounds, {amount_text(tokens)} tokens"
    of = f" of {amount_text(progress.goal_tokens)}" if progress.goal_tokens is not None else ""
    return f"{amount_text(tokens)}{of} tokens"


def left_text(progress: RunProgress) -> str:
    """``about 0:12:00 left``; empty while that is not known."""
    return "" if progress.left_s is None else f"about {duration_text(progress.left_s)} left"
