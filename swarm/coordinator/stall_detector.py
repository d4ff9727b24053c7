"""Detection of stalls: members that hold stages of the pipeline and keep the others waiting.

It is based on heartbeats, which are not journaled: after a restart every member has its whole time again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from shoal.swarm.coordinator.membership import Member
from shoal.swarm.deadlines import Deadlines

if TYPE_CHECKING:
    from shoal.swarm.coordinator.pipeline_run import PipelineRun

_STEPS = 64
"""Number of steps into which a peer's preparation of a stage is divided. Each counts as progress once, so no peer can
prepare for ever."""
_SLOWEST_BPS, _FASTEST_BPS = 1e6, 1e9
"""Limits within which a peer's figure for its link is believed."""
_LONGEST_S = 3600.0
"""Longest believed time of one micro-batch, whatever the peer says."""


class StalledPeer(NamedTuple):
    """Peer that has to give up its stages. ``reason``: for people, to follow the peer's name."""

    peer: str
    reason: str


@dataclass
class _Preparation:
    """Progress of a peer that prepares the stages of its span. ``steps``: the most that it has reached, at ``since_s``.
    Until the first progress (``has_begun``) it is the current figure, which may fall: the peer may still be leaving
    other stages, for which it had prepared everything."""

    span: tuple[int, int]
    since_s: float
    steps: int
    has_begun: bool = False


class StallDetector:
    """Detector of stalls in one pipeline run, whose state it only reads."""

    def __init__(self, deadlines: Deadlines, state_copies: int) -> None:
        """``state_copies``: float32 values that a stage's state has for each parameter."""
        self._deadlines = deadlines
        self._copies = state_copies
        self._preparations: dict[str, _Preparation] = {}
        self._counts: dict[str, int] = {}
        self._due_s: dict[str, float] = {}
        """By peer with something to compute: the time since which it has computed nothing."""
        self._round = -1
        self._begun: set[str] = set()
        """Peers that have computed anything in this round."""
        self._stalled_s: float | None = None
        """Time since which no peer has had anything to compute although samples are left."""

    def postpone(self, seconds: float) -> None:
        """Give every member more time, as this process itself stood still for so long."""
        for preparation in self._preparations.values():
            preparation.since_s += seconds
        self._due_s = {peer: since_s + seconds for peer, since_s in self._due_s.items()}
        if self._stalled_s is not None:
            self._stalled_s += seconds

    def find_stalled(self, run: PipelineRun, now_s: float) -> list[StalledPeer]:
        """Return the peers that have kept the others waiting for too long. Call it regularly."""
        working = [stage.working() for stage in run.scopes]
        late, idle = self._check_preparations(run, working, now_s), self._check_work(run, working, now_s)
        return list({one.peer: one for one in (*idle, *late)}.values())

    # Preparation of stages ------------------------------------------------------------------------------

    def _check_preparations(
        self, run: PipelineRun, working: Sequence[Mapping[str, Member]], now_s: float
    ) -> list[StalledPeer]:
        """Return the peers that have made no progress for too long with a stage in which they do not work yet."""
        stalled, before = [], self._preparations
        self._preparations = {}
        for peer, span in run.spans.items():
            lacking = [stage for stage in range(span[0], span[1] + 1) if peer not in working[stage]]
            if not lacking:
                continue
            steps, preparation = _steps(run, peer, span), before.get(peer)
            if preparation is None or preparation.span != span:
                preparation = _Preparation(span, now_s, steps)
            elif steps > preparation.steps:
                preparation.since_s, preparation.steps, preparation.has_begun = now_s, steps, True
            elif not preparation.has_begun:
                preparation.steps = steps
            if _lacks_donors(run, peer, lacking):
                preparation.since_s = now_s
            allowed_s = self._allowed_s(run, peer, span)
            if (
                now_s > preparation.since_s + allowed_s
            ):  # forgotten: if it is given the span again, its time starts anew
                stalled.append(StalledPeer(peer, f"got no closer to stage {lacking[0]} for {allowed_s:.0f} s"))
            else:
                self._preparations[peer] = preparation
        return stalled

    def _allowed_s(self, run: PipelineRun, peer: str, span: tuple[int, int]) -> float:
        parameters = sum(run.parameters_bytes(stage) for stage in range(span[0], span[1] + 1))
        bps = min(max(run.capabilities[peer].bandwidth_bps, _SLOWEST_BPS), _FASTEST_BPS)
        return self._deadlines.enter_s(8 * self._copies * parameters / bps)

    # Work -----------------------------------------------------------------------------------------------

    def _check_work(self, run: PipelineRun, working: Sequence[Mapping[str, Member]], now_s: float) -> list[StalledPeer]:
        """Return the peers that have something to compute and have computed nothing for too long. If no peer has
        anything to compute although samples are left, return one of the first stage that has begun nothing, as all
        later stages wait for it."""
        if run.round_number != self._round:
            self._round, self._begun, self._stalled_s = run.round_number, set(), None
        headway = {peer: run.membership.members[peer].headway for peer in run.spans}
        moved = {peer for peer, one in headway.items() if one.computed != self._counts.get(peer, one.computed)}
        self._counts = {peer: one.computed for peer, one in headway.items()}
        self._begun |= moved
        due = [peer for peer, one in headway.items() if one.has_work and peer not in moved]
        self._due_s = {peer: self._due_s.get(peer, now_s) for peer in due}
        stalled = []
        for peer, since_s in self._due_s.items():
            allowed_s = self._deadlines.idle_s(min(_span_s(run, peer), _LONGEST_S))
            if now_s > since_s + allowed_s:
                what = f"computed nothing in stage {run.spans[peer][0]} for {allowed_s:.0f} s though it had work there"
                stalled.append(StalledPeer(peer, what))
        if stalled or moved or due:
            self._stalled_s = None
            return stalled
        return self._check_stages(run, working, now_s)

    def _check_stages(
        self, run: PipelineRun, working: Sequence[Mapping[str, Member]], now_s: float
    ) -> list[StalledPeer]:
        """Check a run in which no peer has anything to compute."""
        batch = run.batch()
        is_open = bool(working) and run.phase == "training" and all(working)
        if not is_open or batch is None or not run.missing(batch):
            self._stalled_s = None
            return []
        self._stalled_s = now_s if self._stalled_s is None else self._stalled_s
        allowed_s = self._deadlines.idle_s(min(max(_span_s(run, peer) for peer in run.spans), _LONGEST_S))
        late = [stage for stage, replicas in enumerate(working) if self._begun.isdisjoint(replicas)]
        if now_s <= self._stalled_s + allowed_s or not late:
            return []
        self._stalled_s = now_s
        what = f"began nothing in stage {late[0]} for {allowed_s:.0f} s, and the others waited"
        return [StalledPeer(min(working[late[0]]), what)]


def _steps(run: PipelineRun, peer: str, span: tuple[int, int]) -> int:
    """Return the progress that a peer reports, in steps: of its layers, and of the state of each stage."""
    members = [run.membership.members[peer]]
    for stage in run.scopes[span[0] : span[1] + 1]:
        member = stage.membership.members.get(peer)
        if member is not None and member.alive:
            members.append(member)
    return sum(1 + int(_STEPS * member.headway.prepared) for member in members)


def _lacks_donors(run: PipelineRun, peer: str, lacking: Sequence[int]) -> bool:
    """Return whether a peer has joined all stages that it lacks, and nobody has their states: then the run waits for
    somebody else."""
    for stage in (run.scopes[number] for number in lacking):
        member = stage.membership.members.get(peer)
        is_made_here = not stage.anchor_version and run.run.start is None
        if member is None or not member.alive or is_made_here or stage.working():
            return False
    return True


def _span_s(run: PipelineRun, peer: str) -> float:
    """Return the seconds that a micro-batch takes at a peer and on its way there and back, as the peer measured."""
    (first, last), able = run.spans[peer], run.capabilities[peer]
    start, stop = run.boundaries[first], run.boundaries[last + 1]
    crossing = [run.layers[at - 1].activation_bytes for at in (start, stop) if 0 < at < len(run.layers)]
    return sum(able.layer_s[start:stop]) + 2 * 8 * sum(crossing) / max(able.bandwidth_bps, _SLOWEST_BPS)
