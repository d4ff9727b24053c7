"""A coordinator that was started from an old copy of its journal ends no round a second time."""

from typing import Any

import pytest
import torch
from tests.fakes.swarm import Swarm, run_toml, swarm, together
from tests.fakes.virtual_clock import run_virtual
from tests.swarm.coordinator.stories import RUN, events_in, story
from tests.swarm.coordinator.world import SIGNER, attributes

from shoal.swarm.averaging.outcome import Committed
from shoal.swarm.coordinator.events import JournalEvent, RoundPlanned, VerdictGiven
from shoal.swarm.coordinator.run import PlainRun
from shoal.swarm.coordinator.stale_journal import check_ours
from shoal.swarm.errors import WireError
from shoal.swarm.protocol.identity import Identity
from shoal.swarm.protocol.rounds import Verdict
from shoal.swarm.protocol.verdict_chain import chain_hash, signed_bytes

EVENTS = events_in(len(story()))
GIVEN = [number for number, event in enumerate(EVENTS) if isinstance(event, VerdictGiven)]


def verdict(round_number: int) -> Verdict:
    event = EVENTS[GIVEN[round_number]]
    assert isinstance(event, VerdictGiven)
    return event.verdict


def machine(events: list[JournalEvent]) -> PlainRun:
    made = PlainRun(RUN, SIGNER.sign, 0.0, 10**9)
    made.log.replay(made.scope, events, 0.0)
    return made


def forged(signer: Identity, of: Verdict, **changes: Any) -> Verdict:
    unsigned = of.model_copy(update=changes)
    chain = chain_hash(unsigned)
    return unsigned.model_copy(update={"chain": chain, "signature": signer.sign(signed_bytes(chain))})


# Decisions --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("round_number", range(4))
def test_the_open_rounds_verdict_is_taken_over(round_number: int) -> None:
    end = GIVEN[round_number]
    lacks = machine(EVENTS[:end])
    assert lacks.scope.take_over(verdict(round_number), 0.0)
    assert [type(event) for event in lacks.log.take()] == [VerdictGiven]
    found, wanted = attributes(lacks), attributes(machine(EVENTS[: end + 1]))
    for attributed in (found, wanted):
        attributed["history"] = [one._replace(took_s=0.0) for one in attributed["history"].rounds]
    untold = {"elapsed_before_s"}
    assert [name for name in wanted if name not in untold and found[name] != wanted[name]] == []


@pytest.mark.parametrize("behind", [1, 2, 3])
def test_what_is_known_changes_nothing(behind: int) -> None:
    knows = machine(EVENTS[: GIVEN[3] + 1])
    assert knows.scope.take_over(verdict(4 - behind), 0.0)
    assert knows.log.take() == []


@pytest.mark.parametrize("lacks_plan", [False, True])
def test_a_journal_that_lacks_more_is_too_old(lacks_plan: bool) -> None:
    plan = max(number for number in range(GIVEN[3]) if isinstance(EVENTS[number], RoundPlanned))
    old = machine(EVENTS[:plan] if lacks_plan else EVENTS[: GIVEN[2]])
    assert not old.scope.take_over(verdict(3), 0.0)
    assert old.log.take() == []


def test_an_aborted_round_needs_no_plan() -> None:
    plan = max(number for number in range(GIVEN[3]) if isinstance(EVENTS[number], RoundPlanned))
    aborted = forged(
        SIGNER, verdict(3), committed=False, reason="so", digests=(), makers=(), tokens=0, anchor_version=3
    )
    old = machine(EVENTS[:plan])
    assert old.scope.take_over(aborted, 0.0)
    assert (old.scope.round.number, old.scope.anchor_version, old.scope.rounds_aborted) == (4, 3, 1)


@pytest.mark.parametrize("changes", [{"tokens": 10}, {"anchor_version": 9}, {"previous_chain": bytes(32)}])
def test_a_verdict_that_does_not_follow_is_not_taken_over(changes: dict[str, Any]) -> None:
    assert not machine(EVENTS[: GIVEN[3]]).scope.take_over(forged(SIGNER, verdict(3), **changes), 0.0)


def test_nobody_else_can_make_up_a_verdict() -> None:
    check_ours(verdict(2), RUN.hash, SIGNER.public_key)
    for wrong in (
        forged(Identity.generate(), verdict(2), round=99),
        forged(SIGNER, verdict(2), run_hash=b"o" * 32),
        verdict(2).model_copy(update={"round": 99}),
    ):
        with pytest.raises(WireError):
            check_ours(wrong, RUN.hash, SIGNER.public_key)


# Members and a coordinator ----------------------------------------------------------------------------------


async def play(run: Swarm) -> None:
    outcomes = await together(*(one.play(torch.full((run.elements,), 1.0), 10) for one in run.members))
    assert all(isinstance(one, Committed) and one.included for one in outcomes), outcomes


async def forget(run: Swarm, rounds: int) -> None:
    """Start again from a journal that ends before the verdict of so many rounds ago."""
    given = [number for number, event in enumerate(run.coordinator.events) if isinstance(event, VerdictGiven)]
    run.coordinator.away = True
    del run.coordinator.events[given[-rounds] :]
    run.coordinator.restart()


def test_members_bring_back_the_verdict_that_was_lost() -> None:
    async def main() -> None:
        async with swarm(3, run_toml(30), 20_000) as run:
            await play(run)
            await play(run)
            await forget(run, 1)
            await play(run)
            given = [event.verdict for event in run.coordinator.events if isinstance(event, VerdictGiven)]
            assert [one.round for one in given] == [0, 1, 2]
            assert all(one.committed for one in given)
            assert {one.digest for one in run.members} == {run.members[0].digest}
            assert run.coordinator.machine.scope.tokens_committed == 90
            assert not run.coordinator.is_outdated

    run_virtual(main())


def test_a_coordinator_that_lacks_more_stops() -> None:
    async def main() -> None:
        async with swarm(3, run_toml(30), 20_000) as run:
            for _ in range(3):
                await play(run)
            await forget(run, 2)
            for one in run.members:
                await one.client.wait_for(lambda view: False, 2 * one.client.deadlines.heartbeat_s)
                assert one.view.round == 3, "members do not go back"
            assert run.coordinator.is_outdated
            assert sum(isinstance(event, VerdictGiven) for event in run.coordinator.events) == 1

    run_virtual(main())


def test_a_verdict_of_a_later_coordinator_is_not_taken_over() -> None:
    """It has been given since by another host: this one was paused."""
    lacks = machine(EVENTS[: GIVEN[0]])
    lacks.log.epoch = verdict(0).epoch - 1
    assert not lacks.scope.take_over(verdict(0), 0.0)
    lacks.log.epoch = verdict(0).epoch
    assert lacks.scope.take_over(verdict(0), 0.0)
