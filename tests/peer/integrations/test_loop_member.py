"""Batches for a framework: they belong to one membership."""

from itertools import islice
from types import SimpleNamespace
from typing import Any

import torch
from tests.peer.memory_session import Loop
from torch.utils.data import DataLoader, TensorDataset

from shoal.peer.integrations.loop_member import MemberBatches


def test_another_membership_begins_anew() -> None:
    """Not with what is left of the one before, whose session is closed."""
    loops = [Loop(), Loop()]
    members: list[Any] = [
        SimpleNamespace(session=loop.session, is_over=False, end_evaluation=lambda: None) for loop in loops
    ]
    now = members[0]
    loader = DataLoader(TensorDataset(torch.arange(32.0)), batch_size=4)
    batches = MemberBatches(loader, lambda: now, lambda: None, own_data=True)

    def take(number: int) -> list[float]:
        return [float(batch[0][0]) for batch in islice(iter(batches), number)]

    assert take(2) + take(1) == [0.0, 4.0, 8.0], "one membership goes on where it was"
    now = members[1]
    assert take(2) == [0.0, 4.0]
    assert loops[1].asked, "leases are the new session's"
