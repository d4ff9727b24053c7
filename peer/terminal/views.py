"""Terminal views: a member's live panel, what ``shoal status`` prints, a pipeline's stages.

Values in, renderables out."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from shlex import quote
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from rich import box, filesize
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from shoal.peer.terminal.bars import Bar, Lines, Sparkline, amount_text, left_text, of_goal
from shoal.peer.terminal.events import (
    count_text,
    duration_text,
    loss_text,
    number_of,
    printable,
    range_text,
    span_text,
)
from shoal.peer.terminal.snapshot import Flow, HeldStages
from shoal.swarm.protocol.addresses import join_host_port
from shoal.swarm.protocol.evaluations import HeldOutFigure
from shoal.swarm.protocol.messages import CoordinatorToPeerStatus
from shoal.swarm.protocol.progress import progress_of
from shoal.swarm.protocol.types import CostStatus, Coverage, MemberStatus, RelayStatus, StageStatus

if TYPE_CHECKING:
    from shoal.peer.terminal.snapshot import Snapshot

_BAR_WIDTH = 24
_SHORT_BAR_WIDTH = 10
_SHOWN_OF_ID = 8
_LONGEST_NOTE = 400
_ONE_LINE: Any = {"no_wrap": True, "overflow": "ellipsis"}


# All stages, in `shoal status` --------------------------------------------------------------------------------


def stages_drawing(stages: Sequence[StageStatus], names: Mapping[str, str]) -> RenderableType:
    """Draw the stages as boxes, first to last. A bar's length is the stage's capacity, relative to the largest; its
    filled part is the present rate. ``names``: by peer id."""
    most = max((stage.capacity_tokens_per_s for stage in stages), default=0.0)
    grid = Table.grid(padding=(0, 1), expand=True)
    grid.add_column(no_wrap=True)
    grid.add_column(ratio=1)
    last = len(stages) - 1
    for number, stage in enumerate(stages):
        box = _box(f" {number:>{len(str(last))}} ", is_first=number == 0, is_last=number == last)
        told = Group(_stage_headline(stage), _flow(stage, most), _holders(stage, names))
        grid.add_row(Text(box, style=_style(stage)), told)
    return grid


def _style(stage: StageStatus) -> str:
    return "yellow" if stage.outlook else "magenta" if stage.is_bottleneck else "green"


def _box(number: str, *, is_first: bool, is_last: bool) -> str:
    """Draw a box of three lines, with an arrow from the stage above and a line to the one below."""
    right = "─" * (len(number) // 2)
    left = "─" * (len(number) - len(right) - 1)
    top, bottom = "─" if is_first else "▼", "─" if is_last else "┬"
    return f"╭{left}{top}{right}╮\n│{number}│\n╰{left}{bottom}{right}╯"


def _stage_headline(stage: StageStatus) -> Table:
    layers = range_text("layer", stage.first_layer, stage.stop_layer - 1)
    left = Text.assemble((layers, "bold"), f" · {filesize.decimal(stage.parameters_bytes)} of parameters", **_ONE_LINE)
    left.append(f" · {number_of(len(stage.replicas), 'replica')}")
    state = stage.state_digest.hex()[:8] if stage.state_digest else "not agreed yet"
    return _two_sides(left, Text(f"state {state}", style="dim"))


def _flow(stage: StageStatus, most: float) -> Table:
    """Rate of tokens through the stage, and its capacity."""
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
    """Peers that hold the stage, peers that are about to, and what the stage waits for."""
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
    elif len(stage.replicas) == 1:
        line.append("  one replica: nobody checks it", style="yellow")
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
    """Name the stages that nobody holds; empty if all are held."""
    if not held.empty:
        return ""
    one = len(held.empty) == 1
    numbers = ", ".join(map(str, held.empty))
    return f"{'stage' if one else 'stages'} {numbers}: nobody holds {'it' if one else 'them'}, training waits"


def alone_text(held: HeldStages) -> str:
    """Name the stages with one replica; empty if there are none."""
    if not held.alone:
        return ""
    if len(held.alone) == 1:
        return f"stage {held.alone[0]} has one replica: nobody checks it"
    return f"stages {', '.join(map(str, held.alone))} have one replica each: nobody checks them"


_PHASE_STYLES = {
    "waiting": "yellow",
    "training": "green",
    "closing": "cyan",
    "averaging": "magenta",
    "ended": "bold green",
}


def phase_text(phase: str) -> Text:
    return Text(phase, style=_PHASE_STYLES.get(phase, ""))


LEAVING = "leaving: what has begun is finished and saved; Ctrl-C again leaves at once"

# A member's live view ---------------------------------------------------------------------------------------


def session_panel(
    snapshot: Snapshot,
    losses: Sequence[float],
    lines: Sequence[str],
    *,
    run_tokens_per_s: float = 0.0,
    own_tokens_per_s: float = 0.0,
) -> Panel:
    """Render a member's live panel. ``losses`` and ``lines`` (on events) are the latest, oldest first; the speeds are
    steady ones, over wall time."""
    rows: list[RenderableType] = [_headline(snapshot)]
    if snapshot.held is not None:
        rows.append(Text(held_text(snapshot.held), style="bold", **_ONE_LINE))
    rows += [_progress_bars(snapshot, run_tokens_per_s), _figures(snapshot, losses, own_tokens_per_s)]
    rows += [Text(words, style) for words, style in _notes(snapshot)]
    if lines:
        rows.append(Lines(lines))
    whose = [printable(snapshot.name)] if snapshot.name else []
    return Panel(
        Group(*rows),
        title=Text.assemble(("shoal", "bold"), " · ", (printable(snapshot.run), "bold cyan")),
        title_align="left",
        subtitle=Text(" · ".join([*whose, snapshot.peer[:_SHOWN_OF_ID], snapshot.device]), style="dim"),
        subtitle_align="right",
        box=box.ROUNDED,
        border_style="cyan",
        padding=(0, 1),
    )


def _notes(snapshot: Snapshot) -> list[tuple[str, str]]:
    """List what needs attention, in sentences that wrap, with their styles: first what is waited for."""
    notes: list[tuple[str, str]] = []
    if snapshot.leaving:
        notes.append((LEAVING, "bold yellow"))
    if snapshot.coordinator_is_away:
        notes.append(("the coordinator is away: training goes on, the round ends when it is back", "bold yellow"))
    if snapshot.held is not None:
        notes += [(words, "bold yellow") for words in (empty_text(snapshot.held),) if words]
        notes += [(words, "yellow") for words in (alone_text(snapshot.held),) if words]
    if snapshot.waits_for:
        notes.append((f"the run waits: {printable(snapshot.waits_for)}", "bold yellow"))
    if snapshot.aborted:
        notes.append((printable(snapshot.aborted), "yellow"))
    if snapshot.amended:
        notes.append((f"amended by the host: {printable('; '.join(snapshot.amended))}", "yellow"))
    return [(shorten(words, _LONGEST_NOTE, placeholder=" …"), style) for words, style in notes]


def _headline(snapshot: Snapshot) -> Table:
    left = Text.assemble("round ", (str(snapshot.round), "bold"), "  ", phase_text(snapshot.phase))
    if snapshot.activity not in ("", snapshot.phase):
        left.append(f"  this peer: {printable(snapshot.activity)}", style="dim")
    return _two_sides(left, Text.assemble((number_of(snapshot.members, "peer"), "bold")))


def _progress_bars(snapshot: Snapshot, run_tokens_per_s: float) -> Table:
    """Bars of the whole run, if it has an end, and of the open round."""
    grid = Table.grid(padding=(0, 1), expand=True)
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(ratio=1)
    grid.add_column(justify="right", no_wrap=True)
    if snapshot.ends is not None:
        progress = progress_of(
            snapshot.ends,
            snapshot.tokens_target,
            tokens=snapshot.tokens_committed,
            rounds=snapshot.anchor_version,
            tokens_per_s=run_tokens_per_s,
        )
        words = [of_goal(progress, snapshot.tokens_committed, snapshot.anchor_version)]
        words += [f"{progress.share:.0%}"] if progress.share is not None else []
        words += [left] if (left := left_text(progress)) and snapshot.phase != "ended" else []
        grid.add_row("run", Bar(progress.share) if progress.share is not None else "", Text(" · ".join(words)))
    if snapshot.phase == "ended":
        return grid
    share = snapshot.tokens_in_round / max(1, snapshot.tokens_target)
    told = Text(f"{amount_text(snapshot.tokens_in_round)} of {amount_text(snapshot.tokens_target)} tokens")
    if snapshot.closes_in_s is not None:
        told.append(f" · closes in {duration_text(snapshot.closes_in_s)}", style="cyan")
    grid.add_row("round", Bar(share, "magenta"), told)
    return grid


def _figures(snapshot: Snapshot, losses: Sequence[float], own_tokens_per_s: float) -> RenderableType:
    loss = Table.grid(padding=(0, 1), expand=True)
    loss.add_column(no_wrap=True)
    loss.add_column(ratio=1)
    loss.add_row(_figure("loss", loss_text(snapshot.loss)), Sparkline(losses))
    speed = own_tokens_per_s or snapshot.tokens_per_s
    own = Text("  ").join(
        [
            _figure("trained here", f"{amount_text(snapshot.tokens_trained)} tokens"),
            _figure("tokens/s", count_text(speed)),
            _figure("anchor", f"version {snapshot.anchor_version}"),
        ]
    )
    traffic = Text("  ").join(
        [
            _figure("sent", filesize.decimal(snapshot.bytes_sent)),
            _figure("received", filesize.decimal(snapshot.bytes_received)),
            _figure("compression", f"{snapshot.compression:.1f}×"),
        ]
    )
    rows: list[RenderableType] = [loss, own, traffic]
    if snapshot.held is not None:
        flow = snapshot.held.flow
        rows.append(
            Text("  ").join(
                [
                    _figure("forward", count_text(flow.forwards)),
                    _figure("backward", count_text(flow.backwards)),
                    _figure("in flight", f"{flow.in_flight} of {flow.max_in_flight}"),
                ]
            )
        )
    return Group(*rows)


def _figure(name: str, value: str) -> Text:
    return Text.assemble((f"{name} ", "dim"), (value, "bold"))


def farewell(run: str, folder: Path, *, ended: bool, has_model: bool) -> str:
    """Last words to a member at its end: how to come back, or where the run's model is."""
    if not ended:
        return f"Left {run}. The same command goes on where this was: its state is in {folder}"
    model = (
        f"The model: shoal export {quote(str(folder))} --out model.safetensors"
        if has_model
        else "This member kept no checkpoint: ask the host, or another member, for the model"
    )
    return f"Run finished: {run}. {model}"


def status_line(snapshot: Snapshot) -> str:
    """Format a snapshot as one plain line, for logs."""
    words = [
        f"round {snapshot.round} {snapshot.phase}",
        f"{count_text(snapshot.tokens_in_round)}/{count_text(snapshot.tokens_target)} tokens",
        f"loss {loss_text(snapshot.loss)}",
        f"{count_text(snapshot.tokens_per_s)} tokens/s",
        number_of(snapshot.members, "peer"),
        f"{filesize.decimal(snapshot.bytes_sent)} out, {filesize.decimal(snapshot.bytes_received)} in",
    ]
    if snapshot.held is not None:
        words[1:1] = [held_text(snapshot.held), flow_text(snapshot.held.flow)]
        words += [empty] if (empty := empty_text(snapshot.held)) else []
    if snapshot.activity not in ("", snapshot.phase):
        words.insert(1, printable(snapshot.activity))
    if snapshot.coordinator_is_away:
        words.append("the coordinator is away")
    words += [printable(told) for told in (snapshot.waits_for, snapshot.aborted) if told]
    return " · ".join(words)


# The run's status -------------------------------------------------------------------------------------------


def status_table(status: CoordinatorToPeerStatus) -> RenderableType:
    """Render the output of ``shoal status``."""
    rounds = f"{status.rounds_committed} committed, {status.rounds_aborted} aborted"
    if status.rounds_undone:
        rounds += f", {status.rounds_undone} undone"
    head = Table.grid(padding=(0, 2))
    head.add_column(style="dim", no_wrap=True)
    head.add_column()
    head.add_row("run", Text.assemble((printable(status.run), "bold cyan"), (f"  {status.run_hash.hex()[:16]}", "dim")))
    head.add_row("progress", _progress_line(status))
    head.add_row("round", _round_line(status))
    head.add_row("rounds", rounds)
    head.add_row("loss", Text(loss_text(status.loss), style="bold"))
    if status.evaluation.figures:
        head.add_row("held out", held_out_text(status.evaluation.figures[-1]))
    if status.progress.tokens_per_s:
        head.add_row("speed", f"{count_text(status.progress.tokens_per_s)} tokens/s, over the latest rounds")
    head.add_row("anchor", f"version {status.anchor_version}, {_agreement(status)}")
    for row in [*_cost_rows(status.costs), *_energy_rows(status.costs), *_device_rows(status.members)]:
        head.add_row(*row)
    if status.warning:
        head.add_row("", Text(printable(status.warning), style="bold red"))
    if status.stopping:
        last = "has ended" if status.phase == "ended" else "ends with this round"
        head.add_row("", Text(printable(f"the run {last}: {status.stopping}"), style="bold yellow"))
    if status.outlook:
        head.add_row("", Text(printable(status.outlook), style="bold yellow"))
    if status.journal:
        waiting = f"verdicts wait for the journal, members train on: {status.journal}"
        head.add_row("", Text(printable(waiting), style="bold red"))
    for row in _coverage_rows(status.coverage):
        head.add_row(*row)
    for number, one in enumerate(status.amendments):
        in_effect = "" if one.at_round <= status.round else "to come: "
        head.add_row("" if number else "amended", Text(printable(f"{in_effect}{one.text}"), style="yellow"))
    names = {member.peer: member.name for member in status.members}
    for relay in status.relays:
        head.add_row("relay", relay_text(relay, names))
    for row in _timing_rows(status):
        head.add_row(*row)
    head.add_row("lasted" if status.phase == "ended" else "running for", duration_text(status.elapsed_s))
    shown: list[RenderableType] = [head]
    if status.stages:
        shown += [Text(), stages_drawing(status.stages, names)]
    shown.append(_members_table(status) if status.members else Text("\nnobody has joined yet", style="yellow"))
    shown += [Text(line, style="red") for line in stopped_lines(status.members)]
    return Group(*shown)


def held_out_text(figure: HeldOutFigure) -> Text:
    """Say the newest held-out figure, and on whose word."""
    who = number_of(len(figure.claims), "validator")
    if figure.standing == "disputed":
        told = " and ".join(f"{loss_text(one.loss)} by {one.validator}" for one in figure.claims[:3])
        return Text(f"version {figure.version}: validators disagree ({told}), so none is used", style="bold red")
    words = Text.assemble((loss_text(figure.loss), "bold"), f" at version {figure.version}")
    if figure.accuracy is not None:
        words.append(f", accuracy {figure.accuracy:.1%}")
    if figure.standing == "agreed":
        return words.append(f", agreed on by {who}", style="green")
    return words.append(f", the claim of one validator, {figure.claims[0].validator}", style="dim")


def _timing_rows(status: CoordinatorToPeerStatus) -> list[tuple[str, RenderableType]]:
    """Rows on where the time of the last round went, for whom it waited, and how much of the work is of use."""
    rows: list[tuple[str, RenderableType]] = []
    if (timing := status.timing) is not None:
        parts = (("work", timing.work_s), ("gathering", timing.gather_s), ("exchange", timing.exchange_s))
        words = ", ".join(f"{name} {duration_text(seconds)}" for name, seconds in parts)
        rows.append(("last round", Text(f"{timing.round}  {duration_text(timing.wall_s)}: {words}")))
        if timing.path is not None:
            rows.append(("", Text(printable(timing.path.text), style="yellow")))
    shares = (("utilisation", status.utilisation), ("goodput", status.goodput))
    known = [f"{name} {share:.0%}" for name, share in shares if share is not None]
    return [*rows, ("use", Text(", ".join(known)))] if known else rows


def _progress_line(status: CoordinatorToPeerStatus) -> RenderableType:
    """Progress of the run, with a bar and the time left; ``4.05M of 20M tokens``."""
    progress = status.progress
    words = Text(of_goal(progress, status.tokens_committed, status.rounds_committed))
    if progress.share is None:
        return words
    if (left := left_text(progress)) and status.phase != "ended":
        words.append(f" · {left}")
    grid = Table.grid(padding=(0, 1))
    grid.add_column(width=_SHORT_BAR_WIDTH)
    grid.add_column(no_wrap=True)
    grid.add_column()
    grid.add_row(Bar(progress.share), f"{progress.share:.0%}", words)
    return grid


def _round_line(status: CoordinatorToPeerStatus) -> Text:
    if status.phase == "ended":
        return Text("the run has ended", style=_PHASE_STYLES["ended"])
    line = Text.assemble((str(status.round), "bold"), " ", phase_text(status.phase))
    of = f" of {amount_text(status.round_tokens)}" if status.round_tokens else ""
    line.append(f", {amount_text(status.tokens_in_round)}{of} tokens")
    if status.closes_in_s is not None:
        line.append(f", closes in {duration_text(status.closes_in_s)}")
    return line


def _cost_rows(costs: CostStatus) -> list[tuple[str, RenderableType]]:
    """Rows on what the run has cost, as far as anybody names a price."""
    rows: list[tuple[str, RenderableType]] = []
    if costs.cost is not None:
        words = [f"{money_text(costs.cost, costs.currency)} as members say"]
        if costs.priced_members < costs.members:
            words[0] += f", {costs.priced_members} of {costs.members}"
        if costs.million_tokens_cost is not None:
            words.append(f"{money_text(costs.million_tokens_cost, costs.currency)} per million tokens")
        rows.append(("cost", "; ".join(words)))
    if costs.provider_cost is not None:
        left = costs.provider_unlisted_device_s
        without = f", without {duration_text(left)} of devices that are not in its list" if left else ""
        at = f"at the prices of {costs.provider}" if costs.provider else "at the run file's prices"
        words = [f"{money_text(costs.provider_cost, costs.currency)} {at}{without}"]
        rows.append(("" if rows else "cost", Text(printable("; ".join(words)))))
    return rows


def _energy_rows(costs: CostStatus) -> list[tuple[str, RenderableType]]:
    """Row on the energy that the run took, as far as anybody's GPU is measured."""
    if costs.energy_j is None:
        return []
    words = [f"{energy_text(costs.energy_j)} as members say"]
    if costs.metered_members < costs.members:
        words[0] += f", {costs.metered_members} of {costs.members}"
    if costs.round_energy_j:
        words.append(f"{energy_text(costs.round_energy_j)} in the last round")
    if costs.token_energy_j is not None:
        words.append(f"{energy_text(costs.token_energy_j)} a token")
    return [("energy", "; ".join(words))]


def _device_rows(members: Sequence[MemberStatus]) -> list[tuple[str, RenderableType]]:
    """Row on how busy members' devices are: the mean of those that say, and the power of all of them."""
    uses = [one.use for one in members if one.alive and one.use is not None]
    gpus = [one.gpu for one in uses if one.gpu is not None]
    powers = [one.power_w for one in uses if one.power_w is not None]
    words = []
    if gpus:
        words.append(f"{number_of(len(gpus), 'GPU')} {sum(gpus) / len(gpus):.0%} busy")
    if powers:
        words.append(metric_text(sum(powers), "W"))
    if uses:
        words.append(f"processors {sum(one.cpu for one in uses) / len(uses):.0%} busy")
    return [("devices", f"{', '.join(words)}, as {number_of(len(uses), 'member')} say")] if words else []


def energy_text(joules: float) -> str:
    """``1.25 kWh``; below one watt-hour in joules: ``0.42 J``."""
    return metric_text(joules / 3600, "Wh") if joules >= 3600 else metric_text(joules, "J")


def metric_text(amount: float, unit: str) -> str:
    """``250 W``, ``1.2 kW``, ``0.0042 J``: three digits with the prefix that suits."""
    shown = float(f"{amount:.3g}")
    power = min(6, int(math.log10(shown) // 3)) if shown >= 1000 else 0
    return f"{shown / 1000**power:.3g} {'kMGTPE'[power - 1] if power else ''}{unit}"


def money_text(amount: float, currency: str) -> str:
    """``0.0042 USD``, ``12.30 USD``: two digits behind the point, or two that count."""
    digits = 2 if amount >= 0.1 or amount < 1e-9 else 1 - math.floor(math.log10(amount))
    return f"{amount:,.{digits}f} {currency}"


def relay_text(relay: RelayStatus, names: Mapping[str, str]) -> str:
    """Say where a relay is, whose it is, and what it carries."""
    whose = f" of {printable(names.get(relay.peer, relay.peer))}" if relay.peer else ""
    load = relay.load
    carries = (
        "it does not answer"
        if load is None
        else (
            f"{load.links} connections of {load.clients} members, {filesize.decimal(load.carried_bytes)} so far, "
            f"{load.busy:.0%} busy"
        )
    )
    return f"{join_host_port(relay.host, relay.port)}{whose}: {carries}"


def stopped_lines(members: Iterable[MemberStatus]) -> list[str]:
    """List members that had to leave the run, and why; those with the same reason in one line."""
    names: dict[tuple[str, str], list[str]] = {}
    for member in members:
        if member.trouble and not member.alive and member.left != "paused":
            names.setdefault((member.left, member.trouble), []).append(f"{member.name} {member.peer[:8]}")
    return [
        printable(f"{', '.join(who[:3])}{f' and {len(who) - 3} more' if len(who) > 3 else ''} left ({left}): {trouble}")
        for (left, trouble), who in names.items()
    ]


def _agreement(status: CoordinatorToPeerStatus) -> str:
    """Say which state is agreed on; of a pipeline, in how many stages."""
    if not status.stages:
        return status.state_digest.hex()[:16] if status.state_digest else "not agreed yet"
    agreed = sum(stage.state_digest is not None for stage in status.stages)
    return (
        "agreed on in all stages"
        if agreed == len(status.stages)
        else f"agreed on in {agreed} of {len(status.stages)} stages"
    )


CREDIT_CAPTION = "credit: weight in what members decide, by their latest work; new: none yet"
_MEMBERS_CAPTION = f"tok/s: over whole rounds; state: whether it holds the newest one; {CREDIT_CAPTION}"


def _members_table(status: CoordinatorToPeerStatus) -> Table:
    """A table of the members, two lines for each, so that nothing is cut at 80 columns."""
    members = Table(box=box.SIMPLE_HEAD, padding=(0, 1), collapse_padding=True, pad_edge=False)
    members.add_column("peer\nid", overflow="fold", min_width=16)
    members.add_column("device\ndoing", overflow="fold")
    members.add_column("reach\n ", overflow="fold")
    members.add_column("tok/s\ntokens", justify="right", no_wrap=True)
    members.add_column("share\ncredit", justify="right", no_wrap=True)
    # In a pipeline only holders of the last stage have a loss, and it is shown above.
    members.add_column("stage\nstate" if status.stages else "loss\nstate", justify="right", no_wrap=True)
    members.add_column("sent\nreceived", justify="right", no_wrap=True)
    for member in sorted(status.members, key=lambda one: (not one.alive, -one.share, one.name)):
        row = _status_row(member, in_stages=bool(status.stages))
        members.add_row(*row, style="" if member.alive else "dim")
    members.caption, members.caption_justify = _MEMBERS_CAPTION, "left"
    return members


def credit_text(share: float) -> str:
    """Write a member's share of the credit of all that are here."""
    if not share:
        return "new"
    return f"{100 * share:.0f}%" if share >= 0.01 else "<1%"


def _coverage_rows(coverage: Sequence[Coverage]) -> list[tuple[str, RenderableType]]:
    """Rows on the newest epoch, and on each earlier one of which samples are not committed yet."""
    if not coverage:
        return []
    newest, before = coverage[-1], coverage[:-1]
    left = newest.samples - newest.committed - newest.leased - newest.returned
    done = Text.assemble(
        (f"{newest.epoch}", "bold"),
        f"  {newest.committed / newest.samples:.0%} of {count_text(newest.samples)} samples committed, "
        f"{count_text(newest.leased)} leased, {count_text(newest.returned)} returned, {count_text(left)} not given out",
    )
    open_ones = [
        Text(f"{one.epoch}  {count_text(one.samples - one.committed)} samples are not committed yet", style="yellow")
        for one in before
        if one.committed < one.samples
    ]
    return [*(("epoch", one) for one in open_ones), ("epoch", done)]


def reach_text(member: MemberStatus) -> str:
    """Say how others meet a member: ``direct``, ``2 punched, 1 relayed``, ``relayed``, ``unreachable``."""
    if not member.alive:
        return "–"
    if member.reachable:
        return "direct"
    kinds = Counter(path.kind for path in member.paths)
    if kinds:
        return ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    return "relayed" if member.relayed else "unreachable"


def doing_text(member: MemberStatus) -> str:
    """Say what a member does, or why it is not here."""
    if member.left == "paused":  # its owner's terms; it comes back by itself
        return f"paused: {printable(member.trouble)}" if member.trouble else "paused"
    if member.left:
        return f"left ({printable(member.left)})"
    return "cannot take part" if member.wall else printable(member.activity)


def steady_speed(member: MemberStatus) -> float:
    """A member's speed over wall time, or that of its steps before its first round."""
    return (member.steady_tokens_per_s or member.tokens_per_s) if member.alive else 0.0


def _status_row(member: MemberStatus, *, in_stages: bool) -> list[RenderableType]:
    state = ("holds", "green") if member.synced else ("–", "yellow")
    speed = count_text(steady_speed(member)) if member.alive else "–"
    stages = span_text(*member.stages) if member.stages else "–"
    return [
        Text.assemble((printable(member.name), "bold"), "\n", (member.peer, "dim")),
        Text(f"{printable(member.device.name)}\n{doing_text(member)}"),
        Text(reach_text(member)),
        Text(f"{speed}\n{count_text(member.tokens_committed)}"),
        Text(f"{100 * member.share:.0f}%\n{credit_text(member.credit) if member.alive else '–'}"),
        Text.assemble(stages if in_stages else loss_text(member.loss), "\n", state),
        Text(f"{filesize.decimal(member.bytes_sent)}\n{filesize.decimal(member.bytes_received)}"),
    ]
