"""Four members and a coordinator as real processes, faults in one of their rounds, and what has to be true after."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos.real.orders import COORDINATOR, Order, Orders, cast
from tests.integration.audit import Audit
from tests.integration.harness import (
    KILLED,
    ROUNDS_S,
    START_S,
    Host,
    Member,
    Process,
    Swarm,
    check_parity,
    eventually,
    finish,
    run_toml,
)

from shoal.swarm.coordinator.events import RoundPlanned, VerdictGiven
from shoal.swarm.protocol.rounds import RoundPlan
from shoal.swarm.protocol.run_file import load_run_file

PATIENCE_S = 2.0
SHORT_S = 0.3 * PATIENCE_S
"""Over before anybody's patience is."""

LONG_S = 1.5 * PATIENCE_S
FURTHER_ROUNDS = 2
ROUNDS_AHEAD = 4
"""Rounds from the newest that is known to be planned to that of the orders: nobody is in it when they are placed."""

OWNERS = ("a", "b", "c")
CONTRIBUTOR = "d"
WARM_ROUNDS = 10
"""Of so tiny a model eight rounds' records are kept: from then on there are no more of them."""
SLACK = {"rss_bytes": 16 * 2**20, "threads": 4, "files": 24, "links": 6, "tasks": 0, "blobs": 0, "streams": 0}
"""By how much more a member may hold after a fault. The allocator's arenas come and go; worker threads are started as
they are needed, and each pair of members has up to two links: of what a round leaves behind there is nothing."""

_FAULTY = (sys.executable, str(Path(__file__).parent / "faulty.py"))
Done = dict[str, Any]


@dataclass(frozen=True)
class Level:
    """What one process held after a round."""

    pid: int
    held: dict[str, int]


@dataclass
class Stage:
    """``orders`` go to all of its processes; ``in_order``: no play has failed."""

    swarm: Swarm
    orders: Orders
    host: Host
    members: list[Member]
    audit: Audit
    in_order: bool = True
    _audited: int = 0
    _homes: dict[str, Path] = field(default_factory=dict)
    """Folder with the identity and the state of each member that goes on for a killed one, by its label."""

    @classmethod
    def open(cls, swarm: Swarm) -> Stage:
        """Start all processes; return the stage."""
        folder, corpus = swarm.folder / "orders", swarm.folder / "data" / "corpus.txt"
        swarm.data = corpus.parent
        corpus.parent.mkdir()
        corpus.write_text("the quick brown fox jumps over the lazy dog\n" * 500)
        launcher = (*_FAULTY, str(folder))
        host = swarm.host(run_toml(max_s=0.5, patience_s=PATIENCE_S, source="text:corpus.txt"), launcher=launcher)
        # The first before the others: whoever has the state is the first to be asked for it, and rounds are short.
        members = swarm.members(host.invite, OWNERS[0], launcher=launcher)
        members[0].event("synced", START_S)
        members += swarm.members(host.invite, *OWNERS[1:], launcher=launcher)
        members.append(swarm.member(host.invite, CONTRIBUTOR, launcher, extra=["--role", "contributor"]))
        return cls(swarm, Orders(folder), host, members, Audit(load_run_file(host.run_file)[1]))

    def finish(self) -> None:
        """Let all leave, and check everything once more."""
        finish(self.host, self.members)

    # Who is who -----------------------------------------------------------------------------------------------

    def member(self, peer: str) -> Member:
        return next(one for one in self.members if one.peer == peer)

    def fill_roles(self) -> RoundPlan:
        """The first new plan that has all roles in it: an owner that has failed the others owns nothing any more, until
        it joins anew."""
        for member in self.members:
            member.committed(within_s=START_S + ROUNDS_S)
        started_in = max(member.last_round() for member in self.members) + 1
        restarted: set[str] = set()

        def filled() -> RoundPlan | None:
            planned = self.host.events("round_planned")
            if not planned or planned[-1]["round"] <= started_in or len(planned[-1]["members"]) < len(self.members):
                return None
            plan = [one.plan for one in self.host.journal_events() if isinstance(one, RoundPlanned)][-1]
            if plan.round < planned[-1]["round"]:
                return None
            owners = {plan.members[part.owner].peer for part in plan.parts}
            for member in self.members:
                is_owner = member.label == CONTRIBUTOR or member.peer in owners
                if not is_owner and len(plan.members) == len(self.members) and member.label not in restarted:
                    restarted.add(member.label)
                    member.kill()
                    member.start()
            return plan if cast(plan) else None

        return eventually("a round has all the roles", filled, START_S + ROUNDS_S, self.swarm.tails)

    # A play ---------------------------------------------------------------------------------------------------

    def play(self, *orders: Order) -> list[Done]:
        """All of them in one round; then everything heals, and is checked. Returns what was done."""
        self.in_order = False
        self.fill_roles()
        levels = {member.label: self._level(member, max) for member in self.members}
        resyncs = {member.label: len(member.events("resync")) for member in self.members}
        done = self.carry_out(*orders)
        for order, about in zip(orders, done, strict=True):
            self._heal(order, about)
        self.check(done)
        # Rounds here are much shorter than the patience: who waits for somebody that long finds later rounds under way.
        if all(order.fault != "SIGKILL" and order.seconds < PATIENCE_S for order in orders):
            for member in self.members:
                if member.peer not in {about["peer"] for about in done}:
                    assert len(member.events("resync")) == resyncs[member.label], f"{member.label} has lost its work"
        for member in self.members:
            if member.pid == levels[member.label].pid:
                self._check_level(member, levels[member.label])
        self.in_order = True
        return done

    def carry_out(self, *orders: Order) -> list[Done]:
        """Place the orders, and return when they have been carried out."""
        planned = self.host.events("round_planned")[-1]["round"]
        self.orders.place(*orders, first_round=planned + ROUNDS_AHEAD)
        return [
            eventually(f"somebody does: {order}", lambda order=order: self.orders.done(order), ROUNDS_S, self._about)
            for order in orders
        ]

    def check(self, done: Sequence[Done]) -> None:
        """After those faults, of one round: all train on together, from the same anchors, and the books are right."""
        assert len({about["round"] for about in done}) == 1, "all of them in one round"
        self._trains_on(done[0]["round"])
        events = self.host.journal_events()
        self.audit.take(events[self._audited :])
        self._audited = len(events)
        check_parity(self.host, [one for one in self.swarm.processes if isinstance(one, Member)])

    def spare_at_the_door(self, member: Member) -> Member:
        """The same command again, in a process that has come up and waits for ``let_in``."""
        label, home = f"{member.label}-again", self._homes.get(member.label, member.folder)
        launcher = (*_FAULTY, str(self.orders.folder), "--after", label)
        extra = ["--state", str(home / "state")]
        spare = self.swarm.member(self.host.invite, label, launcher, home / "identity", extra=extra)
        self._homes[label] = home
        spare.says("at the door", START_S)
        return spare

    def let_in(self, spare: Member, instead_of: Member) -> None:
        self.orders.mark(spare.label)
        self.members[self.members.index(instead_of)] = spare

    def _about(self) -> str:
        return f"open: {[str(order) for order in self.orders.open()]}\n{self.swarm.tails()}"

    def _heal(self, order: Order, about: Done) -> None:
        victim: Process = self.host if about["peer"] == COORDINATOR else self.member(about["peer"])
        if order.fault == "SIGSTOP":
            time.sleep(order.seconds)
            victim.send(signal.SIGCONT)
        if order.fault == "SIGKILL":
            assert victim.exit_code(ROUNDS_S) == KILLED
            if victim is not self.host:
                self.verdict_of(about["round"])
            victim.start()

    def verdict_of(self, number: int) -> VerdictGiven:
        """Wait for the verdict of that round, and return it."""

        def look() -> bool:
            return any(one["event"] == "verdict" and one["round"] == number for one in self.host.all_events())

        eventually(f"round {number} ends", look, ROUNDS_S, self.swarm.tails)
        given = [one for one in self.host.journal_events() if isinstance(one, VerdictGiven)]
        return next(one for one in given if one.verdict.round == number)

    def _trains_on(self, after: int) -> None:
        """Wait for rounds that all commit with the work of all."""

        def together() -> bool:
            rounds = [
                {one["round"] for one in member.events("committed", included=True, members=len(self.members))}
                for member in self.members
            ]
            return len([one for one in set.intersection(*rounds) if one > after]) >= FURTHER_ROUNDS

        eventually("all train on together", together, START_S + ROUNDS_S, self.swarm.tails)

    # Memory ---------------------------------------------------------------------------------------------------

    def _level(self, member: Member, of: Callable[..., int] = min) -> Level:
        """What it has held after rounds lately: the least, as others may still be fetching after one of them; or the
        most, as an aborted round leaves less."""

        def warm() -> list[dict[str, int]] | None:
            whole, _, _ = (member.folder / "levels.jsonl").read_text().rpartition("\n")
            found = [one for one in map(json.loads, whole.splitlines()) if one["pid"] == member.pid]
            return found[-WARM_ROUNDS:] if len(found) > WARM_ROUNDS else None

        found = eventually(f"{member.label} has seen some rounds", warm, ROUNDS_S)
        return Level(member.pid, {what: of(one[what] for one in found) for what in found[-1]})

    def _check_level(self, member: Member, before: Level) -> None:
        """Check the memory of a process that has lived through the faults."""

        def is_down() -> bool:
            now = self._level(member).held
            return all(now[what] <= before.held[what] + more for what, more in SLACK.items())

        eventually(
            f"{member.label} holds no more than before",
            is_down,
            ROUNDS_S,
            lambda: f"{before.held}\n{self._level(member).held}",
        )
