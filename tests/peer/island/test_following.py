"""What a rank that follows rank 0 refuses, and what rank 0 asks of it after an error."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from shoal.peer.island.group import Command, Island
from shoal.peer.island.ranks import FollowingSession, IslandLead
from shoal.swarm.errors import IslandBroken, UserError, WireError


@pytest.mark.parametrize(
    "call",
    [
        lambda session: session.stepped(4, 1.0),
        lambda session: session.stepped_batches(1, 1.0),
        lambda session: session.loader([]),
        lambda session: session.counted([], 4),
        lambda session: session.offer_if_due(),
        lambda session: session.conclude(),
    ],
)
def test_calls_that_are_not_for_islands(call: Callable[[Any], object]) -> None:
    with pytest.raises(UserError, match=r"session.batches"):
        call(object.__new__(FollowingSession))


def test_what_only_rank_0_has() -> None:
    session: Any = object.__new__(FollowingSession)
    with pytest.raises(AttributeError, match=r"session.view is not there on the ranks of an island that follow"):
        _ = session.view


@pytest.fixture
def lead(monkeypatch: pytest.MonkeyPatch) -> IslandLead:
    island = object.__new__(Island)
    island.rank, island.is_apart = 0, False
    monkeypatch.setattr(Island, "_broadcast", lambda self, tensor: None)
    return IslandLead(island)


def test_after_an_error_within_a_command_nothing_is_asked_of_the_others(lead: IslandLead) -> None:
    """They wait for rank 0 in a collective, so gathering their optimizers for a checkpoint would take for ever."""
    with lead.island.carrying_out(Command.STEP, 0):
        pass
    assert lead.may_end(ValueError())
    with pytest.raises(torch.OutOfMemoryError), lead.island.carrying_out(Command.STEP, 0):
        raise torch.OutOfMemoryError
    assert not lead.may_end(torch.OutOfMemoryError())
    assert not lead.may_end(None)


def test_what_others_have_sent_is_refused_by_all_ranks_alike(lead: IslandLead) -> None:
    with pytest.raises(WireError), lead.island.carrying_out(Command.BACKWARD, 0):
        raise WireError("a gradient of another shape")
    assert lead.may_end(None)
    assert not lead.may_end(IslandBroken("a rank"))
