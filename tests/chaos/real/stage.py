"""Four members and a coordinator as real processes, faults in one of their rounds, and what has to be true after."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.chaos.real.orders import COORDINATOR, Order, Orders, cast
from tests.integration.harness import (
    KILLED,
    ROUNDS_S,
    START_S,
    Host,
    Member,
    Process,
    Swarm,
    check_journal,
    check_parity,
    eventually,
    finish,
    run_toml,
)

from shoal.swarm.coordinator.facts import RoundPlanned, VerdictGiven
from shoal.swarm.messages import RoundPlan

PATIENCE_S = 2.0
SHORT_S = 0.3 * PATIENCE_S
"""Over before anybody's patience is."""

LONG_S = 1.5 * PATIENCE_S
FURTHER_ROUNDS = 2
OWNERS = ("a", "b", "c")
CONTRIBUTOR = "d"
WARM_ROUNDS = 5
SLACK = {"rss_bytes": 16 * 2**20, "threads": 4, "files": 24, "links": 6, "tasks": 0, "blobs": 0, "streams": 0}
"""By how much more a member may hold after a fault. The allocator's arenas come and go; worker threads are started as
they are needed, and each pair of members has up to two links: of what a round leaves behind there is nothing."""

_FAULTY = (sys.executable, str(Path(__file__).parent / "faulty.py"))


@dataclass
class Stage:
    """``orders`` go to all of its processes."""

    swarm: Swarm
    orders: Orders
    host: Host
    members: list[Member]

    @classmethod
    @contextmanager
    def open(cls, swarm: Swarm) -> Iterator[Stage]:
        """Everybody has joined; at the end everybody leaves, and all is checked once more."""
        folder = swarm.folder / "orders"
        launcher = (*_FAULTY, str(folder))
        (swarm.folder / "corpus.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 500)
        toml = run_toml(max_s=0.5, patience_s=PATIENCE_S, source=f"text:{swarm.folder}/corpus.txt")
        host = swarm.host(toml, launcher=launcher)
        members = swarm.members(host.invite, *OWNERS, launcher=launcher)
        members.append(swarm.member(host.invite, CONTRIBUTOR, launcher, extra=["--role", "contribute-only"]))
        stage = cls(swarm, Orders(folder), host, members)
        yield stage
        finish(host, members)

    # Who is who -----------------------------------------------------------------------------------------------

    def labelled(self, peer: str) -> Member:
        return next(one for one in self.members if one.peer == peer)

    def verdicts(self) -> list[VerdictGiven]:
        return [one for one in self.host.facts() if isinstance(one, VerdictGiven)]

    def last_plan(self) -> RoundPlan | None:
        plans = [one.plan for one in self.host.facts() if isinstance(one, RoundPlanned)]
        return plans[-1] if plans else None

    def fill_roles(self) -> None:
        """Until a round has all roles in it: an owner that has failed the others owns nothing until it joins anew."""
        for member in self.members:
            member.committed(within_s=START_S + ROUNDS_S)
        restarted: set[str] = set()

        def filled() -> bool:
            plan = self.last_plan()
            if plan is None or len(plan.members) < len(self.members):
                return False
            owners = {plan.members[part.owner].peer for part in plan.parts}
            for member in self.members:
                if member.label != CONTRIBUTOR and member.peer not in owners and member.label not in restarted:
                    restarted.add(member.label)
                    member.kill()
                    member.start()
            return bool(cast(plan))

        eventually("a round has all the roles", filled, START_S + ROUNDS_S, self.swarm.tails)

    # A play ---------------------------------------------------------------------------------------------------

    def play(self, *orders: Order, back_at_once: bool = False) -> list[dict[str, Any]]:
        """All of them in one round; then everything heals, and is checked. Returns what was done."""
        self.fill_roles()
        levels = {member.label: self._level(member) for member in self.members}
        resyncs = {member.label: len(member.events("resync")) for member in self.members}
        self.orders.place(*orders)
        done = [self._carried_out(order) for order in orders]
        for order, about in zip(orders, done, strict=True):
            self._heal(order, about, back_at_once)
        hit = {about["peer"] for about in done}
        after = max(about["round"] for about in done)
        self._trains_on(after)
        assert len({about["round"] for about in done}) == 1, "all of them in one round"
        for member in self.members:
            if member.peer not in hit and COORDINATOR not in hit:
                assert len(member.events("resync")) == resyncs[member.label], f"{member.label} has lost its work"
        check_journal(self.host)
        check_parity(self.host, self.members)
        for member in self.members:
            if member.pid == levels[member.label].pid:
                self._check_level(member, levels[member.label])
        return done

    def _carried_out(self, order: Order) -> dict[str, Any]:
        return eventually(f"somebody does: {order}", lambda: self.orders.done(order), ROUNDS_S, self.swarm.tails)

    def _heal(self, order: Order, about: dict[str, Any], back_at_once: bool) -> None:
        victim: Process = self.host if order.role == COORDINATOR else self.labelled(about["peer"])
        if order.fault == "SIGSTOP":
            time.sleep(order.seconds)
            victim.send(signal.SIGCONT)
        if order.fault == "SIGKILL":
            assert victim.exit_code(ROUNDS_S) == KILLED
            if victim is not self.host and not back_at_once:
                eventually(
                    f"the round of {order} ends",
                    lambda: any(one.verdict.round == about["round"] for one in self.verdicts()),
                    ROUNDS_S,
                    self.swarm.tails,
                )
            victim.start()

    def _trains_on(self, after: int) -> None:
        """Rounds that are committed with everybody's work, by everybody."""

        def together() -> bool:
            rounds = [
                {one["round"] for one in member.events("committed", included=True, members=len(self.members))}
                for member in self.members
            ]
            return len([one for one in set.intersection(*rounds) if one > after]) >= FURTHER_ROUNDS

        eventually("all train on together", together, START_S + ROUNDS_S, self.swarm.tails)

    # Memory ---------------------------------------------------------------------------------------------------

    def _level(self, member: Member) -> Level:
        """What it has held after rounds lately: the least of two, as others may still be fetching after one of them."""

        def warm() -> list[dict[str, int]] | None:
            whole, _, _ = (member.folder / "levels.jsonl").read_text().rpartition("\n")
            found = [one for one in map(json.loads, whole.splitlines()) if one["pid"] == member.pid]
            return found[-2:] if len(found) > WARM_ROUNDS else None

        found = eventually(f"{member.label} has seen some rounds", warm, ROUNDS_S)
        return Level(member.pid, {what: min(one[what] for one in found) for what in found[-1]})

    def _check_level(self, member: Member, before: Level) -> None:
        """Of one that has lived through it."""
        def is_down() -> bool:
            now = self._level(member).held
            return all(now[what] <= before.held[what] + more for what, more in SLACK.items())

        eventually(
            f"{member.label} holds no more than before",
            is_down,
            ROUNDS_S,
            lambda: f"{before.held}\n{self._level(member).held}",
        )


@dataclass(frozen=True)
class Level:
    """Of one process."""

    pid: int
    held: dict[str, int]
