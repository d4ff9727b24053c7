"""State of a pipeline run, made by its events: its own scope, who holds which stages, and the stages themselves."""

from __future__ import annotations

from itertools import pairwise

from shoal.swarm.coordinator import events as ev
from shoal.swarm.coordinator.admission import MemberScope
from shoal.swarm.coordinator.micro_batch_ledger import Batch, MicroBatchLedger
from shoal.swarm.coordinator.placement import PipelineViews
from shoal.swarm.coordinator.round_scope import Sign
from shoal.swarm.coordinator.stage_scope import StageScope
from shoal.swarm.pipeline.planner.model import StagePlan
from shoal.swarm.protocol.rounds import RunView
from shoal.swarm.protocol.run_file import RunFile
from shoal.swarm.protocol.types import Capability, LayerSize, Phase, PipelineView
from shoal.swarm.sample_ranges import Ranges, from_wire, to_wire, union


class PipelineState(MemberScope):
    """The run's own scope, in which every peer is a member, and its stages once the model is cut.

    ``spans``: by live member, the first and the last stage that it holds; ``former``: by member, the span that it held
    last, as the state of those stages may be on its disk. ``version``: of the spans. ``moved_s``: when a peer was last
    given another span than it had, in Unix time, as moments of our own clock mean nothing after a restart; ``rests``:
    who kept others waiting, and so is given no stage for a while."""

    def __init__(self, run: RunFile, sign: Sign, now_s: float, epoch: int) -> None:
        super().__init__(run, now_s, epoch)
        self.layers: tuple[LayerSize, ...] = ()
        self.capabilities: dict[str, Capability] = {}
        self.boundaries: tuple[int, ...] = ()
        self.spans: dict[str, tuple[int, int]] = {}
        self.former: dict[str, tuple[int, int]] = {}
        self.moved_s: dict[str, float] = {}
        self.rests: dict[str, ev.Rest] = {}
        self.version = 0
        self.stages: list[StageScope] = []
        self.micro_batches = MicroBatchLedger()
        self._sign = sign
        self._views = PipelineViews(run)

    @property
    def has_ended(self) -> bool:
        return self.phase == "ended"

    @property
    def phase(self) -> Phase:
        """Waiting while any stage has to."""
        phases = {stage.round.phase for stage in self.stages}
        return "waiting" if "waiting" in phases or not phases else self.stages[0].round.phase

    @property
    def round_number(self) -> int:
        return self.stages[0].round.number if self.stages else 0

    @property
    def moment(self) -> tuple[int, str, int]:
        """What members have to hear of at once when it changes."""
        return self.round_number, self.phase, self.version

    def batch(self) -> Batch | None:
        """The samples of this round; None before every stage's model is known."""
        batches = [stage.batch() for stage in self.stages]
        return batches[0] if batches and None not in batches else None

    def missing(self, batch: Batch) -> Ranges:
        """What of the batch some stage has no claim on."""
        missing: Ranges = []
        for stage in self.stages:
            missing = union(missing, stage.unclaimed(batch))
        return missing

    @property
    def unix_s(self) -> float:
        return max(0.0, self.now_s + self.unix_offset_s)

    def resting(self) -> set[str]:
        """Who is to be given no stage now. Whoever had to be given one nonetheless is one of those that hold stages."""
        resting = {peer for peer, rest in self.rests.items() if rest.until_s > self.unix_s}
        return resting - self.spans.keys()

    def parameters_bytes(self, stage: int) -> int:
        """Of a stage's parameters in float32."""
        first, stop = self.boundaries[stage : stage + 2]
        return sum(layer.parameters_bytes for layer in self.layers[first:stop])

    def holders(self, stage: int) -> list[str]:
        """Whose span has this stage."""
        return [peer for peer, (first, last) in self.spans.items() if first <= stage <= last]

    def holds(self, peer: str, stage: int) -> bool:
        span = self.spans.get(peer)
        return span is not None and span[0] <= stage <= span[1]

    # Events ----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        super().begin()
        for stage in self.stages:
            stage.begin()

    def _apply(self, event: ev.JournalEvent) -> None:
        match event:
            case ev.InScope():
                stage = self.stages[event.scope - 1]
                stage.now_s = self.now_s
                stage.replay([event.event], self.now_s)
                self._follow(event)
            case ev.LayersDescribed():
                self.layers = event.layers
            case ev.CapabilityShown():
                self.capabilities[event.peer] = event.capability
            case ev.StagesCut():
                self.boundaries = event.boundaries
                self._make_stages()
            case ev.SpanAssigned():
                if event.peer in self.spans:
                    self.moved_s[event.peer] = event.at_s
                self.spans[event.peer] = self.former[event.peer] = (event.first, event.last)
                self.version += 1
            case ev.SpanTaken():
                del self.spans[event.peer]
                self.version += 1
                if event.reason:
                    times = self.rests[event.peer].times if event.peer in self.rests else 0
                    self.rests[event.peer] = ev.Rest(until_s=event.until_s, reason=event.reason, times=times + 1)
            case ev.SamplesDriven():
                self.micro_batches.take(event.peer, from_wire(event.ranges), from_wire(event.done))
            case ev.MemberJoined(entry=entry):
                earlier = self.membership.members.get(entry.peer)
                if earlier is not None and earlier.entry.certificate.curve_key != entry.certificate.curve_key:
                    self.rests.pop(entry.peer, None)  # another process: whatever ailed the one before
                super()._apply(event)
            case ev.MemberLost():
                super()._apply(event)
                self.capabilities.pop(event.peer, None)
                self.micro_batches.lose(event.peer)
                if self.spans.pop(event.peer, None) is not None:
                    self.version += 1
            case ev.PipelineSnapshot():
                self._restore(event)
            case _:
                super()._apply(event)

    def has_record(self, peer: str) -> bool:
        """In any of the stages: it works nowhere else."""
        return any(stage.has_record(peer) for stage in self.stages)

    def standing(self, peer: str) -> int:
        rounds = [stage.standing(peer) for stage in self.stages if peer in stage.membership.members]
        return max(rounds, default=0) + (peer in self.spans)

    def may_be_idle(self, peer: str) -> bool:
        """Whoever has a place there and keeps the others waiting loses that first (``stall_detector.py``)."""
        return peer not in self.spans and super().may_be_idle(peer)

    def left_traces(self, peer: str) -> bool:
        return peer in self.former or any(peer in stage.membership.members for stage in self.stages)

    def _make_stages(self) -> None:
        arguments = self.run, self._sign, self.now_s, self.epoch
        self.stages = [StageScope(*arguments, number) for number in range(len(self.boundaries) - 1)]
        pinned = self.run.pins.layers if self.run.pins else None
        for stage, (first, stop) in zip(self.stages, pairwise(self.boundaries), strict=True):
            stage.keep = self._take_in
            stage.layers = pinned[first:stop] if pinned else ()

    def _take_in(self, event: ev.InScope) -> None:
        """A stage has decided."""
        self._follow(event)
        self._events.append(event)

    def _follow(self, event: ev.InScope) -> None:
        """What an event of the first stage, whose replicas drive, is for the run's own scope."""
        match event.event:
            case ev.VerdictGiven(verdict=verdict) if event.scope == 1:
                self.micro_batches = self.micro_batches.next_round()
                self.anchor_version = verdict.anchor_version
            case ev.MemberLost(peer=peer) if event.scope == 1:
                self.micro_batches.lose(peer)

    # Compaction -----------------------------------------------------------------------------------------

    def snapshot(self) -> ev.PipelineSnapshot | None:
        """What stands for all events so far; None while a round is about to end, and while events are to be taken."""
        if self._events or self.phase in ("closing", "averaging"):
            return None
        members, replaced = self.membership.kept()
        return ev.PipelineSnapshot(
            epoch=self.epoch,
            model=self.model,
            members=members,
            replaced=replaced,
            layers=self.layers,
            capabilities=tuple(ev.CapabilityShown(peer=one, capability=of) for one, of in self.capabilities.items()),
            boundaries=self.boundaries,
            spans=_spans(self.spans),
            former=_spans(self.former),
            moved_s=dict(self.moved_s),
            rests=dict(self.rests),
            version=self.version,
            driven=to_wire(self.micro_batches.driven),
            in_flight={peer: to_wire(ranges) for peer, ranges in self.micro_batches.in_flight.items()},
            finished=self.micro_batches.finished,
            stages=tuple(stage.as_snapshot() for stage in self.stages),
        )

    def _restore(self, event: ev.PipelineSnapshot) -> None:
        self.model, self.layers, self.boundaries, self.version = (
            event.model,
            event.layers,
            event.boundaries,
            event.version,
        )
        self.membership.restore(event.members, event.replaced, self.epoch, self.now_s)
        self.capabilities = {one.peer: one.capability for one in event.capabilities}
        self.spans = {one.peer: (one.first, one.last) for one in event.spans}
        self.former = {one.peer: (one.first, one.last) for one in event.former}
        self.moved_s, self.rests = dict(event.moved_s), dict(event.rests)
        in_flight = {peer: from_wire(ranges) for peer, ranges in event.in_flight.items()}
        self.micro_batches = MicroBatchLedger(from_wire(event.driven), in_flight, dict(event.finished))
        if self.boundaries:
            self._make_stages()
            for stage, kept in zip(self.stages, event.stages, strict=True):
                stage.replay([kept], self.now_s)
            self.anchor_version = self.stages[0].anchor_version

    # What others see ------------------------------------------------------------------------------------

    def view(self, peer: str, now_s: float, roster_version: int = -1, verdict_chain: bytes | None = None) -> RunView:
        """What this member has to know of the run; of its stages it has their own views."""
        first = self.stages[0] if self.stages else None
        closes_in_s = max(0.0, first.round.closes_s - now_s) if first and self.phase == "closing" else None
        roster, delta = self.membership.roster_news(roster_version)
        return RunView(
            epoch=self.epoch,
            sequence=self.announcements + sum(stage.announcements for stage in self.stages),
            round=self.round_number,
            anchor_version=self.anchor_version,
            phase=self.phase,
            closes_in_s=closes_in_s,
            plan=None,
            verdict=None,
            verdict_chain=None,
            state_digest=None,
            tokens_committed=first.tokens_committed if first else 0,
            tokens_in_round=min((stage.tokens_in_round() for stage in self.stages), default=0),
            members=len(self.membership.trainers()),
            must_resync=False,
            roster_version=self.membership.roster_version,
            roster=roster,
            roster_delta=delta,
            pipeline=self.pipeline_view() if not self._knows_spans(peer) else None,
        )

    def _knows_spans(self, peer: str) -> bool:
        """As it has said itself: of a thousand peers each view would be a thousand spans long."""
        member = self.membership.members.get(peer)
        return member is not None and self.version > 0 and member.headway.plan_version == self.version

    def pipeline_view(self) -> PipelineView | None:
        """Where the model is cut and who holds what; None before it is cut."""
        if not self.boundaries:
            return None
        plan = StagePlan(self.boundaries, self.spans)
        return self._views.of(plan, self.version, self.layers, self.capabilities)


def _spans(spans: dict[str, tuple[int, int]]) -> tuple[ev.SpanAssigned, ...]:
    return tuple(ev.SpanAssigned(peer=peer, first=first, last=last) for peer, (first, last) in spans.items())
