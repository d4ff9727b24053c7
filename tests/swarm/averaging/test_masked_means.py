from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shoal.swarm.averaging import masked_means
from shoal.swarm.averaging.masked_means import mean_of_sums
from shoal.swarm.secure.groups import MaskingGroup

BLOCK = 64


@pytest.mark.parametrize("kind", ["trimmed", "weighted"])
@pytest.mark.parametrize("n", [1, BLOCK, 5 * BLOCK + 3])
def test_a_mean_is_the_same_piece_by_piece(monkeypatch: pytest.MonkeyPatch, kind: str, n: int) -> None:
    drawn, blocks = np.random.default_rng(n), -(-n // BLOCK)
    plan = SimpleNamespace(mean=kind, members=[SimpleNamespace(weight=10 + one) for one in range(12)])
    group = SimpleNamespace(weight=lambda members: sum(plan.members[one].weight for one in members))
    store: Any = SimpleNamespace(plan=plan, group=group, bounds=lambda chunk: (0, n))
    layout: Any = SimpleNamespace(
        secure=SimpleNamespace(block=BLOCK),
        scales=drawn.integers(-16, -10, blocks).astype(np.int8),
        blocks=lambda start, stop: slice(0, blocks),
        bits=lambda members: 11,
    )
    opened: dict[Any, Any] = {}
    for members, most in ((range(4), 90), (range(4, 8), 100), (range(8, 12), 2**16)):  # the last one is shortened
        opened[MaskingGroup(tuple(members))] = list(members), drawn.integers(0, most, n + 8).astype(np.uint16)
    whole = mean_of_sums(store, layout, 0, opened)
    for at_once in (1, BLOCK, 2 * BLOCK + 1):
        monkeypatch.setattr(masked_means, "_AT_ONCE", at_once)
        assert mean_of_sums(store, layout, 0, opened).numpy().tobytes() == whole.numpy().tobytes()
