"""One run with attacks in it: roles, faults at named steps, and the checks at its end."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from tests.chaos.attack import ATTACKED, GLOBAL, Attack
from tests.chaos.casting import cast, other_end
from tests.chaos.checks import check
from tests.chaos.faults import changed, infliction
from tests.chaos.ledger import Ledger
from tests.chaos.lives import Life
from tests.chaos.moments import is_due, is_due_now
from tests.fakes.memory_network import Step
from tests.fakes.processes import context_of, run_processes, the_loop
from tests.fakes.swarm import PATIENCE_S, Swarm, run_toml, swarm
from tests.fakes.virtual_clock import until

from shoal.swarm.coordinator import events as ev
from shoal.swarm.errors import LinkError
from shoal.swarm.protocol.rounds import RoundPlan


@dataclass(frozen=True)
class Topology:
    """``slow`` members, the last ones, own nothing. ``seed``: of the run."""

    members: int
    slow: int
    elements: int
    group_size: int = 32
    seed: int = 0


TOPOLOGIES = {
    "group": Topology(members=4, slow=1, elements=6 * 4096 + 17),
    "grid": Topology(members=6, slow=2, elements=11 * 4096 + 17, group_size=3, seed=1),
}
"""Seven chunks, for three owners. And twelve, in two columns of two row reducers, which own three each; with that seed
there is one slow member in each row of the attacked round."""

FURTHER_ROUNDS = 2
_ASK_S = 0.1
"""After its plan, until a member is asked for contributions by it: meanwhile it works on, if it may."""


@dataclass
class Scene:
    """A running swarm and its attacks. ``fired``: those that have happened; ``pending``: faults that will heal;
    ``sent``: chunks of the attacked round by kind, holder and receiver; ``begun``: those that were about to be, by kind
    and holder; ``corrupt``: who sends wrong bytes to whom;
    ``many_faces``: who sends other results to everybody; ``huge``: whose values are all 1e30."""

    run: Swarm
    attacks: Sequence[Attack]
    tasks: asyncio.TaskGroup
    fired: list[Attack] = field(default_factory=list)
    pending: int = 0
    sent: dict[tuple[str, str, str], int] = field(default_factory=dict)
    begun: dict[tuple[str, str], int] = field(default_factory=dict)
    corrupt: dict[str, set[str]] = field(default_factory=dict)
    many_faces: set[str] = field(default_factory=set)
    huge: set[str] = field(default_factory=set)
    _plan: RoundPlan | None = None

    def __post_init__(self) -> None:
        self.run.network.is_stopped = lambda peer: the_loop().is_stopped(peer)
        self.run.network.faults.append(self._on_step)
        self.run.coordinator.watch = self._on_events

    # Roles --------------------------------------------------------------------------------------------------

    @property
    def lives(self) -> list[Life]:
        everybody = [one for one in self.run.members if isinstance(one, Life)]
        return [life for life in everybody if not life.is_dead]

    def life(self, peer: str) -> Life:
        """Return the latest process of that peer."""
        life = next(one for one in reversed(self.run.members) if one.peer == peer)
        assert isinstance(life, Life)
        return life

    @property
    def is_planned(self) -> bool:
        """Whether the attacked round has been planned by now."""
        now = self.run.coordinator.machine.scope.round
        if now.number == ATTACKED and now.plan is not None:
            self._plan = now.plan
        return self._plan is not None

    @property
    def planned(self) -> RoundPlan:
        assert self._plan is not None
        return self._plan

    def named(self, role: str) -> str:
        """Return the peer in that role, as ``cast`` has it."""
        return cast(self.planned)[role]

    def victim(self, attack: Attack) -> str:
        """Return the attacked peer; for faults of the coordinator's link, the member at its other end."""
        return self.named("owner" if attack.role in GLOBAL else attack.role)

    def other(self, attack: Attack) -> str:
        """Return the peer at the other end of a failing link between two members."""
        return self.named(other_end(self.planned, attack))

    # Attacks ------------------------------------------------------------------------------------------------

    async def _on_step(self, step: Step, payload: bytes) -> bytes:
        if step.blob.number != ATTACKED:
            return payload
        # Who is who stands in the plan: nothing is sent before its holder has it, too, and could be asked by it.
        if not (self.is_planned and self._has_plan(step.holder)):
            await until(lambda: self.is_planned and self._has_plan(step.holder), 0.001)
            await asyncio.sleep(_ASK_S)
        await self._let_others_have_it(step)
        began = (step.blob.kind, step.holder)
        self.begun[began] = self.begun.get(began, 0) + 1
        for attack in self.attacks:
            if attack not in self.fired and is_due(self, attack, step):
                self._fire(attack)
        self._make_room_for_stand_in(step)
        if not self.run.network.connected(step.holder, step.to):
            raise LinkError("the connection was lost")
        await asyncio.sleep(0)  # whoever was stopped just now goes no further
        late = any(attack.moment == "after the report" for attack in self.attacks)
        if late and step.blob.kind == "result" and step.to == self.named("laggard"):
            await asyncio.sleep(1.5)  # or all would report at once, and the verdict would be there
        key = (step.blob.kind, step.holder, step.to)
        self.sent[key] = self.sent.get(key, 0) + 1
        return changed(self, step, payload)

    def _has_plan(self, peer: str) -> bool:
        view = self.life(peer).view
        return view.round > ATTACKED or (view.round == ATTACKED and view.plan is not None)

    async def _let_others_have_it(self, step: Step) -> None:
        """Somebody has the first part's results before a contributor that is attacked then gets any."""
        due = [one for one in self.attacks if one.moment == "some have the result" and one.role == "contributor"]
        if step.blob.kind == "result" and any(one not in self.fired and step.to == self.victim(one) for one in due):
            last = -(-self.planned.parts[0].stop // self.planned.chunk_elements) - 1
            log, have = self.run.network.log, (step.blob, last)
            with suppress(TimeoutError):
                async with asyncio.timeout(0.5):
                    await until(lambda: any((one.blob, one.chunk) == have and one.to != step.to for one in log), 0.001)

    def _make_room_for_stand_in(self, step: Step) -> None:
        """A stand-in is one only when the owner dies before it has sent a result."""
        if not any(attack.role == "stand-in" for attack in self.attacks):
            return
        if step.blob.kind == "result" and step.holder == self.named("owner"):
            owner = self.life(step.holder)
            if not owner.is_dead and owner.processes_before == 0:
                owner.die()
            raise LinkError("the connection was lost")

    def _on_events(self, step: str, events: list[ev.JournalEvent]) -> None:
        if self.is_planned:
            for attack in self.attacks:
                if attack not in self.fired and is_due_now(self, attack, step, events):
                    self._fire(attack)

    def _fire(self, attack: Attack) -> None:
        self.fired.append(attack)
        inflict, heal_s, heal = infliction(self, attack)
        inflict()
        if heal is not None:
            self._later(heal_s, heal)

    def _later(self, after_s: float, act: Callable[[], object]) -> None:
        async def wait() -> None:
            await asyncio.sleep(after_s)
            act()
            self.pending -= 1

        self.pending += 1
        self.tasks.create_task(wait(), context=context_of(""))

    def come_back(self, peer: str) -> None:
        """Start the dead peer again."""

        async def start() -> None:
            life = self.life(peer).reborn()
            await life.join(self.tasks)
            life.start(self.tasks)
            self.pending -= 1

        self.pending += 1
        self.tasks.create_task(start(), context=context_of(""))

    def void_parts(self) -> int:
        """Number of void parts in the attacked round."""
        (verdict,) = [
            one.verdict
            for one in self.run.coordinator.events
            if isinstance(one, ev.VerdictGiven) and one.verdict.round == ATTACKED
        ]
        return verdict.digests.count(None)

    # Afterwards ---------------------------------------------------------------------------------------------

    async def settle(self) -> None:
        """Until the attacked round has its verdict, all has healed and everybody is in step again; then some rounds
        more with all of them, and everything is checked."""
        await until(lambda: self.run.coordinator.machine.scope.round.number > ATTACKED and not self.pending, 0.05)
        self.run.network.faults.clear()
        await until(self._is_in_step, 0.05)
        last = self.run.coordinator.machine.scope.round.number + FURTHER_ROUNDS
        for life in self.lives:
            life.until = last
        await until(lambda: all(life.living is not None and life.living.done() for life in self.lives), 0.05)
        await asyncio.sleep(PATIENCE_S)  # requests that somebody has left run out
        for number in range(last - FURTHER_ROUNDS + 1, last + 1):
            applied = self.lives[0].ledger.rounds[number]
            assert [one.peer for one in applied.plan.members] == sorted(life.peer for life in self.lives)
            assert all(len(included) == len(self.lives) for included in applied.included)
        check(self.run, self.lives, others=2)

    def _is_in_step(self) -> bool:
        """All hold the same, and what piled up meanwhile is averaged: a round of that alone would leave others out."""
        machine = self.run.coordinator.machine
        in_step = len(machine.scope.synced()) == len(self.lives) == len(machine.scope.membership.trainers())
        in_step = in_step and not any(machine.scope.is_left_out(peer) for peer in machine.scope.membership.trainers())
        in_step = in_step and not any(machine.scope.is_left_out(life.peer) for life in self.lives)
        return in_step and machine.scope.tokens_in_round() < machine.scope.run.round.tokens


@asynccontextmanager
async def staged(attacks: Sequence[Attack], topology: str, make: type[Life] = Life) -> AsyncIterator[Scene]:
    """A run that comes to its attacked round by itself. ``topology``: one of ``TOPOLOGIES``; ``make``: how the members
    live, which the run file says, too."""
    shape, ledger = TOPOLOGIES[topology], Ledger()
    toml = run_toml(10 * shape.members, group_size=shape.group_size, seed=shape.seed, overlap=make.overlap)
    async with swarm(shape.members, toml, shape.elements, make=make) as run, asyncio.TaskGroup() as tasks:
        await run.own_nothing(*[run[shape.members - 1 - index] for index in range(shape.slow)])
        scene = Scene(run, attacks, tasks)
        for life in scene.lives:
            life.ledger = ledger
            life.on_offer = _give_residual
            life.start(tasks)
        yield scene
        for life in scene.lives:
            assert life.task is not None
            life.task.cancel()


def _give_residual(life: Life) -> None:
    """Before the attacked round: so that a residual that is lost, or comes twice, is noticed."""
    if life.round == ATTACKED and not life.has_residual:
        life.has_residual = True
        life.carry(life.draw(), 10)


def play(
    attacks: Sequence[Attack], topology: str, void_parts: int | None = None, make: type[Life] = Life
) -> list[Attack]:
    """A whole run, with so many void parts in the attacked round. Returns the attacks that happened: one can take away
    the occasion for another."""

    async def main() -> list[Attack]:
        async with staged(attacks, topology, make) as scene:
            await scene.settle()
            assert void_parts in (None, scene.void_parts())
            return scene.fired

    return run_processes(main())
