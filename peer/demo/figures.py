"""Results of a demo, from the events that its processes logged: figures, tables, a loss curve, and failures."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from shoal.peer.demo.board import Anchor, Death, held_anchors, usual_round_s, whole_run
from shoal.peer.event_schema import Event
from shoal.peer.offline.export import export_model
from shoal.peer.offline.whole_model import WholeModel, use_newest
from shoal.peer.recipes.gpt import Gpt, generate
from shoal.peer.terminal.events import bytes_text, count_text, duration_text, printable
from shoal.swarm.errors import StorageError


@dataclass(frozen=True)
class Assembled:
    """The anchor that the model was made of: its version, and the digest of each stage's state."""

    version: int
    digests: tuple[str, ...]


def assemble_model(folder: Path, out: Path) -> Assembled:
    """Write to ``out`` the newest model of which all stages are below ``folder``, as ``shoal export`` does. Raises
    ``StateFileError``, ``StorageError``."""

    def describe(model: WholeModel) -> Assembled:
        return Assembled(model.version, tuple(stage.load().digest.hex() for stage in model.stages))

    export_model(folder, out)
    return use_newest(folder, None, describe)


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


def float32_ddp_bytes(peers: int, parameters: int, steps: float) -> float:
    """Bytes that one of ``peers`` sends in ``steps`` ring all-reduces of float32 gradients: 2·(N-1)/N of them each."""
    return 2 * (peers - 1) / peers * 4 * parameters * steps


@dataclass(frozen=True)
class Plan:
    """The setting of the demo. ``started``, ``killed_at``, ``joined_at`` are moments of ``time.time()``."""

    peers: int
    parameters: int
    tokens_per_step: int
    killed: str
    joined: str
    started: float
    killed_at: float | None
    joined_at: float | None


@dataclass(frozen=True)
class PeerFigures:
    """One line of the table. ``digest`` and ``version`` are of the last state that it held."""

    name: str
    part: str
    tokens: int
    tokens_per_s: float
    bytes_sent: int
    bytes_float32_ddp: float
    version: int | None
    digest: str | None

    @property
    def is_live(self) -> bool:
        return self.part != "killed"


@dataclass(frozen=True)
class Figures:
    """All of them. ``seconds``: from the coordinator's start to the last event of any peer."""

    initial_loss: float
    final_loss: float
    tokens: int
    rounds_committed: int
    rounds_aborted: int
    peers: tuple[PeerFigures, ...]
    killed: str
    joined: str
    seconds: float

    @property
    def parity(self) -> bool:
        """Every live peer ended with the same anchor, and there is one."""
        digests = {peer.digest for peer in self.peers if peer.is_live}
        return len(digests) == 1 and None not in digests

    @property
    def full_time(self) -> list[PeerFigures]:
        """The peers that were there from the start to the end: means are taken over them."""
        return [peer for peer in self.peers if peer.part == "all along"]

    @property
    def bytes_sent_per_peer(self) -> float:
        return _mean([peer.bytes_sent for peer in self.full_time])

    @property
    def bytes_float32_ddp_per_peer(self) -> float:
        return _mean([peer.bytes_float32_ddp for peer in self.full_time])

    @property
    def ratio(self) -> float:
        """Ratio of the bytes that float32 data-parallel would have sent to those sent."""
        return self.bytes_float32_ddp_per_peer / self.bytes_sent_per_peer if self.bytes_sent_per_peer else 0.0

    def as_json(self) -> dict[str, Any]:
        return {
            "initial_loss": self.initial_loss,
            "final_loss": self.final_loss,
            "tokens": self.tokens,
            "rounds_committed": self.rounds_committed,
            "rounds_aborted": self.rounds_aborted,
            "bytes_sent_per_peer": round(self.bytes_sent_per_peer),
            "bytes_float32_ddp_per_peer": round(self.bytes_float32_ddp_per_peer),
            "parity": self.parity,
            "killed": self.killed,
            "joined": self.joined,
            "seconds": round(self.seconds, 1),
        }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def make_figures(
    plan: Plan, host: Sequence[Event], peers: Mapping[str, Sequence[Event]], losses: tuple[float, float]
) -> Figures:
    """``host`` and ``peers`` (by name): their logged events. ``losses``: held out, at the start and at the end."""
    verdicts = [event for event in host if event["event"] == "verdict"]
    committed = [event for event in verdicts if event["committed"]]
    tokens = committed_tokens(host)
    ends = [event["time"] for events in peers.values() for event in events] or [plan.started]
    return Figures(
        initial_loss=losses[0],
        final_loss=losses[1],
        tokens=committed[-1]["tokens_total"] if committed else 0,
        rounds_committed=len(committed),
        rounds_aborted=len(verdicts) - len(committed),
        peers=tuple(_peer_figures(plan, name, events, tokens) for name, events in peers.items()),
        killed=plan.killed,
        joined=plan.joined,
        seconds=max(ends) - plan.started,
    )


def committed_tokens(host: Sequence[Event]) -> dict[str, int]:
    """Tokens in committed rounds, by peer id."""
    tokens: dict[str, int] = {}
    planned: Event | None = None
    for event in host:
        if event["event"] == "round_planned":
            planned = event
        elif event["event"] == "verdict" and event["committed"] and planned and planned["round"] == event["round"]:
            for peer, weight in zip(planned["members"], planned["tokens"], strict=True):
                tokens[peer] = tokens.get(peer, 0) + weight
    return tokens


def _peer_figures(plan: Plan, name: str, events: Sequence[Event], tokens: Mapping[str, int]) -> PeerFigures:
    peer = next((event["peer"] for event in events if event["event"] == "joined"), "")
    began = next((event["time"] for event in events if event["event"] == "synced"), plan.started)
    trained_s = max(1e-9, events[-1]["time"] - began) if events else 1.0
    # The last word on each, because a killed peer has said nothing in the end.
    last: dict[str, Any] = {}
    for event in events:
        last.update({key: event[key] for key in ("bytes_sent", "anchor_version", "digest") if key in event})
    done = tokens.get(peer, 0)
    steps = done / plan.tokens_per_step
    return PeerFigures(
        name=name,
        part="killed" if name == plan.killed else "came late" if name == plan.joined else "all along",
        tokens=done,
        tokens_per_s=done / trained_s,
        bytes_sent=last.get("bytes_sent", 0),
        bytes_float32_ddp=float32_ddp_bytes(plan.peers, plan.parameters, steps),
        version=last.get("anchor_version"),
        digest=last.get("digest"),
    )


# For people -------------------------------------------------------------------------------------------------


def report(figures: Figures) -> RenderableType:
    """The table at the demo's end."""
    peers = Table(box=box.SIMPLE_HEAD, padding=(0, 1), collapse_padding=True, pad_edge=False)
    peers.add_column("peer", style="bold", no_wrap=True)
    peers.add_column("was there", no_wrap=True)
    for name in ("tokens", "tok/s", "sent", "float32 DDP", "ratio"):
        peers.add_column(name, justify="right", no_wrap=True)
    peers.add_column("anchor", no_wrap=True)
    for peer in figures.peers:
        ratio = f"{peer.bytes_float32_ddp / peer.bytes_sent:.0f}×" if peer.bytes_sent else "–"
        anchor = f"v{peer.version} {(peer.digest or '–')[:8]}"
        peers.add_row(
            peer.name,
            peer.part,
            count_text(peer.tokens),
            count_text(peer.tokens_per_s),
            bytes_text(peer.bytes_sent),
            bytes_text(peer.bytes_float32_ddp),
            ratio,
            anchor,
            style="" if peer.is_live else "dim",
        )
    return Group(peers, _summary(figures))


def _summary(figures: Figures) -> Table:
    grid = summary_grid()
    grid.add_row("held-out loss", loss_words(figures.initial_loss, figures.final_loss))
    grid.add_row("tokens", f"{count_text(figures.tokens)} in {duration_text(figures.seconds)}")
    grid.add_row("rounds", f"{figures.rounds_committed} committed, {figures.rounds_aborted} aborted")
    sent, ddp = bytes_text(figures.bytes_sent_per_peer), bytes_text(figures.bytes_float32_ddp_per_peer)
    times = Text.assemble(f"{sent} a peer; float32 data-parallel {ddp}: ", (f"{figures.ratio:.0f}×", "bold"), " more")
    grid.add_row("sent", times)
    live = sum(peer.is_live for peer in figures.peers)
    parity = Text(f"equal on all {live} live peers", "green") if figures.parity else Text("NOT equal", "bold red")
    grid.add_row("anchors", parity)
    return grid


@dataclass(frozen=True)
class Setting:
    """The setting of the demo. ``stage_bytes``: what each stage takes at least; ``model_bytes``: all in one."""

    stages: int
    memory_bytes: int
    stage_bytes: tuple[int, ...]
    model_bytes: int
    parameters: int
    started: float


@dataclass(frozen=True)
class Held:
    """A peer has held these stages since ``at_s`` after the start."""

    at_s: float
    first: int
    last: int


@dataclass(frozen=True)
class StagePeer:
    """``held``: one after the other; ``anchors``: by stage, of what it held in the end."""

    name: str
    is_live: bool
    held: tuple[Held, ...]
    tokens: int
    bytes_sent: int
    anchors: Mapping[int, Anchor]

    @property
    def moves(self) -> int:
        """Number of times that it was given other stages than it had."""
        spans = [(one.first, one.last) for one in self.held]
        return sum(before != after for before, after in pairwise(spans))


@dataclass(frozen=True)
class Cost:
    """The cost of a death: seconds from the kill to the next committed round, ``next_s``; None when there was none."""

    death: Death
    next_s: float | None


@dataclass(frozen=True)
class PipelineFigures:
    """All of them. ``round_s``: what a round takes when nobody dies; ``aborts``: why rounds were aborted, each reason
    once; ``together``: the hash that ties the verdicts of all stages on the last committed round, by stage."""

    setting: Setting
    initial_loss: float
    final_loss: float
    tokens: int
    rounds_committed: int
    rounds_aborted: int
    aborts: tuple[str, ...]
    rounds_undone: int
    round_s: float
    peers: tuple[StagePeer, ...]
    costs: tuple[Cost, ...]
    together: tuple[str | None, ...]
    seconds: float

    def anchors(self, stage: int) -> dict[str, Anchor]:
        """Anchors that the live replicas of a stage hold in the end, by name."""
        return {peer.name: peer.anchors[stage] for peer in self.peers if peer.is_live and stage in peer.anchors}

    def stage_parity(self, stage: int) -> bool:
        """Every live replica of it holds the same anchor, and there is one."""
        return len(set(self.anchors(stage).values())) == 1

    @property
    def parity(self) -> bool:
        """In all stages, at the same version, under one hash."""
        stages = range(self.setting.stages)
        versions = {version for stage in stages for version, _ in self.anchors(stage).values()}
        is_tied = len(set(self.together)) == 1 and None not in self.together
        return all(map(self.stage_parity, stages)) and len(versions) == 1 and is_tied

    def is_of(self, saved: Assembled) -> bool:
        """Whether the checkpoints have what the live replicas held in the end."""
        anchors = [set(self.anchors(stage).values()) for stage in range(self.setting.stages)]
        return anchors == [{(saved.version, digest)} for digest in saved.digests]

    @property
    def moves(self) -> int:
        return sum(peer.moves for peer in self.peers)

    def as_json(self) -> dict[str, Any]:
        return {
            "initial_loss": self.initial_loss,
            "final_loss": self.final_loss,
            "tokens": self.tokens,
            "rounds_committed": self.rounds_committed,
            "rounds_aborted": self.rounds_aborted,
            "rounds_undone": self.rounds_undone,
            "round_s": round(self.round_s, 2),
            "stages": self.setting.stages,
            "memory_bytes": self.setting.memory_bytes,
            "model_bytes": self.setting.model_bytes,
            "stage_bytes": list(self.setting.stage_bytes),
            "moves": self.moves,
            "deaths": [
                {
                    "peer": cost.death.peer,
                    "stage": cost.death.stage,
                    "replicas": cost.death.replicas,
                    "next_round_s": None if cost.next_s is None else round(cost.next_s, 1),
                }
                for cost in self.costs
            ],
            "parity": self.parity,
            "together": self.together[0] if self.together else None,
            "seconds": round(self.seconds, 1),
        }


# From events ------------------------------------------------------------------------------------------------


def make_pipeline_figures(
    setting: Setting,
    host: Sequence[Event],
    peers: Mapping[str, Sequence[Event]],
    deaths: Sequence[Death],
    losses: tuple[float, float],
) -> PipelineFigures:
    """``host`` and ``peers`` (by name): their logged events. ``losses``: held out, at the start and at the end."""
    run = [event for one in host if (event := whole_run(one, setting.stages)) is not None]
    ends = [event for event in run if event["event"] in ("verdict", "went_back")]
    committed = [event for event in ends if event["committed"]]
    went_back = [event for event in ends if event["event"] == "went_back"]
    moments = [event["time"] for event in committed]
    dead = {death.peer for death in deaths if death.back_at is None}
    tokens = _stage_tokens(setting.stages, host)
    last = [event["time"] for events in peers.values() for event in events] or [setting.started]
    return PipelineFigures(
        setting=setting,
        initial_loss=losses[0],
        final_loss=losses[1],
        tokens=committed[-1]["tokens_total"] if committed else 0,
        rounds_committed=len(committed),
        rounds_aborted=len(ends) - len(committed) - len(went_back),
        aborts=tuple(dict.fromkeys(event["reason"] for event in ends if not event["committed"])),
        rounds_undone=sum(event["from_version"] - event["anchor_version"] for event in went_back),
        round_s=usual_round_s(moments, [death.killed_at for death in deaths]),
        peers=tuple(_stage_peer(setting, name, events, tokens, name not in dead) for name, events in peers.items()),
        costs=tuple(Cost(death, _next_s(moments, death.killed_at)) for death in deaths),
        together=_together(setting.stages, host),
        seconds=max(last) - setting.started,
    )


def _next_s(moments: Sequence[float], killed_at: float) -> float | None:
    return next((moment - killed_at for moment in moments if moment > killed_at), None)


def _stage_tokens(stages: int, host: Sequence[Event]) -> dict[str, int]:
    """In committed rounds of all stages, by peer id."""
    tokens: dict[str, int] = {}
    for stage in range(stages):
        for peer, done in committed_tokens([event for event in host if event.get("stage") == stage]).items():
            tokens[peer] = tokens.get(peer, 0) + done
    return tokens


def _together(stages: int, host: Sequence[Event]) -> tuple[str | None, ...]:
    """The hash over all stages' verdicts of the last committed round, by stage."""
    found: dict[int, str | None] = {}
    for event in host:
        if event["event"] == "verdict" and event["committed"] and "stage" in event:
            found[event["stage"]] = event.get("together")
    return tuple(found.get(stage) for stage in range(stages))


def _stage_peer(
    setting: Setting, name: str, events: Sequence[Event], tokens: Mapping[str, int], is_live: bool
) -> StagePeer:
    peer = next((event["peer"] for event in events if event["event"] == "joined"), "")
    spans = [event for event in events if event["event"] == "span"]
    # A process that starts again counts its bytes from 0.
    sent, before = 0, 0
    for event in events:
        if event["event"] == "joined":
            before, sent = before + sent, 0
        sent = event.get("bytes_sent", sent)
    return StagePeer(
        name=name,
        is_live=is_live,
        held=tuple(Held(event["time"] - setting.started, event["first"], event["last"]) for event in spans),
        tokens=tokens.get(peer, 0),
        bytes_sent=before + sent,
        anchors=held_anchors(events),
    )


# Whether it is enough ---------------------------------------------------------------------------------------


def pipeline_troubles(figures: PipelineFigures, deaths_planned: int, saved: Assembled) -> tuple[str, ...]:
    """Why the demo failed, a sentence each; empty when everything holds. ``saved``: what the checkpoints gave."""
    troubles = []
    if not figures.rounds_committed:
        troubles.append("no round was committed")
    elif figures.final_loss >= figures.initial_loss:
        troubles.append(f"the loss did not fall: {figures.initial_loss:.3f} before, {figures.final_loss:.3f} after")
    for stage in range(figures.setting.stages):
        if not figures.anchors(stage):
            troubles.append(f"nobody holds stage {stage} in the end")
        elif not figures.stage_parity(stage):
            troubles.append(f"the live replicas of stage {stage} do not hold the same anchor")
    if not troubles and not figures.parity:
        troubles.append("the stages do not stand at the same round")
    if not troubles and not figures.is_of(saved):
        troubles.append(f"the checkpoints have version {saved.version}, and not what the peers held last")
    for cost in figures.costs:
        if cost.next_s is None:
            troubles.append(f"no round was committed after the death of {cost.death.peer} in stage {cost.death.stage}")
    if len(figures.costs) < deaths_planned:
        troubles.append("the run was over before everybody was killed who was to be: give it more --minutes")
    return tuple(troubles)


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
    return Group(peers, _stages_summary(figures))


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


def _stages_summary(figures: PipelineFigures) -> Table:
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
    """Title of the curve."""
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
