"""A run machine on a virtual clock, members that can behave or not, and what must hold whatever they do."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.swarm.coordinator.journaled_world import JournaledWorld, attributes_of

from shoal.swarm.averaging.norm_claims import pack, ranges
from shoal.swarm.coordinator import events as ev
from shoal.swarm.coordinator.round_scope import RoundScope
from shoal.swarm.coordinator.run import PlainRun
from shoal.swarm.errors import NotAdmitted, StaleWork
from shoal.swarm.protocol.identity import Identity
from shoal.swarm.protocol.messages import (
    PeerToCoordinatorDescribeModel,
    PeerToCoordinatorHeartbeat,
    PeerToCoordinatorRequestLease,
    PeerToCoordinatorRoundReady,
    PeerToCoordinatorRoundReport,
)
from shoal.swarm.protocol.rounds import RoundPlan, RunView, Verdict
from shoal.swarm.protocol.run_file import RunFile
from shoal.swarm.protocol.types import Address, Certificate, DeviceInfo, KeptState, Role, RosterEntry, TensorSpec
from shoal.swarm.protocol.verdict_chain import check_verdict, genesis
from shoal.swarm.sample_ranges import Ranges, count, from_wire, merge, subtract, to_wire

CPU = DeviceInfo(kind="cpu", name="some CPU", memory_bytes=2**33)
SIGNER = Identity.generate()
TOKENS_PER_SAMPLE = 10
MODEL = PeerToCoordinatorDescribeModel(
    layout=(TensorSpec(name="w", shape=(100, 500)),),
    corpus_digest=b"c" * 32,
    tokens_per_sample=TOKENS_PER_SAMPLE,
    samples=64,
)
INITIAL = hashlib.sha256(b"initial state").digest()


def run_file(algorithm: str = "diloco", overlap: bool = False, **round_or_run: Any) -> RunFile:
    """``tokens=``, ``max_s=``, ``patience_s=`` of the round; ``run_tokens=``, ``run_rounds=``, ``run_max_s=``."""
    run = {key[4:]: value for key, value in round_or_run.items() if key.startswith("run_")}
    goal = {key: value for key, value in round_or_run.items() if not key.startswith("run_")}
    return RunFile.model_validate(
        {
            "run": {"name": "test", **run},
            "recipe": {"name": "own"},
            "algorithm": algorithm,
            "averaging": {"overlap": overlap},
            "inner": {"batch_samples": 2},
            "round": {"tokens": 200, "max_s": 20.0, "patience_s": 3.0, **goal},
        }
    )


def peer_name(number: int) -> str:
    return "peer" + "abcdefghijklmnopqrstuvwxyz234567"[number] * 12


def entry(number: int, key: int = 0, role: Role = "trainer", reachable: bool = True) -> RosterEntry:
    certificate = Certificate(
        identity_key=bytes([number]) * 32, curve_key=key.to_bytes(31, "big") + bytes([number]), signature=bytes(64)
    )
    return RosterEntry(
        peer=peer_name(number),
        certificate=certificate,
        name=f"name {number}",
        role=role,
        addresses=(Address(host="10.0.0.1", control_port=1, data_port=2),),
        reachable=reachable,
    )


def heartbeat(**fields: Any) -> PeerToCoordinatorHeartbeat:
    silent = {
        "round": 0,
        "activity": "training",
        "anchor_version": 0,
        "state_digest": INITIAL,
        "tokens_done": 0,
        "tokens_per_s": 0.0,
        "step_s": 0.0,
        "loss": None,
        "chunks_moved": 0,
        "bytes_sent": 0,
        "bytes_received": 0,
        "bandwidth_bps": 0.0,
        "roster_version": 0,
    }
    return PeerToCoordinatorHeartbeat.model_validate(silent | fields)


def claim(norm: float) -> bytes:
    """Of a contribution of that norm, all in its first range."""
    return pack([norm, *[0.0] * (len(ranges(MODEL.elements)) - 1)]) if norm else b""


def part_digest(plan: RoundPlan, index: int) -> bytes:
    return hashlib.sha256(f"{plan.round} {index} {plan.members}".encode()).digest()


def next_state(digest: bytes) -> bytes:
    return hashlib.sha256(b"next" + digest).digest()


def report(
    plan: RoundPlan, missing: tuple[int, ...] = (), wrong: tuple[int, ...] = (), dropped: tuple[int, ...] = ()
) -> PeerToCoordinatorRoundReport:
    digests: list[bytes | None] = [
        None if i in missing else b"w" * 32 if i in wrong else part_digest(plan, i) for i in range(len(plan.parts))
    ]
    return PeerToCoordinatorRoundReport(
        round=plan.round, digests=tuple(digests), dropped=dropped, trouble="a link was slow" if missing else ""
    )


@dataclass
class Worker:
    """A member's process as the machine's callers see it. ``hung`` ones only ever say that they are there.

    ``version`` and ``digest`` are of the state that it holds, None while it looks for the run's: then it tells what it
    has ``kept``. ``round`` is the one that ``done`` is for; ``ahead``: done since it was offered, for the next one
    (overlap)."""

    number: int
    key: int = 0
    running: bool = False
    hung: bool = False
    round: int = 0
    version: int | None = None
    digest: bytes | None = None
    kept: tuple[KeptState, ...] = ()
    left: Ranges = field(default_factory=list)
    done: Ranges = field(default_factory=list)
    ahead: Ranges = field(default_factory=list)
    offered: bool = False
    """Its contribution to this round was accepted as it is now."""
    last_ask: PeerToCoordinatorRequestLease | None = None
    norm: float = 0.0
    """What it claims of its contributions."""
    diverged: KeptState | None = None
    """From where it says that nothing comes of its work; it has let go of the run's state then."""

    @property
    def peer(self) -> str:
        return peer_name(self.number)

    @property
    def tokens_done(self) -> int:
        return count(self.done) * TOKENS_PER_SAMPLE

    def said(self, overlap: bool) -> dict[str, int]:
        """The round that it works for, and its tokens in that one."""
        if overlap and self.offered:
            return {"round": self.round + 1, "tokens_done": count(self.ahead) * TOKENS_PER_SAMPLE}
        return {"round": self.round, "tokens_done": self.tokens_done}

    def catch_up(self, committed: bool = False) -> None:
        """The round it had offered to is over, or goes on after all."""
        self.done = merge([*([] if committed else self.done), *self.ahead])
        self.ahead, self.offered = [], False

    def forget(self) -> None:
        self.version = self.digest = self.last_ask = None
        self.left, self.done, self.ahead, self.offered = [], [], [], False
        self.diverged = None


def journaled(scope: RoundScope) -> dict[str, Any]:
    """All that a journal has to bring back."""
    current = scope.round
    return {
        "leases": scope.leases,
        "answered": scope.leasing.answered,
        "model": scope.model,
        "anchor": (scope.anchor_version, scope.agreed_digest),
        "verdict": (scope.chain, scope.verdict, scope.loss),
        "history": scope.history,
        "counts": (scope.rounds_aborted, scope.tokens_committed, scope.rounds_undone, scope.tokens_undone),
        "retrained": scope.retrained,
        "accusations": scope.accusations,
        "setback": scope.setback,
        "members": {
            peer: (
                (one.entry, one.device, one.alive, one.left, one.trouble),
                (one.tokens_committed, one.barred_rounds, one.failures),
                (one.present_s, one.open_s, one.round_s, one.energy_j, one.round_energy_j),
                (one.credit, one.credit_rounds, one.has_credit),
                (one.rounds_committed, one.pace_tps, one.missed, one.absences, one.out_until),
                (
                    one.carried_tokens,
                    one.last_tokens,
                    one.unusual_rounds,
                    one.worked_version,
                    one.suspended_until,
                    one.suspensions,
                ),
            )
            for peer, one in scope.membership.members.items()
            if one.entry.role == "trainer"
        },
        "versions": {
            peer: (one.joined_version, one.seen_version)
            for peer, one in scope.membership.members.items()
            if one.entry.role == "trainer"
        },
        "round": (current.number, current.plan, current.ranges, current.orphans, current.loss),
        "phase": "open" if current.phase in ("waiting", "training") else current.phase,
    }


NOT_FROM_EVENTS = {
    "access",
    "log",
    "admission",
    "leasing",
    "review",
    "stage",
    "together",
    "timed",
    "_sign",
    "_ready_delays",
    "_report_delays",
    "_bandwidths",
    "_outage",
    "_punctuality",
    "_claims",
    "timings",
}
"""Attributes of a machine that come from its start, or from what is not journaled, and cannot be compared."""


def attributes(machine: PlainRun) -> dict[str, Any]:
    return attributes_of(machine.scope, NOT_FROM_EVENTS) | {"answered": machine.scope.leasing.answered}


class World(JournaledWorld[PlainRun]):
    """Every event goes through here; ``settle`` after it takes the events and checks what must always hold."""

    def __init__(self, run: RunFile, members: int = 0) -> None:
        super().__init__(run)
        self.overlap = run.averaging.overlap
        self.workers = [Worker(number) for number in range(8)]
        self.walled: set[int] = set()
        """Workers that nobody can dial."""
        self.loss = 2.5
        self.committed: Ranges = []
        self.verdicts: list[ev.VerdictGiven] = []
        self.archive = {0: INITIAL}
        """Of which version there is a state to be had, on disks or from others, and with which digest."""
        self.history: list[tuple[bytes, Ranges]] = []
        """Of each committed round that was not undone: the state that it was planned on, and its samples."""
        self.retrained: tuple[set[int], set[int]] = (set(), set())
        """Samples that have to be trained on again: their contributor died, or their round was undone."""
        self._phase = "open"
        self._planned: Ranges = []
        self._ranges: dict[str, Ranges] = {}
        self._roster = (-1, ())  # type: tuple[int, tuple[RosterEntry, ...]]
        self._keys = 0
        for number in range(members):
            self.join(self.workers[number])
            self.sync(self.workers[number])

    @property
    def scope(self) -> RoundScope:
        return self.machine.scope

    # Events ---------------------------------------------------------------------------------------------

    def join(self, worker: Worker, *, new_process: bool = True) -> None:
        if new_process:
            self._keys += 1
            worker.key = self._keys
        worker.forget()
        worker.running = True
        reachable = worker.number not in self.walled
        self.scope.admission.join(entry(worker.number, worker.key, reachable=reachable), CPU, self.now_s)
        self.scope.describe_model(worker.peer, MODEL)
        self.settle()

    def sync(self, worker: Worker) -> None:
        """Fetch the state that the run is at, from others or the disk, and say so; else say what is on the disk."""
        view = self.view(worker)
        worker.round = view.round
        to_be_had = self.archive.get(view.anchor_version)
        worker.version, worker.digest, worker.kept = None, None, ()
        if view.state_digest is not None and (view.state_digest == to_be_had or self._has_donor(view)):
            worker.version, worker.digest = view.anchor_version, view.state_digest
        elif to_be_had is not None and (view.state_digest is None or view.anchor_version == 0):
            worker.version, worker.digest = view.anchor_version, to_be_had
        else:
            newest = sorted(self.archive.items(), reverse=True)[:16]
            worker.kept = tuple(KeptState(anchor_version=version, digest=digest) for version, digest in newest)
        self.beat(worker)

    def _has_donor(self, view: RunView) -> bool:
        """Whether somebody who says to hold this state is there to be asked."""
        holders = self.scope.membership.synced(view.anchor_version, view.state_digest)
        return any(worker.running and worker.peer in holders for worker in self.workers)

    def lose_all(self, kept: Callable[[int], bool]) -> None:
        """All processes of members are killed, and of all states those versions are left that had been saved."""
        for worker in self.workers:
            worker.running = worker.hung = False
        self.archive = {version: one for version, one in self.archive.items() if version == 0 or kept(version)}

    def afresh(self, worker: Worker) -> None:
        self.leave(worker)
        self.join(worker, new_process=False)
        self.sync(worker)

    def leave(self, worker: Worker) -> None:
        if self.admitted(worker):
            self.scope.admission.leave(worker.peer, "done", self.now_s)
            self.machine.tick(self.now_s)
        worker.running = False
        worker.forget()
        self.settle()

    def admitted(self, worker: Worker) -> bool:
        try:
            return (
                self.scope.admission.require_member(entry(worker.number, worker.key).certificate.curve_key)
                == worker.peer
            )
        except NotAdmitted:
            return False

    def beat(self, worker: Worker, **claims: Any) -> None:
        said = {
            **worker.said(self.overlap),
            "anchor_version": worker.version,
            "state_digest": worker.digest,
            "kept": worker.kept or (self.saved() if self.view(worker).wants_kept else ()),
            "diverged": worker.diverged,
            "tokens_per_s": 40.0,
            "step_s": 0.5,
        }
        self.scope.heartbeat(worker.peer, heartbeat(**(said | claims)), self.now_s)
        self.settle()

    def saved(self) -> tuple[KeptState, ...]:
        """What each member has on its disk."""
        return tuple(KeptState(anchor_version=at, digest=of) for at, of in sorted(self.archive.items())[-16:])

    def ask(self, worker: Worker, samples: int) -> Ranges:
        worker.last_ask = PeerToCoordinatorRequestLease(samples=samples, **worker.said(self.overlap))
        return self.repeat_ask(worker)

    def repeat_ask(self, worker: Worker) -> Ranges:
        assert worker.last_ask is not None
        ranges = self.scope.leasing.request(worker.peer, worker.last_ask, self.now_s)
        self.settle()
        return ranges

    def take(self, worker: Worker, ranges: Ranges) -> None:
        worker.left += subtract(subtract(merge(ranges), merge(worker.left)), merge([*worker.done, *worker.ahead]))

    def train(self, worker: Worker, samples: int = 2) -> None:
        """A step on the next batch; while the contribution of this round is waiting, only with overlap."""
        if not worker.left or (worker.offered and not self.overlap):
            return
        start, stop = worker.left.pop(0)
        middle = min(start + samples, stop)
        if middle < stop:
            worker.left.insert(0, (middle, stop))
        if worker.offered:
            worker.ahead = merge([*worker.ahead, (start, middle)])
        else:
            worker.done = merge([*worker.done, (start, middle)])

    def ready(self, worker: Worker, **claims: Any) -> None:
        """Raises what the machine raises."""
        said = {
            "round": worker.round,
            "anchor_version": worker.version or 0,
            "state_digest": worker.digest or INITIAL,
            "weight_tokens": worker.tokens_done,
            "ranges": to_wire(worker.done),
            "loss": self.loss,
            "norms": claim(worker.norm),
        }
        try:
            self.scope.ready(worker.peer, PeerToCoordinatorRoundReady.model_validate(said | claims), self.now_s)
            self.machine.tick(self.now_s)
        finally:
            self.settle()

    def report(self, worker: Worker, **faults: tuple[int, ...]) -> None:
        plan = self.scope.round.plan
        if plan is not None:
            faults["dropped"] = tuple(i for i in faults.get("dropped", ()) if i < len(plan.members))
            self.scope.report(worker.peer, report(plan, **faults), self.now_s)
            self.machine.tick(self.now_s)
            self.settle()

    def pass_time(self, seconds: float) -> None:
        """In ticks that are short enough not to count as the coordinator's own silence."""
        for _ in range(round(seconds / 0.25)):
            self.tick(0.25)

    def made(self) -> PlainRun:
        return PlainRun(self.run, SIGNER.sign, self.now_s, self.epoch)

    def journaled(self, machine: PlainRun) -> dict[str, Any]:
        return journaled(machine.scope)

    def attributes(self, machine: PlainRun) -> dict[str, Any]:
        return attributes(machine)

    def view(self, worker: Worker) -> RunView:
        return self.scope.view(worker.peer, self.now_s)

    # A member that behaves --------------------------------------------------------------------------------

    def behave(self, worker: Worker) -> None:
        """One turn of its loop."""
        try:
            self._behave(worker)
        except StaleWork:
            self.afresh(worker)

    def _behave(self, worker: Worker) -> None:
        if not worker.running or not self.admitted(worker):
            self.join(worker)
            self.sync(worker)
        self.conclude(worker)
        self.beat(worker)
        if worker.version is None:
            return
        view = self.view(worker)
        if view.must_resync and not worker.offered:
            self.afresh(worker)
            return
        match view.phase:
            case "training":
                worker.catch_up()
                self.work(worker)
            case "closing":
                if not worker.offered:
                    self.ready(worker)
                    worker.offered = True
            case "averaging":
                assert view.plan is not None
                weights = {one.peer: one.weight_tokens for one in view.plan.members}
                if worker.offered and worker.peer in weights:
                    assert weights[worker.peer] == worker.tokens_done
                    self.report(worker)
        if self.overlap and worker.offered:
            self.work(worker)

    def work(self, worker: Worker) -> None:
        """What it does in a turn."""
        if not worker.left:
            self.take(worker, self.ask(worker, 6))
        self.train(worker)

    def conclude(self, worker: Worker) -> None:
        """Act on the verdict of the round that it worked for."""
        view = self.view(worker)
        if view.round == worker.round:
            if view.state_digest is None or view.anchor_version != worker.version or worker.digest is None:
                self.sync(worker)
            return
        verdict = view.verdict
        if verdict is None or verdict.round != worker.round:
            self.afresh(worker)
            return
        included = False
        if verdict.anchor_version < (worker.version or 0):
            self.afresh(worker)
            return
        if verdict.committed:
            assert verdict.plan is not None
            if (verdict.plan.anchor_version, verdict.plan.state_digest) != (worker.version, worker.digest):
                self.afresh(worker)
                return
            assert worker.digest is not None
            worker.version, worker.digest = verdict.anchor_version, next_state(worker.digest)
            included = worker.offered and worker.peer in [one.peer for one in verdict.plan.members]
        worker.catch_up(included)
        worker.round = verdict.round + 1

    # What must hold ---------------------------------------------------------------------------------------

    def settle(self) -> None:
        for event in self.written():
            self._follow(event)
        self.check()

    def _follow(self, event: ev.JournalEvent) -> None:
        """The story that the events tell must be one story."""
        machine = self.machine
        match event:
            case ev.MemberJoined():
                assert event.entry.role != "observer", "observers leave no traces"
            case ev.RoundClosing():
                assert self._phase == "open"
                assert event.round == len(self.verdicts)
                if machine.scope.round.phase == "closing" and machine.scope.round.number == event.round:
                    lead_s = 0 if self.run.algorithm == "virtual_batch" else machine.scope.deadlines.announce_s / 2
                    assert machine.scope.round.closes_s >= self.now_s + lead_s
                self._phase = "closing"
            case ev.RoundReopened():
                assert (self._phase, event.round) == ("closing", len(self.verdicts))
                self._phase = "open"
            case ev.RoundPlanned():
                assert self._phase == "closing"
                self._check_plan(event)
                self._phase = "averaging"
            case ev.VerdictGiven():
                self._check_verdict(event)
                self._phase = "open"
            case ev.EpochsCovered():
                stop = event.stop * event.samples
                assert event.samples == MODEL.samples
                assert self.committed[0][0] == 0
                assert self.committed[0][1] >= stop, "all are committed"
                bounds = range(event.first * event.samples, stop)
                assert [event.lost, event.undone] == [len(one.intersection(bounds)) for one in self.retrained]
                self.retrained = tuple(one.difference(range(stop)) for one in self.retrained)  # type: ignore[assignment]

    def _check_plan(self, event: ev.RoundPlanned) -> None:
        plan, machine = event.plan, self.machine
        self.archive[plan.anchor_version] = plan.state_digest
        peers = [one.peer for one in plan.members]
        assert plan.round == len(self.verdicts)
        assert peers == sorted(set(peers))
        self._ranges = {peer: from_wire(one) for peer, one in zip(peers, event.ranges, strict=True)}
        for one in plan.members:
            assert one.peer in machine.scope.round.ready or machine.scope.round.number != plan.round
            assert one.weight_tokens == count(self._ranges[one.peer]) * TOKENS_PER_SAMPLE
        at = 0
        for part in plan.parts:
            assert part.start == at < part.stop
            assert part.owner < len(peers)
            assert part.start % plan.chunk_elements == 0
            at = part.stop
        assert at == sum(spec.elements for spec in MODEL.layout)
        if self.run.algorithm == "virtual_batch":
            tokens = sum(one.weight_tokens for one in plan.members)
            forced = self.now_s >= machine.scope.round.opened_s + machine.scope.goal().max_s
            assert tokens == self.run.round.tokens or (tokens < self.run.round.tokens and forced)

    def _check_verdict(self, event: ev.VerdictGiven) -> None:
        verdict = event.verdict
        chain = self.verdicts[-1].verdict.chain if self.verdicts else genesis(self.run.hash)
        before = len(self.history)
        assert verdict.round == len(self.verdicts)
        assert verdict.previous_chain == chain
        check_verdict(verdict, SIGNER.public_key)
        assert verdict.epoch >= (self.verdicts[-1].verdict.epoch if self.verdicts else 0)
        if verdict.committed:
            assert self._phase == "averaging"
            assert verdict.plan is not None
            assert len(verdict.digests) == len(verdict.plan.parts)
            assert verdict.anchor_version == before + 1
            fresh = [one for peer, ranges in self._ranges.items() if peer not in event.lost for one in ranges]
            lost = [one for peer in event.lost for one in self._ranges[peer]]
            self.retrained[0].update(sample for bounds in lost for sample in range(*bounds))
            assert count(subtract(merge(fresh), self.committed)) == count(fresh), "committed twice"
            self.committed = merge([*self.committed, *fresh])
            self.history.append((verdict.plan.state_digest, fresh))
            assert verdict.tokens == count(fresh) * TOKENS_PER_SAMPLE
            self.archive[verdict.anchor_version] = next_state(verdict.plan.state_digest)
        else:
            assert verdict.reason
            assert verdict.tokens == 0
        if event.went_back is not None:
            self._check_return(event.went_back, verdict)
        elif not verdict.committed:
            assert verdict.anchor_version == before
        assert verdict.tokens_total == count(self.committed) * TOKENS_PER_SAMPLE
        self.verdicts.append(event)

    def _check_return(self, back: ev.WentBack, verdict: Verdict) -> None:
        """To a version with the digest that a round was planned on that has been committed and not undone since."""
        assert not verdict.committed
        assert self._phase == "open" or back.diverged
        assert back.from_version == len(self.history)
        assert verdict.anchor_version < back.from_version
        digest, _ = self.history[verdict.anchor_version]
        assert digest == back.digest
        vouching = self.verdicts[back.vouched_round].verdict
        assert vouching.committed
        assert vouching.plan is not None
        assert (vouching.plan.anchor_version, vouching.plan.state_digest) == (verdict.anchor_version, digest)
        assert back.keepers
        undone = [one for _, ranges in self.history[verdict.anchor_version :] for one in ranges]
        self.retrained[1].update(sample for bounds in undone for sample in range(*bounds))
        self.committed = subtract(self.committed, merge(undone))
        self.history = self.history[: verdict.anchor_version]
        self.archive = {at: one for at, one in self.archive.items() if at <= verdict.anchor_version}

    def check(self) -> None:
        machine = self.machine
        leases, members = machine.scope.leases, machine.scope.membership
        everything = sorted(
            [*self.committed, *leases.pool, *(one for ranges in leases.held.values() for one in ranges)]
        )
        assert merge(everything) == ([(0, leases.fresh)] if leases.fresh else [])
        assert count(everything) == leases.fresh, "a sample is in two places"
        for peer in leases.held:
            assert members.members[peer].is_trainer or peer in machine.scope.round.orphans
        assert machine.scope.tokens_committed == count(self.committed) * TOKENS_PER_SAMPLE
        credit = sum(one.tokens_committed for one in members.members.values())
        assert credit == machine.scope.tokens_committed + machine.scope.tokens_undone
        assert machine.scope.anchor_version == machine.scope.rounds_committed == len(self.history)
        verdicts = machine.scope.rounds_committed + machine.scope.rounds_aborted + machine.scope.rounds_undone
        assert verdicts == len(self.verdicts)
        assert machine.scope.round.number == len(self.verdicts)
        assert (machine.scope.round.plan is not None) == (machine.scope.round.phase == "averaging")
        if self.run.algorithm == "virtual_batch":
            assert leases.outstanding() * TOKENS_PER_SAMPLE <= self.run.round.tokens
        version, roster = self._roster
        assert members.roster_version >= version
        assert members.roster() == roster or members.roster_version > version
        self._roster = members.roster_version, members.roster()
        view = machine.scope.view(peer_name(0), self.now_s)
        status = machine.scope.status(self.now_s)
        assert view.tokens_in_round == status.tokens_in_round
        assert len(status.members) == sum(one.entry.role != "observer" for one in members.members.values())
