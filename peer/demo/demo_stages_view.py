"""The table and the curve at the end of the demo in stages. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shoal.peer.demo.demo_report import BACK, KILLED, Mark, loss_words, summary_grid
from shoal.peer.demo.demo_stages import Cost, PipelineFigures, StagePeer
from shoal.peer.terminal.events import bytes_text, count_text, duration_text, printable


def stages_report(figures: PipelineFigures) -> RenderableType:
    """Peers and what they held; then what came of it."""
    peers = Table(box=box.SIMPLE_HEAD, padding=(0, 1), collapse_padding=True, pad_edge=False)
    peers.add_column("peer", style="bold", no_wrap=True)
    peers.add_column("held stage")
    for name in ("takes", "may use", "tokens", "sent"):
        peers.add_column(name, justify="right", no_wrap=True)
    peers.add_column("anchor", no_wrap=True)
    for peer in figures.peers:
        peers.add_row(
            peer.name,
            _held_words(figures, peer),
            _takes_words(figures, peer),
            bytes_text(figures.setting.memory_bytes),
            count_text(peer.tokens),
            bytes_text(peer.bytes_sent),
            ", ".join(f"v{version} {digest[:8]}" for version, digest in peer.anchors.values()) or "–",
            style="" if peer.is_live else "dim",
        )
    return Group(peers, _summary(figures))


def _held_words(figures: PipelineFigures, peer: StagePeer) -> str:
    moments = [(one.at_s, f"{_stages_words(one.first, one.last)} from {duration_text(one.at_s)}") for one in peer.held]
    for death in (cost.death for cost in figures.costs if cost.death.peer == peer.name):
        at_s = death.killed_at - figures.setting.started
        moments.append((at_s, f"killed {duration_text(at_s)}"))
    return ", ".join(words for _, words in sorted(moments)) or "none"


def _stages_words(first: int, last: int) -> str:
    return str(first) if first == last else f"{first} to {last}"


def _takes_words(figures: PipelineFigures, peer: StagePeer) -> str:
    if not peer.held:
        return "–"
    first, last = peer.held[-1].first, peer.held[-1].last
    return bytes_text(sum(figures.setting.stage_bytes[first : last + 1]))


def _summary(figures: PipelineFigures) -> Table:
    grid, setting = summary_grid(), figures.setting
    grid.add_row(
        "model",
        f"{count_text(setting.parameters)} parameters; to train it takes {bytes_text(setting.model_bytes)}, "
        f"and a peer may use {bytes_text(setting.memory_bytes)}",
    )
    grid.add_row("held-out loss", loss_words(figures.initial_loss, figures.final_loss))
    grid.add_row("tokens", f"{count_text(figures.tokens)} in {duration_text(figures.seconds)}")
    undone = f", {figures.rounds_undone} undone" if figures.rounds_undone else ""
    rounds = f"{figures.rounds_committed} committed, {figures.rounds_aborted} aborted{undone}"
    grid.add_row("rounds", f"{rounds}; one takes {figures.round_s:.1f} s")
    for reason in figures.aborts:
        grid.add_row("", printable(reason))
    for cost in figures.costs:
        grid.add_row("death", _cost_words(cost))
    grid.add_row("moves", f"{figures.moves} of peers to another stage")
    for stage in range(setting.stages):
        grid.add_row(f"stage {stage}", _parity_words(figures, stage))
    tied = figures.together[0] if figures.together else None
    words = Text(f"one hash over all stages' verdicts: {(tied or '–')[:16]}", "green")
    grid.add_row("last round", words if figures.parity else Text("the stages do NOT agree", "bold red"))
    return grid


def _cost_words(cost: Cost) -> str:
    death = cost.death
    who = "the only replica" if death.replicas == 1 else f"one of {death.replicas} replicas"
    after = "no round after it" if cost.next_s is None else f"the next round {cost.next_s:.1f} s later"
    return f"{death.peer}, {who} of stage {death.stage}: {after}"


def _parity_words(figures: PipelineFigures, stage: int) -> Text:
    anchors = figures.anchors(stage)
    if not anchors:
        return Text("held by nobody", "bold red")
    if not figures.stage_parity(stage):
        return Text(f"NOT equal on {', '.join(anchors)}", "bold red")
    version, digest = next(iter(anchors.values()))
    names = list(anchors)
    who = f"on {names[0]} alone" if len(names) == 1 else f"equal on {', '.join(names)}"
    return Text(f"v{version} {digest[:8]}, {who}", "green")


def stages_title(figures: PipelineFigures) -> str:
    """Of the curve."""
    setting = figures.setting
    peer, model = bytes_text(setting.memory_bytes), bytes_text(setting.model_bytes)
    return (
        f"{len(figures.peers)} peers of {peer}, a model of {model} in {setting.stages} stages; "
        f"{figures.rounds_committed} rounds, {count_text(figures.tokens)} tokens"
    )


def stages_marks(figures: PipelineFigures) -> Sequence[Mark]:
    """Deaths and returns, in the order of their moments."""
    marks = []
    for death in (cost.death for cost in figures.costs):
        which = "the only one" if death.replicas == 1 else f"one of {death.replicas}"
        words = f"{death.peer} killed, {which} in stage {death.stage}"
        marks.append(Mark(death.killed_at - figures.setting.started, words, KILLED))
        if death.back_at is not None:
            marks.append(Mark(death.back_at - figures.setting.started, f"{death.peer} comes back", BACK))
    return sorted(marks, key=lambda mark: mark.at_s)
