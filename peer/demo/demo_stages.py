"""What the demo in stages has shown, from the events that its processes logged, and whether that is enough. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from shoal.peer.demo.demo_assembly import Assembled
from shoal.peer.demo.demo_figures import committed_tokens
from shoal.peer.demo.demo_stage_events import Anchor, Death, held_anchors, usual_round_s, whole_run
from shoal.peer.terminal.events import Event


@dataclass(frozen=True)
class Setting:
    """What the demo set out to do. ``stage_bytes``: what each stage takes at least; ``model_bytes``: all in one."""

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
        """How often it was given other stages than it had."""
        spans = [(one.first, one.last) for one in self.held]
        return sum(before != after for before, after in pairwise(spans))


@dataclass(frozen=True)
class Cost:
    """Of a death: from the kill to the next committed round, ``next_s``; None when there was none."""

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
        """What the live replicas of a stage hold in the end, by name."""
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
    tokens = _tokens(setting.stages, host)
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


def _tokens(stages: int, host: Sequence[Event]) -> dict[str, int]:
    """In committed rounds of all stages, by peer id."""
    tokens: dict[str, int] = {}
    for stage in range(stages):
        for peer, done in committed_tokens([event for event in host if event.get("stage") == stage]).items():
            tokens[peer] = tokens.get(peer, 0) + done
    return tokens


def _together(stages: int, host: Sequence[Event]) -> tuple[str | None, ...]:
    """Of every stage's last committed round."""
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


def troubles_of(figures: PipelineFigures, deaths_planned: int, saved: Assembled) -> tuple[str, ...]:
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
