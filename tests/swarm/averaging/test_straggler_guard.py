import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tests.fakes.exchanges import PATIENCE_S, Side, digests, make_sides, run_all
from tests.fakes.grids import PEERS, plan_of
from tests.fakes.memory_network import UplinkNetwork, dripping
from tests.fakes.swarm import Swarm, run_toml, swarm, together
from tests.fakes.virtual_clock import now_s, run_virtual

from shoal.swarm.averaging.allreduce import ExchangeResult
from shoal.swarm.averaging.chunk_streams import ExchangeContext, StreamMeter
from shoal.swarm.averaging.outcome import Committed
from shoal.swarm.averaging.straggler_guard import StragglerDetector, StragglerGuard
from shoal.swarm.deadlines import Deadlines
from shoal.swarm.errors import MemberGone, Unreachable
from shoal.swarm.protocol.messages import PeerToCoordinatorRoundReport
from shoal.swarm.protocol.rounds import RoundPlan

DEADLINES = Deadlines(PATIENCE_S)
FAST_BPS = 1e6
"""A chunk of 16 KiB in 0.13 s; at a tenth of that a part of 25 takes 5 times the patience. In rounds, chunks
are 16 times as large, so links are, too."""

MEMBERS = 4


def flat(members: int = MEMBERS) -> RoundPlan:
    """25 chunks a part."""
    return plan_of([1] * members, [range(members)], members * 25 * 4096, chunk=4096)


@dataclass
class _Reduction:
    """Sources that are fetched from chunk by chunk; who is ahead of the slowest by 4 chunks is not asked.

    ``chunk_s``: how long each one's chunk takes."""

    chunk_s: Sequence[float]
    limit_s: float = 6.0

    def found(self, chunks: int, step_s: float = 0.125) -> tuple[set[int], float]:
        """Whom the others go on without, and when all is done."""
        stragglers, here = StragglerDetector(), [0] * len(self.chunk_s)
        meters = [StreamMeter() for _ in here]
        due_s: list[float | None] = list(self.chunk_s)
        given_up: set[int] = set()
        for source in range(len(here)):
            stragglers.begin(source, self.limit_s, chunks, meters[source])
        at_s = 0.0
        while True:
            at_s += step_s
            following = min(count for source, count in enumerate(here) if source not in given_up)
            if following == chunks:
                return given_up, at_s
            for source, due in enumerate(due_s):
                if due is not None and due <= at_s:
                    here[source] += 1
                    meters[source].arrived(1000, at_s)
                    due_s[source] = None
                if due_s[source] is None and here[source] < min(chunks, following + 4):
                    meters[source].asked(at_s)
                    due_s[source] = at_s + self.chunk_s[source]
            behind = {source for source, count in enumerate(here) if count <= following}
            for source in stragglers.look(at_s, at_s - step_s, behind):
                stragglers.forget(source)
                given_up.add(source)
                due_s[source] = None
                here[source] = chunks


def test_who_drips_is_given_up_after_the_limit_and_what_a_slow_link_needs() -> None:
    found, took_s = _Reduction([0.125, 0.125, 5.0]).found(100)
    assert found == {2}
    assert 5.0 + 6.0 + 20 * 12.5 < took_s < 5.0 + 6.0 + 20 * 12.5 + 100 * 0.25


def test_several_that_drip_are_found_among_more_that_do_not() -> None:
    assert _Reduction([0.125, 0.125, 5.0, 0.125, 5.0]).found(100)[0] == {2, 4}


@pytest.mark.parametrize("chunk_s", [[0.125, 0.125, 1.25], [0.125, 1.25], [1.25, 0.125, 0.25, 0.125, 0.5]])
def test_a_tenth_of_the_others_rate_is_waited_for_however_long(chunk_s: list[float]) -> None:
    found, took_s = _Reduction(chunk_s).found(1000)
    assert not found
    assert took_s > 100 * 6.0


@pytest.mark.parametrize("members", [1, 2, 3, 8])
def test_nobody_is_slow_among_equals(members: int) -> None:
    assert _Reduction([5.0] * members).found(100)[0] == set()


def test_nobody_is_slow_alone() -> None:
    assert _Reduction([5.0]).found(100)[0] == set()


def test_short_delays_cost_nobody_its_place() -> None:
    assert _Reduction([0.125, 0.125, 5.0], limit_s=math.inf).found(100)[0] == set()
    assert _Reduction([0.125, 0.125, 5.0], limit_s=15.0).found(4)[0] == set()


def arrive(meter: StreamMeter, at_s: float) -> None:
    meter.arrived(1000, at_s)
    meter.asked(at_s)


def test_what_had_been_lying_here_makes_nobody_fast() -> None:
    stragglers, meters = StragglerDetector(), [StreamMeter(), StreamMeter()]
    for source, meter in enumerate(meters):
        stragglers.begin(source, 6.0, 50, meter)
        arrive(meter, 0.0)
    arrive(meters[0], 0.5)
    for chunk in range(1, 50):
        at_s = 5.0 * chunk
        arrive(meters[1], at_s)
        meters[0].arrived(1000, at_s)  # and held until the other's next one is here
        meters[0].asked(at_s + 5.0)
        assert stragglers.look(at_s, at_s - 5.0, {1}) == []


def test_who_is_not_waited_for_alone_costs_nothing() -> None:
    stragglers = StragglerDetector()
    for source in range(3):
        meter = StreamMeter()
        stragglers.begin(source, 6.0, 3, meter)
        for at_s in (0.0, 0.125):
            arrive(meter, at_s)
    assert stragglers.look(100.0, 0.0, {0, 1, 2}) == []
    assert stragglers.look(105.0, 100.0, {2}) == []
    assert stragglers.look(115.0, 105.0, {2}) == [2]


# Repeating ----------------------------------------------------------------------------------------------------

BACK_S = 10.0
"""When the coordinator is."""


async def run_guarded(attempt: Callable[[], Awaitable[None]]) -> None:
    nothing: Any = None
    context = ExchangeContext(nothing, nothing, 0, DEADLINES, lambda since_s: since_s < BACK_S, {})
    await StragglerGuard(context, set).fetch(0, 6.0, 1, StreamMeter(), attempt)


def test_who_cannot_be_had_is_asked_again_a_beat_later_while_the_coordinator_is_away() -> None:
    """That there is no way to somebody is known at once: without a pause nothing else would run meanwhile."""
    tries: list[float] = []

    async def fetch() -> None:
        tries.append(now_s())
        raise Unreachable("nothing answers there")

    async def main() -> None:
        with pytest.raises(Unreachable):
            await run_guarded(fetch)

    run_virtual(main())
    assert tries == [beat * DEADLINES.heartbeat_s for beat in range(11)]


def test_who_is_gone_is_not_asked_again() -> None:
    tries: list[float] = []

    async def fetch() -> None:
        tries.append(now_s())
        raise MemberGone("it left")

    async def main() -> None:
        with pytest.raises(MemberGone):
            await run_guarded(fetch)

    run_virtual(main())
    assert tries == [0.0]


# Exchanges ----------------------------------------------------------------------------------------------------


def drips(sides: Sequence[Side], *who: int) -> None:
    """They were in the first chunks of the parts, which all have; and nobody else was left out."""
    store = next(side.store for index, side in enumerate(sides) if index not in who)
    for part in store.plan.parts:
        for chunk in store.chunks_of(part)[-1:]:
            assert set(store.header(chunk).included) == set(range(len(sides))) - (set(who) - {part.owner})
    assert all(digests(side) == digests(sides[0]) for side in sides)
    assert None not in digests(sides[0])
    assert set().union(*(side.outcome.dropped for side in sides if side.outcome)) == set(who)
    assert all(side.outcome is not None and not side.outcome.failed for side in sides)


@pytest.mark.parametrize("slow", [None, 2], ids=["others alike", "beside one at a tenth"])
def test_a_contributor_that_drips_is_left_out(slow: int | None) -> None:
    async def main() -> None:
        network = UplinkNetwork(100 * FAST_BPS if slow is None else FAST_BPS)
        if slow is not None:
            network.uplinks_bps[PEERS[slow]] = FAST_BPS / 10
        sides = make_sides(network, flat())
        network.faults.append(dripping("contribution", PEERS[3], 0.9 * DEADLINES.contribution_s))
        await run_all(sides)
        drips(sides, 3)
        assert sides[0].store.header(0).included == [0, 1, 2, 3], "its first chunk came in time"
        assert now_s() < (3 if slow is None else 17) * PATIENCE_S

    run_virtual(main())


def test_an_owner_that_waits_for_those_that_drip_is_not_given_up() -> None:
    async def main() -> None:
        network = UplinkNetwork(100 * FAST_BPS)
        sides = make_sides(network, flat(6))
        for member in (4, 5):
            wait_s = 0.9 * DEADLINES.contribution_s
            network.faults.append(dripping("contribution", PEERS[member], wait_s, to=PEERS[0]))
        await run_all(sides)
        assert [side.outcome for side in sides] == [ExchangeResult({4, 5}, undelivered={4, 5}), *[ExchangeResult()] * 5]
        assert all(digests(side) == digests(sides[0]) for side in sides)
        assert now_s() < 3 * PATIENCE_S

    run_virtual(main())


def test_while_the_coordinator_is_away_waiting_costs_nothing() -> None:
    async def main() -> None:
        network = UplinkNetwork(100 * FAST_BPS)
        sides = make_sides(network, flat(), was_away=lambda since_s: since_s < 10 * PATIENCE_S)
        network.faults.append(dripping("contribution", PEERS[3], 0.9 * DEADLINES.contribution_s))
        await run_all(sides)
        drips(sides, 3)
        assert now_s() > 11 * PATIENCE_S

    run_virtual(main())


@pytest.mark.parametrize("slow", [(), (2,), (0, 1, 2, 3)], ids=["none", "one", "all"])
def test_slow_links_are_waited_for(slow: tuple[int, ...]) -> None:
    async def main() -> None:
        network = UplinkNetwork(FAST_BPS)
        network.uplinks_bps = {PEERS[member]: FAST_BPS / 10 for member in slow}
        sides = make_sides(network, flat())
        await run_all(sides)
        assert all(side.outcome == ExchangeResult() for side in sides)
        assert now_s() > 5 * PATIENCE_S or not slow

    run_virtual(main())


@pytest.mark.parametrize("kinds", [("partial",), ("result",), ("partial", "result")])
def test_a_row_reducer_that_drips_costs_its_row_nothing(kinds: tuple[str, ...]) -> None:
    async def main() -> None:
        plan = plan_of([1] * 9, [(0, 1, 2), (3, 4, 5), (6, 7, 8)], 9 * 20 * 4096, chunk=4096)
        part = plan.parts[0]
        row_reducer = next(one for one in plan.row_reducers(part) if one != part.owner)
        network = UplinkNetwork(100 * FAST_BPS)
        every_s = {"partial": 0.9 * DEADLINES.partial_s, "result": 0.9 * DEADLINES.grid_result_s}
        for kind in kinds:
            network.faults.append(dripping(kind, PEERS[row_reducer], every_s[kind]))
        sides = make_sides(network, plan)
        await run_all(sides)
        others = [side for index, side in enumerate(sides) if index != row_reducer]
        owned = [one.owner == row_reducer for one in plan.parts]
        for held in zip(*map(digests, others), owned, strict=True):
            assert None not in held
            assert held[-1] or len(set(held[:-1])) == 1, "only what it reduced itself may have been made twice"
        assert {row_reducer} == set().union(*(side.outcome.failed for side in others if side.outcome))
        assert now_s() < 12 * PATIENCE_S

    run_virtual(main())


# Rounds -------------------------------------------------------------------------------------------------------

ELEMENTS = MEMBERS * 12 * 65536


async def play(run: Swarm) -> list[PeerToCoordinatorRoundReport]:
    """A round that all commit and hold alike. Returns the reports."""
    machine, reports = run.coordinator.machine, []
    report = machine.scope.report
    machine.scope.report = lambda peer, one, at_s: (reports.append(one), report(peer, one, at_s))[1]  # type: ignore[method-assign]
    outcomes = await together(*(member.play(torch.ones(ELEMENTS), 4) for member in run.members))
    machine.scope.report = report  # type: ignore[method-assign]
    assert all(isinstance(outcome, Committed) for outcome in outcomes)
    assert all(torch.equal(member.anchor, run[0].anchor) for member in run.members)
    return reports


def test_an_owner_that_drips_has_its_part_made_by_a_stand_in() -> None:
    async def main() -> None:
        network = UplinkNetwork(1600 * FAST_BPS)
        async with swarm(MEMBERS, run_toml(4 * MEMBERS), ELEMENTS, network) as run:
            network.faults.append(dripping("result", run[2].peer, 0.9 * DEADLINES.result_s))
            began_s = now_s()
            reports = await play(run)
            assert now_s() - began_s < 9 * PATIENCE_S
            assert [report.failed for report in reports].count((2,)) == MEMBERS - 1

    run_virtual(main())


def test_a_member_at_a_tenth_of_the_rate_is_in_every_round() -> None:
    async def main() -> None:
        network = UplinkNetwork(16 * FAST_BPS)
        async with swarm(MEMBERS, run_toml(4 * MEMBERS), ELEMENTS, network) as run:
            network.uplinks_bps[run[2].peer] = 16 * FAST_BPS / 10
            for member in run.members:  # as their probes would say
                member.bandwidth_bps = network.uplinks_bps.get(member.peer, 16 * FAST_BPS)
            for _ in range(3):
                began_s = now_s()
                reports = await play(run)
                assert now_s() - began_s > 2 * PATIENCE_S
                assert all((report.dropped, report.failed, report.trouble) == ((), (), "") for report in reports)

    run_virtual(main())
