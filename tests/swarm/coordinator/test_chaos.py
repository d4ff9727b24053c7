"""Whatever members and the coordinator's own crashes do: one story, every sample accounted for, and it goes on."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from tests.swarm.coordinator.world import CPU, TOKENS_PER_SAMPLE, Worker, World, entry, run_file

from shoal.swarm.protocol.types import KeptState, SampleRange
from shoal.swarm.sample_ranges import count, subtract, to_wire

NUMBERS = st.integers(0, 3)
FEW = st.lists(st.integers(0, 3), max_size=2).map(tuple)


class Chaos(RuleBasedStateMachine):
    algorithm = "diloco"
    overlap = False
    world: World

    @initialize(members=st.integers(1, 4))
    def start(self, members: int) -> None:
        self.world = World(run_file(self.algorithm, self.overlap), members)

    def _present(self, number: int) -> Worker:
        """Some member that is in the run."""
        world = self.world
        present = [one for one in world.workers if one.running and world.admitted(one)]
        if not present:
            self.arrive(number)
            return world.workers[number]
        return present[number % len(present)]

    @rule(number=NUMBERS)
    def arrive(self, number: int) -> None:
        """The first time, or again, in the place of an earlier process that may be there still."""
        self.world.workers[number].hung = False
        self.world.join(self.world.workers[number])
        self.world.sync(self.world.workers[number])

    @precondition(lambda self: len(self.world.scope.membership.trainers()) > 1)
    @rule(number=NUMBERS)
    def leave(self, number: int) -> None:
        self.world.leave(self._present(number))

    @rule(number=NUMBERS)
    def crash(self, number: int) -> None:
        self.world.workers[number].running = False

    @precondition(lambda self: not any(one.hung for one in self.world.workers))
    @rule(number=NUMBERS)
    def hang(self, number: int) -> None:
        self._present(number).hung = True

    @rule(survive=st.sampled_from([0, 1, 2, 3]), back=st.integers(1, 3), with_coordinator=st.booleans())
    def lose_all(self, survive: int, back: int, with_coordinator: bool) -> None:
        """Everybody is killed; only each third version, or the third of it, was saved; some come back."""
        world = self.world
        world.lose_all(lambda version: survive > 0 and version % survive == 0)
        if with_coordinator:
            world.restart()
        for number in range(back):
            self.arrive(number)

    @rule(number=NUMBERS, key=st.integers(1000, 1003))
    def observe(self, number: int, key: int) -> None:
        self.world.refused(self.world.scope.admission.join, entry(number + 4, key, "observer"), CPU, self.world.now_s)

    @rule(turns=st.integers(1, 12), seconds=st.floats(0, 1))
    def work(self, turns: int, seconds: float) -> None:
        for _ in range(turns):
            self._all_behave(seconds)

    @rule(phase=st.sampled_from(["closing", "averaging"]), far=st.integers(0, 3))
    def work_until(self, phase: str, far: int) -> None:
        """So that what comes next happens there; ``far`` members into it."""
        for _ in range(60):
            if self.world.scope.round.phase == phase:
                break
            self._all_behave(0.5)
        self._all_behave(0.0, far)

    @rule(back=st.booleans(), dropped=st.booleans())
    def die_in_the_exchange(self, back: bool, dropped: bool) -> None:
        self.work_until("averaging", 0)
        world = self.world
        plan = world.scope.round.plan
        if plan is None or len(plan.members) < 2:
            return
        victim = next(one for one in world.workers if one.peer == plan.members[-1].peer)
        world.leave(victim)
        if back:
            world.join(victim)
            world.sync(victim)
        for worker in world.workers:
            if worker is not victim and worker.running and world.admitted(worker):
                world.report(worker, dropped=(len(plan.members) - 1,) if dropped else ())

    def _all_behave(self, seconds: float, most: int = 4) -> None:
        for worker in self.world.workers[:most]:
            if worker.running and not worker.hung:
                self.world.behave(worker)
        self.world.tick(seconds)

    @rule(number=NUMBERS, tokens=st.integers(0, 2**62), speed=st.floats(0, 1e18), step=st.floats(0, 1e9))
    def boast(self, number: int, tokens: int, speed: float, step: float) -> None:
        worker = self._present(number)
        self.world.beat(worker, tokens_done=tokens, tokens_per_s=speed, step_s=step, chunks_moved=tokens)

    @rule(number=NUMBERS, version=st.integers(0, 3), digest=st.sampled_from([b"x" * 32, b"y" * 32]))
    def claim_state(self, number: int, version: int, digest: bytes) -> None:
        self.world.beat(self._present(number), anchor_version=version, state_digest=digest)

    @rule(number=NUMBERS, norm=st.sampled_from([0.0, 1e-30, 1.0, 3.0, 1e30]))
    def claim_norm(self, number: int, norm: float) -> None:
        self.world.workers[number].norm = norm

    @rule(version=st.integers(0, 4), is_known=st.booleans(), most=st.integers(1, 4))
    def say_that_it_diverged(self, version: int, is_known: bool, most: int) -> None:
        digest = self.world.archive.get(version, bytes(32)) if is_known else b"x" * 32
        bad = KeptState(anchor_version=version, digest=digest)
        kept = tuple(KeptState(anchor_version=one, digest=of) for one, of in self.world.archive.items())[:16]
        for worker in self.world.workers[:most]:
            if worker.running and self.world.admitted(worker):
                self.world.beat(worker, diverged=bad, kept=kept)
        self.world.tick(0.25)

    @rule(number=NUMBERS, samples=st.integers(1, 40), lost=st.booleans())
    def ask(self, number: int, samples: int, lost: bool) -> None:
        worker = self._present(number)
        ranges = self.world.ask(worker, samples)
        if lost:
            assert not ranges or self.world.repeat_ask(worker) == ranges
        self.world.take(worker, ranges)

    @rule(number=NUMBERS)
    def ask_again(self, number: int) -> None:
        worker = self._present(number)
        if worker.last_ask is not None:
            self.world.take(worker, self.world.repeat_ask(worker))

    @rule(number=NUMBERS, steps=st.integers(1, 6))
    def train(self, number: int, steps: int) -> None:
        worker = self._present(number)
        for _ in range(steps):
            self.world.train(worker)

    @rule(number=NUMBERS, kind=st.sampled_from(["good", "late", "heavy", "twice", "others", "nothing", "other state"]))
    def say_ready(self, number: int, kind: str) -> None:
        worker, world = self._present(number), self.world
        samples, ranges = count(worker.done), to_wire(worker.done)
        anywhere = (SampleRange(start=0, stop=7),)
        mine = not subtract([(0, 7)], world.scope.leases.held.get(worker.peer, []))
        counts = world.scope.round.phase == "closing" and worker.round == world.scope.round.number
        match kind:
            case "good":
                if not world.refused(world.ready, worker):
                    worker.offered = counts
            case "late":
                assert not world.refused(world.ready, worker, round=worker.round + 7)
            case "heavy":
                heavier = samples * TOKENS_PER_SAMPLE + 1
                assert world.refused(world.ready, worker, weight_tokens=heavier) == counts
            case "twice" if ranges:
                twice = 2 * samples * TOKENS_PER_SAMPLE
                assert world.refused(world.ready, worker, ranges=ranges * 2, weight_tokens=twice) == counts
            case "others" if not mine:
                weight = 7 * TOKENS_PER_SAMPLE
                assert world.refused(world.ready, worker, ranges=anywhere, weight_tokens=weight) == counts
            case "nothing":
                if not world.refused(world.ready, worker, ranges=(), weight_tokens=0):
                    worker.offered = False
            case "other state":
                world.refused(world.ready, worker, state_digest=b"z" * 32)
                worker.offered = False

    @rule(number=NUMBERS, missing=FEW, wrong=FEW, dropped=FEW)
    def report(self, number: int, missing: tuple[int, ...], wrong: tuple[int, ...], dropped: tuple[int, ...]) -> None:
        self.world.report(self._present(number), missing=missing, wrong=wrong, dropped=dropped)

    @rule(number=NUMBERS)
    def conclude(self, number: int) -> None:
        self.world.conclude(self._present(number))

    @rule(seconds=st.sampled_from([0.1, 0.5, 2.0, 30.0]), ticks=st.integers(1, 9))
    def wait(self, seconds: float, ticks: int) -> None:
        for _ in range(ticks):
            self.world.tick(seconds)

    @rule(compact=st.booleans())
    def restart_coordinator(self, compact: bool) -> None:
        self.world.restart(compact=compact)

    @precondition(lambda self: self.world.scope.round.phase != "waiting")
    @rule(seconds=st.sampled_from([0.1, 1.0]))
    def crash_unwritten(self, seconds: float) -> None:
        self.world.crash_unwritten(seconds)

    def teardown(self) -> None:
        if hasattr(self, "world"):
            goes_on(self.world)


def goes_on(world: World, rounds: int = 2) -> None:
    """With one member that behaves, rounds are committed, though others hang and only say that they are there."""
    good = world.workers[4]
    good.running = False
    goal = len([one for one in world.verdicts if one.verdict.committed]) + rounds
    wait_s = world.scope.deadlines.return_s + world.scope.history.cost_s(0)
    deadline_s = world.now_s + wait_s + 60 + rounds * (world.run.round.max_s + 30)
    while sum(one.verdict.committed for one in world.verdicts) < goal:
        assert world.now_s < deadline_s, f"stuck in {world.scope.round.phase}"
        for worker in world.workers[:4]:
            if worker.running and worker.hung and world.admitted(worker):
                world.beat(worker, tokens_done=10**6, tokens_per_s=1e6)
        world.behave(good)
        world.tick(0.25)


class ExactChaos(Chaos):
    algorithm = "virtual_batch"


class OverlapChaos(Chaos):
    overlap = True


_SETTINGS = settings(max_examples=20, stateful_step_count=40, deadline=None)
_MORE = settings(_SETTINGS, max_examples=300)
TestChaos = Chaos.TestCase
TestChaos.settings = _SETTINGS
TestExactChaos = ExactChaos.TestCase
TestExactChaos.settings = _SETTINGS
TestOverlapChaos = OverlapChaos.TestCase
TestOverlapChaos.settings = _SETTINGS


@pytest.mark.matrix
class TestMoreChaos(Chaos.TestCase):
    settings = _MORE


@pytest.mark.matrix
class TestMoreExactChaos(ExactChaos.TestCase):
    settings = _MORE


@pytest.mark.matrix
class TestMoreOverlapChaos(OverlapChaos.TestCase):
    settings = _MORE
