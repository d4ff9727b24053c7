"""Connection reversal: a member that nobody can dial dials one that can be, as it is asked to over the coordinator."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import pytest
from tests.swarm.network import LONG_S, Member, Sink, Source, introduce, run, swarm_of

from shoal.swarm.errors import LinkError, Unreachable
from shoal.swarm.protocol.types import Blob

STATE = Blob(kind="state", number=1)


@asynccontextmanager
async def parted() -> AsyncIterator[tuple[Member, Member, list[str]]]:
    """A member that can be dialed, one that cannot, and whom the first one had asked to dial it."""
    public, walled, asked = Member(), Member(), list[str]()
    walled.reachable = False
    async with swarm_of(public, walled):

        async def request_dial(peer: str) -> None:
            asked.append(peer)
            walled.node.dial_back(public.peer)

        public.node.request_dial = request_dial
        yield public, walled, asked


async def fetched(to: Member, of: Member, source: Source, progress_s: float = LONG_S) -> None:
    sink = Sink()
    async with aclosing(to.node.fetch(of.peer, STATE, range(source.chunks), sink, progress_s)) as stream:
        assert [chunk async for chunk in stream] == list(range(source.chunks))
    assert sink.holds(source, range(source.chunks))


@run
async def test_a_member_behind_a_wall_dials_back_and_is_fetched_from() -> None:
    async with parted() as (public, walled, asked):
        walled.node.publish(STATE, Source(5))
        await fetched(public, walled, Source(5))
        assert set(asked) == {walled.peer}
        assert [(one.peer, one.kind) for one in public.node.path_reports()] == [(walled.peer, "reversed")]
        assert [(one.peer, one.kind) for one in walled.node.path_reports()] == [(public.peer, "direct")]
        calls = len(asked)
        await fetched(public, walled, Source(5))
        assert len(asked) == calls, "the connection is there"


@run
async def test_a_reversed_connection_that_breaks_is_asked_for_again() -> None:
    async with parted() as (public, walled, asked):
        walled.node.publish(STATE, source := Source(10, held_at=5))
        fetching = asyncio.create_task(fetched(public, walled, source))
        while 5 not in source.asked:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        calls = len(asked)
        for link in public.node._data.all_links():
            public.node._data.close_link(link)
        source.go.set()
        await fetching
        assert len(asked) > calls


@run
async def test_nobody_is_asked_who_can_be_dialed_or_by_whom_nobody_can_dial() -> None:
    async with parted() as (public, walled, asked):
        public.node.publish(STATE, Source(2))
        await fetched(walled, public, Source(2))
        public.node.request_dial = None
        await walled.stop()
        with pytest.raises(LinkError):
            await fetched(public, walled, Source(1), progress_s=0.5)
        assert asked == []


@pytest.mark.parametrize("is_away", [False, True])
@run
async def test_one_that_does_not_dial_back_costs_a_while_and_no_more(is_away: bool) -> None:
    async with parted() as (public, walled, asked):

        async def request_dial(peer: str) -> None:
            asked.append(peer)
            if is_away:
                raise Unreachable("the coordinator is away")

        public.node.request_dial = request_dial
        with pytest.raises(Unreachable, match="has not connected"):
            await fetched(public, walled, Source(1), progress_s=0.5)
        assert (len(asked) > 1) is is_away, "who was asked and is silent is not asked again at once"


@run
async def test_a_member_dials_back_members_alone_that_can_be_dialed_and_each_once_at_a_time() -> None:
    async with parted() as (public, walled, _):
        stranger, other = Member(), Member()
        other.reachable = False
        async with swarm_of(stranger, other):
            introduce(public, walled, other)
            for peer in (stranger.peer, other.peer, walled.peer):
                walled.node.dial_back(peer)
            assert walled.node._dialing_back == set()
            for _ in range(3):
                walled.node.dial_back(public.peer)
            assert walled.node._dialing_back == {public.peer}
