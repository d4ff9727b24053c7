"""What the demo without stages has shown, from the events that its processes logged: figures and a table. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shoal.peer.demo.demo_report import loss_words, summary_grid
from shoal.peer.terminal.events import Event, bytes_text, count_text, duration_text


def float32_ddp_bytes(peers: int, parameters: int, steps: float) -> float:
    """What one of ``peers`` sends in ``steps`` ring all-reduces of float32 gradients: 2·(N-1)/N of them each."""
    return 2 * (peers - 1) / peers * 4 * parameters * steps


@dataclass(frozen=True)
class Plan:
    """What the demo set out to do. ``started``, ``killed_at``, ``joined_at`` are moments of ``time.time()``."""

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
        """How many times more float32 data-parallel would have sent."""
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
