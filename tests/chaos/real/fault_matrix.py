"""More faults of real members and of the coordinator than ``test_real_faults.py`` has; ``make chaos`` runs them."""

from __future__ import annotations

import pytest
from tests.chaos.real.orders import Order
from tests.chaos.real.stage import LONG_S, SHORT_S, Stage

pytestmark = pytest.mark.integration

ORDERS = [
    Order("contributor", "SIGSTOP", "before contributing", LONG_S),
    Order("owner", "SIGSTOP", "some have the result", LONG_S),
    Order("coordinator", "SIGSTOP", "while contributing", SHORT_S),
    Order("owner", "cut", "while reducing", LONG_S),
    Order("coordinator", "cut", "before the verdict is announced"),
    Order("contributor", "half-open", "while contributing", LONG_S),
    Order("contributor", "half-open to all", "before contributing", LONG_S),
    Order("owner", "corrupted bytes to one", "some have the result"),
    Order("coordinator", "SIGKILL", "some have the result"),
]


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_one_fault(stage: Stage, order: Order) -> None:
    stage.play(order)
