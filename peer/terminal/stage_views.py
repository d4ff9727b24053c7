"""A pipeline's stages in a terminal: how micro-batches flow through them, and who holds which. Pure: values in,
renderables out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shoal.peer.terminal.events import bytes_text, count_text, number_of, printable, range_text
from shoal.peer.terminal.snapshot import Flow, HeldStages
from shoal.swarm.protocol.messages import StageStatus

_BAR_WIDTH = 24
_SHOWN_OF_ID = 8
_ONE_LINE: Any = {"no_wrap": True, "overflow": "ellipsis"}


# All stages, in `shoal status` --------------------------------------------------------------------------------


def stages_drawing(stages: Sequence[StageStatus], names: Mapping[str, str]) -> RenderableType:
    """Boxes, from the first stage to the last one. A bar is as long as what the stage could do, next to the stage that
    could do the most, and full as far as it does that. ``names``: by peer id."""
    most = max((stage.capacity_tokens_per_s for stage in stages), default=0.0)
    grid = Table.grid(padding=(0, 1), expand=True)
    grid.add_column(no_wrap=True)
    grid.add_column(ratio=1)
    last = len(stages) - 1
    for number, stage in enumerate(stages):
        box = _box(f" {number:>{len(str(last))}} ", is_first=number == 0, is_last=number == last)
        told = Group(_headline(stage), _flow(stage, most), _holders(stage, names))
        grid.add_row(Text(box, style=_style(stage)), told)
    return grid


def _style(stage: StageStatus) -> str:
    return "yellow" if stage.outlook else "magenta" if stage.is_bottleneck else "green"


def _box(number: str, *, is_first: bool, is_last: bool) -> str:
    """Three lines; an arrow comes in from the stage above, and a line goes on to the one below."""
    right = "─" * (len(number) // 2)
    left = "─" * (len(number) - len(right) - 1)
    top, bottom = "─" if is_first else "▼", "─" if is_last else "┬"
    return f"╭{left}{top}{right}╮\n│{number}│\n╰{left}{bottom}{right}╯"


def _headline(stage: StageStatus) -> Table:
    layers = range_text("layer", stage.first_layer, stage.stop_layer - 1)
    left = Text.assemble((layers, "bold"), f" · {bytes_text(stage.parameters_bytes)} of parameters", **_ONE_LINE)
    left.append(f" · {number_of(len(stage.replicas), 'replica')}")
    state = stage.state_digest.hex()[:8] if stage.state_digest else "not agreed yet"
    return _two_sides(left, Text(f"state {state}", style="dim"))


def _flow(stage: StageStatus, most: float) -> Table:
    """What comes through, and what could."""
    could = stage.capacity_tokens_per_s
    width = max(1, round(_BAR_WIDTH * could / most)) if could else 0
    full = round(width * min(1.0, stage.tokens_per_s / could)) if could else 0
    bar = Text.assemble(("━" * full, _style(stage)), ("╌" * (width - full), "dim"), " " * (_BAR_WIDTH - width))
    words = Text.assemble(" ", (count_text(stage.tokens_per_s), "bold"), **_ONE_LINE)
    words.append(f" of {count_text(could)} tok/s" if could else " tok/s")
    if stage.is_bottleneck and not stage.outlook:
        words.append("  bottleneck", style="bold magenta")
    return _two_sides(bar + words, Text(f"queue {count_text(stage.queue)}", style="dim"))


def _holders(stage: StageStatus, names: Mapping[str, str]) -> Text:
    """Who holds it and who is about to; or what it waits for."""
    line = Text(**_ONE_LINE)
    for mark, style, peers in (("●", "green", stage.replicas), ("○", "yellow", stage.coming)):
        for peer in peers:
            line.append("  " if line else "")
            line.append(f"{mark} ", style=style)
            line.append(printable(names.get(peer, "")))
            line.append(f" {peer[:_SHOWN_OF_ID]}", style="dim")
    if stage.outlook:
        line.append("  " if line else "")
        line.append(printable(stage.outlook), style="bold yellow")
    return line


def _two_sides(left: RenderableType, right: RenderableType) -> Table:
    grid = Table.grid(padding=(0, 2), expand=True)
    grid.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    grid.add_column(justify="right", no_wrap=True)
    grid.add_row(left, right)
    return grid


# A member's own, in its live view -----------------------------------------------------------------------------


def held_text(held: HeldStages) -> str:
    """``stages 2 to 3 of 6, layers 4 to 7, 2 replicas``."""
    replicas = number_of(held.replicas, "replica")
    stages = range_text("stage", held.first, held.last)
    return f"{stages} of {held.stages}, {range_text('layer', held.first_layer, held.stop_layer - 1)}, {replicas}"


def flow_text(flow: Flow) -> str:
    """``12 forward, 10 backward, 2 of 4 in flight``."""
    return f"{flow.forwards:,} forward, {flow.backwards:,} backward, {flow.in_flight} of {flow.max_in_flight} in flight"


def empty_text(held: HeldStages) -> str:
    """Which stages nobody holds; empty where all are held."""
    if not held.empty:
        return ""
    one = len(held.empty) == 1
    numbers = ", ".join(map(str, held.empty))
    return f"{'stage' if one else 'stages'} {numbers}: nobody holds {'it' if one else 'them'}, training waits"
