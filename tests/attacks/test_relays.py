"""A run's relay that works against it, as a process of its own: nothing is accepted that was not sent, or learnt."""

import asyncio
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from tests.attacks.hostile_relay import FAULTS
from tests.integration.harness import end_with_parent
from tests.swarm.network import LONG_S, Member, Sink, Source, introduce, run, swarm_of, until
from tests.swarm.transport.test_relay import credentials

from shoal.swarm.errors import LinkError
from shoal.swarm.protocol.identity import Identity, key_text
from shoal.swarm.protocol.relay_url import RelayUrl
from shoal.swarm.protocol.types import Blob
from shoal.swarm.transport.relay.client import RelayCredentials

pytestmark = pytest.mark.integration

HERE = Path(__file__).parent
STATE = Blob(kind="state", number=1)
CHUNKS, CHUNK_BYTES = 100, 50_000
PROGRESS_S = 12.0


@pytest.mark.parametrize("how", FAULTS)
@run
async def test_members_get_what_was_sent_and_the_relay_learns_nothing(how: str, tmp_path: Path) -> None:
    host, members, out = Identity.generate(), [Member(), Member()], tmp_path / "url"
    relay = await asyncio.create_subprocess_exec(
        *(sys.executable, str(HERE / "hostile_relay.py"), how, str(out), key_text(host.public_key)),
        preexec_fn=end_with_parent,
    )
    try:
        await until(out.exists)
        url = RelayUrl.parse(out.read_text())
        async with swarm_of(*members) as (a, b):
            for member in members:
                member.reachable = False
                mine = credentials(host, member)

                async def shown(mine: RelayCredentials = mine) -> RelayCredentials:
                    return mine

                member.node.relays.credentials = shown
                member.node.relays.punches = False
                registration, _ = member.node.relays.register(url.address, lambda mine=mine: mine, lambda: None)
                await until(lambda one=registration: one.is_registered)
                member.relays = (url.address,)
            introduce(a, b)
            source, sink = Source(CHUNKS, CHUNK_BYTES), Sink()
            a.node.publish(STATE, source)
            got: list[int] = []
            async with asyncio.timeout(4 * LONG_S):
                while len(got) < CHUNKS:
                    with suppress(LinkError):  # a connection whose messages were spoilt is given up
                        async for chunk in b.node.fetch(a.peer, STATE, range(len(got), CHUNKS), sink, PROGRESS_S):
                            got.append(chunk)
            assert got == list(range(CHUNKS))
            assert sink.holds(source, range(CHUNKS))
        if how == "record":
            recorded = out.with_suffix(".recorded")
            await until(lambda: recorded.exists() and recorded.stat().st_size > CHUNKS * CHUNK_BYTES / 2)
            seen = recorded.read_bytes()
            assert not any(source.data(index)[:64] in seen for index in range(1, CHUNKS))
    finally:
        relay.kill()
        await relay.wait()
