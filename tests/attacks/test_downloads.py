"""A guest and a trainer that download the state in a loop, over many streams, from a donor on real sockets."""

import asyncio
from collections import Counter
from contextlib import aclosing
from pathlib import Path

import pytest
import torch
from tests.swarm.network import LONG_S, Member, Sink, fetch, run, swarm_of

from shoal.peer.state_transfer.chunk_format import RAW
from shoal.peer.state_transfer.donor import StateDonor, digests_blob
from shoal.peer.state_transfer.download import StateDownload
from shoal.peer.state_transfer.partial_state import PartialState, WantedState
from shoal.peer.training.anchor import AnchorState
from shoal.swarm.errors import Busy
from shoal.swarm.protocol.types import RosterEntry
from shoal.swarm.transport.limits.download_quota import BEGIN_STATES, MAX_GUESTS, Reader
from shoal.swarm.transport.node import ScopedEndpoint

SIZE = 5 * 2**20
"""Elements of a state, which has 20 MiB: above those that count as small."""

STREAMS, TIMES = 4, 6
CHUNK = 2**20
STATE_BYTES = 4 * SIZE
CHUNKS = STATE_BYTES // CHUNK
MARGIN = 2 * BEGIN_STATES + (STREAMS + 1) / CHUNKS
"""States that a quota gives on top: its margin, and a chunk of each stream."""

STATE = AnchorState.of(torch.randn(1, SIZE, generator=torch.Generator().manual_seed(0)), 3)


class Guest(Member):
    """Looks at the run, by an invite for observers."""

    def entry(self) -> RosterEntry:
        return super().entry().model_copy(update={"role": "observer"})


class Attacker:
    """Downloads the state ``TIMES`` times over each of its streams. ``chunks``: that it got; ``refusals``: in words."""

    def __init__(self, member: Member, donor: Member) -> None:
        self.chunks = 0
        self.refusals: list[Busy] = []
        self._member, self._donor = member, donor

    @property
    def states(self) -> float:
        return self.chunks / CHUNKS

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(STREAMS):
                tasks.create_task(self._download_on_and_on())

    async def _download_on_and_on(self) -> None:
        for _ in range(TIMES):
            fetching = self._member.node.fetch(self._donor.peer, RAW.blob(3), range(CHUNKS), Sink(), LONG_S)
            try:
                async with aclosing(fetching) as stream:
                    async for _ in stream:
                        self.chunks += 1
            except Busy as error:
                self.refusals.append(error)


async def join(member: Member, donors: list[Member]) -> Counter[str]:
    """Join as an honest peer does; returns the chunks that each donor delivered."""
    delivered = Counter[str]()

    def report(event: str, **fields: object) -> None:
        if event == "state_fetched":
            delivered.update(fields["donors"])  # type: ignore[call-overload]

    partial = PartialState(WantedState(3, STATE.digest, (1, SIZE)))
    peers = [donor.peer for donor in donors]
    await StateDownload(member.node, partial, lambda: peers, LONG_S, report).run()
    assert torch.equal(partial.values, STATE.values)
    return delivered


@run
async def test_a_guest_that_downloads_in_a_loop_gets_one_state() -> None:
    async with swarm_of(Member(), Guest(), Member()) as (donor, guest, newcomer):
        StateDonor(donor.node, LONG_S).offer(STATE)
        attacker = Attacker(guest, donor)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(attacker.run())
            await join(newcomer, [donor])
        assert 1.0 <= attacker.states <= 1.0 + MARGIN
        assert all(one.retry_s > 60.0 for one in attacker.refusals), "so that it does not ask again and again"
        await join(newcomer, [donor])


@run
async def test_a_trainer_that_downloads_in_a_loop_gets_three_states() -> None:
    async with swarm_of(Member(), Member(), Member()) as (donor, trainer, newcomer):
        StateDonor(donor.node, LONG_S).offer(STATE)
        attacker = Attacker(trainer, donor)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(attacker.run())
            await join(newcomer, [donor])
        assert 3.0 <= attacker.states <= 3.0 + MARGIN
        assert attacker.refusals
        await join(newcomer, [donor])


@run
async def test_the_states_of_all_stages_that_a_donor_holds_count_as_one() -> None:
    stages = range(1, 6)
    async with swarm_of(Member(), Member()) as (donor, newcomer):
        for stage in stages:
            for one, other in ((donor, newcomer), (newcomer, donor)):
                one.node.update_roster((other.entry(),), scope=stage)
            StateDonor(ScopedEndpoint(donor.node, stage), LONG_S).offer(STATE)
        blobs = [RAW.blob(3).model_copy(update={"scope": stage}) for stage in stages]
        for blob in 3 * blobs:
            assert await fetch(newcomer, donor, Sink(), range(CHUNKS), blob=blob) == list(range(CHUNKS))
        with pytest.raises(Busy):
            await fetch(newcomer, donor, Sink(), range(CHUNKS), blob=blobs[0])


@run
async def test_guests_take_two_of_a_donors_places() -> None:
    guests = [Guest() for _ in range(6)]
    async with swarm_of(Member(), Member(), *guests) as (donor, newcomer, *_):
        offering = StateDonor(donor.node, LONG_S)
        offering.offer(STATE)
        held: list[object] = []
        refused = 0
        for guest in guests:
            stream = guest.node.fetch(donor.peer, RAW.blob(3), range(CHUNKS), Sink(), LONG_S)
            try:
                await anext(stream)  # and takes no more of it
                held.append(stream)
            except Busy:
                refused += 1
        assert len(held) == MAX_GUESTS
        assert refused == len(guests) - MAX_GUESTS
        await join(newcomer, [donor])
        for stream in held:
            await stream.aclose()  # type: ignore[attr-defined]


@run
async def test_who_has_no_quota_left_goes_on_at_another_donor_with_the_chunk_that_was_not_sent() -> None:
    async with swarm_of(Member(), Member(), Member()) as (spent, other, newcomer):
        for one in (spent, other):
            StateDonor(one.node, LONG_S).offer(STATE)
        for times in range(4):
            sink, got = Sink(), list[int]()
            try:
                async with aclosing(
                    newcomer.node.fetch(spent.peer, RAW.blob(3), range(CHUNKS), sink, LONG_S)
                ) as stream:
                    async for index in stream:
                        got.append(index)
            except Busy:
                assert times == 3
            assert got == list(range(len(got)))
            assert len(got) == CHUNKS if times < 3 else 0 < len(got) < CHUNKS
        assert await join(newcomer, [spent, other]) == {other.peer: CHUNKS}


@run
async def test_a_guest_without_quota_does_not_make_a_donor_write_its_states_to_disk(tmp_path: Path) -> None:
    async with swarm_of(Member(), Guest()) as (donor, guest):
        attacker = Attacker(guest, donor)
        offering = StateDonor(donor.node, LONG_S)
        offering.offer(STATE)
        await attacker.run()
        offering.folder = tmp_path / "serving"
        offering.offer(AnchorState.of(STATE.values.clone(), 4))
        for blob in (RAW.blob(4), digests_blob(4)):
            with pytest.raises(Busy):
                await fetch(guest, donor, Sink(), range(1), LONG_S, blob)
        assert not offering._offered[4].is_wanted()
        assert offering._offered[4].spool is None


@run
async def test_a_reader_is_known_by_its_identity_and_network() -> None:
    async with swarm_of(Member(), Guest(), Member()) as (donor, guest, trainer):
        reader_of = donor.node._reader
        assert reader_of(guest.keys.public, "10.1.2.3") == Reader(guest.peer, "10.1.2.0/24", is_guest=True)
        assert reader_of(trainer.keys.public, "10.1.2.3") == Reader(trainer.peer, "10.1.2.0/24")
