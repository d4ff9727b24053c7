"""A member's history: complete whenever the member joined, and a help when all processes start anew."""

import asyncio
from pathlib import Path

import pytest
import torch
from tests.fakes.memory_coordinator import MemoryChannel
from tests.fakes.swarm import SimMember, Swarm, run_toml, swarm, together
from tests.fakes.virtual_clock import run_virtual, until

from shoal.peer.history.history_file import unpack_history
from shoal.peer.history.history_sync import HistorySync
from shoal.swarm.coordinator.events import VerdictGiven
from shoal.swarm.protocol.messages import PeerToCoordinatorGetVerdicts, PeerToCoordinatorShowVerdict
from shoal.swarm.protocol.rounds import Verdict
from shoal.swarm.protocol.types import Message

ELEMENTS = 4096


async def play(run: Swarm, rounds: int) -> None:
    for _ in range(rounds):
        await together(*(member.play(torch.ones(ELEMENTS), 4) for member in run.members))


class Keeping:
    """A member's synchronisation and the file that it writes."""

    def __init__(self, member: SimMember, path: Path, tasks: asyncio.TaskGroup) -> None:
        self.path = path
        self.client = member.client
        self.keeper = HistorySync(member.client, path)
        self.task = tasks.create_task(self.keeper.run())

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        return unpack_history(self.path.read_bytes(), "").verdicts if self.path.exists() else ()


def tear(path: Path) -> None:
    """Leave the file as a killed process leaves it."""
    with path.open("ab") as file:
        file.write(b"\x8e\xa5round")


def put_aside(folder: Path) -> int:
    return len(list(folder.glob("*.old")))


def told(run: Swarm) -> tuple[Verdict, ...]:
    return tuple(event.verdict for event in run.coordinator.verdicts(0, 10**6))


@pytest.mark.parametrize("from_round", [0, 3])
def test_a_member_knows_the_whole_history_whenever_it_came(tmp_path: Path, from_round: int) -> None:
    async def main() -> None:
        async with swarm(2, run_toml(8), ELEMENTS) as run, asyncio.TaskGroup() as tasks:
            await play(run, from_round)
            keeping = Keeping(run[0], tmp_path / "history.msgpack", tasks)
            await play(run, 2)
            await until(lambda: keeping.verdicts == told(run), 0.1)
            assert len(told(run)) == from_round + 2
            keeping.task.cancel()

    run_virtual(main())


def test_what_was_missed_while_the_member_was_away_is_fetched(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(2, run_toml(8), ELEMENTS) as run, asyncio.TaskGroup() as tasks:
            first = Keeping(run[0], tmp_path / "history.msgpack", tasks)
            await play(run, 1)
            await until(lambda: first.verdicts == told(run), 0.1)
            first.task.cancel()
            await play(run, 3)
            tear(tmp_path / "history.msgpack")
            again = Keeping(run[0], tmp_path / "history.msgpack", tasks)
            await until(lambda: again.verdicts == told(run), 0.1)
            assert len(told(run)) == 4
            again.task.cancel()

    run_virtual(main())


def test_the_history_waits_for_a_coordinator_that_is_away(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(2, run_toml(8), ELEMENTS) as run, asyncio.TaskGroup() as tasks:
            await play(run, 2)
            run.coordinator.away = True
            keeping = Keeping(run[0], tmp_path / "history.msgpack", tasks)
            await asyncio.sleep(30.0)
            assert keeping.verdicts == ()
            run.coordinator.restart()
            await until(lambda: keeping.verdicts == told(run), 0.1)
            keeping.task.cancel()

    run_virtual(main())


def test_another_history_of_the_same_coordinator_replaces_ours(tmp_path: Path) -> None:
    path = tmp_path / "history.msgpack"

    async def main(rounds: int, others: int) -> None:
        async with swarm(2, run_toml(8), ELEMENTS, latency_s=0.01 * rounds) as run, asyncio.TaskGroup() as tasks:
            run.coordinator.machine.log.unix_offset_s = rounds
            await play(run, 1)
            keeping = Keeping(run[0], path, tasks)
            await play(run, rounds - 1)
            await until(lambda: keeping.verdicts == told(run), 0.1)
            assert len(told(run)) == rounds
            assert put_aside(tmp_path) == others
            keeping.task.cancel()

    run_virtual(main(3, 0))
    run_virtual(main(2, 1))
    run_virtual(main(4, 2))


def test_a_coordinator_that_has_lost_rounds_takes_none_from_us(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(2, run_toml(8), ELEMENTS) as run, asyncio.TaskGroup() as tasks:
            keeping = Keeping(run[0], tmp_path / "history.msgpack", tasks)
            await play(run, 3)
            await until(lambda: keeping.verdicts == told(run), 0.1)
            before = keeping.verdicts
            newest = run[0].client.view
            older = newest.model_copy(
                update={"sequence": newest.sequence + 1, "verdict": before[1], "verdict_chain": before[1].chain}
            )
            run[0].client._apply_view(older)
            await asyncio.sleep(20.0)
            assert keeping.verdicts == before
            assert put_aside(tmp_path) == 0
            keeping.task.cancel()

    run_virtual(main())


# Members that start anew, and what they kept ----------------------------------------------------------------


async def all_start_anew(run: Swarm, lost: int) -> None:
    """Restart all, the coordinator from a journal that lacks the newest verdicts. Only what is on disk is
    remembered."""
    given = [number for number, event in enumerate(run.coordinator.events) if isinstance(event, VerdictGiven)]
    run.coordinator.away = True
    del run.coordinator.events[given[-lost] :]
    run.coordinator.restart()
    for member in run.members:
        member.client._view = None
        await member.client.join()
        assert member.view.round == len(given) - lost


@pytest.mark.parametrize(("lost", "known"), [(2, True), (3, True), (2, False)])
def test_an_outdated_copy_is_told_by_the_history_on_disk(tmp_path: Path, lost: int, known: bool) -> None:
    """Of three rounds the copy lacks two, or all: too many to be taken over."""

    async def main() -> None:
        async with swarm(2, run_toml(8), ELEMENTS) as run, asyncio.TaskGroup() as tasks:
            keeping = Keeping(run[0], tmp_path / "history.msgpack", tasks)
            await play(run, 3)
            await until(lambda: keeping.verdicts == told(run), 0.1)
            keeping.task.cancel()
            await all_start_anew(run, lost)
            if not known:
                (tmp_path / "history.msgpack").unlink()
            again = Keeping(run[0], tmp_path / "history.msgpack", tasks)
            await asyncio.sleep(20.0)
            assert run.coordinator.is_outdated == known
            assert put_aside(tmp_path) == 0
            again.task.cancel()

    run_virtual(main())


def test_the_verdict_that_a_coordinator_lost_is_in_the_history_on_disk(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm(2, run_toml(8), ELEMENTS) as run, asyncio.TaskGroup() as tasks:
            keeping = Keeping(run[0], tmp_path / "history.msgpack", tasks)
            await play(run, 3)
            await until(lambda: keeping.verdicts == told(run), 0.1)
            before = told(run)
            keeping.task.cancel()
            await all_start_anew(run, 1)
            again = Keeping(run[0], tmp_path / "history.msgpack", tasks)
            await run[0].client.wait_for(lambda view: view.round == 3, 20.0)
            assert told(run) == before == again.verdicts
            assert not run.coordinator.is_outdated
            again.task.cancel()

    run_virtual(main())


def test_missed_rounds_are_read_here_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with swarm(2, run_toml(8), ELEMENTS) as run, asyncio.TaskGroup() as tasks:
            keeping = Keeping(run[0], tmp_path / "history.msgpack", tasks)
            assert await keeping.keeper.since(0) == []
            await play(run, 3)
            await until(lambda: keeping.verdicts == told(run), 0.1)
            keeping.task.cancel()
            await play(run, 2)
            asked: list[int] = []
            answer = run.coordinator.answer

            async def watched(channel: MemoryChannel, message: Message) -> Message:
                if isinstance(message, PeerToCoordinatorGetVerdicts):
                    asked.append(message.first)
                return await answer(channel, message)

            monkeypatch.setattr(run.coordinator, "answer", watched)
            assert await keeping.keeper.since(1) == list(told(run)[1:])
            assert asked == [3]
            keeping.path.unlink()
            assert await keeping.keeper.since(1) == list(told(run)[1:])

    run_virtual(main())


def test_missed_rounds_are_not_read_from_another_history(tmp_path: Path) -> None:
    path = tmp_path / "history.msgpack"

    async def main(rounds: int) -> None:
        async with swarm(2, run_toml(8), ELEMENTS) as run, asyncio.TaskGroup() as tasks:
            run.coordinator.machine.log.unix_offset_s = rounds
            await play(run, rounds)
            keeping = Keeping(run[0], path, tasks)
            if rounds == 3:
                await until(lambda: keeping.verdicts == told(run), 0.1)
            else:
                await until(lambda: keeping.keeper._file is not None, 0.001)
                assert keeping.keeper._file.verdicts() != told(run)  # type: ignore[union-attr]
                assert await keeping.keeper.since(0) == list(told(run))
            keeping.task.cancel()

    for rounds in (3, 5, 2):
        run_virtual(main(rounds))


def test_a_restarted_member_believes_no_coordinator_that_was_followed_by_that_of_its_history(tmp_path: Path) -> None:
    """Its first view may come from one that was paused: it is away for this member, until another one leads."""
    path = tmp_path / "history.msgpack"

    async def before() -> None:
        async with swarm(1, run_toml(8), ELEMENTS) as run, asyncio.TaskGroup() as tasks:
            run.coordinator.machine.log.epoch += 7
            keeping = Keeping(run[0], path, tasks)
            await play(run, 1)
            await until(lambda: keeping.verdicts == told(run), 0.1)
            keeping.task.cancel()

    async def after() -> None:
        async with swarm(1, run_toml(8), ELEMENTS) as run, asyncio.TaskGroup() as tasks:
            client, log = run[0].client, run.coordinator.machine.log
            first = client.view
            run.coordinator.deaf_to = {PeerToCoordinatorShowVerdict}  # by which it would know that it was followed
            keeping = Keeping(run[0], path, tasks)
            await asyncio.sleep(3 * client.deadlines.heartbeat_s)
            assert client.coordinator_is_away
            assert client.view is first
            log.epoch += 7
            await asyncio.sleep(3 * client.deadlines.heartbeat_s)
            assert not client.coordinator_is_away
            assert client.view.epoch == log.epoch
            keeping.task.cancel()

    run_virtual(before())
    run_virtual(after())
