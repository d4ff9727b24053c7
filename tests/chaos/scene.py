"""One run with faults in it: whom they hit (roles), what they are (faults), and at which step (moments)."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from tests.chaos.checks import check
from tests.chaos.ledger import Ledger
from tests.chaos.lives import Life
from tests.fakes.memory_network import Step
from tests.fakes.processes import context_of, the_loop
from tests.fakes.swarm import PATIENCE_S, Swarm, run_toml, swarm
from tests.fakes.virtual_clock import until

from shoal.swarm.coordinator import facts as f
from shoal.swarm.errors import LinkError
from shoal.swarm.messages import RoundPlan

MEMBERS = 4
ELEMENTS = 6 * 4096 + 17
"""Seven chunks, for three owners; the fourth member owns nothing."""

ATTACKED = 1
"""The round that the faults fall into; one before, so that there is something to lose."""

ROLES = ("contributor", "owner", "stand-in", "coordinator")
MOMENTS = (
    "before contributing",
    "while contributing",
    "while reducing",
    "some have the result",
    "after the report",
    "before the verdict is announced",
)
COORDINATOR_AWAY_S = 10.0


@dataclass(frozen=True)
class Attack:
    role: str
    fault: str
    moment: str

    def __str__(self) -> str:
        return f"{self.role}, {self.fault}, {self.moment}"


@dataclass
class Scene:
    """A running swarm and its attacks. ``fired``: those that have happened; ``pending``: faults that will heal."""

    run: Swarm
    attacks: Sequence[Attack]
    tasks: asyncio.TaskGroup
    fired: list[Attack] = field(default_factory=list)
    pending: int = 0
    sent: dict[tuple[str, str, str], int] = field(default_factory=dict)
    corrupt: dict[str, set[str]] = field(default_factory=dict)
    """Of the bytes of whom what is wrong: contributions, results to everybody, or results to one."""

    def __post_init__(self) -> None:
        network, coordinator = self.run.network, self.run.coordinator
        network.is_stopped = lambda peer: the_loop().is_stopped(peer)
        network.faults.append(self._on_step)
        coordinator.watch = self._on_facts

    # Roles --------------------------------------------------------------------------------------------------

    @property
    def lives(self) -> list[Life]:
        everybody = [one for one in self.run.members if isinstance(one, Life)]
        return [life for life in everybody if not life.is_dead]

    @property
    def plan(self) -> RoundPlan | None:
        now = self.run.coordinator.machine.round
        if now.number == ATTACKED and now.plan is not None:
            self._plan = now.plan
        return getattr(self, "_plan", None)

    def named(self, role: str) -> str:
        """The peer in that role; ``witness``: the owner that is neither attacked nor the first stand-in of it."""
        plan = self.plan
        assert plan is not None
        part = plan.parts[0]
        owner, stand_in = plan.members[part.owner].peer, plan.members[part.stand_ins[0]].peer
        owners = {plan.members[one.owner].peer for one in plan.parts}
        contributor = next(member.peer for member in plan.members if member.peer not in owners)
        (witness,) = {member.peer for member in plan.members} - {owner, stand_in, contributor}
        return {"owner": owner, "stand-in": stand_in, "contributor": contributor, "witness": witness}[role]

    def victim(self, attack: Attack) -> str:
        """Of faults of the coordinator's link, the member at its other end."""
        return self.named("owner" if attack.role == "coordinator" else attack.role)

    def other(self, attack: Attack) -> str:
        return self.named("owner" if attack.role == "contributor" else "witness")

    def life(self, peer: str) -> Life:
        """The latest process of that peer."""
        life = next(one for one in reversed(self.run.members) if one.peer == peer)
        assert isinstance(life, Life)
        return life

    # Moments ------------------------------------------------------------------------------------------------

    async def _on_step(self, step: Step, payload: bytes) -> bytes:
        plan = self.plan
        if plan is None or step.blob.number != ATTACKED:
            return payload
        for attack in self.attacks:
            if attack not in self.fired and self._is_due(attack, step):
                self.fire(attack)
        needs_stand_in = any(attack.role == "stand-in" for attack in self.attacks)
        if needs_stand_in and step.blob.kind == "result" and step.holder == self.named("owner"):
            owner = self.life(step.holder)
            if not owner.is_dead:
                owner.die()
            raise LinkError("the connection was lost")
        if not self.run.network.connected(step.holder, step.to):
            raise LinkError("the connection was lost")
        await asyncio.sleep(0)  # whoever was stopped just now goes no further
        late = any(attack.moment == "after the report" for attack in self.attacks)
        if late and step.blob.kind == "result" and step.to == self.named("witness"):
            await asyncio.sleep(1.5)
        key = (step.blob.kind, step.holder, step.to)
        self.sent[key] = self.sent.get(key, 0) + 1
        return self._changed(step, payload)

    def _is_due(self, attack: Attack, step: Step) -> bool:
        """Whether this step, which is about to happen, is the attack's moment."""
        is_coordinator = attack.role == "coordinator"
        kind = step.blob.kind
        match attack.moment:
            case "before contributing":
                return kind == "contribution" and (is_coordinator or step.holder == self.victim(attack))
            case "while contributing":
                mine = is_coordinator or step.holder == self.victim(attack)
                return kind == "contribution" and mine and (kind, step.holder, step.to) in self.sent
            case "while reducing":
                return self._is_reducing(attack, step)
            case "some have the result":
                return self._some_have(attack, step)
        return False

    def _is_reducing(self, attack: Attack, step: Step) -> bool:
        kind = step.blob.kind
        if attack.role == "contributor":
            # It has sent all that is asked of it, and waits.
            plan = self.plan
            assert plan is not None
            mine = sum(n for (what, holder, _), n in self.sent.items() if (what, holder) == ("contribution", step.holder))
            return step.holder == self.victim(attack) and mine == self.run.elements // plan.chunk_elements
        if attack.role == "coordinator":
            return kind == "result"
        if attack.role == "stand-in" and not self._is_first_part(step):
            return False
        return kind == "contribution" and step.to == self.victim(attack) and (kind, step.holder, step.to) in self.sent

    def _is_first_part(self, step: Step) -> bool:
        plan = self.plan
        assert plan is not None
        return step.chunk * plan.chunk_elements < plan.parts[0].stop

    def _some_have(self, attack: Attack, step: Step) -> bool:
        """Somebody has all of a part, and this step's receiver does not."""
        plan = self.plan
        assert plan is not None
        if step.blob.kind != "result" or not self._is_first_part(step):
            return False
        last = -(-plan.parts[0].stop // plan.chunk_elements) - 1
        if attack.role == "contributor" and step.to != self.victim(attack):
            return False
        if attack.role in ("owner", "stand-in") and step.holder != self.victim(attack):
            return False
        log = self.run.network.log
        return any(
            (one.blob, one.holder, one.chunk) == (step.blob, step.holder, last) and one.to != step.to for one in log
        )

    def _on_facts(self, step: str, facts: list[f.Fact]) -> None:
        if self.plan is None:
            return
        machine = self.run.coordinator.machine
        ended = any(isinstance(one, f.VerdictGiven) and one.verdict.round == ATTACKED for one in facts)
        for attack in self.attacks:
            if attack in self.fired:
                continue
            reported = machine.round.number == ATTACKED and attack.moment == "after the report"
            reports = machine.round.reports
            if (
                (step == "journaled" and attack.moment == "before the verdict is announced" and ended)
                or (step == "decided" and attack.moment == "before the verdict is journaled" and ended)
                or (reported and (self.victim(attack) in reports or (attack.role == "coordinator" and reports)))
            ):
                self.fire(attack)

    # Faults -------------------------------------------------------------------------------------------------

    def fire(self, attack: Attack) -> None:
        self.fired.append(attack)
        is_coordinator = attack.role == "coordinator"
        inflict, heal_s, heal = (self._of_coordinator if is_coordinator else self._of_member)(attack)
        inflict()
        if heal is not None:
            self.later(heal_s, heal)

    def later(self, after_s: float, act: Callable[[], None]) -> None:
        async def wait() -> None:
            await asyncio.sleep(after_s)
            act()
            self.pending -= 1

        self.pending += 1
        self.tasks.create_task(wait(), context=context_of(""))

    def _of_coordinator(self, attack: Attack) -> "Infliction":
        coordinator = self.run.coordinator
        channel = self.life(self.victim(attack)).channel
        match attack.fault:
            case "SIGKILL":
                return (lambda: setattr(coordinator, "away", True)), COORDINATOR_AWAY_S, coordinator.restart
            case "SIGSTOP" | "SIGSTOP, long":
                stopped_s = HANGS_S[attack.fault]
                return (
                    (lambda: setattr(coordinator, "stopped", True)),
                    stopped_s,
                    lambda: setattr(coordinator, "stopped", False),
                )
            case "cut" | "cut, long":
                cut_s = HANGS_S[attack.fault]
                return (lambda: setattr(channel, "open", False)), cut_s, lambda: setattr(channel, "open", True)
            case "half-open":
                half_s = HANGS_S[attack.fault]
                return (lambda: setattr(channel, "silent", True)), half_s, lambda: setattr(channel, "silent", False)
        raise AssertionError(attack)

    def _of_member(self, attack: Attack) -> "Infliction":
        network, loop = self.run.network, the_loop()
        peer, other = self.victim(attack), self.other(attack)
        pair = frozenset((peer, other))
        ways = {"half-open": {(peer, other)}, "half-open to all": {(peer, one.peer) for one in self.run.members}}
        match attack.fault:
            case "SIGKILL":
                return self.life(peer).die, 0.0, None
            case "SIGSTOP" | "SIGSTOP, long":
                return (
                    (lambda: loop.stop_process(peer)),
                    HANGS_S[attack.fault],
                    lambda: loop.resume_process(peer),
                )
            case "cut" | "cut, long":
                return (lambda: network.cut.add(pair)), HANGS_S[attack.fault], lambda: network.cut.discard(pair)
            case "half-open" | "half-open to all":
                way = ways[attack.fault]
                return (
                    (lambda: network.silent.update(way)),
                    HANGS_S[attack.fault],
                    lambda: network.silent.difference_update(way),
                )
            case "corrupted bytes" | "corrupted bytes to one":
                whom = {other} if attack.fault == "corrupted bytes to one" else {one.peer for one in self.run.members}
                return (lambda: self.corrupt.update({peer: whom})), 0.0, None
        raise AssertionError(attack)

    def _changed(self, step: Step, payload: bytes) -> bytes:
        if step.to not in self.corrupt.get(step.holder, ()) or not payload:
            return payload
        if step.blob.kind == "contribution":
            return b"\xff" * len(payload)
        return payload[:-4] + bytes(4) if len(self.corrupt[step.holder]) == 1 else payload[:-1]

    # Afterwards ---------------------------------------------------------------------------------------------

    async def settle(self) -> None:
        """Until the attacked round has its verdict, all has healed, and everybody is in step again; then two rounds
        more, and everything is checked."""
        machine = lambda: self.run.coordinator.machine  # noqa: E731 - the coordinator restarts
        await until(lambda: machine().round.number > ATTACKED and not self.pending, 0.05)
        self.run.network.faults.clear()
        await until(lambda: len(machine().synced()) == len(self.lives) == len(machine().membership.trainers()), 0.05)
        last = machine().round.number + 2
        for life in self.lives:
            life.until = last
        await until(lambda: all(life.living is not None and life.living.done() for life in self.lives), 0.05)
        await asyncio.sleep(PATIENCE_S)  # streams that somebody has left run out
        for number in (last - 1, last):
            applied = self.lives[0].ledger.rounds[number]
            assert [one.peer for one in applied.plan.members] == sorted(life.peer for life in self.lives)
            assert all(len(included) == len(self.lives) for included in applied.included)
        check(self.run, self.lives, others=2)


Infliction = tuple[Callable[[], object], float, Callable[[], None] | None]
"""What is done, after how many seconds it heals, and how."""

HANGS_S = {
    "SIGSTOP": 0.5 * PATIENCE_S,
    "SIGSTOP, long": 2.5 * PATIENCE_S,
    "cut": 2.0,
    "cut, long": 10 * PATIENCE_S,
    "half-open": 10 * PATIENCE_S,
    "half-open to all": 10 * PATIENCE_S,
}
"""The short ones are over before anybody's patience is, the long ones are not."""


@asynccontextmanager
async def staged(attacks: Sequence[Attack], topology: str) -> AsyncIterator[Scene]:
    """A run that comes to its attacked round by itself. ``topology``: how the members are planned."""
    assert topology == "group"
    ledger = Ledger()
    async with swarm(MEMBERS, run_toml(10 * MEMBERS), ELEMENTS, make=Life) as run, asyncio.TaskGroup() as tasks:
        await run.own_nothing(run[MEMBERS - 1])
        scene = Scene(run, attacks, tasks)
        for life in scene.lives:
            life.ledger = ledger
            life.on_offer = give_residual
            life.start(tasks)
        yield scene


def give_residual(life: Life) -> None:
    """Before the attacked round: so that a residual that is lost, or comes twice, is noticed."""
    if life.round == ATTACKED and life.joins_with_residual is None:
        life.joins_with_residual = life.client.joins
        life.carry(life.draw(), 10)
