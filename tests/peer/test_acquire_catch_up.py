"""States that a starting process finds locally, and its way from there to the run's state."""

import asyncio
from types import SimpleNamespace
from typing import Any

import torch

from shoal.peer.state_transfer.acquire import LocalCandidates, acquire_state
from shoal.peer.training.anchor import AnchorState
from shoal.swarm.errors import LinkError
from shoal.swarm.protocol.types import KeptState


def state_of(version: int, branch: int = 0) -> AnchorState:
    return AnchorState.make(torch.full((4,), float(version)), torch.full((1, 4), float(branch)), version)


class Records:
    """Roll-forward to ``last``, where there is anything to do."""

    def __init__(self, last: int) -> None:
        self.last = last
        self.asked: list[tuple[int, int]] = []

    def __call__(self, state: AnchorState, newest: int) -> AnchorState:
        self.asked.append((state.version, newest))
        return state if min(self.last, newest) <= state.version else state_of(min(self.last, newest))


def test_rounds_that_were_kept_lead_on_from_the_initial_state() -> None:
    records = Records(last=3)
    own = LocalCandidates(None, lambda: state_of(0), records, is_first=True)
    found = own.find(3, state_of(3).digest)
    assert found is not None
    assert found.digest == state_of(3).digest
    assert own.find(3, state_of(3, 1).digest) is None
    assert records.asked == [(0, 3)], "once"
    assert [(one.anchor_version, one.digest) for one in own.kept_states()] == [
        (3, state_of(3).digest),
        (0, state_of(0).digest),
    ]


def test_who_starts_afresh_has_only_what_it_held() -> None:
    records = Records(last=3)
    own = LocalCandidates(None, None, records, is_first=False)
    assert own.find(3, None) is None
    assert own.newest is None
    own.earlier = state_of(2)
    assert own.newest is own.earlier
    assert records.asked == []


class Holder:
    """A member of a run that is at ``version``; ``fetched``: versions that were fetched from donors."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.fetched: list[int] = []
        self.told = 0

    @property
    def client(self) -> Any:
        view = SimpleNamespace(anchor_version=self.version, state_digest=state_of(self.version).digest)
        return SimpleNamespace(view=view)

    def hold_state(self, state: AnchorState) -> None:
        """Said with the next beat."""

    def drop_state(self) -> None:
        """Said with the next beat."""

    async def send_heartbeat(self) -> None:
        """It is heard."""

    async def report_kept(self, kept: Any) -> None:
        self.told += 1

    # As a download --------------------------------------------------------------------------------------------

    async def unfinished(self) -> None:
        return None

    async def fetch(self, wanted: Any) -> AnchorState:
        self.fetched.append(wanted.version)
        return state_of(wanted.version)

    async def drop(self) -> None:
        """Nothing is kept of it."""


def agree(holder: Any, own: LocalCandidates, catch_up: Any) -> AnchorState:
    return asyncio.run(acquire_state(holder, own, (2, 4), holder, catch_up))


def test_what_is_behind_is_caught_up_and_not_fetched() -> None:
    holder, asked = Holder(5), []

    async def catch_up(state: AnchorState) -> AnchorState:
        asked.append(state.version)
        if state.version == 2:
            holder.version = 7  # the run goes on meanwhile
            return state_of(5)
        return state_of(7)

    own = LocalCandidates(None, lambda: state_of(0), Records(last=2), is_first=True)
    assert agree(holder, own, catch_up).version == 7
    assert asked == [2, 5], "from what its own records lead to, and then from there"
    assert holder.fetched == []


def test_what_cannot_be_caught_up_is_fetched() -> None:
    holder, asked = Holder(5), []

    async def catch_up(state: AnchorState) -> AnchorState:
        asked.append(state.version)
        raise LinkError("for the test")

    own = LocalCandidates(None, lambda: state_of(0), Records(last=2), is_first=True)
    assert agree(holder, own, catch_up).version == 5
    assert (asked, holder.fetched) == ([2], [5])


def test_a_wrong_state_that_was_caught_up_is_replaced() -> None:
    holder = Holder(5)

    async def catch_up(state: AnchorState) -> AnchorState:
        return state_of(5, branch=1)

    own = LocalCandidates(None, lambda: state_of(0), Records(last=2), is_first=True)
    assert agree(holder, own, catch_up).digest == state_of(5).digest
    assert holder.fetched == [5]


def test_rounds_that_were_applied_before_an_error_count() -> None:
    """They were applied in the memory of the state from before, which is there no more."""
    holder, asked = Holder(5), []

    async def catch_up(state: AnchorState) -> AnchorState:
        asked.append(state.version)
        if state.version == 3:
            return state_of(5)
        mean = torch.ones(state.elements)
        state.step(3, [(0, state.elements, mean)], lambda _, values, piece: values[0].add_(piece))
        raise LinkError("the next round is not to be had now")

    async def fetch(wanted: Any) -> AnchorState:
        raise LinkError("nobody serves it now")

    holder.fetch = fetch  # type: ignore[method-assign]
    own = LocalCandidates(None, lambda: state_of(0), Records(last=2), is_first=True)
    assert agree(holder, own, catch_up).version == 5
    assert asked == [2, 3]


def test_what_was_read_is_freed_before_a_state_is_fetched() -> None:
    holder = Holder(5)
    own = LocalCandidates(None, lambda: state_of(0), Records(last=2), is_first=True)

    async def catch_up(state: AnchorState) -> AnchorState:
        raise LinkError("for the test")

    async def fetch(wanted: Any) -> AnchorState:
        assert own.newest is None
        assert own._rolled is not None
        assert not own._rolled.is_current
        return state_of(5)

    holder.fetch = fetch  # type: ignore[method-assign]
    assert agree(holder, own, catch_up).version == 5
    assert own.kept_states()[1:] == (
        KeptState(anchor_version=2, digest=state_of(2).digest),
        KeptState(anchor_version=0, digest=state_of(0).digest),
    ), "it can be computed again"
    assert own.find(2, state_of(2).digest) is not None
