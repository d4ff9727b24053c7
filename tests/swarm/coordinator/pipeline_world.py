"""A pipeline machine on a virtual clock, peers that pass micro-batches on, and what must hold whatever they do."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.swarm.coordinator.journaled_world import JournaledWorld, attributes_of
from tests.swarm.coordinator.world import (
    CPU,
    SIGNER,
    TOKENS_PER_SAMPLE,
    entry,
    heartbeat,
    next_state,
    peer_name,
    report,
)
from tests.swarm.coordinator.world import NOT_FROM_EVENTS as NOT_FROM_STAGE_EVENTS
from tests.swarm.coordinator.world import journaled as journaled_stage

from shoal.swarm.coordinator import events as ev
from shoal.swarm.coordinator.pipeline_run import PipelineRun
from shoal.swarm.coordinator.round_scope import RoundScope
from shoal.swarm.errors import NotAdmitted, StaleWork
from shoal.swarm.pipeline.planner.model import Infeasible, LayerCost, PeerCapability, StagePlan
from shoal.swarm.pipeline.planner.planner import Rebalancing
from shoal.swarm.protocol.messages import (
    PeerToCoordinatorClaim,
    PeerToCoordinatorDescribeModel,
    PeerToCoordinatorDrive,
    PeerToCoordinatorRelease,
    PeerToCoordinatorRoundReady,
    PeerToCoordinatorShowCapability,
)
from shoal.swarm.protocol.rounds import RunView
from shoal.swarm.protocol.run_file import RunFile
from shoal.swarm.protocol.types import Capability, Headway, KeptState, LayerSize, TensorSpec
from shoal.swarm.protocol.verdict_chain import check_verdict, genesis, tied_together
from shoal.swarm.sample_ranges import Ranges, count, from_wire, merge, subtract, to_wire

STAGES, LAYERS, MICRO = 3, 6, 2
BATCH = 12
WHOLE, SMALL = 10**9, 10**6
"""Bytes of memory of a peer that can hold the whole model, and of one that can hold a stage."""

SIZES = tuple(LayerSize(parameters_bytes=1000 + layer, activation_bytes=10, kept_bytes=20) for layer in range(LAYERS))


def run_file(stages: int | str = STAGES, **round_or_run: Any) -> RunFile:
    run = {key[4:]: value for key, value in round_or_run.items() if key.startswith("run_")}
    goal = {key: value for key, value in round_or_run.items() if not key.startswith("run_")}
    return RunFile.model_validate(
        {
            "run": {"name": "test", **run},
            "recipe": {"name": "own"},
            "algorithm": "virtual_batch",
            "pipeline": {"stages": stages, "micro_batch": MICRO},
            "round": {"tokens": BATCH * TOKENS_PER_SAMPLE, "max_s": 40.0, "patience_s": 3.0, **goal},
        }
    )


def initial(stage: int) -> bytes:
    return hashlib.sha256(f"initial state of stage {stage}".encode()).digest()


def model(stage: int) -> PeerToCoordinatorDescribeModel:
    return PeerToCoordinatorDescribeModel(
        layout=(TensorSpec(name="w", shape=(100, 50 + stage)),),
        corpus_digest=b"c" * 32,
        tokens_per_sample=TOKENS_PER_SAMPLE,
        samples=64,
    )


def plan(
    previous: StagePlan | None,
    layers: Sequence[LayerCost],
    peers: Sequence[PeerCapability],
    rebalancing: Rebalancing | None,
) -> StagePlan | Infeasible:
    """Whoever can, holds all stages; the others one each, newcomers where there are fewest; empty stages are filled by
    whoever is least missed. From the last to the first: then one move changes who drives only if it has to. Whoever is
    not named among ``peers`` has no place."""
    there = {one.peer for one in peers}
    spans = {peer: span for peer, span in previous.spans.items() if peer in there} if previous else {}
    boundaries = previous.boundaries if previous else tuple(range(0, LAYERS + 1, LAYERS // STAGES))

    def holders(stage: int) -> list[str]:
        return [one for one, (first, last) in spans.items() if first <= stage <= last]

    for peer in [one for one in peers if one.peer not in spans]:
        scarce = min(range(STAGES), key=lambda stage: (len(holders(stage)), stage))
        spans[peer.peer] = (0, STAGES - 1) if peer.host_bytes >= WHOLE else (scarce, scarce)
    while empty := [stage for stage in range(STAGES) if not holders(stage)]:
        spare = [one for one, (a, b) in sorted(spans.items()) if a == b and len(holders(a)) > 1]
        if not spare:
            return Infeasible(f"nobody can hold stage {empty[0]}, which takes {SMALL} bytes")
        spans[spare[0]] = (empty[0], empty[0])
    most, least = max(range(STAGES), key=lambda s: len(holders(s))), min(range(STAGES), key=lambda s: len(holders(s)))
    if rebalancing is not None and len(holders(most)) > len(holders(least)) + 1:
        movable = [one for one in holders(most) if spans[one] == (most, most)]
        if movable:
            spans[movable[-1]] = (least, least)
    return StagePlan(boundaries, spans)


@dataclass
class Replica:
    """A peer's process in one stage. ``done``: what is in its gradient sum; ``claimed``: what it was granted."""

    round: int = 0
    version: int | None = None
    digest: bytes | None = None
    kept: tuple[KeptState, ...] = ()
    claimed: Ranges = field(default_factory=list)
    done: Ranges = field(default_factory=list)
    offered: bool = False

    def begin(self, number: int) -> None:
        self.round, self.claimed, self.done, self.offered = number, [], [], False


@dataclass
class MicroBatch:
    """On its way through ``route`` (a peer of each stage): ``at`` stages forward, then ``back`` stages backward."""

    round: int
    cell: tuple[int, int]
    route: list[str]
    at: int = 0
    back: int = 0
    granted: list[bool] = field(default_factory=list)

    @property
    def stage(self) -> int:
        """Where it is."""
        return self.at if self.at < STAGES else STAGES - 1 - self.back


@dataclass
class Peer:
    """One process. ``hung`` ones only ever say that they are there."""

    number: int
    memory_bytes: int = SMALL
    key: int = 0
    running: bool = False
    hung: bool = False
    replicas: dict[int, Replica] = field(default_factory=dict)
    computed: int = 0
    prepared: float = 0.0
    drives: list[MicroBatch] = field(default_factory=list)
    driven: Ranges = field(default_factory=list)
    """Since it asked last."""
    driven_round: int = 0

    @property
    def name(self) -> str:
        return peer_name(self.number)

    def forget(self) -> None:
        self.replicas, self.drives, self.driven = {}, [], []


def journaled(machine: PipelineRun) -> dict[str, Any]:
    """All that a journal has to bring back."""
    members = machine.membership.members
    return {
        "members": {peer: (one.entry, one.device, one.alive) for peer, one in members.items()},
        "plan": (machine.layers, machine.capabilities, machine.boundaries, machine.spans, machine.former),
        "moves": (machine.moved_s, machine.rests),
        "versions": (machine.version, machine.anchor_version),
        "micro_batches": [stage.micro_batches for stage in machine.stages],
        "stages": [journaled_stage(stage) for stage in machine.scopes],
    }


NOT_FROM_EVENTS = {
    "_sign",
    "barrier",
    "scopes",
    "stages",
    "_accusers",
    "_drove_s",
    "_is_plan_due",
    "_may_rebalance",
    "_asked",
    "_proposed",
    "_cut_from_s",
    "_stall_detector",
    "_resting",
    "_next_stall_check_s",
    "_views",
    "shortage",
}


def attributes(machine: Any) -> dict[str, Any]:
    """As of a run that is one scope, of all scopes."""
    found = attributes_of(machine, NOT_FROM_EVENTS | NOT_FROM_STAGE_EVENTS)
    scopes = [attributes_of(scope, NOT_FROM_EVENTS | NOT_FROM_STAGE_EVENTS) for scope in machine.scopes]
    return found | {"scopes": scopes, "micro_batches": [stage.micro_batches for stage in machine.stages]}


STATUS_EVERY = 16
"""Checks of which one asks for the status, too: it takes most of a check's time."""


class PipelineWorld(JournaledWorld[PipelineRun]):
    """Every event goes through here; ``settle`` after it takes the events and checks what must always hold."""

    def __init__(self, run: RunFile, peers: int = 0) -> None:
        super().__init__(run)
        self._keys = self._turn = self.checks = 0
        self.peers = [Peer(number) for number in range(10)]
        self.verdicts: list[dict[int, ev.VerdictGiven]] = []
        self.planned: dict[int, ev.RoundPlanned] = {}
        self.history: list[dict[int, Ranges]] = []
        """Of each committed round that was not undone, the samples of each scope."""
        self.archive = [{0: initial(stage)} for stage in range(STAGES)]
        """Of which version of each stage there is a state to be had, on disks or from others."""
        self.plans = True
        self.walled: set[int] = set()
        """Peers that nobody can dial."""
        self.settle()
        for peer in self.peers[:peers]:
            self.start(peer)

    def made(self) -> PipelineRun:
        return PipelineRun(self.run, SIGNER.sign, self.now_s, self.epoch)

    def journaled(self, machine: PipelineRun) -> dict[str, Any]:
        return journaled(machine)

    def attributes(self, machine: PipelineRun) -> dict[str, Any]:
        return attributes(machine)

    # Peers ----------------------------------------------------------------------------------------------

    def by_name(self, name: str) -> Peer:
        return next(peer for peer in self.peers if peer.name == name)

    def start(self, peer: Peer) -> None:
        self._keys += 1
        peer.key, peer.running, peer.hung = self._keys, True, False
        self.join(peer)

    def join(self, peer: Peer) -> None:
        peer.forget()
        reachable = peer.number not in self.walled
        self.machine.admission.join(entry(peer.number, peer.key, reachable=reachable), CPU, self.now_s)
        able = Capability(
            host_bytes=peer.memory_bytes, device_bytes=None, layer_s=(0.1,) * LAYERS, bandwidth_bps=1e9, rtt_s=0.01
        )
        shown = PeerToCoordinatorShowCapability(capability=able, layers=SIZES)
        self.machine.show_capability(peer.name, shown, self.now_s)
        self.settle()

    def admitted(self, peer: Peer, scope: int = 0) -> bool:
        where = self.machine.scopes[scope - 1] if scope else self.machine
        try:
            return where.admission.require_member(entry(peer.number, peer.key).certificate.curve_key) == peer.name
        except NotAdmitted:
            return False

    def leave(self, peer: Peer) -> None:
        if self.admitted(peer):
            self.machine.admission.leave(peer.name, "done", self.now_s)
            self.machine.tick(self.now_s)
        peer.running = False
        peer.forget()
        self.settle()

    def crash(self, peer: Peer) -> None:
        peer.running = False
        peer.forget()

    def lose_all(self, kept: Callable[[int, int], bool]) -> None:
        """All processes are killed; of stage s those versions v are left for which ``kept(s, v)``, and the first."""
        for peer in self.peers:
            self.crash(peer)
        self.archive = [
            {version: one for version, one in states.items() if version == 0 or kept(stage, version)}
            for stage, states in enumerate(self.archive)
        ]

    def saved(self, stage: int) -> tuple[KeptState, ...]:
        """What members of a stage keep beside the state that they hold."""
        return ()

    def view(self, peer: Peer, stage: int) -> RunView:
        return self.machine.scopes[stage].view(peer.name, self.now_s)

    def beat(self, peer: Peer) -> None:
        """In all its scopes."""
        headway = Headway(prepared=peer.prepared, computed=peer.computed, has_work=self._has_work(peer))
        said = heartbeat(anchor_version=None, state_digest=None, headway=headway)
        self.machine.heartbeat(peer.name, said, self.now_s)
        self.settle()
        for stage, replica in peer.replicas.items():
            if self.admitted(peer, stage + 1):
                said = heartbeat(
                    round=replica.round,
                    anchor_version=replica.version,
                    state_digest=replica.digest,
                    kept=replica.kept or (self.saved(stage) if self.view(peer, stage).wants_kept else ()),
                    tokens_done=count(replica.done) * TOKENS_PER_SAMPLE,
                    tokens_per_s=40.0,
                    step_s=0.5,
                )
                self.machine.scopes[stage].heartbeat(peer.name, said, self.now_s)
                self.settle()

    def _has_work(self, peer: Peer) -> bool:
        """Something has come to it. A driver that hangs keeps all that it drives from moving."""
        moving = [batch for one in self.peers for batch in one.drives if one.running and not one.hung]
        return bool(peer.hung and peer.drives) or any(batch.route[batch.stage] == peer.name for batch in moving)

    def sync(self, peer: Peer, stage: int) -> None:
        """Fetch the state that the stage is at, from others or the disk, and say so; else say what is on the disk."""
        view, replica, states = self.view(peer, stage), peer.replicas[stage], self.archive[stage]
        replica.begin(view.round)
        replica.version = replica.digest = None
        replica.kept = ()
        to_be_had = states.get(view.anchor_version)
        holders = self.machine.scopes[stage].membership.synced(view.anchor_version, view.state_digest)
        has_donor = view.state_digest is not None and any(self.by_name(name).running for name in holders)
        if view.state_digest is not None and (view.state_digest == to_be_had or has_donor):
            replica.version, replica.digest = view.anchor_version, view.state_digest
        elif to_be_had is not None and (view.state_digest is None or view.anchor_version == 0):
            replica.version, replica.digest = view.anchor_version, to_be_had
        else:
            newest = sorted(states.items(), reverse=True)[:16]
            replica.kept = tuple(KeptState(anchor_version=version, digest=digest) for version, digest in newest)
        self.beat(peer)

    def enter(self, peer: Peer, stage: int) -> None:
        """Come to a stage, for the first time or again."""
        machine = self.machine.scopes[stage]
        if self.admitted(peer, stage + 1):
            machine.admission.leave(peer.name, "starts afresh", self.now_s)
        peer.replicas[stage] = Replica()
        self.machine.join_stage(stage, entry(peer.number, peer.key), CPU, self.now_s)
        self.machine.describe_stage(stage, peer.name, model(stage))
        self.settle()
        self.sync(peer, stage)

    # What a peer that behaves does ------------------------------------------------------------------------

    def behave(self, peer: Peer, steps: int = 12, *, drives: bool = True) -> None:
        """One turn of its loop."""
        if not peer.running:
            self.start(peer)
        if not self.admitted(peer):
            self.join(peer)
        self.beat(peer)
        first, last = self.machine.spans.get(peer.name, (0, -1))
        peer.replicas = {stage: one for stage, one in peer.replicas.items() if first <= stage <= last}
        for stage in range(first, last + 1):
            if stage not in peer.replicas or not self.admitted(peer, stage + 1):
                self.enter(peer, stage)
            try:
                self.follow(peer, stage)
            except StaleWork:
                self.enter(peer, stage)
        if drives:
            self.drive(peer)
        for _ in range(steps):
            for batch in list(peer.drives):
                self.advance(peer, batch)

    def follow(self, peer: Peer, stage: int) -> None:
        """Act on the stage's view."""
        self.conclude(peer, stage)
        self.beat(peer)
        replica, view = peer.replicas[stage], self.view(peer, stage)
        if replica.version is None:
            return
        match view.phase:
            case "training":
                replica.offered = False
            case "closing" if not replica.offered:
                self.ready(peer, stage)
                replica.offered = True
            case "averaging":
                assert view.plan is not None
                weights = {one.peer: one.weight_tokens for one in view.plan.members}
                if replica.offered and peer.name in weights:
                    assert weights[peer.name] == count(replica.done) * TOKENS_PER_SAMPLE
                    self.report(peer, stage)

    def conclude(self, peer: Peer, stage: int) -> None:
        """Act on the verdict of the round that it worked for."""
        replica, view = peer.replicas[stage], self.view(peer, stage)
        if view.round == replica.round:
            if replica.digest is None or view.anchor_version != replica.version or view.must_resync:
                self.sync(peer, stage)
            return
        verdict = view.verdict
        if verdict is None or verdict.round != replica.round or verdict.anchor_version < (replica.version or 0):
            self.enter(peer, stage)
            return
        if verdict.committed:
            assert verdict.plan is not None
            if (verdict.plan.anchor_version, verdict.plan.state_digest) != (replica.version, replica.digest):
                self.enter(peer, stage)
                return
            assert replica.digest is not None
            replica.version, replica.digest = verdict.anchor_version, next_state(replica.digest)
        replica.begin(verdict.round + 1)

    def ready(self, peer: Peer, stage: int, **claims: Any) -> None:
        """Raises what the machine raises."""
        replica = peer.replicas[stage]
        said = {
            "round": replica.round,
            "anchor_version": replica.version or 0,
            "state_digest": replica.digest or initial(stage),
            "weight_tokens": count(replica.done) * TOKENS_PER_SAMPLE,
            "ranges": to_wire(replica.done),
            "loss": 2.5 if stage == STAGES - 1 else None,
        }
        try:
            message = PeerToCoordinatorRoundReady.model_validate(said | claims)
            self.machine.scopes[stage].ready(peer.name, message, self.now_s)
            self.machine.tick(self.now_s)
        finally:
            self.settle()

    def report(self, peer: Peer, stage: int, **faults: tuple[int, ...]) -> None:
        machine = self.machine.scopes[stage]
        if machine.round.plan is not None and peer.name in machine.membership.members:
            planned = machine.round.plan
            faults["dropped"] = tuple(i for i in faults.get("dropped", ()) if i < len(planned.members))
            machine.report(peer.name, report(planned, **faults), self.now_s)
            self.machine.tick(self.now_s)
            self.settle()

    # Micro-batches ----------------------------------------------------------------------------------------

    def ask(self, peer: Peer, samples: int = 6) -> Ranges:
        """Its question as it stands: the same until it has heard an answer."""
        round_number = peer.replicas[0].round if 0 in peer.replicas else self.machine.round_number
        if peer.driven_round != round_number:
            peer.driven, peer.drives, peer.driven_round = [], [], round_number
        ask = PeerToCoordinatorDrive(round=round_number, samples=samples, done=to_wire(peer.driven))
        ranges = self.machine.drive(peer.name, ask, self.now_s)
        self.settle()
        return ranges

    def drive(self, peer: Peer) -> None:
        if 0 not in peer.replicas or not self.admitted(peer, 1):
            return
        ranges = self.ask(peer)
        peer.driven = []
        under_way = [batch.cell for batch in peer.drives]
        for cell in ranges:
            if cell not in under_way and (route := self.route(peer)) is not None:
                peer.drives.append(MicroBatch(peer.driven_round, cell, route))

    def route(self, driver: Peer) -> list[str] | None:
        """Itself where it can, else each time another replica, one that does not hang if there is any."""
        self._turn += 1
        route = []
        for stage in range(STAGES):
            able = self._able(stage)
            if not able:
                return None
            route.append(driver.name if driver.name in able else able[self._turn % len(able)])
        return route

    def _able(self, stage: int) -> list[str]:
        there = [one for one in self.peers if one.running and stage in one.replicas]
        return [one.name for one in there if not one.hung] or [one.name for one in there]

    def advance(self, driver: Peer, batch: MicroBatch) -> None:
        """One hop: forward with a claim, or backward; given up where the other side is not there any more."""
        stage = batch.stage
        peer = self.by_name(batch.route[stage])
        replica = peer.replicas.get(stage)
        if peer.hung and peer.name in self._able(stage) and self.admitted(peer, stage + 1):
            return  # there is nobody else to send it to
        if replica is None or peer.hung or replica.round != batch.round or not self.admitted(peer, stage + 1):
            self.give_up(driver, batch)
            return
        peer.computed += 1
        if batch.at < STAGES:
            batch.granted.append(self.claim(peer, stage, [batch.cell]) == [batch.cell])
            batch.at += 1
            return
        if batch.granted[stage] and subtract([batch.cell], replica.claimed) == []:
            replica.done = merge([*subtract(replica.done, [batch.cell]), batch.cell])
        batch.back += 1
        if batch.back == STAGES:
            driver.drives.remove(batch)
            driver.driven = merge([*driver.driven, batch.cell])

    def claim(self, peer: Peer, stage: int, cells: Ranges) -> Ranges:
        replica = peer.replicas[stage]
        if replica.version is None:
            return []
        claim = PeerToCoordinatorClaim(round=replica.round, ranges=to_wire(cells))
        granted = self.machine.stages[stage].claim(peer.name, claim, self.now_s)
        self.settle()
        replica.claimed = merge([*subtract(replica.claimed, merge(granted)), *granted])
        return granted

    def release(self, peer: Peer, stage: int, cells: Ranges) -> None:
        replica = peer.replicas[stage]
        replica.claimed = subtract(replica.claimed, cells)
        replica.done = subtract(replica.done, cells)
        release = PeerToCoordinatorRelease(round=replica.round, ranges=to_wire(cells))
        self.machine.stages[stage].release(peer.name, release, self.now_s)
        self.settle()

    def give_up(self, driver: Peer, batch: MicroBatch) -> None:
        """Whoever has claimed it, and has no gradient yet, releases it; the driver has it still to drive."""
        driver.drives.remove(batch)
        for stage, granted in enumerate(batch.granted):
            peer = self.by_name(batch.route[stage])
            replica = peer.replicas.get(stage)
            if replica is None or peer.hung or not granted or not self.admitted(peer, stage + 1):
                continue
            if replica.round == batch.round and subtract([batch.cell], replica.done):
                self.release(peer, stage, [batch.cell])

    # What must hold ---------------------------------------------------------------------------------------

    def plan(self) -> None:
        """The planner answers whatever it is asked, unless it is busy."""
        while self.plans and (asked := self.machine.plan_request(self.now_s)) is not None:
            self.machine.take_plan(asked, asked.plan(plan), self.now_s)

    def settle(self) -> None:
        self.plan()
        events = self.written()
        for event in events:
            if isinstance(event, ev.InScope) and isinstance(event.event, ev.RoundPlanned):
                self.planned[event.scope] = event.event
        given = ev.verdicts_in(events)
        if given:
            self._check_verdicts(given)
        self.check()

    def _check_verdicts(self, given: dict[int, ev.VerdictGiven]) -> None:
        """All stages at once, alike, each in its own unbroken chain, and all on exactly the batch."""
        assert list(given) == list(range(1, STAGES + 1)), "one write for all stages"
        verdicts = [event.verdict for event in given.values()]
        one = verdicts[0]
        for scope, verdict in zip(given, verdicts, strict=True):
            before = self.verdicts[-1][scope].verdict.chain if self.verdicts else genesis(self.run.hash, scope)
            assert verdict.previous_chain == before
            check_verdict(verdict, SIGNER.public_key)
            for name in ("round", "committed", "reason", "anchor_version", "tokens", "tokens_total"):
                assert getattr(verdict, name) == getattr(one, name)
        assert one.round == len(self.verdicts)
        assert [verdict.together for verdict in tied_together(verdicts)] == [verdict.together for verdict in verdicts]
        if one.committed:
            assert one.anchor_version == len(self.history) + 1
            assert one.tokens == self.run.round.tokens
            batch = (len(self.history) * BATCH, (len(self.history) + 1) * BATCH)
            ranges = {}
            for scope, verdict in zip(given, verdicts, strict=True):
                planned = self.planned[scope]
                assert planned.plan == verdict.plan
                assert verdict.plan is not None
                assert given[scope].lost == ()
                ranges[scope] = sorted(each for mine in planned.ranges for each in from_wire(mine))
                assert count(ranges[scope]) == BATCH, "each sample once"
                assert merge(ranges[scope]) == [batch]
                self.archive[scope - 1][verdict.anchor_version] = next_state(verdict.plan.state_digest)
            self.history.append(ranges)
        elif (back := given[1].went_back) is not None:
            assert one.anchor_version < back.from_version == len(self.history)
            self.history = self.history[: one.anchor_version]
            self.archive = [
                {at: digest for at, digest in states.items() if at <= one.anchor_version} for states in self.archive
            ]
            assert all(event.went_back is not None for event in given.values())
        else:
            assert one.anchor_version == len(self.history)
        assert one.tokens_total == len(self.history) * self.run.round.tokens
        self.verdicts.append(given)

    def check(self) -> None:
        machine = self.machine
        assert machine.anchor_version == len(self.history)
        assert machine.spans.keys() <= {peer for peer, one in machine.membership.members.items() if one.alive}
        rounds = {(one.round.number, one.anchor_version, one.tokens_committed) for one in machine.scopes}
        assert rounds in (set(), {(len(self.verdicts), len(self.history), len(self.history) * self.run.round.tokens)})
        phases = {stage.round.phase for stage in machine.scopes}
        assert len(phases) <= 1 or phases == {"waiting", "training"}, "closed and planned together"
        for number, stage in enumerate(machine.scopes):
            self._check_stage(number, stage)
        batch = machine.batch()
        if batch is not None:
            ledger = machine.stages[0].micro_batches
            for ranges in [ledger.driven, *ledger.in_flight.values()]:
                assert subtract(merge(ranges), batch.ranges) == []
        self.checks += 1
        if self.checks % STATUS_EVERY == 0:
            status = machine.status(self.now_s)
            assert len(status.stages) == len(machine.scopes)
            assert machine.view(peer_name(0), self.now_s).tokens_in_round == status.tokens_in_round

    def _check_stage(self, number: int, stage: RoundScope) -> None:
        leases, members, batches = stage.leases, stage.membership.members, len(self.history)
        held = [one for ranges in leases.held.values() for one in ranges]
        committed = [(0, batches * BATCH)] if batches else []
        everything = sorted([*committed, *leases.pool, *held])
        assert count(everything) == count(merge(everything)) == leases.fresh, "a sample is in two places, or nowhere"
        assert all(batches * BATCH <= start < stop <= (batches + 1) * BATCH for start, stop in held)
        for peer in leases.held:
            assert members[peer].alive or peer in stage.round.orphans
        for peer, member in members.items():
            assert not member.alive or self.machine.holds(peer, number)
            assert not member.alive or self.machine.membership.members[peer].alive
