"""Members and the coordinator fail at named steps of a round: real processes, real sockets, several faults a swarm."""

from __future__ import annotations

import pytest
from tests.chaos.real.orders import Order
from tests.chaos.real.stage import LONG_S, SHORT_S, Stage
from tests.integration.harness import Swarm

pytestmark = [pytest.mark.integration]


def test_dev(swarm: Swarm) -> None:
    import time

    from tests.chaos.real import cases

    with Stage.open(swarm) as stage:
        for case in cases.CASES:
            start = time.monotonic()
            stage.play(*case)
            print(time.strftime("%X"), " and ".join(map(str, case)), f"{time.monotonic() - start:.1f} s", flush=True)
