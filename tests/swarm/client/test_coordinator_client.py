"""A member always knows the newest verdict, though it is told it once: on the virtual clock."""

import asyncio
from random import Random
from typing import Any

import pytest
import torch
from tests.fakes.memory_coordinator import MemoryChannel
from tests.fakes.swarm import Swarm, run_toml, swarm, together
from tests.fakes.virtual_clock import run_virtual

from shoal.swarm.errors import NotAdmitted, TryLater, WireError
from shoal.swarm.protocol.messages import CoordinatorToPeerView
from shoal.swarm.protocol.rounds import PartMaker, RunView, VerdictOnPlan
from shoal.swarm.protocol.types import Message, RosterDelta

ELEMENTS = 4096


class _Heard:
    """The views that a member got, as they came."""

    def __init__(self, channel: MemoryChannel) -> None:
        self.views: list[RunView] = []
        request, push = channel.request, channel.push

        async def requested(*arguments: Any) -> Message:
            return self._note(await request(*arguments))

        async def pushed(message: Message, scope: int = 0) -> None:
            await push(self._note(message), scope)

        channel.request, channel.push = requested, pushed  # type: ignore[method-assign]

    def _note(self, message: Message) -> Message:
        if isinstance(message, CoordinatorToPeerView):
            self.views.append(message.view)
        return message


async def a_round(run: Swarm) -> None:
    await together(*(member.play(torch.ones(ELEMENTS), 4) for member in run.members))


def test_a_verdict_is_told_until_it_is_known_and_kept_from_then_on() -> None:
    async def main() -> None:
        async with swarm(2, run_toml(8), ELEMENTS) as run:
            heard = _Heard(run[0].channel)
            for number in range(2):
                await a_round(run)
                heard.views.clear()
                verdict = run.coordinator.machine.scope.verdict
                assert verdict is not None
                await asyncio.sleep(3 * run[0].client.deadlines.heartbeat_s)
                assert heard.views[-1].verdict is None
                assert heard.views[-1].verdict_chain == verdict.chain
                assert run[0].view.verdict == verdict
                assert verdict.round == number

    run_virtual(main())


def test_a_verdict_that_got_lost_is_told_again() -> None:
    async def main() -> None:
        async with swarm(2, run_toml(8), ELEMENTS) as run:
            deaf = run[0]
            await a_round(run)
            before = deaf.view.verdict
            deaf.channel.silent = True
            plays = [asyncio.create_task(member.play(torch.ones(ELEMENTS), 4)) for member in run.members]
            await asyncio.sleep(5.0)
            assert deaf.view.verdict == before
            deaf.channel.silent = False
            await asyncio.gather(*plays)
            assert deaf.view.verdict == run.coordinator.machine.scope.verdict != before

    run_virtual(main())


def test_a_view_without_a_verdict_that_is_not_known_here_counts_as_lost() -> None:
    async def main() -> None:
        async with swarm(1, run_toml(4), ELEMENTS) as run:
            await a_round(run)
            before = run[0].view
            strange = before.model_copy(
                update={"sequence": before.sequence + 1, "verdict": None, "verdict_chain": b"s" * 32}
            )
            await run[0].channel.push(CoordinatorToPeerView(view=strange))
            assert run[0].view is before
            known = strange.model_copy(update={"verdict_chain": before.verdict_chain})
            await run[0].channel.push(CoordinatorToPeerView(view=known))
            assert run[0].view == before.model_copy(update={"sequence": before.sequence + 1})

    run_virtual(main())


def test_a_coordinator_that_another_one_has_followed_is_refused() -> None:
    """It was paused, and wakes up: for its members it is away, until it is the one that leads again."""

    async def main() -> None:
        async with swarm(1, run_toml(8), ELEMENTS) as run:
            await a_round(run)
            client, log = run[0].client, run.coordinator.machine.log
            log.epoch += 5
            await asyncio.sleep(3 * client.deadlines.heartbeat_s)
            view = run[0].view
            assert view.epoch == log.epoch
            assert not client.coordinator_is_away
            log.epoch -= 1
            log.announcements += 10
            await asyncio.sleep(3 * client.deadlines.heartbeat_s)
            assert client.coordinator_is_away
            assert run[0].view is view
            log.epoch += 1
            await asyncio.sleep(3 * client.deadlines.heartbeat_s)
            assert not client.coordinator_is_away
            assert run[0].view is not view

    run_virtual(main())


def test_no_verdict_is_of_a_later_coordinator_than_the_one_that_tells_it() -> None:
    async def main() -> None:
        async with swarm(1, run_toml(8), ELEMENTS) as run:
            await a_round(run)
            before = run[0].view
            assert before.verdict is not None
            verdict = before.verdict.model_copy(update={"epoch": before.epoch + 1, "chain": b"c" * 32})
            changes = {"sequence": before.sequence + 1, "verdict": verdict, "verdict_chain": verdict.chain}
            changes["round"] = before.round + 1
            with pytest.raises(WireError, match="later coordinator"):
                await run[0].channel.push(CoordinatorToPeerView(view=before.model_copy(update=changes)))
            assert run[0].view is before

    run_virtual(main())


# Plans --------------------------------------------------------------------------------------------------------


def test_a_plan_is_told_until_it_is_known_and_named_from_then_on() -> None:
    async def main() -> None:
        async with swarm(2, run_toml(8), ELEMENTS) as run:
            heard = _Heard(run[0].channel)
            await a_round(run)
            averaging = [view for view in heard.views if view.phase == "averaging"]
            digests = {view.plan_digest for view in averaging}
            assert len(digests) == 1
            assert averaging[0].plan is not None
            reported = next(number for number, view in enumerate(averaging) if view.plan is None)
            assert all(view.plan is None for view in averaging[reported:])
            told = [view for view in heard.views if view.round == 1 and (view.verdict or view.verdict_on_plan)]
            assert told
            assert all(view.verdict is None for view in told), "its plan is most of a verdict"
            verdict = run.coordinator.machine.scope.verdict
            assert verdict is not None
            assert verdict.plan == averaging[0].plan
            assert run[0].view.verdict == verdict
            assert run[0].client._plan_digest in digests

    run_virtual(main())


def test_a_view_that_refers_to_a_plan_that_is_not_known_here_counts_as_lost() -> None:
    async def main() -> None:
        async with swarm(1, run_toml(4), ELEMENTS) as run:
            await a_round(run)
            before, scope = run[0].view, run.coordinator.machine.scope
            assert scope.verdict is not None
            digest = run[0].client._plan_digest
            assert digest is not None
            strange = before.model_copy(update={"sequence": before.sequence + 1})
            on_plan = VerdictOnPlan.of(scope.verdict, bytes(32))
            for update in (
                {"plan_digest": bytes(32)},
                {"plan_digest": digest},  # of a round that is over
                {"verdict": None, "verdict_on_plan": on_plan},
            ):
                await run[0].channel.push(CoordinatorToPeerView(view=strange.model_copy(update=update)))
                assert run[0].view is before
            known = {"verdict": None, "verdict_on_plan": on_plan.model_copy(update={"plan_digest": digest})}
            await run[0].channel.push(CoordinatorToPeerView(view=strange.model_copy(update=known)))
            assert run[0].view == strange

    run_virtual(main())


def test_a_verdict_without_its_plan_is_checked_like_a_whole_one() -> None:
    async def main() -> None:
        async with swarm(1, run_toml(4), ELEMENTS) as run:
            await a_round(run)
            before, scope, digest = run[0].view, run.coordinator.machine.scope, run[0].client._plan_digest
            assert scope.verdict is not None
            assert digest is not None
            told = VerdictOnPlan.of(scope.verdict.model_copy(update={"round": 1, "chain": b"c" * 32}), digest)
            stranger = PartMaker(member=7, chunks=((0, 1),), signature=bytes(64))
            for on_plan, also, why in (
                (told, None, "hash"),
                (told.model_copy(update={"makers": (stranger,)}), None, "does not fit"),
                (told, scope.verdict, "two forms"),
            ):
                changes = {"round": 2, "verdict": also, "verdict_on_plan": on_plan, "verdict_chain": b"c" * 32}
                with pytest.raises(WireError, match=why):
                    await run[0].channel.push(CoordinatorToPeerView(view=before.model_copy(update=changes)))
                assert run[0].view is before

    run_virtual(main())


def test_a_view_may_bring_a_plan_and_the_verdict_on_the_one_before() -> None:
    async def main() -> None:
        async with swarm(1, run_toml(4), ELEMENTS) as run:
            heard, client = _Heard(run[0].channel), run[0].client
            await a_round(run)
            first = next(view for view in heard.views if view.phase == "averaging" and view.plan is not None)
            verdict, digest = run[0].view.verdict, client._plan_digest
            assert verdict is not None
            assert digest is not None
            heard.views.clear()
            await a_round(run)
            second = next(view for view in heard.views if view.phase == "averaging" and view.plan is not None)
            client._view, client._plan, client._plan_digest = first, first.plan, digest  # the verdict got lost
            told = {"verdict": None, "verdict_on_plan": VerdictOnPlan.of(verdict, digest)}
            await run[0].channel.push(CoordinatorToPeerView(view=second.model_copy(update=told)))
            assert (run[0].view.plan, run[0].view.verdict) == (second.plan, verdict)
            assert client._plan_digest == second.plan_digest

    run_virtual(main())


def test_what_a_host_tells_again_of_a_verdict_changes_nothing() -> None:
    async def main() -> None:
        async with swarm(1, run_toml(4), ELEMENTS) as run:
            await a_round(run)
            before, digest = run[0].view, run[0].client._plan_digest
            verdict = before.verdict
            assert verdict is not None
            assert digest is not None
            other = verdict.model_copy(update={"digests": (bytes(32),)})  # under the hash and signature of the true one
            for told in (
                {"verdict": other},
                {"verdict": None, "verdict_on_plan": VerdictOnPlan.of(other, digest)},
            ):
                view = before.model_copy(update={"sequence": before.sequence + 1, **told})
                await run[0].channel.push(CoordinatorToPeerView(view=view))
                assert run[0].view.verdict == verdict

    run_virtual(main())


@pytest.mark.parametrize("seed", range(8))
def test_a_member_acts_on_nothing_but_the_hosts_plan_and_verdict_whatever_gets_lost(seed: int) -> None:
    """Views are lost, come twice and late; the host restarts in the middle of rounds, and forgets plans."""

    async def main() -> None:
        rng = Random(seed)
        async with swarm(3, run_toml(12), ELEMENTS) as run:
            host = run.coordinator
            true: dict[tuple[int, int], tuple[Any, Any]] = {}
            make = host._view

            def made(peer: str, key: bytes) -> CoordinatorToPeerView:
                scope = host.machine.scope
                true[scope.log.epoch, scope.log.announcements] = scope.round.plan, scope.verdict
                return make(peer, key)

            host._view = made  # type: ignore[method-assign]
            seen = {"plans": 0, "named": 0}

            def watch(member: Any) -> None:
                client, late = member.client, list[RunView]()
                apply = client._apply_view

                def applied(view: RunView) -> None:
                    late.append(view)
                    for one in (view, *rng.sample(late, min(2, len(late)))):
                        if rng.random() < 0.3 and one is view:
                            continue  # lost
                        before = client.view
                        # A plan that was sent a moment ago is only named, as on its way.
                        apply(one.model_copy(update={"plan": None}) if rng.random() < 0.3 else one)
                        now = client.view
                        assert (now.epoch, now.sequence) >= (before.epoch, before.sequence)
                        assert (now.plan, now.verdict) == true[now.epoch, now.sequence]
                        seen["plans"] += now.plan is not None
                        seen["named"] += now is not one and one.plan_digest is not None and one.plan is None

                client._apply_view = applied

            for member in run.members:
                watch(member)
                true[member.view.epoch, member.view.sequence] = member.view.plan, member.view.verdict

            async def restart_now_and_then() -> None:
                while True:
                    await asyncio.sleep(rng.uniform(5.0, 20.0))
                    host.restart()

            restarting = asyncio.create_task(restart_now_and_then())
            async with asyncio.timeout(3000.0):
                while host.machine.scope.round.number < 4:
                    await a_round(run)
            restarting.cancel()
            assert seen["plans"]
            assert seen["named"]

    run_virtual(main())


# Rosters ------------------------------------------------------------------------------------------------------


def known_to(member: Any) -> list[str]:
    return sorted(member.client._roster)


def test_members_are_told_who_came_and_went_and_not_the_whole_roster_again() -> None:
    async def main() -> None:
        async with swarm(3, run_toml(12), ELEMENTS) as run:
            heard = _Heard(run.members[0].channel)
            await run.members[2].client.leave("done")
            await asyncio.sleep(1.0)
            assert run.members[2].peer not in known_to(run.members[0])
            await run.members[2].client.join()
            await asyncio.sleep(1.0)
            assert known_to(run.members[0]) == sorted(one.peer for one in run.members)
            assert [view.roster for view in heard.views] == [None] * len(heard.views)
            deltas = [view.roster_delta for view in heard.views if view.roster_delta is not None]
            assert [len(one.changed) + len(one.removed) for one in deltas] == [1, 1]

    run_virtual(main())


def test_changes_that_got_lost_come_with_the_next_heartbeat() -> None:
    async def main() -> None:
        async with swarm(3, run_toml(12), ELEMENTS) as run:
            deaf, goes = run.members[0], run.members[2]
            deaf.channel.silent = True
            await goes.client.leave("done")
            await asyncio.sleep(0.5)
            assert goes.peer in known_to(deaf)
            deaf.channel.silent = False
            heard = _Heard(deaf.channel)
            await goes.client.join()
            await asyncio.sleep(3 * deaf.client.deadlines.heartbeat_s)
            assert deaf.client._roster_version == run.coordinator.machine.scope.membership.roster_version
            assert [view.roster for view in heard.views] == [None] * len(heard.views)
            entries = {one.peer: one for one in run.coordinator.machine.scope.membership.roster()}
            assert deaf.client._roster == entries

    run_virtual(main())


def test_changes_of_a_version_that_is_not_known_here_change_nothing() -> None:
    async def main() -> None:
        async with swarm(2, run_toml(8), ELEMENTS) as run:
            one, before = run.members[0], known_to(run.members[0])
            version = one.client._roster_version
            for since, newest in ((version + 1, version + 2), (version - 2, version - 1)):
                delta = RosterDelta(since=since, changed=(), removed=tuple(before))
                update = {"roster": None, "roster_delta": delta, "roster_version": newest}
                await one.channel.push(CoordinatorToPeerView(view=one.client.view.model_copy(update=update)))
                assert (known_to(one), one.client._roster_version) == (before, version)

    run_virtual(main())


def test_a_coordinator_that_was_started_again_tells_the_whole_roster() -> None:
    async def main() -> None:
        async with swarm(2, run_toml(8), ELEMENTS) as run:
            heard = _Heard(run.members[0].channel)
            run.coordinator.restart()
            await asyncio.sleep(3 * run.members[0].client.deadlines.heartbeat_s)
            assert any(view.roster for view in heard.views)
            assert known_to(run.members[0]) == sorted(one.peer for one in run.members)

    run_virtual(main())


def test_nobody_is_called_in_our_own_network_for_a_coordinator_out_in_the_internet() -> None:
    async def main() -> None:
        async with swarm(2, run_toml(8), ELEMENTS) as run:
            one = run.members[0]
            assert {entry.reachable for entry in one.client._roster.values()} == {True}
            one.channel.remote_host = "8.8.8.8"
            await one.client.rejoin()
            await asyncio.sleep(3 * one.client.deadlines.heartbeat_s)
            assert {entry.address.host for entry in one.client._roster.values()} == {"127.0.0.1"}
            assert {entry.reachable for entry in one.client._roster.values()} == {False}

    run_virtual(main())


# Joining ------------------------------------------------------------------------------------------------------


def test_who_finds_no_place_waits_for_one_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with swarm(2, run_toml(8), ELEMENTS) as run:
            client = run.members[0].client
            run.coordinator.refusals = [TryLater("the run is full: try again in 4 s") for _ in range(6)]
            began_s = asyncio.get_running_loop().time()
            await client.join_in_time()
            took_s = asyncio.get_running_loop().time() - began_s
            assert 0.5 * (1 + 2 + 4 + 8 + 15 + 15) < took_s < 46
            assert caplog.text.count("cannot join yet, trying again soon: the run is full") == 6
            run.coordinator.refusals = [TryLater("full")]
            with pytest.raises(TryLater):
                await client.join()

    run_virtual(main())


def test_what_waiting_does_not_help_against_is_raised_at_once() -> None:
    async def main() -> None:
        async with swarm(1, run_toml(8), ELEMENTS) as run:
            run.coordinator.refusals = [TryLater("full"), NotAdmitted("a private address")]
            with pytest.raises(NotAdmitted):
                await run.members[0].client.join_in_time()

    run_virtual(main())


# Callers ------------------------------------------------------------------------------------------------------


def test_a_caller_is_awaited_until_a_roster_of_after_its_call_is_here_however_late_that_comes() -> None:
    async def main() -> None:
        async with swarm(3, run_toml(12), ELEMENTS) as run:
            late, comes = run.members[0], run.members[2]
            key, late_s = comes.channel.own_keys.public, late.client.deadlines.request_s
            assert comes.task is not None
            comes.task.cancel()
            await comes.client.leave("done")
            await asyncio.sleep(1.0)
            assert not late.client.node.knows_key(key)
            run.coordinator.pushes = False
            await comes.client.join()
            late.channel.silent = True  # a machine so busy that the answers to its heartbeats are lost
            call = asyncio.create_task(late.client.admit(key))
            await asyncio.sleep(late_s)
            assert not call.done()
            late.channel.silent = False
            assert await call

    run_virtual(main())


def test_a_stranger_is_refused_as_soon_as_the_next_heartbeat_has_its_answer() -> None:
    async def main() -> None:
        async with swarm(2, run_toml(8), ELEMENTS) as run:
            client = run.members[0].client
            start_s = asyncio.get_running_loop().time()
            assert not await client.admit(bytes(32))
            assert asyncio.get_running_loop().time() - start_s < 2 * client.deadlines.heartbeat_s
            run.coordinator.away = True
            start_s = asyncio.get_running_loop().time()
            assert not await client.admit(bytes(32))
            assert asyncio.get_running_loop().time() - start_s == pytest.approx(client.deadlines.dead_s)

    run_virtual(main())
