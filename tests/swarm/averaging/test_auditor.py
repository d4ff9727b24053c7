"""Auditors draw chunks by private randomness, fetch what their makers included, and accuse by evidence alone."""

import asyncio
import math
import random
import resource
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.fakes.audits import MEMBERS, AuditedRound, committed_round, facts
from tests.fakes.memory_network import Step
from tests.fakes.swarm import SimMember, run_toml, swarm, together
from tests.fakes.virtual_clock import run_virtual

from shoal.swarm.averaging import spooled_chunks
from shoal.swarm.averaging.auditor import Auditor, ChosenChunk, choose, unsigned_owners
from shoal.swarm.averaging.averager import Averager
from shoal.swarm.averaging.chunk_judge import judge
from shoal.swarm.averaging.inclusions import Inclusions, audits_a_round
from shoal.swarm.averaging.outcome import Committed
from shoal.swarm.deadlines import Deadlines
from shoal.swarm.errors import (
    BlobUnavailable,
    Busy,
    DeadlineExceeded,
    LinkError,
    NotAdmitted,
    StorageError,
    TryLater,
)
from shoal.swarm.protocol.evidence import unpack_evidence

ME = 0
"""Everybody owns two of the six chunks."""
ALL = {one.peer_id for one in MEMBERS}


async def nobody_lies(evidence: bytes) -> None:
    raise AssertionError("nobody lies here")


def auditor_of(
    done: AuditedRound, accuse: Callable[[bytes], Awaitable[None]] = nobody_lies, share: float = 1.0
) -> Auditor:
    me = MEMBERS[ME].peer_id
    return Auditor(done.network.endpoints[me], me, share, Deadlines(6.0), accuse, random.Random(1))


async def audited(done: AuditedRound, rounds: int = 1, share: float = 1.0) -> tuple[Auditor, list[bytes]]:
    """Let the first member audit the round some times, as if it were as many rounds."""
    accused: list[bytes] = []

    async def accuse(evidence: bytes) -> None:
        accused.append(evidence)

    auditor = auditor_of(done, accuse, share)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(auditor.run())
        for _ in range(rounds):
            for kept in done.inclusions:
                kept._streams.clear()
            auditor.offer(done.sides[ME].store, done.verdict)
            await asyncio.sleep(10.0)
        running.cancel()
    return auditor, accused


def test_honest_owners_are_accused_of_nothing() -> None:
    async def main() -> None:
        auditor, accused = await audited(await committed_round(), rounds=3)
        assert auditor.audited >= 6
        assert auditor.audited_bytes > 0
        assert accused == []

    run_virtual(main())


def test_evidence_names_the_liar_and_nobody_else() -> None:
    async def main() -> None:
        done = await committed_round(liar=1)
        _, accused = await audited(done, rounds=4)
        assert accused
        found = [judge(data, facts("int8")) for data in accused]
        assert {(one.word, one.maker) for one in found} == {("guilty", MEMBERS[1].peer_id)}
        assert {unpack_evidence(data).chunk for data in accused} <= {2, 3}

    run_virtual(main())


def test_own_and_void_parts_are_not_drawn() -> None:
    async def main() -> None:
        done = await committed_round()
        digests = done.verdict.digests
        verdict = done.verdict.model_copy(update={"digests": (*digests[:2], None)})
        store, me = done.sides[ME].store, MEMBERS[ME].peer_id
        drawn = {one for seed in range(50) for one in choose(store, verdict, me, ALL, 1.0, random.Random(seed))}
        assert drawn == {ChosenChunk(1, 2, 1), ChosenChunk(1, 3, 1)}

    run_virtual(main())


def test_every_chunk_is_drawn_as_often_as_the_share_says() -> None:
    async def main() -> None:
        done = await committed_round()
        store, me, rng, share, rounds = done.sides[ME].store, MEMBERS[ME].peer_id, random.Random(7), 0.15, 4000
        draws = [choose(store, done.verdict, me, ALL, share, rng) for _ in range(rounds)]
        drawn = Counter(one.chunk for draw in draws for one in draw)
        expected = audits_a_round(share, 3, store.chunks)
        assert expected == pytest.approx(0.4)
        assert drawn.total() / rounds == pytest.approx(expected, rel=0.05)
        assert set(drawn) == {2, 3, 4, 5}
        assert max(drawn.values()) < 1.2 * min(drawn.values())

    run_virtual(main())


def test_makers_that_were_not_checked_yet_are_looked_at_first() -> None:
    """A share of 0.1 is 0.27 chunks a round here, so five times that is one in each round."""

    async def main() -> None:
        done = await committed_round()
        store, me, rng, others = (
            done.sides[ME].store,
            MEMBERS[ME].peer_id,
            random.Random(7),
            ALL - {MEMBERS[ME].peer_id},
        )
        draws = [choose(store, done.verdict, me, {MEMBERS[2].peer_id}, 0.1, rng) for _ in range(200)]
        assert all(any(one.maker == 1 for one in draw) for draw in draws)
        rarely = [choose(store, done.verdict, me, set(), 0.01, rng) for _ in range(2000)]
        assert sum(map(len, rarely)) / 2000 == pytest.approx(6 * audits_a_round(0.01, 3, store.chunks), rel=0.2)
        auditor, _ = await audited(done, rounds=2, share=0.1)
        assert auditor._known == others

    run_virtual(main())


def test_the_bytes_of_audits_are_the_share_of_the_rounds() -> None:
    """Contributions and means of the same codec: what the first member receives, in and after many rounds."""

    async def main() -> None:
        done = await committed_round()
        me = MEMBERS[ME].peer_id
        carried = sum(size for (_, to), size in done.network.moved_bytes.items() if to == me)
        auditor, _ = await audited(done, rounds=60, share=0.3)
        assert auditor.audited_bytes / (60 * carried) == pytest.approx(0.3, rel=0.15)

    run_virtual(main())


Fault = Callable[[Step, bytes], bytes]


@pytest.mark.parametrize(
    "fault",
    [lambda payload: b"", lambda payload: payload[:-1] + bytes([payload[-1] ^ 1]), lambda payload: payload + b"x"],
    ids=["nothing", "other bytes", "too many bytes"],
)
def test_an_owner_that_shows_something_else_is_not_accused(fault: Callable[[bytes], bytes]) -> None:
    """What it shows proves nothing: anybody could have sent it."""

    async def main() -> None:
        done = await committed_round()

        async def changed(step: Step, payload: bytes) -> bytes:
            return fault(payload) if step.blob.kind == "included" else payload

        done.network.faults.append(changed)
        auditor, accused = await audited(done)
        assert (auditor.audited, accused) == (0, [])
        assert auditor.accused(3 + 8)
        assert auditor.accused(3 + 8) <= {MEMBERS[1].peer_id, MEMBERS[2].peer_id}
        assert auditor.accused(3 + 9) == set()

    run_virtual(main())


def test_an_owner_that_signs_nothing_or_a_part_of_its_part_is_accused() -> None:
    async def main() -> None:
        done = await committed_round(made={1: ((2, 3),)})
        auditor, accused = await audited(done)
        assert accused == []
        assert auditor.accused(3 + 2) == {MEMBERS[1].peer_id}
        assert auditor.accused(3 + 3) == set()
        honest = await committed_round()
        makers = (*honest.verdict.makers[:2], None)
        verdict = honest.verdict.model_copy(update={"makers": makers})
        assert list(unsigned_owners(honest.sides[ME].store, verdict)) == [MEMBERS[2].peer_id]
        verdict = honest.verdict.model_copy(update={"makers": ()})
        assert len(list(unsigned_owners(honest.sides[ME].store, verdict))) == 3
        (*_, made) = honest.verdict.makers
        assert made is not None
        for chunks, owing in [(made.chunks, 0), (((5, 6),), 1)]:
            stand_in = made.model_copy(update={"member": 1, "chunks": chunks})
            others = honest.verdict.model_copy(update={"makers": (*honest.verdict.makers[:2], stand_in)})
            named = list(unsigned_owners(honest.sides[ME].store, others))
            assert named == [MEMBERS[2].peer_id] * owing, "a stand-in does not sign for what it adopted"
        void = verdict.model_copy(update={"digests": (None, None, None)})
        assert list(unsigned_owners(honest.sides[ME].store, void)) == []

    run_virtual(main())


class Audited(SimMember):
    """A member that audits as much as it can."""

    async def _make_averager(self, tasks: asyncio.TaskGroup) -> Averager:
        averager = await super()._make_averager(tasks)
        rng, deadlines = random.Random(self.peer), self.client.deadlines
        averager.auditor = Auditor(self.endpoint, self.client.peer, 1.0, deadlines, nobody_lies, rng)
        return averager

    async def _live(self) -> None:
        assert self.averager.auditor is not None
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(super()._live())
            tasks.create_task(self.averager.auditor.run())


@pytest.mark.parametrize("shows", [True, False])
def test_who_shows_nothing_owns_nothing_for_a_while(shows: bool) -> None:
    async def main() -> None:
        toml = run_toml(30, "int8") + "[audit]\nshare = 1.0\n"
        async with swarm(3, toml, 6 * 4096, make=Audited) as run:
            hiding = run[0]

            async def hide(step: Step, payload: bytes) -> bytes:
                return b"" if step.blob.kind == "included" and step.holder == hiding.peer and not shows else payload

            run.network.faults.append(hide)
            owned: list[bool] = []
            for number in range(6):
                plays = [one.play(torch.ones(6 * 4096) * number, 10) for one in run.members]
                assert all(isinstance(one, Committed) for one in await together(*plays))
                verdict = run[1].view.verdict
                assert verdict is not None
                assert verdict.plan is not None
                owned.append(0 in {part.owner for part in verdict.plan.parts})
                await asyncio.sleep(5.0)
            assert owned[0]
            assert all(owned) == shows

    run_virtual(main())


def test_rounds_that_makers_do_not_show_any_more_are_not_audited() -> None:
    """Of short rounds an auditor may not get all done before the next verdict but one, at which makers drop them."""

    async def main() -> None:
        done = await committed_round()

        async def slow(step: Step, payload: bytes) -> bytes:
            await asyncio.sleep(0.5)
            return payload

        done.network.faults.append(slow)
        nothing = done.verdict.model_copy(update={"round": 4, "digests": (None,) * 3, "makers": ()})
        auditor = auditor_of(done)
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(auditor.run())
            auditor.offer(done.sides[ME].store, done.verdict)
            await asyncio.sleep(1.0)
            auditor.offer(done.sides[ME].store, nothing)
            await asyncio.sleep(1.0)
            for kept in done.inclusions:
                kept.close()
            await asyncio.sleep(20.0)
            running.cancel()
        assert auditor.audited == 1
        assert auditor.accused(4) == set()

    run_virtual(main())


def test_a_maker_that_shows_slowly_keeps_nobody_from_the_others() -> None:
    """Each place comes before its deadline, and all of them long after."""

    async def main() -> None:
        done = await committed_round(liar=2)
        endpoint = done.network.endpoints[MEMBERS[ME].peer_id]
        real = endpoint.fetch

        async def fetch(peer: str, *args: Any) -> AsyncGenerator[int, None]:
            async with aclosing(real(peer, *args)) as stream:
                async for place in stream:
                    await asyncio.sleep(2.8 if peer == MEMBERS[1].peer_id else 0.0)
                    yield place

        endpoint.fetch = fetch  # type: ignore[method-assign]
        auditor, accused = await audited(done, rounds=4)
        assert {judge(data, facts("int8")).maker for data in accused} == {MEMBERS[2].peer_id}
        assert auditor._known == {MEMBERS[2].peer_id}
        assert auditor.accused(4) == {MEMBERS[1].peer_id}

    run_virtual(main())


@pytest.mark.parametrize("error", [TryLater, NotAdmitted], ids=["no room", "no credit yet"])
def test_evidence_that_is_not_taken_is_shown_again(error: type[LinkError]) -> None:
    async def main() -> None:
        done = await committed_round(liar=1)
        shown: list[bytes] = []

        async def accuse(evidence: bytes) -> None:
            shown.append(evidence)
            if len(shown) <= 2:
                raise error("not now")

        void = done.verdict.model_copy(update={"digests": (None,) * 3, "makers": ()})
        auditor = auditor_of(done, accuse)
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(auditor.run())
            auditor.offer(done.sides[ME].store, done.verdict)
            await asyncio.sleep(10.0)
            first = len(shown)
            for number in (4, 5, 6, 7):
                auditor.offer(done.sides[ME].store, void.model_copy(update={"round": number}))
                await asyncio.sleep(10.0)
            running.cancel()
        assert first
        assert len(shown) == max(3, first)
        assert judge(shown[-1], facts("int8")).maker == MEMBERS[1].peer_id

    run_virtual(main())


def test_dropped_results_end_no_auditor() -> None:
    async def main() -> None:
        done, later = await committed_round(), await committed_round(liar=1)
        await done.sides[ME].store.close()
        await audited(done)
        _, accused = await audited(later, rounds=3)
        assert accused

    run_virtual(main())


# What owners keep ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory_bytes", [2**24, 1000], ids=["in memory", "in a file"])
def test_an_owner_keeps_what_it_included(memory_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spooled_chunks, "_MEMORY_BYTES", memory_bytes)

    async def main() -> None:
        done = await committed_round()
        side = done.sides[1]
        kept = Inclusions(side.store, 1.0, tmp_path / "serving")
        size = side.store.leaf_grid.chunk_bytes(*side.store.bounds(2))
        data = {(chunk, member): bytes([chunk, member]) * (size // 2) for chunk in (2, 3) for member in range(3)}
        for (chunk, member), one in data.items():
            kept.keep(chunk, member, memoryview(one))
        assert {(i // 3, i % 3): bytes(await kept.chunk(i)) for i in range(6, 12)} == data
        assert bytes(await kept.chunk(0)) == b"", "not ours"
        kept.close()
        kept.keep(2, 0, memoryview(b"late"))
        with pytest.raises(BlobUnavailable):
            await kept.chunk(6)

    run_virtual(main())


def test_a_full_disk_stops_no_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spooled_chunks, "_MEMORY_BYTES", 10)
    (tmp_path / "serving").write_text("a file where the folder should be")

    async def main() -> None:
        done = await committed_round()
        kept = Inclusions(done.sides[1].store, 1.0, tmp_path / "serving")
        kept.keep(2, 0, memoryview(bytes(100)))
        with pytest.raises(BlobUnavailable):
            await kept.chunk(6)

    run_virtual(main())


def test_a_disk_that_becomes_full_stops_no_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing the file tries once more to write what did not fit."""
    monkeypatch.setattr(spooled_chunks, "_MEMORY_BYTES", 10)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    async def main() -> None:
        kept = Inclusions((await committed_round()).sides[1].store, 1.0, tmp_path)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        try:
            for chunk in (2, 3):
                kept.keep(chunk, 0, memoryview(bytes(3000)))
            kept.keep(2, 1, memoryview(bytes(3000)))
            with pytest.raises(BlobUnavailable):
                await kept.chunk(6)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        kept.close()

    run_virtual(main())


def test_an_auditor_gets_no_more_than_its_share() -> None:
    async def main() -> None:
        kept = (await committed_round()).inclusions[1]
        kept.begin_reading(b"one")
        with pytest.raises(Busy):
            kept.begin_reading(b"one")
        for other in range(100):
            kept.begin_reading(b"slow" + bytes([other]))
        kept.end_reading(b"one")
        most = math.floor(4 * audits_a_round(1.0, 3, 6))
        for _ in range(most):
            kept.begin_reading(b"one")
            kept.end_reading(b"one")
        with pytest.raises(BlobUnavailable):
            kept.begin_reading(b"one")

    run_virtual(main())


@pytest.mark.parametrize("silent", [1, 2])
def test_a_member_that_does_not_answer_is_accused_unless_nobody_does(silent: int) -> None:
    """Where most members cannot be reached, it is this peer's link."""

    async def main() -> None:
        done = await committed_round()
        others = [one.peer_id for one in MEMBERS[1:]]
        endpoint = done.network.endpoints[MEMBERS[ME].peer_id]
        real = endpoint.fetch

        def fetch(peer: str, *args: Any) -> Any:
            if peer in others[:silent]:
                raise DeadlineExceeded("no answer")
            return real(peer, *args)

        endpoint.fetch = fetch  # type: ignore[method-assign]
        auditor, _ = await audited(done, rounds=4)
        assert auditor.audited == 0 or silent == 1
        assert auditor.accused(3 + 8) == (set(others[:1]) if silent == 1 else set())

    run_virtual(main())


def test_what_goes_wrong_here_is_no_fault_of_a_maker(monkeypatch: pytest.MonkeyPatch) -> None:
    """A coordinator that does not hear this peer, or a disk that is full."""

    def full(*_: object) -> bytes:
        raise StorageError("the disk is full")

    async def main() -> None:
        monkeypatch.setattr("shoal.swarm.averaging.auditor.make_evidence", full)
        auditor, accused = await audited(await committed_round(liar=1))
        assert auditor.audited > 0
        assert accused == []
        assert auditor.accused(4) == set()

    run_virtual(main())
