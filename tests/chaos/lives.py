"""A member's whole life, as a session leads it: lease, work, close, apply, start afresh; and its account of it."""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from tests.chaos.ledger import Applied, GivenUp, Ledger, near
from tests.fakes.processes import context_of, the_loop
from tests.fakes.swarm import SimMember, Swarm
from torch import Tensor

from shoal.swarm.averaging.outcome import Aborted, Committed, Resync, RoundOffer, RoundOutcome
from shoal.swarm.errors import NotAdmitted
from shoal.swarm.protocol.messages import CoordinatorToPeerLease, PeerToCoordinatorRequestLease
from shoal.swarm.protocol.rounds import RunView
from shoal.swarm.sample_ranges import count, merge

if TYPE_CHECKING:
    from collections.abc import Coroutine

LEASE_SAMPLES = 5
WORK_S = 1.0


class Life(SimMember):
    """Samples are worth random values; a member's are its own. ``until``: the last round that it takes part in."""

    overlap = False
    ledger: Ledger
    until: int | None = None
    born_again: "type[Life]"

    def __init__(self, swarm: Swarm, number: int, latency_s: float) -> None:
        super().__init__(swarm, number, latency_s)
        self._values = torch.Generator().manual_seed(number)
        self.is_dead = False
        self.number = number
        self.process = self.peer
        self.living: asyncio.Task[None] | None = None
        self.outcomes: list[object] = []
        self.has_residual = False
        self.on_offer: Callable[[Life], None] = lambda life: None
        self.local, self.carried, self.late = torch.zeros(3, self.elements, dtype=torch.float64)
        self.late_samples = 0
        self._digest_of: tuple[Tensor, bytes] = (self.anchor, super().digest)

    @property
    def digest(self) -> bytes:
        """Made once for every anchor: it is in every heartbeat."""
        if self._digest_of[0] is not self.anchor:
            self._digest_of = (self.anchor, super().digest)
        return self._digest_of[1]

    @property
    def owed(self) -> Tensor:
        return self.local + self.carried + self.late

    def draw(self) -> Tensor:
        """``(n,) float32``"""
        return torch.randn(self.elements, generator=self._values)

    # Processes ----------------------------------------------------------------------------------------------

    async def join(self, tasks: asyncio.TaskGroup) -> None:
        await super().join(tasks)
        assert self.task is not None
        self.task.cancel()
        self.task = self._spawn(tasks, self._live())

    def start(self, tasks: asyncio.TaskGroup) -> None:
        self.living = self._spawn(tasks, self.live())

    def _spawn(self, tasks: asyncio.TaskGroup, coroutine: "Coroutine[object, object, None]") -> "asyncio.Task[None]":
        return tasks.create_task(coroutine, context=context_of(self.process))

    def die(self) -> None:
        """Die for good, in the middle of whatever it does."""
        super().die()
        self.is_dead = True
        if self.living is not None:
            self.living.cancel()

    @property
    def is_stopped(self) -> bool:
        return the_loop().is_stopped(self.process)

    # Life ---------------------------------------------------------------------------------------------------

    async def live(self) -> None:
        await self.sync()
        while self.until is None or self.round <= self.until:
            view = self.view
            if self.rejoined or view.must_resync:
                await self.start_afresh()
            elif view.round != self.round or view.phase in ("closing", "averaging"):
                await self.close_round()
            else:
                await self._work_some()

    async def _work_some(self) -> None:
        ask = PeerToCoordinatorRequestLease(round=self.round, samples=LEASE_SAMPLES, tokens_done=count(self.done))
        try:
            answer = await self.client.ask(ask, CoordinatorToPeerLease)
        except NotAdmitted:
            await self.beat()
            return
        taken = [(one.start, one.stop) for one in answer.ranges]
        self.done = merge([*self.done, *taken])
        self.local += count(taken) * self.draw().double()
        if taken:
            await asyncio.sleep(WORK_S)
        else:
            before = self.view
            await self.client.wait_for(lambda view: (view.round, view.phase) != (before.round, before.phase), 0.5)

    async def close_round(self) -> None:
        await self.until_due()
        offer, joins = self.make_offer(), self.client.joins
        await self.act(offer.round, joins, await self.averager.average(offer))

    def make_offer(self) -> RoundOffer:
        self.on_offer(self)
        new = count(self.done) - self.late_samples
        contribution = (self.local / max(new, 1)).float()
        self.local = contribution.double() * new
        if not self._is_planned(self.round):
            self.ledger.offers[self.round, self.peer] = self.owed
        return self.offer(contribution)

    async def act(self, number: int, joins: int, outcome: RoundOutcome) -> None:
        """Act on the outcome of an offer to that round, made as a member of so many joins."""
        self.outcomes.append(outcome)
        match outcome:
            case Committed():
                self._take(outcome, is_ours=self.client.joins == joins)
            case Aborted():
                if outcome.verdict is not None:
                    self.round = outcome.verdict.round + 1
            case Resync():
                kept = self._held_residual()
                self.ledger.given_up.append(GivenUp(number, self.peer, self.carried, kept))
                self.carried = kept
                await self.start_afresh()

    def _is_planned(self, number: int) -> bool:
        """Whether this offer comes too late to be the one that the plan counts on."""
        now = self.swarm.coordinator.machine.scope.round
        if now.number != number:
            return True
        return now.plan is not None and self.peer in [one.peer for one in now.plan.members]

    def _take(self, outcome: Committed, is_ours: bool) -> None:
        verdict = outcome.verdict
        assert verdict.plan is not None
        store = self.averager._stores[verdict.round]
        applied = Applied(
            verdict, verdict.plan, outcome.mean.whole(), [store.header(chunk).included for chunk in range(store.chunks)]
        )
        self.ledger.commit(applied)
        if not is_ours:
            self._give_up_late()
        if outcome.included:
            left_out = self.owed if is_ours else self.carried
            self.carried = left_out.masked_fill(applied.has(self.peer), 0.0)
            self.local, self.late, self.late_samples, self.done = self.local * 0, self.late * 0, 0, []
        elif is_ours:
            if self.done:
                self.late, self.local = self.late + self.local, self.local * 0
                self.late_samples = count(self.done)
        else:
            self.late, self.local = self.late * 0, self.local * 0
        self.apply(outcome.mean.whole())
        self.version = verdict.anchor_version
        self.round = verdict.round + 1

    def _give_up_late(self) -> None:
        """Late work is in the residual, which is given up with it."""
        if bool(self.late.any()):
            self.carried, self.late = self.carried * 0, self.late * 0

    def _held_residual(self) -> Tensor:
        carried = self.averager.round_feedback.carried
        return carried.residual.double() * carried.weight_tokens

    def carry(self, residual: Tensor, weight_tokens: int) -> None:
        """Carry a residual, as if earlier rounds had left it over."""
        self.averager.round_feedback.restore(lambda memory: (memory.copy_(residual), weight_tokens)[1])
        self.carried = residual.double() * weight_tokens

    # Starting afresh ------------------------------------------------------------------------------------------

    async def start_afresh(self) -> None:
        """Give everything back, join again, and go on from the run's state."""
        self._give_up_late()
        self.done, self.late_samples = [], 0
        self.local, self.late = torch.zeros(2, self.elements, dtype=torch.float64)
        await self.client.rejoin()
        self.rejoined = False
        await self.sync()

    async def sync(self) -> None:
        """Get the run's state, unless we hold it."""
        while True:
            view = self.view
            if (view.anchor_version, view.state_digest) == (self.version, self.digest):
                break
            donor = self._donor(view)
            if donor is None:
                await asyncio.sleep(0.2)
                continue
            self.anchor, self.version = donor.anchor.clone(), donor.version
            self.round = view.round
            await self.beat()
        self.round = self.view.round
        await self.beat()

    def _donor(self, view: RunView) -> "Life | None":
        for other in self.swarm.members:
            assert isinstance(other, Life)
            is_there = not (other.is_dead or other.is_stopped)
            near_by = is_there and self.swarm.network.connected(self.peer, other.peer)
            if near_by and (other.version, other.digest) == (view.anchor_version, view.state_digest):
                return other
        return None

    def reborn(self) -> "Life":
        """The same command again, after a death: a new process that has nothing but its identity."""
        life = self.born_again(self.swarm, self.number, 0.01)
        life.ledger, life.has_residual = self.ledger, True
        self.swarm.members.append(life)
        return life

    # Account ------------------------------------------------------------------------------------------------

    def check_account(self) -> None:
        """Check that the member's residual is what is owed to it."""
        feedback = self.averager.round_feedback
        if feedback.late is not None and feedback.late.joins == self.client.joins:
            assert feedback.late.weight_tokens == self.late_samples
            held = feedback.error_feedback.residual.double() * self.late_samples
            near(held, self.carried + self.late, f"residual and late work of {self.peer}")
        else:
            near(self._held_residual(), self.carried, f"residual of {self.peer}")
            assert not bool(self.late.any())


class Reborn(Life):
    processes_before = 1

    def __init__(self, swarm: Swarm, number: int, latency_s: float) -> None:
        super().__init__(swarm, number, latency_s)
        self.process = f"{self.peer} again"


Life.born_again = Reborn
