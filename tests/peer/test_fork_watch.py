"""Members compare verdicts: only two signed ones of one round, of this run, stop a peer. On the virtual clock."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.fakes.memory_coordinator import identity
from tests.fakes.swarm import SimMember, Swarm, run_toml, swarm, together
from tests.fakes.virtual_clock import run_virtual

from shoal.peer.history.fork_watch import ForkProof, ForkWatch, read_proof
from shoal.peer.history.history_file import HistoryOrigin
from shoal.swarm.errors import CoordinatorForked, StateFileError, WireError
from shoal.swarm.protocol.messages import PeerToPeerCompareVerdict, PeerToPeerOtherVerdict, PeerToPeerShowVerdict
from shoal.swarm.protocol.rounds import Verdict
from shoal.swarm.protocol.types import Message
from shoal.swarm.protocol.verdict_chain import chain_hash, signed_bytes

ELEMENTS = 4096


class Wire:
    """Nodes of watches that hear each other at once."""

    def __init__(self) -> None:
        self.nodes: dict[str, Any] = {}
        self.answers: dict[str, Verdict] = {}
        """What a liar answers to every comparison, by peer."""
        self.asked = 0

    def node(self, member: SimMember) -> Any:
        peer, handlers = member.client.peer, {}

        async def ask(to: str, message: Message, reply: type, wait_s: float, scope: int = 0) -> Message:
            self.asked += 1
            if to in self.answers and isinstance(message, PeerToPeerCompareVerdict):
                return PeerToPeerOtherVerdict(verdict=self.answers[to])
            return await self.nodes[to].handlers[type(message)](SimpleNamespace(remote_key=peer.encode()), message)

        self.nodes[peer] = SimpleNamespace(
            handlers=handlers,
            control=SimpleNamespace(handle=lambda kind, handler, scope: handlers.__setitem__(kind, handler)),
            trainers=lambda scope: list(self.nodes),
            knows_key=lambda key: True,
            ask=ask,
        )
        return self.nodes[peer]


class Watched:
    def __init__(self, member: SimMember, wire: Wire, folder: Path) -> None:
        self.folder = folder / member.client.peer
        self.folder.mkdir()
        self.client = member.client
        self.watch = ForkWatch(member.client, wire.node(member), self.folder, random.Random(0))
        self.error: CoordinatorForked | None = None

    async def run(self) -> None:
        try:
            await self.watch.run()
        except CoordinatorForked as error:
            self.error = error

    @property
    def proofs(self) -> list[Path]:
        return list(self.folder.glob("*.fork"))


@asynccontextmanager
async def watched(folder: Path, members: int = 2) -> AsyncIterator[tuple[Swarm, Wire, list[Watched]]]:
    async with swarm(members, run_toml(4 * members), ELEMENTS) as run, asyncio.TaskGroup() as tasks:
        wire = Wire()
        all_of_them = [Watched(member, wire, folder) for member in run.members]
        running = [tasks.create_task(one.run()) for one in all_of_them]
        yield run, wire, all_of_them
        for task in running:
            task.cancel()


async def play(run: Swarm) -> Verdict:
    await together(*(member.play(torch.ones(ELEMENTS), 4) for member in run.members))
    await asyncio.sleep(5.0)
    verdict = run.coordinator.machine.scope.verdict
    assert verdict is not None
    return verdict


def forged(run: Swarm, verdict: Verdict, signer: Any = None, **changes: object) -> Verdict:
    changed = verdict.model_copy(update={"loss": 0.25, **changes})
    chain = chain_hash(changed)
    signature = (signer or run.coordinator.identity).sign(signed_bytes(chain))
    return changed.model_copy(update={"chain": chain, "signature": signature})


def test_members_with_the_same_verdicts_go_on(tmp_path: Path) -> None:
    async def main() -> None:
        async with watched(tmp_path) as (run, wire, both):
            for _ in range(3):
                await play(run)
            assert wire.asked == 6, "each compares each"
            assert all(one.error is None and not one.proofs for one in both)

    run_virtual(main())


def test_two_members_with_different_verdicts_both_get_the_proof(tmp_path: Path) -> None:
    async def main() -> None:
        async with watched(tmp_path) as (run, wire, both):
            wire.nodes[both[1].client.peer].trainers = lambda scope: []  # it asks nobody, and is shown
            verdict = await play(run)
            told = forged(run, verdict, round=verdict.round + 1)
            both[1].watch._verdicts[told.round] = told
            both[1].watch._is_new = lambda one: False  # it has been told nothing else
            await play(run)
            for one in both:
                assert one.error is not None
                (path,) = one.proofs
                assert str(path) in str(one.error)
                assert told in (read_proof(path).first, read_proof(path).second)

    run_virtual(main())


@pytest.mark.parametrize("lie", ["unsigned", "other host", "other run", "other round"])
def test_nothing_less_than_two_signed_verdicts_of_one_round_stops_a_peer(tmp_path: Path, lie: str) -> None:
    async def main() -> None:
        async with watched(tmp_path) as (run, wire, both):
            verdict = await play(run)
            told = {
                "unsigned": verdict.model_copy(update={"loss": 0.25, "chain": bytes(32)}),
                "other host": forged(run, verdict, identity(77)),
                "other run": forged(run, verdict, run_hash=b"o" * 32),
                "other round": forged(run, verdict, round=verdict.round + 7),
            }[lie]
            handler = wire.nodes[both[0].client.peer].handlers[PeerToPeerShowVerdict]
            channel: Any = SimpleNamespace(remote_key=b"liar")
            if lie == "other round":
                await handler(channel, PeerToPeerShowVerdict(verdict=told))  # it knows nothing of that round
            else:
                for _ in range(3):
                    with pytest.raises(WireError):
                        await handler(channel, PeerToPeerShowVerdict(verdict=told))
                with pytest.raises(WireError, match="too many"):
                    await handler(channel, PeerToPeerShowVerdict(verdict=told))
            wire.answers[both[1].client.peer] = told
            await play(run)
            assert both[0].error is None
            assert not both[0].proofs

    run_virtual(main())


def test_verdicts_of_two_stages_on_one_round_prove_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        async with watched(tmp_path) as (run, _, (one, _)):
            verdict = await play(run)
            origin = HistoryOrigin(run_toml=one.client.run_toml, coordinator=one.client.coordinator, scope=2)
            told = {stage: forged(run, verdict, stage=stage, together=b"t" * 32) for stage in (None, 0, 1)}
            for stage in (None, 0):
                with pytest.raises(WireError, match="another run or stage"):
                    ForkProof(origin, told[1], told[stage]).check()
            same = {"stage": 1, "together": b"t" * 32}
            ForkProof(origin, told[1], forged(run, verdict, loss=0.5, **same)).check()  # whatever else they name

    run_virtual(main())


def test_only_the_newest_verdicts_are_kept(tmp_path: Path) -> None:
    async def main() -> None:
        async with watched(tmp_path, members=1) as (run, wire, (one,)):
            for number in range(-100, 0):
                one.watch._verdicts[number] = one.watch._verdicts.get(number, None)  # type: ignore[assignment]
            await play(run)
            assert len(one.watch._verdicts) == 32
            assert wire.asked == 0, "there is nobody to ask"

    run_virtual(main())


def test_a_file_that_proves_nothing_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        async with watched(tmp_path) as (run, _, both):
            verdict = await play(run)
            both[1].watch._verdicts[verdict.round + 1] = forged(run, verdict, round=verdict.round + 1)
            await play(run)
            path = both[0].proofs[0]
            data = path.read_bytes()
            for damage in (data[:-1], data[:100], b"", data[:-70] + bytes(70)):
                path.write_bytes(damage)
                with pytest.raises(StateFileError, match=path.name):
                    read_proof(path)

    run_virtual(main())
