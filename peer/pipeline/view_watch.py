"""What a pipeline's peer has to know of the others and of its rounds, from the views of the run and of its stages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from shoal.peer.member.member import Member
from shoal.peer.member.memberships import StageMembers
from shoal.peer.member.round_deadline import is_due
from shoal.swarm.aio import task_scope
from shoal.swarm.pipeline.engine.engine import StageSpan
from shoal.swarm.protocol.messages import RunView

Attention = Literal["", "round", "afresh", "spoilt", "moved", "ended"]
"""What goes before computing: a round that is to be closed or concluded, or was; a membership that was lost or a state
that is not the run's; results that are infinite or not a number; other stages; the run's end."""


class ViewWatch:
    """``driven``: samples that went through all stages from here."""

    def __init__(self, members: StageMembers, span: StageSpan) -> None:
        self.driven = 0
        self._members = members
        self._span = span
        self._stages = [members.stages[stage] for stage in range(span.first, span.last + 1)]
        self._known: dict[str, bytes] = {}
        self._replicas: frozenset[str] | None = None

    async def run(self, changed: Callable[[], None]) -> None:
        """``changed`` is called after each view, for ever."""
        async with task_scope() as tasks:
            for member in (self._members.run, *self._stages):
                tasks.create_task(_follow(member, changed))

    # The round ------------------------------------------------------------------------------------------------

    def attention(self, round_number: int) -> Attention:
        """``round_number``: that of the work here; from any thread, as views are replaced and never changed."""
        run = self._members.run
        if run.rejoined or any(member.rejoined or member.client.view.must_resync for member in self._stages):
            return "afresh"
        place = assigned_span(run.client.view, run.client.peer)
        if place is None or place.span != self._span:
            return "moved"
        views = [member.client.view for member in self._stages]
        if round_number >= 0 and any(_is_due(view, round_number) for view in views):
            return "round"
        return "ended" if any(view.phase == "ended" for view in views) else ""

    def is_closing(self, round_number: int) -> bool:
        """The batch of the round is given out and, as far as is known, done."""
        views = [member.client.view for member in self._stages]
        return any(view.round == round_number and view.phase in ("closing", "averaging") for view in views)

    def say_idle(self) -> None:
        """There is nothing to compute until somebody sends something."""
        for member in (self._members.run, *self._stages):
            member.progress.activity = "idle"

    def tell_progress(self) -> None:
        """In the stages, soon."""
        for member in self._stages:
            member.beat_soon()

    # Replicas -------------------------------------------------------------------------------------------------

    def take_gone(self) -> list[str]:
        """Peers that are not in the run any more, or are another process than before; each one once."""
        now = self._members.run.node.processes()
        gone = [peer for peer, process in self._known.items() if now.get(peer) != process]
        self._known = now
        if self._replicas is not None and not self._replicas.isdisjoint(gone):
            self._replicas = None  # who began anew is a replica again, as somebody else
        return gone

    def take_replicas(self) -> dict[str, float | None] | None:
        """Those of the stage behind ours, if they are others than the last time, each with the micro-batches a second
        that the plan expects of it; None where it does not know."""
        view, me = self._members.run.client.view, self._members.run.client.peer
        rates = holders(view, self._span.last + 1)
        found = {peer: rate for peer, rate in rates.items() if peer in self._known and peer != me}
        if found.keys() == self._replicas:
            return None
        self._replicas = frozenset(found)
        return found


@dataclass(frozen=True)
class AssignedSpan:
    """What a peer is to hold, where the model is cut, and whether it is to keep inputs only and compute forward
    again."""

    boundaries: tuple[int, ...]
    span: StageSpan
    recomputes: bool

    @property
    def stages(self) -> int:
        """Of the whole model."""
        return len(self.boundaries) - 1


def assigned_span(view: RunView, peer: str) -> AssignedSpan | None:
    """Where the plan has that peer."""
    if view.pipeline is None:
        return None
    for one in view.pipeline.spans:
        if one.peer == peer:
            return AssignedSpan(view.pipeline.boundaries, StageSpan(one.first, one.last), one.recomputes)
    return None


def is_held(view: RunView, peer: str, stage: int) -> bool:
    """Whether that peer is to hold that stage."""
    return peer in holders(view, stage)


def holders(view: RunView, stage: int) -> dict[str, float | None]:
    """Who is to hold a stage, and the micro-batches a second that are expected of it."""
    spans = view.pipeline.spans if view.pipeline else ()
    return {span.peer: span.rate or None for span in spans if span.first <= stage <= span.last}


def _is_due(view: RunView, round_number: int) -> bool:
    # Nothing is to be finished before a moment that was announced: it is announced when everything is done.
    return is_due(view, 0.0, 1.0, 0.0, round_number=round_number, exchanging=False)


async def _follow(member: Member, changed: Callable[[], None]) -> None:
    def is_new(view: RunView) -> bool:
        return view is not seen

    seen = member.client.view
    while True:
        seen = await member.client.wait_for(is_new)
        changed()
