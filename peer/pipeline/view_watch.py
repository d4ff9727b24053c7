"""Observer of the views of the run and of the held stages: rounds, replicas, and what to attend to next."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from shoal.peer.member.member import LocalMember
from shoal.peer.member.memberships import Memberships
from shoal.peer.member.round_deadline import Attention, attention, is_due
from shoal.swarm.aio import task_scope
from shoal.swarm.pipeline.engine.engine import StageSpan
from shoal.swarm.protocol.rounds import RunView


class ViewWatch:
    """Observer of the views for one held span."""

    def __init__(self, members: Memberships, span: StageSpan) -> None:
        self._members = members
        self._span = span
        self._stages = [members.stages[stage] for stage in range(span.first, span.last + 1)]
        self._known: dict[str, bytes] = {}
        self._replicas: frozenset[str] | None = None

    async def run(self, changed: Callable[[], None]) -> None:
        """Call ``changed`` after each new view, until cancelled."""
        async with task_scope() as tasks:
            for member in (self._members.run, *self._stages):
                tasks.create_task(_follow(member, changed))

    # The round ------------------------------------------------------------------------------------------------

    def attention(self, round_number: int) -> Attention:
        """Decide what goes before further computations; from any thread, as views are replaced and never changed.

        ``round_number``: the round that the work here is for; negative before the first.
        """
        run, views = self._members.run, [member.client.view for member in self._stages]
        rejoined = run.rejoined or any(member.rejoined for member in self._stages)
        found = attention(views, lambda view: round_number >= 0 and _is_due(view, round_number), rejoined=rejoined)
        place = assigned_span(run.client.view, run.client.peer)
        if found is not Attention.RESYNC and (place is None or place.span != self._span):
            return Attention.MOVED
        return found

    def is_closing(self, round_number: int) -> bool:
        """Return whether the round is closing: all its samples are leased and, as far as is known, done."""
        views = [member.client.view for member in self._stages]
        return any(view.round == round_number and view.phase in ("closing", "averaging") for view in views)

    def report_idle(self) -> None:
        """Set the activity to idle: nothing can be computed until another peer sends a tensor."""
        for member in (self._members.run, *self._stages):
            member.progress.activity = "idle"

    def request_heartbeats(self) -> None:
        """Send the stages' next heartbeats at once."""
        for member in self._stages:
            member.request_heartbeat()

    # Replicas -------------------------------------------------------------------------------------------------

    def take_gone(self) -> list[str]:
        """Return the peers that left the run or restarted since the last call."""
        now = self._members.run.node.processes()
        gone = [peer for peer, process in self._known.items() if now.get(peer) != process]
        self._known = now
        if self._replicas is not None and not self._replicas.isdisjoint(gone):
            self._replicas = None  # a restarted peer is a new replica
        return gone

    def take_replicas(self, besides: Collection[str] = ()) -> dict[str, float | None] | None:
        """Return the replicas of the next stage with their planned rates in micro-batches a second (None: unknown).

        Returns None if the replicas are those of the last call. ``besides``: peers that this one does without.
        """
        view, me = self._members.run.client.view, self._members.run.client.peer
        rates = holders(view, self._span.last + 1)
        found = {peer: rate for peer, rate in rates.items() if peer in self._known and peer not in (me, *besides)}
        if found.keys() == self._replicas:
            return None
        self._replicas = frozenset(found)
        return found


@dataclass(frozen=True)
class SpanAssignment:
    """Span that the plan assigns to a peer.

    ``boundaries``: first layer of each of the model's stages, then the number of layers; ``recomputes``: whether to
    repeat forward passes rather than keep their activations.
    """

    boundaries: tuple[int, ...]
    span: StageSpan
    recomputes: bool

    @property
    def stages(self) -> int:
        """Number of stages of the whole model."""
        return len(self.boundaries) - 1


def assigned_span(view: RunView, peer: str) -> SpanAssignment | None:
    """Return the span that the plan assigns to a peer, if any."""
    if view.pipeline is None:
        return None
    for one in view.pipeline.spans:
        if one.peer == peer:
            return SpanAssignment(view.pipeline.boundaries, StageSpan(one.first, one.last), one.recomputes)
    return None


def is_held(view: RunView, peer: str, stage: int) -> bool:
    """Return whether the plan assigns a stage to a peer."""
    return peer in holders(view, stage)


def holders(view: RunView, stage: int) -> dict[str, float | None]:
    """Return the peers that the plan assigns a stage to, with their planned rates in micro-batches a second."""
    spans = view.pipeline.spans if view.pipeline else ()
    return {span.peer: span.rate or None for span in spans if span.first <= stage <= span.last}


def _is_due(view: RunView, round_number: int) -> bool:
    # A pipeline's round closes once all its samples are done, so no step has to fit before the closing moment.
    return is_due(view, 0.0, 1.0, 0.0, round_number=round_number, exchanging=False)


async def _follow(member: LocalMember, changed: Callable[[], None]) -> None:
    def is_new(view: RunView) -> bool:
        return view is not seen

    seen = member.client.view
    while True:
        seen = await member.client.wait_for(is_new)
        changed()
