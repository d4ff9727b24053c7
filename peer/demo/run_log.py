"""Log of a demo: what its coordinator and peers have logged as events, and what the demo did to the peers.

The board, the scenario's conditions and the report all read it. Its moments are those of ``time.time()``.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from shoal.peer.event_schema import Event
from shoal.swarm.protocol.run_file import RunSection

Anchor = tuple[int, str]
"""Version and digest."""


@dataclass(frozen=True)
class Death:
    """A peer that the demo has killed. In a pipeline: the stage that it held, and how many replicas the stage had."""

    peer: str
    killed_at: float
    stage: int | None = None
    replicas: int = 0
    back_at: float | None = None

    @property
    def about(self) -> str:
        """The words after the peer's name; empty where the model is not in stages."""
        who = "the only replica" if self.replicas == 1 else f"one of {self.replicas} replicas"
        return "" if self.stage is None else f", {who} of stage {self.stage}"


@dataclass
class PeerLog:
    """One peer, over all its processes. ``anchors``: the newest one of each stage that it holds, or held when it was
    killed; the stage of a whole model is 0. ``spans``: when it entered which stages, first and last. ``tokens``: those
    in committed rounds. ``mark``: what the demo did to it."""

    late_at: float | None = None
    mark: str = ""
    peer: str = ""
    state: str = "starting"
    anchors: dict[int, Anchor] = field(default_factory=dict)
    spans: list[tuple[float, int, int]] = field(default_factory=list)
    round: int | None = None
    loss: float | None = None
    tokens: int = 0
    synced_at: float | None = None
    last_at: float = 0.0
    bytes_received: int = 0
    _sent_before: int = 0
    _sent: int = 0

    @property
    def is_live(self) -> bool:
        return self.state != "killed"

    @property
    def part(self) -> str:
        """The peer's part in the demo: killed, there all along, or a late joiner."""
        return "killed" if not self.is_live else "all along" if self.late_at is None else "came late"

    @property
    def bytes_sent(self) -> int:
        return self._sent_before + self._sent

    @property
    def tokens_per_s(self) -> float:
        """Committed tokens a second since it first held a state."""
        return self.tokens / max(1e-9, self.last_at - self.synced_at) if self.synced_at else 0.0

    @property
    def moves(self) -> int:
        """Number of times that the peer was assigned other stages than it had."""
        return sum(before[1:] != after[1:] for before, after in pairwise(self.spans))

    def feed(self, event: Event) -> None:
        """Take the next event that it has logged."""
        self.last_at = event["time"]
        self._sent = event.get("bytes_sent", self._sent)
        self.bytes_received = event.get("bytes_received", self.bytes_received)
        state = self.state
        match event["event"]:
            case "joined":  # a new process, which counts its bytes from 0
                self.peer, self.anchors, state = event["peer"], {}, "syncing"
                self._sent_before, self._sent = self.bytes_sent, 0
            case "span":
                self.spans.append((event["time"], event["first"], event["last"]))
                self.anchors, state = {}, "syncing"
            case "synced":
                self.synced_at, state = self.synced_at or event["time"], "training"
                self.anchors[event.get("stage", 0)] = event["anchor_version"], event["digest"]
            case "committed":
                self.round, self.loss = event["round"], event["loss"]
                self.anchors[event.get("stage", 0)] = event["anchor_version"], event["digest"]
            case "left":
                state = "done"
        self.state = state if self.is_live else self.state


class RunLog:
    """The whole demo. ``now``: the moment at which it was fed last. ``outlook``: what the coordinator says that the run
    waits for. ``boundaries``: of the stages' layers, empty while there are none."""

    def __init__(self, ends: RunSection, started: float) -> None:
        self._ends = ends
        self.started = self.now = started
        self.peers: dict[str, PeerLog] = {}
        self.deaths: list[Death] = []
        self.outlook = ""
        self.boundaries: tuple[int, ...] = ()
        self.commits: list[Event] = []
        self.abort_reasons: list[str] = []
        self.rounds_aborted = 0
        self.rounds_undone = 0
        self.round = 0
        self.tokens = 0
        self.together: dict[int, str | None] = {}
        self._planned: dict[int | None, Event] = {}

    def feed_host(self, event: Event) -> Event | None:
        """Take the next event of the coordinator. Returns it as one of the whole run, with the peer's name; None where
        it is about one stage alone: the rounds of all stages end alike, and the last stage knows the loss."""
        stage = event.get("stage")
        if event["event"] == "round_planned":
            self._planned[stage] = event
        elif event["event"] == "verdict" and event["committed"]:
            self._count_tokens(event)
            if stage is not None:
                self.together[stage] = event.get("together")
        if stage is not None:
            if event["event"] not in ("verdict", "went_back") or stage != self.stages - 1:
                return None
            event = {key: value for key, value in event.items() if key != "stage"}
        match event["event"]:
            case "member_joined" if event["name"] in self.peers:
                self.peers[event["name"]].peer = event["peer"]
            case "member_lost" | "span_assigned" | "span_taken":
                names = [name for name, log in self.peers.items() if log.peer == event["peer"]]
                return {**event, "name": names[0] if names else ""}
            case "stages_cut":
                self.boundaries = tuple(event["boundaries"])
            case "verdict" | "went_back":
                self._end_round(event)
        return event

    def _count_tokens(self, verdict: Event) -> None:
        planned = self._planned.get(verdict.get("stage"))
        if planned is not None and planned["round"] == verdict["round"]:
            done = dict(zip(planned["members"], planned["tokens"], strict=True))
            for log in self.peers.values():
                log.tokens += done.get(log.peer, 0)

    def _end_round(self, event: Event) -> None:
        self.round = event["round"] + 1
        if event["committed"]:
            self.commits.append(event)
            self.tokens = event["tokens_total"]
            return
        if event["reason"] not in self.abort_reasons:
            self.abort_reasons.append(event["reason"])
        if event["event"] == "went_back":
            self.tokens = event["tokens_total"]
            self.rounds_undone += event["from_version"] - event["anchor_version"]
        else:
            self.rounds_aborted += 1

    def kill(self, death: Death) -> None:
        """Note a death."""
        self.deaths.append(death)
        self.peers[death.peer].state, self.peers[death.peer].mark = "killed", "SIGKILL"

    def restart(self, name: str) -> None:
        """Note that the peer that was killed last is started again."""
        self.deaths[-1] = replace(self.deaths[-1], back_at=self.now)
        self.peers[name].state, self.peers[name].mark = "starting", "came back"

    @property
    def stages(self) -> int:
        return len(self.boundaries) - 1

    @property
    def ends_by_rounds(self) -> bool:
        return self._ends.rounds is not None

    @property
    def done(self) -> tuple[float, float]:
        """Progress and total: in rounds where the run ends by them, else in seconds."""
        total = self._ends.rounds or self._ends.max_s
        assert total is not None
        return min(len(self.commits) if self.ends_by_rounds else self.now - self.started, total), total

    @property
    def is_recovered(self) -> bool:
        """Whether a round was committed since the last death, if there was one."""
        return not self.deaths or self.next_commit_s(self.deaths[-1]) is not None

    def next_commit_s(self, death: Death) -> float | None:
        """Seconds from the death to the next committed round; None where there was none."""
        return next((one["time"] - death.killed_at for one in self.commits if one["time"] > death.killed_at), None)

    @property
    def round_s(self) -> float:
        """Usual duration of a round, in seconds; 0 while that is not known."""
        return usual_round_s([one["time"] for one in self.commits], [death.killed_at for death in self.deaths])


def usual_round_s(moments: Sequence[float], deaths: Sequence[float]) -> float:
    """The median time between the ``moments`` at which rounds ended, without those in which somebody died; 0 where
    there is none."""
    gaps = [
        after - before for before, after in pairwise(moments) if not any(before <= death <= after for death in deaths)
    ]
    return statistics.median(gaps) if gaps else 0.0
