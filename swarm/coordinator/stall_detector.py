"""Detection of members that have a place in the pipeline and keep the others waiting.

What is seen here comes from heartbeats and is not journaled: after a restart everybody has all the time again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shoal.swarm.coordinator.membership import Member
from shoal.swarm.coordinator.pipeline_state import PipelineState
from shoal.swarm.deadlines import Deadlines

_STEPS = 64
"""Into which the way to a stage is divided: each is a sign of progress, once. So nobody is on its way for ever."""
_SLOWEST_BPS, _FASTEST_BPS = 1e6, 1e9
"""What is believed of a link that a state comes over."""
_LONGEST_S = 3600.0
"""For one micro-batch, whatever a peer says that it takes."""


class Overdue(NamedTuple):
    """``reason``: for people, after the peer's name."""

    peer: str
    reason: str


@dataclass
class _Way:
    """Of a peer into the stages of its span. ``steps``: the furthest that it has been, at ``since_s``; until it has
    come closer once, where it is: at first it may be leaving other stages, of which it had everything."""

    span: tuple[int, int]
    since_s: float
    steps: int
    has_begun: bool = False


class StallDetector:
    """``look`` at every moment; of one pipeline, whose state it only reads."""

    def __init__(self, deadlines: Deadlines, state_copies: int) -> None:
        """``state_copies``: float32 values of a stage's state for each parameter."""
        self._deadlines = deadlines
        self._copies = state_copies
        self._ways: dict[str, _Way] = {}
        self._counts: dict[str, int] = {}
        self._due_s: dict[str, float] = {}
        """By peer that has something to compute: since when it has computed nothing."""
        self._round = -1
        self._begun: set[str] = set()
        """Who has computed anything in this round."""
        self._stalled_s: float | None = None
        """From when on nobody has had anything to compute, though there are samples to be had."""

    def excuse(self, seconds: float) -> None:
        """We stood still for so long: nobody was late."""
        for way in self._ways.values():
            way.since_s += seconds
        self._due_s = {peer: since_s + seconds for peer, since_s in self._due_s.items()}
        if self._stalled_s is not None:
            self._stalled_s += seconds

    def look(self, run: PipelineState, now_s: float) -> list[Overdue]:
        """Whose place is for others, if anybody's."""
        there = [stage.working() for stage in run.stages]
        late, idle = self._look_at_ways(run, there, now_s), self._look_at_work(run, there, now_s)
        return list({one.peer: one for one in (*idle, *late)}.values())

    # Getting there --------------------------------------------------------------------------------------

    def _look_at_ways(self, run: PipelineState, there: Sequence[Mapping[str, Member]], now_s: float) -> list[Overdue]:
        overdue, before = [], self._ways
        self._ways = {}
        for peer, span in run.spans.items():
            lacking = [stage for stage in range(span[0], span[1] + 1) if peer not in there[stage]]
            if not lacking:
                continue
            steps, way = _steps(run, peer, span), before.get(peer)
            if way is None or way.span != span:
                way = _Way(span, now_s, steps)
            elif steps > way.steps:
                way.since_s, way.steps, way.has_begun = now_s, steps, True
            elif not way.has_begun:
                way.steps = steps
            if _lacks_donors(run, peer, lacking):
                way.since_s = now_s
            allowed_s = self._allowed_s(run, peer, span)
            if now_s > way.since_s + allowed_s:  # if it has to be given the same again, it has all the time again
                overdue.append(Overdue(peer, f"got no closer to stage {lacking[0]} for {allowed_s:.0f} s"))
            else:
                self._ways[peer] = way
        return overdue

    def _allowed_s(self, run: PipelineState, peer: str, span: tuple[int, int]) -> float:
        parameters = sum(run.parameters_bytes(stage) for stage in range(span[0], span[1] + 1))
        bps = min(max(run.capabilities[peer].bandwidth_bps, _SLOWEST_BPS), _FASTEST_BPS)
        return self._deadlines.enter_s(8 * self._copies * parameters / bps)

    # Doing something there ------------------------------------------------------------------------------

    def _look_at_work(self, run: PipelineState, there: Sequence[Mapping[str, Member]], now_s: float) -> list[Overdue]:
        """Who has something to compute and does not; else, where nobody has and there are samples to be had, the first
        stage that has not begun, as what comes after it waits for that."""
        if run.round_number != self._round:
            self._round, self._begun, self._stalled_s = run.round_number, set(), None
        headway = {peer: run.membership.members[peer].headway for peer in run.spans}
        moved = {peer for peer, one in headway.items() if one.computed != self._counts.get(peer, one.computed)}
        self._counts = {peer: one.computed for peer, one in headway.items()}
        self._begun |= moved
        due = [peer for peer, one in headway.items() if one.has_work and peer not in moved]
        self._due_s = {peer: self._due_s.get(peer, now_s) for peer in due}
        overdue = []
        for peer, since_s in self._due_s.items():
            allowed_s = self._deadlines.idle_s(min(_span_s(run, peer), _LONGEST_S))
            if now_s > since_s + allowed_s:
                what = f"computed nothing in stage {run.spans[peer][0]} for {allowed_s:.0f} s though it had work there"
                overdue.append(Overdue(peer, what))
        if overdue or moved or due:
            self._stalled_s = None
            return overdue
        return self._look_at_stages(run, there, now_s)

    def _look_at_stages(self, run: PipelineState, there: Sequence[Mapping[str, Member]], now_s: float) -> list[Overdue]:
        """Of a run in which nobody has anything to compute."""
        batch = run.batch()
        is_open = bool(there) and run.phase == "training" and all(there)
        if not is_open or batch is None or not run.missing(batch):
            self._stalled_s = None
            return []
        self._stalled_s = now_s if self._stalled_s is None else self._stalled_s
        allowed_s = self._deadlines.idle_s(min(max(_span_s(run, peer) for peer in run.spans), _LONGEST_S))
        late = [stage for stage, replicas in enumerate(there) if self._begun.isdisjoint(replicas)]
        if now_s <= self._stalled_s + allowed_s or not late:
            return []
        self._stalled_s = now_s
        what = f"began nothing in stage {late[0]} for {allowed_s:.0f} s, and the others waited"
        return [Overdue(min(there[late[0]]), what)]


def _steps(run: PipelineState, peer: str, span: tuple[int, int]) -> int:
    """How far it says to be: its layers, and the state of each stage."""
    members = [run.membership.members[peer]]
    for stage in run.stages[span[0] : span[1] + 1]:
        member = stage.membership.members.get(peer)
        if member is not None and member.alive:
            members.append(member)
    return sum(1 + int(_STEPS * member.headway.prepared) for member in members)


def _lacks_donors(run: PipelineState, peer: str, lacking: Sequence[int]) -> bool:
    """It has come to its stages, and what it lacks nobody has: the run waits for somebody else."""
    for stage in (run.stages[number] for number in lacking):
        member = stage.membership.members.get(peer)
        is_made_here = not stage.anchor_version and run.run.start is None
        if member is None or not member.alive or is_made_here or stage.working():
            return False
    return True


def _span_s(run: PipelineState, peer: str) -> float:
    """What a micro-batch takes there and on its way, as the peer says."""
    (first, last), able = run.spans[peer], run.capabilities[peer]
    start, stop = run.boundaries[first], run.boundaries[last + 1]
    crossing = [run.layers[at - 1].activation_bytes for at in (start, stop) if 0 < at < len(run.layers)]
    return sum(able.layer_s[start:stop]) + 2 * 8 * sum(crossing) / max(able.bandwidth_bps, _SLOWEST_BPS)
