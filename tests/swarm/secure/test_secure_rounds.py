"""Secure rounds of a whole run on the virtual clock: parity, deaths at each step, and what may be offered again."""

import asyncio
import threading
from typing import Any

import numpy as np
import pytest
import torch
from tests.fakes.means import weighted
from tests.fakes.memory_network import Step
from tests.fakes.secure_rounds import Scene
from tests.fakes.swarm import PATIENCE_S, SimMember, Swarm, run_toml, swarm, together
from tests.fakes.virtual_clock import now_s, run_virtual, until
from torch import Tensor

from shoal.swarm.averaging import averager, secure_exchange
from shoal.swarm.averaging.chunk_header import ChunkHeader
from shoal.swarm.averaging.masked_chunks import LaneLayout
from shoal.swarm.averaging.masked_means import OpenedSums
from shoal.swarm.averaging.outcome import Aborted, Committed, Resync, RoundOutcome
from shoal.swarm.averaging.reduction import ReducedChunk
from shoal.swarm.averaging.results import ResultStore
from shoal.swarm.averaging.secure_exchange import SecureExchange
from shoal.swarm.coordinator import round_scope
from shoal.swarm.coordinator.events import VerdictGiven
from shoal.swarm.coordinator.round_plan import draw_secure
from shoal.swarm.coordinator.round_scope import RoundScope
from shoal.swarm.errors import LinkError
from shoal.swarm.protocol.messages import PeerToCoordinatorRoundReady, PeerToCoordinatorSecureStep
from shoal.swarm.protocol.rounds import RoundPlan
from shoal.swarm.protocol.run_file import parse_run_file
from shoal.swarm.protocol.secure import SecureStage, SignedSets, first_scales
from shoal.swarm.secure.board import SecureBoard, SecureFailure
from shoal.swarm.secure.groups import MaskingGroup
from shoal.swarm.secure.member import SecureMember
from shoal.swarm.secure.opening import Unopened
from shoal.swarm.secure.reveal_record import RevealRecord
from shoal.swarm.secure.round_keys import RoundKeys

ELEMENTS = 5 * 4096 + 17
UNIT = {"int8": 2.0**-13, "int4": 2.0**-9}
"""Of the first round."""


def toml(tokens: int, codec: str = "int8", group: int = 8, robust: str = "none") -> str:
    secure = f"[averaging]\nsecure = true\nsecure_group = {group}\n"
    return run_toml(tokens, codec, robust=robust).replace("[averaging]\n", secure)


def contribution(seed: int) -> Tensor:
    return torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(seed)) * 0.003


def in_step(*members: SimMember) -> bool:
    return len({(one.digest, one.version) for one in members}) == 1


def residual(member: SimMember) -> Tensor:
    return member.averager.round_feedback.error_feedback.residual.double()


def stage(run: Swarm) -> int:
    board = run.coordinator.machine.scope.round.board
    return -1 if board is None else int(board.stage)


async def at_stage(run: Swarm, wanted: SecureStage) -> None:
    await until(lambda: stage(run) >= wanted, 0.005)


@pytest.mark.parametrize(("members", "codec", "group"), [(4, "int8", 8), (5, "int4", 8), (9, "int8", 4)])
def test_rounds_commit_the_mean_without_masks(members: int, codec: str, group: int) -> None:
    """To within half a unit of each code, and what that loses is in the residuals."""

    async def main() -> None:
        weights = [10 + index for index in range(members)]
        async with swarm(members, toml(sum(weights), codec, group), ELEMENTS) as run:
            brought = applied = torch.zeros(ELEMENTS, dtype=torch.float64)
            for number in range(2):
                seeds = range(100 * number, 100 * number + members)
                outcomes = await together(
                    *[run[index].play(contribution(seeds[index]), weights[index]) for index in range(members)]
                )
                assert all(isinstance(one, Committed) and one.included for one in outcomes)
                first = outcomes[0]
                assert isinstance(first, Committed)
                assert in_step(*run.members)
                assert first.verdict.plan is not None
                assert first.verdict.plan.secure is not None
                assert not any(one.norms for one in first.verdict.plan.members)
                expected = weighted([contribution(one) for one in seeds], weights)
                mean = first.mean.whole().double()
                if not number:
                    assert (mean - expected).abs().max() < 2 * UNIT[codec]
                brought, applied = brought + expected, applied + mean
            kept = weighted([residual(run[index]).float() for index in range(members)], weights)
            torch.testing.assert_close(applied + kept, brought, atol=1e-6, rtol=0)
            assert len({one.averager._scales for one in run.members}) == 1
            assert run[0].averager._scales

    run_virtual(main())


def test_a_member_that_joins_later_takes_the_scales_of_the_others() -> None:
    async def main() -> None:
        async with swarm(5, toml(50), ELEMENTS) as run:
            await together(*[run[index].play(contribution(index), 10) for index in range(5)])
            scales = run[0].averager._scales
            run[0].averager._scales = b""
            outcomes = await together(*[run[index].play(contribution(10 + index), 10) for index in range(5)])
            assert isinstance(outcomes[0], Committed)
            plan = outcomes[0].verdict.plan
            assert plan is not None
            assert plan.secure is not None
            assert plan.secure.scales == scales
            assert run[0].averager._scales == run[1].averager._scales

    run_virtual(main())


def test_three_members_wait_for_a_fourth() -> None:
    async def main() -> None:
        async with swarm(4, toml(30), ELEMENTS) as run, asyncio.TaskGroup() as tasks:
            plays = [tasks.create_task(run[index].play(contribution(index), 10)) for index in range(3)]
            await asyncio.sleep(3 * PATIENCE_S)
            assert run.coordinator.machine.scope.round.phase == "training"
            plays.append(tasks.create_task(run[3].play(contribution(3), 10)))
            await asyncio.wait(plays)
            assert all(isinstance(one.result(), Committed) for one in plays)

    run_virtual(main())


def test_shares_that_come_while_a_sum_is_being_opened_open_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a thread, with the shares from before."""
    real, outcomes_of_opening = secure_exchange.in_thread, list[Any]()

    async def slow(work: Any, *arguments: Any) -> Any:
        made = await real(work, *arguments)
        if getattr(work, "__name__", "") == "_open":
            outcomes_of_opening.append(made)
            await asyncio.sleep(PATIENCE_S / 10)
        return made

    monkeypatch.setattr(secure_exchange, "in_thread", slow)

    async def main() -> None:
        async with swarm(5, toml(50), ELEMENTS) as run:
            outcomes = await together(*[run[index].play(contribution(index), 10) for index in range(5)])
            assert any(isinstance(one, Unopened) for one in outcomes_of_opening), "some were too early"
            first = outcomes[0]
            assert isinstance(first, Committed)
            expected = weighted([contribution(index) for index in range(5)], [10] * 5)
            assert (first.mean.whole().double() - expected).abs().max() < 2 * UNIT["int8"]

    run_virtual(main())


# Deaths -------------------------------------------------------------------------------------------------------


async def survive(run: Swarm, victim: SimMember, moment: Any) -> list[RoundOutcome]:
    """Play a round in which the victim dies at a moment; return the outcomes of the others."""
    alive = [one for one in run.members if one is not victim]
    async with asyncio.TaskGroup() as tasks:
        doomed = tasks.create_task(victim.play(contribution(run.index(victim)), 10))

        async def kill() -> None:
            await moment
            victim.die()
            doomed.cancel()

        tasks.create_task(kill())
        return await together(*[one.play(contribution(run.index(one)), 10) for one in alive])


def owned(run: Swarm, plan: RoundPlan, member: SimMember) -> list[tuple[int, int]]:
    return [(part.start, part.stop) for part in plan.parts if part.owner == run.index(member)]


@pytest.mark.parametrize("moment", [SecureStage.SETS, SecureStage.UNMASK])
def test_deaths_after_the_sets_cost_only_the_part_of_an_owner(moment: SecureStage) -> None:
    """The dead one stays in the sum of all other parts. Its own part is void, as nobody else may open it, and spent:
    nobody offers it again. Nobody but the dead one is to blame, and the others go on without it."""

    async def main() -> None:
        async with swarm(5, toml(50), ELEMENTS) as run:
            victim = run[2]
            outcomes = await survive(run, victim, at_stage(run, moment))
            alive = [one for one in run.members if one is not victim]
            assert all(isinstance(one, Committed) for one in outcomes)
            assert in_step(*alive)
            first = outcomes[0]
            assert isinstance(first, Committed)
            assert first.verdict.plan is not None
            void = torch.zeros(ELEMENTS, dtype=torch.bool)
            for start, stop in owned(run, first.verdict.plan, victim):
                void[start:stop] = True
            assert void.any()
            expected = weighted([contribution(index) for index in range(5)], [10] * 5)
            mean = first.mean.whole().double()
            assert (mean - expected)[~void].abs().max() < 2 * UNIT["int8"]
            assert (mean[void] == 0).all()
            for one in alive:
                assert residual(one)[void].abs().max() <= UNIT["int8"] / 2 + 1e-9, "what was cut off, and no more"
            given = [one for one in run.coordinator.events if isinstance(one, VerdictGiven)][-1]
            assert {*given.failed, *given.missing} <= {victim.peer}
            outcomes = await together(*[one.play(contribution(20 + run.index(one)), 10) for one in alive])
            assert all(isinstance(one, Committed) and None not in one.verdict.digests for one in outcomes)
            assert in_step(*alive)

    run_virtual(main())


def test_a_member_that_dies_before_it_sends_is_left_out_and_the_others_go_on() -> None:
    async def main() -> None:
        async with swarm(5, toml(50), ELEMENTS) as run:
            victim = run[2]
            outcomes = await survive(run, victim, at_stage(run, SecureStage.MASKS))
            alive = [one for one in run.members if one is not victim]
            assert all(isinstance(one, Committed) for one in outcomes)
            assert in_step(*alive)
            first = outcomes[0]
            assert isinstance(first, Committed)
            assert first.verdict.plan is not None
            void = torch.zeros(ELEMENTS, dtype=torch.bool)
            for start, stop in owned(run, first.verdict.plan, victim):
                void[start:stop] = True
            others = [index for index in range(5) if index != 2]
            expected = weighted([contribution(index) for index in others], [10] * 4)
            assert (first.mean.whole().double() - expected)[~void].abs().max() < 2 * UNIT["int8"]
            for one in alive:
                # Enough have signed that nothing of the dead owner's part is opened: it is brought again.
                brought = contribution(run.index(one)).double()
                torch.testing.assert_close(residual(one)[void], brought[void], atol=1e-7, rtol=0)

    run_virtual(main())


@pytest.mark.parametrize("moment", [SecureStage.KEYS, SecureStage.SHARES])
def test_a_death_before_any_masked_byte_costs_no_work(moment: SecureStage) -> None:
    async def main() -> None:
        async with swarm(5, toml(50), ELEMENTS) as run:
            victim = run[2]
            if moment == SecureStage.KEYS:

                def deaf(step: str, events: list[Any]) -> None:
                    if any(type(one).__name__ == "RoundPlanned" for one in events):
                        victim.channel.open = False

                run.coordinator.watch = deaf
            outcomes = await survive(run, victim, at_stage(run, moment))
            alive = [one for one in run.members if one is not victim]
            if moment == SecureStage.KEYS:
                assert all(isinstance(one, Aborted) for one in outcomes)
                assert not any(residual(one).any() for one in alive), "they keep their work, and offer it again"
                outcomes = await together(*[one.average(contribution(run.index(one))) for one in alive])
            assert all(isinstance(one, Committed) and one.included for one in outcomes)
            assert in_step(*alive)

    run_virtual(main())


def test_an_owner_that_opens_a_sum_and_keeps_the_mean_has_spent_it() -> None:
    """It has the group's sum of its part. The part is void, and what members brought to it is not offered again."""

    async def main() -> None:
        async with swarm(5, toml(50), ELEMENTS) as run:
            owner = run[2]

            async def withheld(step: Step, data: bytes) -> bytes:
                if step.holder == owner.peer and step.blob.kind in ("result", "held"):
                    raise LinkError("it says nothing")
                return data

            run.network.faults.append(withheld)
            outcomes = await together(*[run[index].play(contribution(index), 10) for index in range(5)])
            first = outcomes[0]
            assert isinstance(first, Committed)
            assert None in first.verdict.digests
            assert first.verdict.plan is not None
            for start, stop in owned(run, first.verdict.plan, owner):
                for one in run.members:
                    assert residual(one)[start:stop].abs().max() <= UNIT["int8"] / 2 + 1e-9

    run_virtual(main())


def test_an_aborted_round_is_lost_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """All means are withheld. The members go on from the anchor with other samples, without joining again; what they
    had brought, and the samples that it was of, come in no round any more."""

    async def main() -> None:
        async with swarm(4, toml(40), ELEMENTS) as run:

            async def withheld(step: Step, data: bytes) -> bytes:
                if step.blob.kind in ("result", "held"):
                    raise LinkError("it says nothing")
                return data

            run.network.faults.append(withheld)
            before, anchor = [one.client.joins for one in run.members], run[0].digest
            outcomes = await together(*[run[index].play(contribution(index), 10) for index in range(4)])
            assert all(isinstance(one, Aborted) and one.is_spent for one in outcomes)
            assert not any(residual(one).any() for one in run.members)
            run.network.faults.clear()
            await together(*[run[index].work(10) for index in range(4)])
            again = [sample for one in run.members for samples in one.done for sample in range(*samples)]
            assert sorted(again) == list(range(40, 80))
            outcomes = await together(*[run[index].average(contribution(10 + index)) for index in range(4)])
            assert all(isinstance(one, Committed) and one.included for one in outcomes)
            expected = weighted([contribution(10 + index) for index in range(4)], [10] * 4)
            assert isinstance(outcomes[0], Committed)
            assert (outcomes[0].mean.whole().double() - expected).abs().max() < 2 * UNIT["int8"]
            assert [one.client.joins for one in run.members] == before
            assert anchor != run[0].digest

    run_virtual(main())


@pytest.mark.parametrize("anchor", [b"", bytes(32)])
def test_work_on_spent_samples_is_not_offered_again(anchor: bytes) -> None:
    """A host would lease them once more, after an abort, to know one contribution by the difference: from the same
    anchor, or from one that has hardly moved."""

    async def main() -> None:
        async with swarm(4, toml(40), ELEMENTS) as run:
            await together(*[one.work(10) for one in run.members])
            (start, _stop), *_ = run[1].done
            run[1].averager.reveal_record.spend(anchor or run[1].digest, [(start, start + 1)])
            outcome = await run[1].average(contribution(1))
            assert isinstance(outcome, Resync)
            assert run[1].peer not in run.coordinator.machine.scope.round.ready
            run[1].averager.reveal_record = RevealRecord(None)
            outcomes = await together(*[one.average(contribution(0)) for one in run.members])
            assert all(isinstance(one, Committed) for one in outcomes)

    run_virtual(main())


def test_groups_are_not_drawn_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that knows the draw ends the round, hoping for a group that suits it better: members wait for longer."""

    async def main() -> None:
        draws: list[float] = []

        def unlucky(board: SecureBoard, now_s: float) -> SecureFailure:
            draws.append(now_s)
            return SecureFailure("not the group that I wanted")

        monkeypatch.setattr(SecureBoard, "_fix_senders", unlucky)
        monkeypatch.setattr(averager, "_DRAW_EVERY_S", 60.0)
        async with swarm(4, toml(40), ELEMENTS) as run:
            began_s = now_s()
            await together(*[one.work(10) for one in run.members])
            while now_s() < began_s + 90:
                outcomes = await together(*[one.average(contribution(1)) for one in run.members])
                assert not any(isinstance(one, Committed) for one in outcomes)
        assert 3 <= len(draws) <= 5

    run_virtual(main())


def test_a_draw_that_goes_on_without_us_is_one_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that knows the draw lets only the groups that suit it go on, and commits the round without the others."""

    async def main() -> None:
        fix = SecureBoard._fix_senders

        def choosy(board: SecureBoard, now_s: float) -> SecureFailure | None:
            board._sealed = {one: board._sealed[one] for one in board._groups[0].members}
            return fix(board, now_s)

        monkeypatch.setattr(SecureBoard, "_fix_senders", choosy)
        monkeypatch.setattr(averager, "_DRAWS", 1)
        async with swarm(8, toml(80, group=4), ELEMENTS) as run:
            outcomes = await together(*[run[index].play(contribution(index), 10) for index in range(8)])
            assert all(isinstance(one, Committed) for one in outcomes)
            waiting = [one for one in run.members if one.averager._draws.level("draw", now_s()) < 0.5]
            assert len(waiting) == 4, "those that showed their random numbers and were not let in"

    run_virtual(main())


@pytest.mark.parametrize("kept_back", ["first chunk", "last chunk"])
def test_an_owner_that_keeps_single_chunks_back_has_failed(monkeypatch: pytest.MonkeyPatch, kept_back: str) -> None:
    """It has opened their sums as well: their work is lost, as that of a part that is void."""

    async def main() -> None:
        async with swarm(4, toml(40), 16 * 4096) as run:
            owner, real = run[2], SecureExchange._make

            def make(self: SecureExchange, index: int, opened: Any) -> None:
                real(self, index, opened)
                if self.signer.peer == owner.peer:
                    chunks = self.store.chunks_of(self._plan.parts[index])
                    assert len(chunks) > 1
                    nothing = memoryview(self.store.group.pack_header(ChunkHeader()))
                    self.made_chunks[chunks[0 if kept_back == "first chunk" else -1]] = ReducedChunk(nothing, [], None)

            monkeypatch.setattr(SecureExchange, "_make", make)
            ones = torch.full((16 * 4096,), 0.003)
            outcomes = await together(*[run[index].play(ones, 10) for index in range(4)])
            assert all(isinstance(one, Committed) for one in outcomes)
            given = [one for one in run.coordinator.events if isinstance(one, VerdictGiven)][-1]
            assert given.failed == (owner.peer,)

    run_virtual(main())


def test_two_deaths_of_five_after_the_sets_blame_nobody_who_is_left() -> None:
    """Three cannot open a sum of five: it is lost, and told at once rather than when the round is overdue."""

    async def main() -> None:
        async with swarm(5, toml(50), ELEMENTS) as run, asyncio.TaskGroup() as tasks:
            victims = [run[1], run[3]]
            doomed = [tasks.create_task(one.play(contribution(9), 10)) for one in victims]

            async def kill() -> None:
                await at_stage(run, SecureStage.SETS)
                for one, task in zip(victims, doomed, strict=True):
                    one.die()
                    task.cancel()

            tasks.create_task(kill())
            alive = [one for one in run.members if one not in victims]
            outcomes = await together(*[one.play(contribution(3), 10) for one in alive])
            given = [one for one in run.coordinator.events if isinstance(one, VerdictGiven)][-1]
            assert not set(given.missing) & {one.peer for one in alive}
            assert not set(given.failed) & {one.peer for one in alive}
            assert in_step(*alive)
            for one, outcome in zip(alive, outcomes, strict=True):
                assert isinstance(outcome, Committed) or (isinstance(outcome, Aborted) and outcome.is_spent)
                assert residual(one).abs().max() <= UNIT["int8"] / 2 + 1e-9, "what was cut off, and no more"

    run_virtual(main())


@pytest.mark.parametrize("lie", ["members", "values"])
def test_an_owner_cannot_make_up_whose_mean_it_is(monkeypatch: pytest.MonkeyPatch, lie: str) -> None:
    """A mean of itself alone, or one above what all together could bring: its part is void, and it is named."""

    async def main() -> None:
        async with swarm(5, toml(50), ELEMENTS) as run:
            liar, real = run[2], SecureExchange._encoded

            def encoded(self: SecureExchange, chunk: int, mean: Tensor, header: ChunkHeader) -> ReducedChunk:
                if self.signer.peer == liar.peer:
                    header = ChunkHeader([2]) if lie == "members" else header
                    mean = torch.full_like(mean, 0.01 if lie == "members" else 0.1)
                return real(self, chunk, mean, header)

            monkeypatch.setattr(SecureExchange, "_encoded", encoded)
            outcomes = await together(*[run[index].play(contribution(index), 10) for index in range(5)])
            first = outcomes[0]
            assert isinstance(first, Committed)
            assert None in first.verdict.digests
            assert first.mean.whole().abs().max() < 0.02
            given = [one for one in run.coordinator.events if isinstance(one, VerdictGiven)][-1]
            assert given.failed == (liar.peer,)

    run_virtual(main())


def test_an_owner_that_says_that_nothing_could_be_opened_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the sum, and publishes an empty mean: the others know that enough shares were revealed."""

    async def main() -> None:
        async with swarm(5, toml(50), ELEMENTS) as run:
            owner, real = run[2], SecureExchange._make

            def made(self: SecureExchange, index: int, opened: dict[Any, Any]) -> None:
                real(self, index, {} if self.signer.peer == owner.peer else opened)

            monkeypatch.setattr(SecureExchange, "_make", made)
            outcomes = await together(*[run[index].play(contribution(index), 10) for index in range(5)])
            assert all(isinstance(one, Committed) for one in outcomes)
            given = [one for one in run.coordinator.events if isinstance(one, VerdictGiven)][-1]
            assert given.failed == (owner.peer,)

    run_virtual(main())


def ready(tokens: int, scales: bytes = b"") -> PeerToCoordinatorRoundReady:
    return PeerToCoordinatorRoundReady(
        round=1, anchor_version=1, state_digest=bytes(32), weight_tokens=tokens, ranges=(), loss=None, scales=scales
    )


@pytest.mark.parametrize(
    ("told", "members", "has_units"),
    [
        ([b"a", b"a", b"a", b""], 4, True),
        ([b"a", b"", b"", b"", b"", b""], 5, False),
        ([b"a", b"a", b"b", b"", b"", b""], 5, True),
        ([b"a", b"", b"", b""], 3, False),
        ([b"", b"", b"", b""], 4, False),
    ],
)
def test_members_of_a_plan_agree_on_its_units(told: list[bytes], members: int, has_units: bool) -> None:
    """Who has some believes in no others, and who has none in those of more than a third, or a run's first ones."""
    averaging = parse_run_file(toml(10)).averaging
    all_of = {f"p{index}": ready(10, scales) for index, scales in enumerate(told)}
    chosen, scales = draw_secure(all_of, list(all_of), averaging, 1, 0)
    assert (len(chosen), scales == b"a") == (members, has_units)
    holders = sum(one.scales == scales for one in chosen.values())
    assert all(one.scales in (scales, b"") for one in chosen.values())
    assert 3 * holders > len(chosen) or scales == first_scales(8, 1)


def test_who_has_little_work_waits_for_more() -> None:
    """Weights are cut to twice the lightest one: a single sample must not flatten what all others have done."""
    averaging = parse_run_file(toml(10)).averaging
    weights = [100, 110, 90, 100, 1, 49]
    chosen, _ = draw_secure(
        {f"p{one}": ready(weight) for one, weight in enumerate(weights)}, ["p0", "p1"], averaging, 1, 0
    )
    assert sorted(chosen) == ["p0", "p1", "p2", "p3"]


@pytest.mark.parametrize(("credited", "others", "most"), [(8, 20, 3), (40, 20, 2), (3, 9, 9)])
def test_newcomers_are_fewer_than_a_third_of_any_group(credited: int, others: int, most: int) -> None:
    averaging = parse_run_file(toml(10)).averaging
    peers = [f"p{one:02}" for one in range(credited + others)]
    chosen, _ = draw_secure({one: ready(10) for one in peers}, peers[:credited], averaging, 1, 0)
    assert sum(one in peers[credited:] for one in chosen) == most


def test_a_dealer_of_wrong_shares_is_left_out_of_later_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """It costs its group two rounds, and then none for a while; the owners that could not open its part do not pay."""

    async def main() -> None:
        real = RoundKeys.deal

        def deal(self: RoundKeys, group: MaskingGroup) -> dict[int, bytes]:
            dealt = real(self, group)
            if self.plan.name.round < 2 and self.member_peer == dealer.peer:
                wrong = bytes(1) + bytes(range(32))
                return {one: wrong * (len(shares) // 33) for one, shares in dealt.items()}
            return dealt

        made = SecureMember.__init__

        def named(self: SecureMember, plan: RoundPlan, *others: Any, **more: Any) -> None:
            made(self, plan, *others, **more)
            self._secrets.member_peer = plan.members[self.me].peer  # type: ignore[attr-defined]

        monkeypatch.setattr(SecureMember, "__init__", named)
        monkeypatch.setattr(RoundKeys, "deal", deal)
        async with swarm(5, toml(50), ELEMENTS) as run:
            dealer = run[2]
            for _ in range(2):
                outcomes = await together(*[run[index].play(contribution(index), 10) for index in range(5)])
                given = [one for one in run.coordinator.events if isinstance(one, VerdictGiven)][-1]
                assert given.missing == (dealer.peer,)
                assert given.failed == ()
                assert isinstance(outcomes[0], Committed)
                assert not outcomes[0].mean.whole().any()
            assert run.coordinator.machine.scope.is_left_out(dealer.peer)

    run_virtual(main())


@pytest.mark.parametrize("moment", [SecureStage.SHARES, SecureStage.MASKS, SecureStage.SETS, SecureStage.UNMASK])
def test_a_coordinator_that_is_killed_at_each_stage(moment: SecureStage) -> None:
    """It forgets the board, is told the same, and the round ends as if nothing had happened."""

    async def main() -> None:
        async with swarm(5, toml(50), ELEMENTS) as run, asyncio.TaskGroup() as tasks:

            async def kill() -> None:
                await at_stage(run, moment)
                run.coordinator.away = True
                await asyncio.sleep(2.0)
                run.coordinator.restart()

            tasks.create_task(kill())
            outcomes = await together(*[run[index].play(contribution(index), 10) for index in range(5)])
            assert all(isinstance(one, Committed) for one in outcomes)
            assert in_step(*run.members)
            expected = weighted([contribution(index) for index in range(5)], [10] * 5)
            first = outcomes[0]
            assert isinstance(first, Committed)
            assert (first.mean.whole().double() - expected).abs().max() < 2 * UNIT["int8"]

    run_virtual(main())


@pytest.mark.parametrize("moment", [SecureStage.MASKS, SecureStage.SETS])
def test_what_a_dead_member_had_masked_is_trained_by_nobody_else(moment: SecureStage) -> None:
    """Its samples may be in a sum, so the same work by another member would show it."""

    async def main() -> None:
        async with swarm(5, toml(50), ELEMENTS) as run:
            outcomes = await survive(run, run[2], at_stage(run, moment))
            assert all(isinstance(one, Committed) for one in outcomes)
            alive = [one for one in run.members if one is not run[2]]
            await together(*[one.work(12) for one in alive])
            samples = {sample for one in alive for samples in one.done for sample in range(*samples)}
            assert len(samples) == 48
            assert min(samples) >= 50

    run_virtual(main())


@pytest.mark.parametrize("lie", ["none", "sets", "consents"])
def test_the_verdict_shows_whose_work_its_means_are_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, lie: str
) -> None:
    """A host that writes other sets into the chain than members have signed is noticed by each of them."""

    async def main() -> None:
        signed = SecureBoard.signed

        def written(board: SecureBoard) -> SignedSets | None:
            real = signed(board)
            if real is None or lie == "none":
                return real
            without = tuple(tuple(one for one in each if one != 2) for each in real.sets)
            return real.model_copy(update={"sets": without} if lie == "sets" else {"consents": ()})

        async with swarm(5, toml(50), ELEMENTS) as run, asyncio.TaskGroup() as tasks:

            async def lies() -> None:
                await at_stage(run, SecureStage.OPEN)
                monkeypatch.setattr(SecureBoard, "signed", written)

            tasks.create_task(lies())
            outcomes = await together(*[run[index].play(contribution(index), 10) for index in range(5)])
            assert all(isinstance(one, Committed) for one in outcomes)
            first = outcomes[0]
            assert isinstance(first, Committed)
            about = first.verdict.signed_sets
            assert about is not None
            assert about.senders == tuple(range(5))
            assert set(about.sets) == {tuple(range(5)) if lie != "sets" else (0, 1, 3, 4)}
            said = [one for one in caplog.records if one.levelname == "ERROR" and "round 0" in one.getMessage()]
            assert len(said) == (0 if lie == "none" else 5)

    run_virtual(main())


# Groups that are compared --------------------------------------------------------------------------------------


def groups_seen(monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[int, ...]]]:
    """Return a list that gets the members of all groups once for each part of a round."""
    seen: list[list[tuple[int, ...]]] = []
    real = SecureExchange._make

    def make(self: SecureExchange, index: int, opened: dict[Any, Any]) -> None:
        seen.append([group.members for group in self.member.groups])
        real(self, index, opened)

    monkeypatch.setattr(SecureExchange, "_make", make)
    return seen


def means_of(groups: list[tuple[int, ...]]) -> list[Tensor]:
    return [weighted([contribution(one) for one in group], [10] * len(group)) for group in groups]


@pytest.mark.parametrize("robust", ["trimmed", "none"])
def test_a_member_that_fills_the_lanes_moves_no_trimmed_mean(monkeypatch: pytest.MonkeyPatch, robust: str) -> None:
    """Far more than its codes could say, in all values; with ``none`` that is the mean, for comparison."""

    async def main() -> None:
        seen, add, mask = groups_seen(monkeypatch), secure_exchange.add_masks, SecureExchange._masked
        lying = threading.local()

        def masked(self: SecureExchange, index: int) -> list[memoryview]:
            lying.now = self.signer.peer == liar.peer
            return mask(self, index)

        def added(lanes: Any, masks: Any) -> None:
            if getattr(lying, "now", False):
                lanes += np.uint16(350)
                lying.now = False
            add(lanes, masks)

        monkeypatch.setattr(SecureExchange, "_masked", masked)
        monkeypatch.setattr(secure_exchange, "add_masks", added)
        async with swarm(12, toml(120, group=4, robust=robust), ELEMENTS) as run:
            liar = run[5]
            outcomes = await together(*[run[index].play(contribution(index), 10) for index in range(12)])
            assert all(isinstance(one, Committed) and one.included for one in outcomes)
            assert in_step(*run.members)
            first = outcomes[0]
            assert isinstance(first, Committed)
            assert first.verdict.plan is not None
            assert first.verdict.plan.mean == ("trimmed" if robust == "trimmed" else "weighted")
            honest = torch.stack(means_of([group for group in seen[0] if 5 not in group]))
            assert len(honest) == 2
            mean, unit = first.mean.whole().double(), 2 * UNIT["int8"]
            within = (honest.amin(0) - unit <= mean) & (mean <= honest.amax(0) + unit)
            assert bool(within.all()) == (robust == "trimmed")
            assert (mean.mean() > 10 * unit) == (robust == "none")

    run_virtual(main())


def test_a_run_that_compares_groups_waits_for_three() -> None:
    async def main() -> None:
        async with swarm(12, toml(120, group=4, robust="trimmed"), 4096) as run, asyncio.TaskGroup() as tasks:
            brought = [torch.full((4096,), 0.003)] * 12
            plays = [tasks.create_task(run[index].play(brought[index], 10)) for index in range(11)]
            await asyncio.sleep(3 * PATIENCE_S)
            assert run.coordinator.machine.scope.round.plan is None
            plays.append(tasks.create_task(run[11].play(brought[11], 10)))
            await asyncio.wait(plays)
            assert all(isinstance(one.result(), Committed) for one in plays)

    run_virtual(main())


@pytest.mark.parametrize("honest_owner", [True, False])
def test_two_groups_make_no_trimmed_mean(monkeypatch: pytest.MonkeyPatch, honest_owner: bool) -> None:
    """One dealer's wrong shares close its group: the means are empty, and it alone is to blame. An owner that makes a
    mean of the other two is refused, and has failed."""

    async def main() -> None:
        deal = RoundKeys.deal

        def dealt(self: RoundKeys, group: MaskingGroup) -> dict[int, bytes]:
            shares = deal(self, group)
            if self.member == 5:
                return {one: (bytes(1) + bytes(range(32))) * (len(each) // 33) for one, each in shares.items()}
            return shares

        monkeypatch.setattr(RoundKeys, "deal", dealt)
        async with swarm(12, toml(120, group=4, robust="trimmed"), ELEMENTS) as run:
            made, liars = SecureExchange.__init__, set[str]()

            def begun(self: SecureExchange, *others: Any, **more: Any) -> None:
                made(self, *others, **more)
                if self.me == next(part.owner for part in self._plan.parts if part.owner != 5) and not honest_owner:
                    self._fewest = 1
                    liars.add(self.signer.peer)

            def mean(store: ResultStore, layout: LaneLayout, chunk: int, opened: OpenedSums) -> Tensor:
                return torch.full((layout.values(chunk),), 0.001)

            monkeypatch.setattr(SecureExchange, "__init__", begun)
            monkeypatch.setattr(secure_exchange, "mean_of_sums", mean)
            outcomes = await together(*[run[index].play(contribution(index), 10) for index in range(12)])
            first = outcomes[0]
            assert isinstance(first, Committed)
            assert not first.mean.whole().any()
            given = [one for one in run.coordinator.events if isinstance(one, VerdictGiven)][-1]
            assert given.missing == (run[5].peer,)
            assert set(given.failed) == liars
            assert len(liars) == (not honest_owner)

    run_virtual(main())


def test_a_plan_of_two_groups_compares_nothing() -> None:
    scene = Scene(n=12)
    secure = scene.plan.secure
    assert secure is not None
    fields = dict(scene.plan) | {"mean": "trimmed"}
    with pytest.raises(ValueError, match="24 to 128 members"):
        RoundPlan(**fields)
    assert RoundPlan(**fields | {"secure": secure.model_copy(update={"group": 4})}).mean == "trimmed"
    averaging = parse_run_file(toml(10, robust="trimmed")).averaging
    assert not averaging.fits_secure(secure, "weighted"), "the host must not leave the comparison out"
    assert averaging.fits_secure(secure, "trimmed")


def test_a_part_that_too_few_groups_have_reached_has_no_set() -> None:
    """Its work is brought again, as nothing of it can be opened."""
    scene = Scene(n=12, group=4, mean="trimmed")
    scene.until(SecureStage.MASKS)
    while len(scene.sent) < 2 * 12:
        scene.turn()
    groups = scene.members[0].groups
    assert len(groups) == 3
    scene.arrive(0)
    scene.arrive(1, [one for group in groups[1:] for one in group.members])
    scene.until(SecureStage.OPEN, arrive=False)
    assert scene.board.sets == (tuple(range(12)), ())
    assert not any(one.is_spent(1) for one in scene.members)
    assert all(one.is_spent(0) for one in scene.members)


# A host that would like to see more ---------------------------------------------------------------------------


def test_a_plan_without_masks_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Members of a secure run take no part in it, publish nothing and say nothing about their contribution."""

    async def main() -> None:
        monkeypatch.setattr(round_scope, "as_secure", lambda plan, *others: plan)
        async with swarm(4, toml(40), ELEMENTS) as run:
            readies: list[PeerToCoordinatorRoundReady] = []
            answer = run.coordinator.answer

            async def listen(channel: Any, message: Any) -> Any:
                if isinstance(message, PeerToCoordinatorRoundReady):
                    readies.append(message)
                return await answer(channel, message)

            monkeypatch.setattr(run.coordinator, "answer", listen)
            outcomes = await together(*[run[index].play(contribution(index), 10) for index in range(4)])
            assert all(isinstance(one, Aborted) for one in outcomes), "and they keep their work"
            assert not any(step.blob.kind == "contribution" for step in run.network.log)
            assert readies
            assert not any(one.norms for one in readies)

    run_virtual(main())


def test_nothing_is_fetched_ahead_of_the_plan() -> None:
    async def main() -> None:
        async with swarm(4, toml(40), ELEMENTS) as run:
            seen: list[int] = []

            async def watch(step: Step, data: bytes) -> bytes:
                if step.blob.kind == "contribution":
                    seen.append(stage(run))
                return data

            run.network.faults.append(watch)
            outcomes = await together(*[run[index].play(contribution(index), 10) for index in range(4)])
            assert all(isinstance(one, Committed) for one in outcomes)
            assert seen
            assert min(seen) == SecureStage.MASKS

    run_virtual(main())


def test_a_member_whose_answers_are_lost_posts_them_again() -> None:
    async def main() -> None:
        async with swarm(5, toml(50), ELEMENTS) as run, asyncio.TaskGroup() as tasks:

            async def deafen() -> None:
                await at_stage(run, SecureStage.SETS)
                run.coordinator.deaf_to.add(PeerToCoordinatorSecureStep)
                await asyncio.sleep(1.0)
                run.coordinator.deaf_to.clear()

            tasks.create_task(deafen())
            outcomes = await together(*[run[index].play(contribution(index), 10) for index in range(5)])
            assert all(isinstance(one, Committed) and one.included for one in outcomes)
            assert now_s() < 6 * PATIENCE_S

    run_virtual(main())


async def offered(member: SimMember, brought: Tensor) -> RoundOutcome:
    """Work and offer the work once, whatever comes of it."""
    await member.work(10)
    return await member.average(brought)


def test_a_host_that_takes_a_plan_back_does_not_get_the_work_again() -> None:
    """It would plan the same contributions anew with another set, and know one by the difference."""

    async def main() -> None:
        async with swarm(4, toml(40), ELEMENTS) as run, asyncio.TaskGroup() as tasks:

            async def forget() -> None:
                await at_stage(run, SecureStage.SETS)
                planned = next(
                    at for at, one in enumerate(run.coordinator.events) if type(one).__name__ == "RoundClosing"
                )
                del run.coordinator.events[planned:]
                run.coordinator.restart()

            tasks.create_task(forget())
            outcomes = await together(*[offered(one, contribution(index)) for index, one in enumerate(run.members)])
            assert all(isinstance(one, Resync) for one in outcomes)
            assert not any(residual(one).any() for one in run.members)

    run_virtual(main())


def test_a_verdict_by_another_plan_does_not_bring_the_work_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with swarm(4, toml(40), ELEMENTS) as run:
            give = RoundScope.give_verdict

            def swapped(scope: RoundScope, unsigned: VerdictGiven) -> None:
                plan = unsigned.verdict.plan
                assert plan is not None
                first = plan.members[0].model_copy(update={"root": bytes(32)})
                other = plan.model_copy(update={"members": (first, *plan.members[1:])})
                give(
                    scope, unsigned.model_copy(update={"verdict": unsigned.verdict.model_copy(update={"plan": other})})
                )

            monkeypatch.setattr(RoundScope, "give_verdict", swapped)
            outcomes = await together(*[run[index].play(contribution(index), 10) for index in range(4)])
            assert all(isinstance(one, Resync) for one in outcomes)
            assert not any(residual(one).any() for one in run.members)

    run_virtual(main())
