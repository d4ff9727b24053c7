from typing import Any

import pytest
from tests.fakes.virtual_clock import now_s, run_virtual

from shoal.swarm.averaging.chunk_streams import ExchangeContext
from shoal.swarm.deadlines import Deadlines
from shoal.swarm.errors import MemberGone, Unreachable

DEADLINES = Deadlines(6.0)
BACK_S = 10.0
"""When the coordinator is."""


def context() -> ExchangeContext:
    nothing: Any = None
    return ExchangeContext(nothing, nothing, 0, DEADLINES, lambda since_s: since_s < BACK_S, {})


def test_who_cannot_be_had_is_asked_again_a_beat_later_while_the_coordinator_is_away() -> None:
    """That there is no way to somebody is known at once: without a pause nothing else would run meanwhile."""
    tries: list[float] = []

    async def fetch() -> None:
        tries.append(now_s())
        raise Unreachable("nothing answers there")

    async def main() -> None:
        with pytest.raises(Unreachable):
            await context().patiently(fetch)

    run_virtual(main())
    assert tries == [beat * DEADLINES.heartbeat_s for beat in range(11)]


def test_who_is_gone_is_not_asked_again() -> None:
    tries: list[float] = []

    async def fetch() -> None:
        tries.append(now_s())
        raise MemberGone("it left")

    async def main() -> None:
        with pytest.raises(MemberGone):
            await context().patiently(fetch)

    run_virtual(main())
    assert tries == [0.0]
