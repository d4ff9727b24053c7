"""Whatever peers and the coordinator's own crashes do to a pipeline: every stage on the same samples, each once."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from tests.swarm.coordinator.pipeline_world import MICRO, STAGES, WHOLE, Peer, PipelineWorld, run_file
from tests.swarm.coordinator.world import CPU, entry

from shoal.swarm.protocol.messages import PeerToCoordinatorClaim
from shoal.swarm.protocol.types import SampleRange

NUMBERS = st.integers(0, 5)
STAGE = st.integers(0, STAGES - 1)
FEW = st.lists(st.integers(0, 3), max_size=2).map(tuple)


class PipelineChaos(RuleBasedStateMachine):
    world: PipelineWorld

    @initialize(peers=st.integers(2, 6), whole=st.booleans())
    def start(self, peers: int, whole: bool) -> None:
        self.world = PipelineWorld(run_file(), 0)
        if whole:
            self.world.peers[5].memory_bytes = WHOLE
        for peer in self.world.peers[:peers]:
            self.world.start(peer)

    def _present(self, number: int) -> Peer:
        present = [one for one in self.world.peers if one.running and self.world.admitted(one)]
        if not present:
            self.arrive(number)
            return self.world.peers[number]
        return present[number % len(present)]

    def _replica(self, number: int, stage: int) -> tuple[Peer, int] | None:
        """Of somebody in a stage, if there is anybody."""
        world = self.world
        found = [
            (peer, at)
            for peer in world.peers
            for at in sorted(peer.replicas, key=lambda at: (at - stage) % STAGES)
            if world.admitted(peer, at + 1)
        ]
        return found[number % len(found)] if found else None

    @rule(number=NUMBERS)
    def arrive(self, number: int) -> None:
        """The first time, or again, in the place of an earlier process that may be there still."""
        self.world.crash(self.world.peers[number])
        self.world.start(self.world.peers[number])

    @rule(number=NUMBERS)
    def leave(self, number: int) -> None:
        self.world.leave(self._present(number))

    @rule(number=NUMBERS)
    def crash(self, number: int) -> None:
        self.world.crash(self.world.peers[number])

    @precondition(lambda self: not any(one.hung for one in self.world.peers))
    @rule(number=NUMBERS)
    def hang(self, number: int) -> None:
        self._present(number).hung = True

    @rule(number=NUMBERS, stage=STAGE)
    def leave_a_stage(self, number: int, stage: int) -> None:
        found = self._replica(number, stage)
        if found is not None:
            self.world.machine.scopes[found[1]].admission.leave(found[0].name, "its stage failed", self.world.now_s)
            self.world.settle()

    @rule(survive=st.sampled_from([0, 1, 2]), stage=STAGE, back=st.integers(1, 6), with_coordinator=st.booleans())
    def lose_all(self, survive: int, stage: int, back: int, with_coordinator: bool) -> None:
        """Everybody is killed; of one stage only each second version, all or none was saved."""
        world = self.world
        world.lose_all(lambda at, version: at != stage or (survive > 0 and version % survive == 0))
        if with_coordinator:
            world.restart()
        for peer in world.peers[:back]:
            world.start(peer)

    @rule(turns=st.integers(1, 12), seconds=st.floats(0, 1), steps=st.integers(0, 7))
    def work(self, turns: int, seconds: float, steps: int) -> None:
        for _ in range(turns):
            self._all_behave(seconds, steps)

    @rule(phase=st.sampled_from(["closing", "averaging"]), far=st.integers(0, 6))
    def work_until(self, phase: str, far: int) -> None:
        """So that what comes next happens there; ``far`` peers into it."""
        for _ in range(40):
            if self.world.machine.phase == phase:
                break
            self._all_behave(0.5, 6)
        for peer in self.world.peers[:far]:
            if peer.running and not peer.hung:
                self.world.behave(peer)

    @rule(number=NUMBERS, stage=STAGE)
    def die_in_the_exchange(self, number: int, stage: int) -> None:
        """Of one stage the averaging fails, with a death or without."""
        self.work_until("averaging", 0)
        found = self._replica(number, stage)
        if found is not None:
            self.world.leave(found[0])

    def _all_behave(self, seconds: float, steps: int) -> None:
        for peer in self.world.peers[:6]:
            if peer.running and not peer.hung:
                self.world.behave(peer, steps)
        self.world.tick(seconds)

    @rule(number=NUMBERS, samples=st.integers(1, 20), times=st.integers(1, 3))
    def ask_and_hear_nothing(self, number: int, samples: int, times: int) -> None:
        peer = self._present(number)
        first = self.world.ask(peer, samples)
        for _ in range(times):
            assert self.world.ask(peer, samples) == first

    @rule(number=NUMBERS, stage=STAGE, which=st.integers(0, 5), twice=st.booleans(), lost=st.booleans())
    def claim(self, number: int, stage: int, which: int, twice: bool, lost: bool) -> None:
        """Of any micro-batch of the round, driven or not; the answer may get lost."""
        found, batch = self._replica(number, stage), self.world.machine.batch()
        if found is None or batch is None or found[0].replicas[found[1]].version is None:
            return
        peer, at = found
        replica = peer.replicas[at]
        cell = batch.cells(batch.ranges)[which]
        if replica.round != self.world.machine.round_number:
            return
        before = list(replica.claimed)
        granted = self.world.claim(peer, at, [cell])
        if twice:
            assert self.world.claim(peer, at, [cell]) == granted
        if lost:
            replica.claimed = before

    @rule(number=NUMBERS, stage=STAGE, start=st.integers(0, 100))
    def claim_anything(self, number: int, stage: int, start: int) -> None:
        """What is not of this batch is refused, and nobody gets what is another's."""
        found, batch = self._replica(number, stage), self.world.machine.batch()
        if found is None or batch is None or batch.start <= start < batch.stop:
            return
        machine = self.world.machine.scopes[found[1]]
        claim = PeerToCoordinatorClaim(
            round=machine.round.number, ranges=(SampleRange(start=start, stop=start + MICRO),)
        )
        if found[0].name not in machine.round.orphans:
            assert self.world.refused(self.world.machine.stages[found[1]].claim, found[0].name, claim, self.world.now_s)

    @rule(number=NUMBERS, stage=STAGE, which=st.integers(0, 5))
    def release(self, number: int, stage: int, which: int) -> None:
        found, batch = self._replica(number, stage), self.world.machine.batch()
        if found is None or batch is None or found[0].replicas[found[1]].offered:
            return
        if self.world.machine.phase == "training":
            self.world.release(*found, [batch.cells(batch.ranges)[which]])

    @rule(number=NUMBERS, stage=STAGE, missing=FEW, wrong=FEW, dropped=FEW)
    def report(
        self, number: int, stage: int, missing: tuple[int, ...], wrong: tuple[int, ...], dropped: tuple[int, ...]
    ) -> None:
        found = self._replica(number, stage)
        if found is not None:
            self.world.report(*found, missing=missing, wrong=wrong, dropped=dropped)

    @rule(number=NUMBERS, stage=STAGE)
    def join_a_stage(self, number: int, stage: int) -> None:
        """One that is not its own is refused."""
        world, peer = self.world, self._present(number)
        if stage < len(world.machine.scopes) and not world.machine.holds(peer.name, stage):
            knock = entry(peer.number, peer.key)
            assert world.refused(world.machine.join_stage, stage, knock, CPU, world.now_s)

    @rule(seconds=st.sampled_from([0.1, 0.5, 2.0, 30.0]), ticks=st.integers(1, 9))
    def wait(self, seconds: float, ticks: int) -> None:
        for _ in range(ticks):
            self.world.tick(seconds)

    @rule(compact=st.booleans())
    def restart_coordinator(self, compact: bool) -> None:
        self.world.restart(compact=compact)

    @rule(seconds=st.sampled_from([0.1, 1.0]))
    def crash_unwritten(self, seconds: float) -> None:
        self.world.crash_unwritten(seconds)

    def teardown(self) -> None:
        if hasattr(self, "world"):
            goes_on(self.world)


def goes_on(world: PipelineWorld, rounds: int = 2) -> None:
    """With one peer that behaves in every stage, rounds are committed, though others hang and only say that they are
    there."""
    for peer in world.peers:
        if peer.running and not peer.hung:
            world.crash(peer)
    for peer in world.peers[6:9]:
        world.start(peer)
    good = world.peers[9]
    good.memory_bytes = WHOLE
    goal = len([one for one in world.verdicts if one[1].verdict.committed]) + rounds
    deadlines = world.machine.deadlines
    wait_s = deadlines.return_s * 4 + sum(stage.history.cost_s(0) for stage in world.machine.scopes)
    deadline_s = world.now_s + wait_s + 100 + (rounds + 2) * (world.run.round.max_s + 40)
    while sum(one[1].verdict.committed for one in world.verdicts) < goal:
        assert world.now_s < deadline_s, f"stuck in {world.machine.phase}: {world.machine.say_outlook()}"
        for peer in world.peers:
            if peer.running and peer.hung and world.admitted(peer):
                world.beat(peer)
        for peer in [*world.peers[6:9], good]:
            world.behave(peer)
        world.tick(0.25)


TestPipelineChaos = PipelineChaos.TestCase
TestPipelineChaos.settings = settings(max_examples=20, stateful_step_count=30, deadline=None)


@pytest.mark.matrix
class TestMorePipelineChaos(PipelineChaos.TestCase):
    settings = settings(TestPipelineChaos.settings, max_examples=300)
