import asyncio
import itertools
from collections.abc import Coroutine
from typing import Any

import pytest
import torch
from tests.fakes.claims import honest
from tests.fakes.means import MEAN_ATOL, weighted
from tests.fakes.memory_network import MemoryNetwork, Step, at, changed, stalled
from tests.fakes.swarm import PATIENCE_S, SimMember, Swarm, run_toml, swarm, together
from tests.fakes.virtual_clock import now_s, run_virtual, until
from torch import Tensor

from shoal.compression.error_feedback import ErrorFeedback
from shoal.compression.formats import CODEC_NAMES
from shoal.swarm.averaging.buffer_pool import BufferPool
from shoal.swarm.averaging.contribution import encode
from shoal.swarm.averaging.leaf_grid import LeafGrid
from shoal.swarm.averaging.outcome import Aborted, Committed, Resync
from shoal.swarm.coordinator.events import WentBack
from shoal.swarm.coordinator.round_rules import Judgement
from shoal.swarm.errors import WireError
from shoal.swarm.protocol.messages import (
    PeerToCoordinatorHeartbeat,
    PeerToCoordinatorRoundReady,
    PeerToCoordinatorRoundReport,
)
from shoal.swarm.protocol.rounds import Verdict
from shoal.swarm.protocol.statements import ChunkRanges, ContributionStatement, PartStatement, check_plan, has_signed
from shoal.swarm.protocol.verdict_chain import check_verdict
from shoal.swarm.sample_ranges import count

ELEMENTS = 3 * 4096 + 17
"""Four chunks: of three members one owns two."""


def contribution(seed: int) -> Tensor:
    return torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(seed))


def in_step(*members: SimMember) -> bool:
    return all(one.digest == members[0].digest and one.version == members[0].version for one in members)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=0)


def play_all(run: Swarm, seed: int, samples: list[int] | None = None) -> list[Coroutine[Any, Any, Any]]:
    """In the order of the plan, each with the contribution of its own seed."""
    samples = samples or [10] * len(run.members)
    return [run[index].play(contribution(seed + index), count) for index, count in enumerate(samples)]


def owned_chunk(run: Swarm, owner: int) -> int:
    """The first chunk of a member's part, of three equal members: 0-1, 2, 3."""
    return [0, 2, 3][owner]


@pytest.mark.parametrize("codec", CODEC_NAMES)
@pytest.mark.parametrize("members", [1, 2, 3, 5, 8])
def test_rounds_commit_the_same_for_all(members: int, codec: str) -> None:
    async def main() -> None:
        weights = [5 * (index + 1) for index in range(members)]
        async with swarm(members, run_toml(sum(weights), codec), ELEMENTS) as run:
            chains = []
            for number in range(2):
                outcomes = await together(*play_all(run, 100 * number, weights))
                assert all(isinstance(one, Committed) and one.included for one in outcomes)
                first = outcomes[0]
                assert isinstance(first, Committed)
                chains.append(first.verdict.chain)
                check_verdict(first.verdict, run.coordinator.identity.public_key)
                assert in_step(*run.members)
                if number == 0:
                    expected = weighted([contribution(index) for index in range(members)], weights)
                    kept = weighted(
                        [run[index].averager.round_feedback.error_feedback.residual for index in range(members)],
                        weights,
                    )
                    torch.testing.assert_close(first.mean.whole().double() + kept, expected, atol=1e-5, rtol=0)
                    if codec in MEAN_ATOL:
                        torch.testing.assert_close(first.mean.whole().double(), expected, atol=MEAN_ATOL[codec], rtol=0)
            assert len(set(chains)) == 2
            assert run.coordinator.machine.scope.tokens_committed == 2 * sum(weights)

    run_virtual(main())


def test_nothing_is_lost_when_weights_change() -> None:
    """Means times total weight, and residuals times the weight they stem from, add up to what was brought."""

    async def main() -> None:
        rounds = [[10, 20, 30], [1, 25, 34], [40, 19, 1], [2, 2, 56]]
        async with swarm(3, run_toml(60, "int8"), ELEMENTS) as run:
            brought, applied = torch.zeros(2, ELEMENTS, dtype=torch.float64)
            for number, weights in enumerate(rounds):
                outcomes = await together(*play_all(run, 10 * number, weights))
                assert isinstance(outcomes[0], Committed)
                applied += sum(weights) * outcomes[0].mean.whole().double()
                brought += sum(weights) * weighted([contribution(10 * number + index) for index in range(3)], weights)
            for index, weight in enumerate(rounds[-1]):
                applied += weight * run[index].averager.round_feedback.error_feedback.residual.double()
            torch.testing.assert_close(applied, brought, atol=2e-3, rtol=0)

    run_virtual(main())


def test_others_are_told_that_an_exchange_runs() -> None:
    """So that joiners wait while it does, and no longer."""

    async def main() -> None:
        async with swarm(2, run_toml(20), ELEMENTS) as run:
            told: list[tuple[bool, str]] = []
            averager = run[0].averager
            averager.on_exchange = lambda runs: told.append((runs, averager.activity))
            await together(*play_all(run, 0, [10, 10]))
            assert [runs for runs, _ in told] == [True, False]
            assert told[0][1] == "averaging"

    run_virtual(main())


# Members that fail --------------------------------------------------------------------------------------------


def test_a_member_that_dies_before_it_is_ready_is_not_waited_for_long() -> None:
    async def main() -> None:
        async with swarm(3, run_toml(30), ELEMENTS) as run:
            await run[1].work(10)
            run[1].die()
            outcomes = await together(run[0].play(contribution(0), 10), run[2].play(contribution(2), 10))
            assert all(isinstance(one, Committed) and one.included for one in outcomes)
            assert in_step(run[0], run[2])
            close(-run[0].anchor, (contribution(0) + contribution(2)).double() / 2)
            assert now_s() < 4 * PATIENCE_S
            # Its samples are free again.
            assert count(run.coordinator.machine.scope.leases.pool) == 10

    run_virtual(main())


def dying(run: Swarm, member: SimMember, task: list[asyncio.Task[Any]]) -> None:
    member.die()
    task[0].cancel()


@pytest.mark.parametrize("kind", ["contribution", "result"])
def test_a_member_that_dies_in_the_exchange(kind: str) -> None:
    """A stand-in reduces its part; what of its contribution had arrived counts, and nothing of the others' is lost."""

    async def main() -> None:
        async with swarm(3, run_toml(30), ELEMENTS) as run, asyncio.TaskGroup() as tasks:
            victim, alive = run[2], [run[0], run[1]]
            doomed = [tasks.create_task(victim.play(contribution(2), 10))]
            chunk = 0 if kind == "contribution" else owned_chunk(run, 2)
            run.network.faults.append(at(kind, victim.peer, chunk, lambda: dying(run, victim, doomed)))
            outcomes = await together(*[one.play(contribution(run.index(one)), 10) for one in alive])
            assert all(isinstance(one, Committed) and one.included for one in outcomes)
            assert len({one.verdict.chain for one in outcomes if isinstance(one, Committed)}) == 1
            assert None not in outcomes[0].verdict.digests
            assert in_step(*alive)
            both = (contribution(0) + contribution(1)).double() / 2
            its_part = slice(3 * 4096, ELEMENTS)
            if kind == "result":
                close(-run[0].anchor[its_part], both[its_part])
            all_three = weighted([contribution(index) for index in range(3)], [1, 1, 1])
            for start in range(0, ELEMENTS, 4096):
                found, chunk = -run[0].anchor[start : start + 4096].double(), slice(start, start + 4096)
                assert any(torch.allclose(found, mean[chunk], atol=1e-6) for mean in (both, all_three))
            assert not any(bool(one.averager.round_feedback.error_feedback.residual.any()) for one in alive)

    run_virtual(main())


def test_a_stalled_contributor_is_left_out_and_makes_up_for_it() -> None:
    async def main() -> None:
        async with swarm(3, run_toml(30), ELEMENTS) as run:
            slow = run[1]
            fault = stalled("contribution", slow.peer, 0)
            run.network.faults.append(fault)
            outcomes = await together(*play_all(run, 0))
            assert all(isinstance(one, Committed) and one.included for one in outcomes)
            assert in_step(*run.members)
            run.network.faults.remove(fault)
            await together(*play_all(run, 10))
            assert in_step(*run.members)
            assert run.coordinator.machine.scope.tokens_committed == 60
            anchor = -run[0].anchor.double()
            # Its own part had its work in the first mean already, the others' have it in the second.
            own, others = slice(2 * 4096, 3 * 4096), slice(0, 2 * 4096)
            everything = sum(contribution(seed).double() for seed in (0, 1, 2, 10, 11, 12)) / 3
            torch.testing.assert_close(anchor[own], everything[own], atol=1e-5, rtol=0)
            first = (contribution(0) + contribution(2)).double() / 2
            second = sum(contribution(seed).double() for seed in (1, 10, 11, 12)) / 3
            torch.testing.assert_close(anchor[others], (first + second)[others], atol=1e-5, rtol=0)

    run_virtual(main())


def test_a_garbage_contributor_is_left_out() -> None:
    async def main() -> None:
        async with swarm(3, run_toml(30, "int8"), ELEMENTS) as run:
            run.network.faults.append(changed("contribution", run[1].peer, lambda data: b"\xff" * len(data)))
            outcomes = await together(*play_all(run, 0))
            assert all(isinstance(one, Committed) for one in outcomes)
            assert in_step(*run.members)
            first = run[0].anchor[:4096].double()
            expected = -(contribution(0) + contribution(2))[:4096].double() / 2
            torch.testing.assert_close(first, expected, atol=4.5 / 127, rtol=0)

    run_virtual(main())


def test_of_the_two_faces_of_an_owner_the_one_that_most_saw_counts() -> None:
    async def main() -> None:
        async with swarm(5, run_toml(50), ELEMENTS) as run:
            for fooled in (run[2], run[3]):
                fault = changed("result", run[1].peer, lambda data: data[:-4] + bytes(4), to=fooled.peer)
                run.network.faults.append(fault)
            outcomes = await together(*play_all(run, 0))
            assert all(isinstance(one, Committed) for one in outcomes)
            members = run.coordinator.machine.scope.membership.members
            assert all(members[member.peer].can_own for member in run.members), "two of its four witnesses are not most"
            close(-run[0].anchor, weighted([contribution(index) for index in range(5)], [1] * 5))
            assert in_step(*run.members)

    run_virtual(main())


def test_the_verdict_ends_an_exchange_that_goes_on() -> None:
    async def main() -> None:
        async with swarm(4, run_toml(40), ELEMENTS) as run:
            run.network.faults.append(changed("result", run[0].peer, lambda data: data[:-4] + bytes(4), to=run[1].peer))
            run.network.faults.append(stalled("result", run[0].peer, 0, to=run[3].peer))
            outcomes = await together(*play_all(run, 0))
            assert all(isinstance(one, Committed) for one in outcomes)
            assert in_step(*run.members)
            assert now_s() < 3 * PATIENCE_S
            assert not any(one.averager.round_feedback.error_feedback.in_round for one in run.members)

    run_virtual(main())


def test_who_lacks_committed_bytes_fetches_them_from_another() -> None:
    """The owner delivers to some, then dies."""

    async def main() -> None:
        async with swarm(4, run_toml(40), ELEMENTS) as run, asyncio.TaskGroup() as tasks:
            victim, alive = run[0], [run[1], run[2], run[3]]
            doomed = [tasks.create_task(victim.play(contribution(0), 10))]
            run.network.faults.append(stalled("result", victim.peer, 0, to=run[3].peer))
            reported: list[bool] = []

            async def die_when_reported() -> None:
                await until(lambda: len(run.coordinator.machine.scope.round.reports) == 3)
                reported.append(True)
                dying(run, victim, doomed)

            tasks.create_task(die_when_reported())
            outcomes = await together(*[one.play(contribution(run.index(one)), 10) for one in alive])
            assert reported
            assert all(isinstance(one, Committed) and one.included for one in outcomes)
            assert in_step(*alive)
            helped = {step.holder for step in run.network.log if step.to == run[3].peer and step.blob.kind == "result"}
            assert victim.peer not in helped

    run_virtual(main())


def test_committed_bytes_that_nobody_has_any_more_mean_out_of_date() -> None:
    async def main() -> None:
        async with swarm(4, run_toml(40), ELEMENTS) as run:
            for holder, kind in itertools.product((0, 1, 2), ("result", "held")):
                run.network.faults.append(stalled(kind, run[holder].peer, 0, to=run[3].peer))
            outcomes = await together(*play_all(run, 0))
            assert [type(one) for one in outcomes] == [Committed] * 3 + [Resync]
            assert not run[3].averager.round_feedback.error_feedback.in_round

    run_virtual(main())


# Members that are late, or look away --------------------------------------------------------------------------


def test_who_comes_too_late_brings_it_to_the_next_round_by_its_weight() -> None:
    async def main() -> None:
        async with swarm(3, run_toml(60), ELEMENTS) as run:
            late = run[2]

            async def sleepy() -> Any:
                await late.work(30)
                await asyncio.sleep(2 * PATIENCE_S)
                return await late.average(contribution(2))

            outcomes = await together(run[0].play(contribution(0), 15), run[1].play(contribution(1), 15), sleepy())
            assert [isinstance(one, Committed) and one.included for one in outcomes] == [True, True, False]
            assert isinstance(outcomes[2], Committed)
            assert in_step(*run.members)
            assert count(late.done) == 30
            # It works on, from the new anchor, and brings both.
            outcomes = await together(
                run[0].play(contribution(10), 10), run[1].play(contribution(11), 10), late.play(contribution(12), 10)
            )
            assert all(isinstance(one, Committed) and one.included for one in outcomes)
            assert isinstance(outcomes[0], Committed)
            brought = [contribution(seed) for seed in (10, 11, 2, 12)]
            close(outcomes[0].mean.whole(), weighted(brought, [10, 10, 30, 10]))
            assert in_step(*run.members)
            # Once only.
            outcomes = await together(
                run[0].play(contribution(20), 10), run[1].play(contribution(21), 10), late.play(contribution(22), 40)
            )
            assert isinstance(outcomes[0], Committed)
            mean = weighted([contribution(20 + index) for index in range(3)], [10, 10, 40])
            close(outcomes[0].mean.whole(), mean)

    run_virtual(main())


def test_what_was_late_is_dropped_with_its_samples() -> None:
    """Who joins anew has given its samples back: others train on them."""

    async def main() -> None:
        async with swarm(2, run_toml(40), ELEMENTS) as run:
            late = run[1]

            async def sleepy() -> Any:
                await late.work(20)
                await asyncio.sleep(2 * PATIENCE_S)
                return await late.average(contribution(1))

            outcomes = await together(run[0].play(contribution(0), 20), sleepy())
            assert isinstance(outcomes[1], Committed)
            assert not outcomes[1].included
            await late.client.rejoin()
            late.done = []
            await late.beat()
            outcomes = await together(run[0].play(contribution(10), 20), late.play(contribution(11), 20))
            assert isinstance(outcomes[0], Committed)
            expected = weighted([contribution(10), contribution(11)], [1, 1])
            close(outcomes[0].mean.whole(), expected)

    run_virtual(main())


def test_nobody_takes_part_in_a_plan_with_a_contribution_that_its_member_has_not_signed() -> None:
    """The host could give a friend all the weight, or another contribution than the one that it brought."""

    async def main() -> None:
        async with swarm(3, run_toml(30), ELEMENTS) as run:
            scope: Any = run.coordinator.machine.scope
            real = scope.proposal

            def proposal() -> Any:
                honest = real()
                first, *others = honest.plan.members
                members = (first.model_copy(update={"weight_tokens": 1000}), *others)
                return honest.model_copy(update={"plan": honest.plan.model_copy(update={"members": members})})

            scope.proposal = proposal
            outcomes = await together(*play_all(run, 0))
            assert all(isinstance(one, Aborted) for one in outcomes)
            assert all("has not signed" in one.reason for one in outcomes if isinstance(one, Aborted))
            assert not [step for step in run.network.log if step.blob.kind == "contribution"]
            scope.proposal = real
            outcomes = await together(*play_all(run, 0))
            assert all(isinstance(one, Committed) and one.included for one in outcomes)

    run_virtual(main())


def makers(verdict: Verdict) -> list[tuple[int, ChunkRanges] | None]:
    """Who has made which chunks of each part, with their signatures checked."""
    assert verdict.plan is not None
    found: list[tuple[int, ChunkRanges] | None] = []
    for part, maker in enumerate(verdict.makers):
        statement = PartStatement.of(verdict, part)
        assert (statement is None) == (maker is None)
        if maker is not None and statement is not None:
            member = verdict.plan.members[maker.member]
            assert has_signed(member.identity_key, member.peer, maker.signature, statement.bytes_to_sign())
        found.append((maker.member, maker.chunks) if maker is not None else None)
    return found


def test_who_reduced_a_part_has_signed_it_in_the_verdict() -> None:
    async def main() -> None:
        async with swarm(3, run_toml(30), ELEMENTS) as run:
            outcomes = await together(*play_all(run, 0))
            assert isinstance(outcomes[0], Committed)
            assert makers(outcomes[0].verdict) == [(0, ((0, 2),)), (1, ((2, 3),)), (2, ((3, 4),))]

    run_virtual(main())


def test_a_stand_in_signs_for_the_chunks_that_it_made_and_not_for_those_of_the_failed_owner() -> None:
    async def main() -> None:
        async with swarm(4, run_toml(40), ELEMENTS) as run, asyncio.TaskGroup() as tasks:
            await run.own_nothing(run[3])
            owner, lacking = run[0], {run[index].peer for index in (1, 2, 3)}
            doomed = [tasks.create_task(owner.play(contribution(0), 10))]

            async def fault(step: Step, payload: bytes) -> bytes:
                """All get its first chunk, and then it dies."""
                if (step.blob.kind, step.holder, step.chunk) == ("result", owner.peer, 1) and not doomed[0].done():
                    await until(lambda: not lacking)
                    dying(run, owner, doomed)
                if (step.blob.kind, step.holder, step.chunk) == ("result", owner.peer, 0):
                    lacking.discard(step.to)
                return payload

            run.network.faults.append(fault)
            outcomes = await together(*[run[index].play(contribution(index), 10) for index in (1, 2, 3)])
            assert isinstance(outcomes[0], Committed)
            verdict = outcomes[0].verdict
            assert verdict.plan is not None
            first = verdict.plan.parts[0]
            assert (first.owner, first.stop) == (0, 2 * 4096)
            assert makers(verdict) == [(first.stand_ins[0], ((1, 2),)), (1, ((2, 3),)), (2, ((3, 4),))]

    run_virtual(main())


def test_a_plan_that_the_coordinator_has_not_signed_is_not_acted_on() -> None:
    async def main() -> None:
        async with swarm(2, run_toml(20), ELEMENTS) as run:
            client, tried = run[0].client, []

            async def fault(step: Step, payload: bytes) -> bytes:
                view = client.view
                assert view.plan is not None
                check_plan(client.round_name(0), view.plan, view.plan_signature, client.coordinator_key)
                forged = view.plan.model_copy(update={"rho": 1e9})
                for plan, signature in ((forged, view.plan_signature), (view.plan, bytes(64)), (view.plan, b"")):
                    update = {"sequence": view.sequence + 1, "plan": plan, "plan_signature": signature}
                    with pytest.raises(WireError, match="not signed by the coordinator"):
                        client._apply_view(view.model_copy(update=update))
                assert client.view is view
                tried.append(step)
                return payload

            run.network.faults.append(fault)
            outcomes = await together(*play_all(run, 0))
            assert tried
            assert all(isinstance(one, Committed) for one in outcomes)

    run_virtual(main())


def test_a_planned_member_that_missed_the_exchange_keeps_it_for_the_next() -> None:
    """Its samples count as trained on, so the work must not be lost: it is in the residual."""

    async def main() -> None:
        async with swarm(3, run_toml(30), ELEMENTS) as run:
            absent = run[2]
            await run.own_nothing(absent)

            async def away() -> Any:
                await absent.work(10)
                await absent.until_due()
                offer = absent.offer(contribution(2))
                feedback, grid = ErrorFeedback(ELEMENTS), LeafGrid(ELEMENTS, absent.averager._codec_map)
                feedback.begin(offer.contribution)
                encoded = await encode(feedback, grid, BufferPool())
                ready = PeerToCoordinatorRoundReady(
                    round=offer.round,
                    anchor_version=offer.anchor_version,
                    state_digest=offer.state_digest,
                    weight_tokens=offer.weight_tokens,
                    ranges=offer.ranges,
                    loss=None,
                    norms=honest(contribution(2)),
                    root=encoded.root,
                )
                statement = ContributionStatement.of_ready(absent.client.round_name(offer.round), ready)
                await absent.client.ask_view(ready.model_copy(update={"signature": absent.client.sign(statement)}))
                await absent.client.wait_for(lambda view: view.round > 0)
                return await absent.average(contribution(2))

            outcomes = await together(run[0].play(contribution(0), 10), run[1].play(contribution(1), 10), away())
            assert all(isinstance(one, Committed) and one.included for one in outcomes)
            assert in_step(*run.members)
            assert torch.equal(absent.averager.round_feedback.error_feedback.residual, contribution(2))
            outcomes = await together(*play_all(run, 10))
            assert isinstance(outcomes[0], Committed)
            expected = sum(contribution(seed).double() for seed in (10, 11, 12, 2)) / 3
            close(outcomes[0].mean.whole(), expected)

    run_virtual(main())


def test_nothing_to_offer_still_gets_the_outcome() -> None:
    async def main() -> None:
        async with swarm(3, run_toml(20), ELEMENTS) as run:
            outcomes = await together(*play_all(run, 0, [10, 10, 0]))
            assert [isinstance(one, Committed) and one.included for one in outcomes] == [True, True, False]
            assert in_step(*run.members)
            assert not bool(run[2].averager.round_feedback.error_feedback.residual.any())
            close(-run[2].anchor, (contribution(0) + contribution(1)).double() / 2)

    run_virtual(main())


def test_a_missed_verdict_means_out_of_date() -> None:
    async def main() -> None:
        async with swarm(3, run_toml(20), ELEMENTS) as run:
            sleeper, offer = run[2], run[2].offer(contribution(2))
            for number in range(2):
                await together(*play_all(run, number, [10, 10]))
            await sleeper.client.wait_for(lambda view: view.round == 2)
            assert sleeper.round == 0
            outcome = await sleeper.averager.average(offer)
            assert outcome == Resync("the verdict of round 0 was missed")

    run_virtual(main())


def test_another_state_than_the_runs_is_out_of_date() -> None:
    async def main() -> None:
        async with swarm(3, run_toml(30), ELEMENTS) as run:
            await together(*play_all(run, 0))
            run[2].anchor = run[2].anchor + 1.0
            await run[2].beat()
            outcomes = await together(
                run[0].play(contribution(3), 15), run[1].play(contribution(4), 15), run[2].average(contribution(5))
            )
            assert [type(one) for one in outcomes] == [Committed, Committed, Resync]
            assert not run[2].averager.round_feedback.error_feedback.in_round
            assert in_step(run[0], run[1])

    run_virtual(main())


def test_given_up_samples_are_stale() -> None:
    async def main() -> None:
        async with swarm(2, run_toml(20), ELEMENTS) as run:
            lost = run[1]
            await lost.work(10)
            offer = lost.offer(contribution(1))
            run.coordinator.machine.scope.admission.leave(lost.peer, "test", now_s())
            await lost.beat()
            assert lost.rejoined
            playing = asyncio.ensure_future(run[0].play(contribution(0), 20))
            await lost.client.wait_for(lambda view: view.phase == "closing")
            outcome = await lost.averager.average(offer)
            assert isinstance(outcome, Resync)
            await playing

    run_virtual(main())


def test_who_is_given_up_in_the_exchange_keeps_nothing_of_it() -> None:
    """Others get its samples again, so what the mean lacks of it must not come twice."""

    async def main() -> None:
        async with swarm(3, run_toml(30), ELEMENTS) as run:
            lost = run[2]
            await run.own_nothing(lost)
            run.network.faults.append(stalled("contribution", lost.peer, 1))

            async def give_up() -> None:
                await until(lambda: run.coordinator.machine.scope.round.plan is not None)
                run.coordinator.machine.scope.admission.leave(lost.peer, "test", now_s())
                await lost.beat()

            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(give_up())
                outcomes = await together(*play_all(run, 0))
            assert lost.rejoined
            assert all(isinstance(one, Committed) for one in outcomes)
            assert in_step(*run.members)
            assert not bool(lost.averager.round_feedback.error_feedback.residual.any())
            assert count(run.coordinator.machine.scope.leases.pool) == 10

    run_virtual(main())


def test_a_new_process_under_an_old_name_takes_no_part_in_its_round() -> None:
    """The plan counts on work that died with the process before: nothing must be sent in its place."""

    async def main() -> None:
        async with swarm(3, run_toml(30), ELEMENTS) as run:
            reborn = run[2]
            await run.own_nothing(reborn)
            run.network.faults.append(stalled("contribution", reborn.peer, 0))

            async def be_reborn() -> Any:
                old = asyncio.ensure_future(reborn.play(contribution(2), 10))
                await until(lambda: run.coordinator.machine.scope.round.plan is not None)
                old.cancel()
                await asyncio.wait([old])
                run.network.faults.clear()
                reborn.endpoint.blobs.clear()
                run.coordinator.machine.scope.admission.leave(reborn.peer, "died", now_s())
                await reborn.client.join()
                reborn.done = []
                await reborn.beat()
                return await reborn.average(torch.zeros(ELEMENTS))

            outcomes = await together(run[0].play(contribution(0), 10), run[1].play(contribution(1), 10), be_reborn())
            assert all(isinstance(one, Committed) for one in outcomes)
            assert in_step(*run.members)
            close(-run[0].anchor, (contribution(0) + contribution(1)).double() / 2)

    run_virtual(main())


def test_a_reopened_round_goes_on() -> None:
    """A whole batch is needed and a member dies with its samples: the others train them, too."""

    async def main() -> None:
        async with swarm(3, run_toml(30, algorithm="virtual_batch"), ELEMENTS) as run:
            await run[2].work(10)
            reopened: list[int] = []

            async def worker(member: SimMember, seed: int) -> Any:
                await member.work(10)
                while True:
                    outcome = await member.average(contribution(seed))
                    if not (isinstance(outcome, Aborted) and outcome.verdict is None):
                        return outcome
                    assert not member.averager.round_feedback.error_feedback.in_round
                    reopened.append(seed)
                    if seed == 0:
                        await member.work(10)

            async def dies_when_closing() -> None:
                await run[2].until_due()
                run[2].die()

            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(dies_when_closing())
                outcomes = await together(worker(run[0], 0), worker(run[1], 1))
            assert {0, 1} <= set(reopened)
            assert all(isinstance(one, Committed) and one.included for one in outcomes)
            assert in_step(run[0], run[1])
            expected = weighted([contribution(0), contribution(1)], [20, 10])
            close(-run[0].anchor, expected)
            assert run.coordinator.machine.scope.tokens_committed == 30

    run_virtual(main())


# A coordinator that fails -------------------------------------------------------------------------------------

ABSENCE_S = 40.0


@pytest.mark.parametrize("moment", ["closing", "averaging", "reports"])
def test_a_coordinator_that_comes_back_ends_the_round_as_if_nothing_had_been(moment: str) -> None:
    async def main() -> None:
        async with swarm(3, run_toml(30), ELEMENTS) as run:
            coordinator = run.coordinator

            async def fail() -> None:
                machine = coordinator.machine
                moments = {
                    "closing": lambda: machine.scope.round.phase == "closing",
                    "averaging": lambda: machine.scope.round.plan is not None,
                    "reports": lambda: machine.scope.round.reports,
                }
                await until(moments[moment])
                coordinator.away = True
                await asyncio.sleep(ABSENCE_S)
                assert any(one.client.coordinator_is_away for one in run.members)
                coordinator.restart()

            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(fail())
                outcomes = await together(*play_all(run, 0))
            assert all(isinstance(one, Committed) and one.included for one in outcomes), outcomes
            assert in_step(*run.members)
            assert ABSENCE_S < now_s() < ABSENCE_S + 3 * PATIENCE_S
            close(-run[0].anchor, weighted([contribution(index) for index in range(3)], [1, 1, 1]))
            assert not any(one.client.coordinator_is_away for one in run.members)

    run_virtual(main())


@pytest.mark.parametrize(
    "lost", [PeerToCoordinatorRoundReady, PeerToCoordinatorRoundReport, PeerToCoordinatorHeartbeat]
)
def test_lost_requests_are_repeated(lost: type) -> None:
    async def main() -> None:
        async with swarm(3, run_toml(30), ELEMENTS) as run:
            run.coordinator.deaf_to.add(lost)

            async def hear_again() -> None:
                await asyncio.sleep(PATIENCE_S * 0.4)
                run.coordinator.deaf_to.clear()

            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(hear_again())
                outcomes = await together(*play_all(run, 0))
            assert all(isinstance(one, Committed) for one in outcomes)
            assert in_step(*run.members)

    run_virtual(main())


def test_without_pushes_rounds_only_take_longer() -> None:
    async def main() -> None:
        async with swarm(3, run_toml(30), ELEMENTS) as run:
            run.coordinator.pushes = False
            for number in range(2):
                outcomes = await together(*play_all(run, number))
                assert all(isinstance(one, Committed) for one in outcomes)
            assert in_step(*run.members)
            assert now_s() < 30

    run_virtual(main())


def test_a_report_is_made_once() -> None:
    """The coordinator takes reports for progress: repeated ones would keep an overdue verdict away."""

    async def main() -> None:
        async with swarm(3, run_toml(30), ELEMENTS) as run:
            reports: list[float] = []
            original = run.coordinator.machine.scope.report

            def report(peer: str, message: PeerToCoordinatorRoundReport, at_s: float) -> None:
                if peer == run[0].peer:
                    reports.append(at_s)
                original(peer, message, at_s)

            run.coordinator.machine.scope.report = report  # type: ignore[method-assign]
            run.network.faults.append(stalled("result", run[1].peer, 2, to=run[2].peer))
            outcomes = await together(*play_all(run, 0))
            assert all(isinstance(one, Committed) for one in outcomes[:2])
            assert len(reports) == 1

    run_virtual(main())


def test_a_new_coordinator_gets_the_reports_that_the_old_one_had() -> None:
    async def main() -> None:
        async with swarm(3, run_toml(30), ELEMENTS) as run:
            run.network.faults.append(stalled("result", run[1].peer, 2, to=run[2].peer))

            async def restart() -> None:
                await until(lambda: len(run.coordinator.machine.scope.round.reports) == 2)
                await asyncio.sleep(0.5)
                run.coordinator.restart()
                run.network.faults.clear()

            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(restart())
                outcomes = await together(*play_all(run, 0))
            assert all(isinstance(one, Committed) for one in outcomes)
            assert now_s() < 2 * PATIENCE_S, "long before it would have been overdue"

    run_virtual(main())


def test_leaving_and_joining_again_outlives_an_absence() -> None:
    async def main() -> None:
        async with swarm(1, run_toml(10), ELEMENTS) as run:
            run.coordinator.away = True
            rejoining = asyncio.ensure_future(run[0].client.rejoin())
            await asyncio.sleep(ABSENCE_S)
            assert not rejoining.done()
            assert run[0].client.coordinator_is_away
            run.coordinator.restart()
            await rejoining
            assert run[0].client.joins == 2

    run_virtual(main())


# What is kept -------------------------------------------------------------------------------------------------


def test_the_last_committed_results_are_kept_and_none_of_aborted_rounds() -> None:
    async def main() -> None:
        async with swarm(2, run_toml(20), ELEMENTS) as run:
            faults = [changed("result", one.peer, lambda data: data[:-4] + bytes(4)) for one in run.members]
            moved = 0
            for number in range(6):
                if number == 3:
                    run.network.faults += faults
                outcomes = await together(*play_all(run, number, [10, 10] if number != 4 else [0, 0]))
                assert isinstance(outcomes[0], Aborted if number == 3 else Committed)
                run.network.faults.clear()
                for one in run.members:
                    kept = number if number != 3 else 2
                    blobs = {(blob.kind, blob.number) for blob in one.endpoint.blobs}
                    for kind in ("included", "committed"):
                        shown = {blob for blob in blobs if blob[0] == kind}
                        assert shown <= {(kind, one) for one in (kept, kept - 1, kept - 2) if one != 3}
                        assert len(shown) <= 2
                        blobs -= shown
                    assert blobs == {("result", kept), ("held", kept)}
                    assert one.averager.chunks_moved > moved
                moved = max(one.averager.chunks_moved for one in run.members)
            assert in_step(*run.members)

    run_virtual(main())


def test_a_contribution_beyond_float32_is_refused_and_forgotten() -> None:
    async def main() -> None:
        async with swarm(1, run_toml(10), ELEMENTS) as run:
            run[0].averager.round_feedback.error_feedback.load(lambda memory: memory.fill_(3e38))
            await run[0].work(10)
            outcome = await run[0].average(torch.full((ELEMENTS,), 3e38))
            assert isinstance(outcome, Resync)
            assert not run[0].averager.round_feedback.error_feedback.in_round
            assert not bool(run[0].averager.round_feedback.error_feedback.residual.any()), (
                "or it would be refused for ever"
            )

    run_virtual(main())


def test_a_residual_that_overflows_in_new_units_is_forgotten() -> None:
    async def main() -> None:
        async with swarm(1, run_toml(10), ELEMENTS) as run:
            averager = run[0].averager
            averager.round_feedback.restore(lambda residual: (residual.fill_(1e38), 1000)[1])
            await run[0].work(10)
            assert isinstance(await run[0].average(torch.ones(ELEMENTS)), Resync)
            assert averager.round_feedback.carried.weight_tokens == 0
            assert not bool(averager.round_feedback.carried.residual.any()), "or it would be refused for ever"

    run_virtual(main())


def test_slow_links_and_uneven_arrival_change_no_bit() -> None:
    def anchor(seed: int, latency_s: float) -> bytes:
        async def main() -> bytes:
            network = MemoryNetwork(seed, latency_s=(0.0, latency_s), bandwidth_bps=(1e5, 1e8))
            async with swarm(3, run_toml(30, "int8"), ELEMENTS, network, latency_s) as run:
                for number in range(3):
                    # One after the other, so that everybody always has the same samples.
                    outcomes = await together(*play_all(run, 10 * number))
                    assert all(isinstance(one, Committed) for one in outcomes)
                assert in_step(*run.members)
                return run[0].anchor.numpy().tobytes()

        return run_virtual(main())

    assert anchor(1, 0.001) == anchor(2, 0.3) == anchor(3, 0.05)


def test_when_the_run_goes_back_the_work_and_the_residual_are_dropped() -> None:
    """They stem from rounds that others do again."""

    async def main() -> None:
        async with swarm(2, run_toml(20, "int8"), ELEMENTS) as run:
            await together(*play_all(run, 0))
            assert all(bool(one.averager.round_feedback.carried.residual.any()) for one in run.members)
            machine = run.coordinator.machine
            digest = machine.scope.history.rounds[0].digest
            back = WentBack(from_version=1, digest=digest, vouched_round=0, keepers=())
            machine.log.now_s = now_s()
            machine.scope.give_verdict(machine.scope.verdict_of(Judgement(reason="back to version 0"), back))
            assert machine.scope.anchor_version == 0
            outcomes = await together(*[one.average(contribution(5)) for one in run.members])
            assert outcomes == [Resync("back to version 0")] * 2
            assert not any(bool(one.averager.round_feedback.carried.residual.any()) for one in run.members)

    run_virtual(main())
