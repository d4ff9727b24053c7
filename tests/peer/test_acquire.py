"""Local candidates of a peer: which state it goes on from, and what it announces while nobody holds the run's."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.fakes.virtual_clock import run_virtual

from shoal.peer.state_transfer.acquire import LocalCandidates, acquire_state
from shoal.peer.training.anchor import AnchorState
from shoal.swarm.protocol.types import MAX_KEPT, KeptState


def state(version: int, value: float = 0.0) -> AnchorState:
    return AnchorState.make(torch.full((4,), value + version), torch.zeros(1, 4), version)


class Keeper:
    """Checkpoints of these states, the newest first; ``reads`` counts those that were read."""

    def __init__(self, *states: AnchorState) -> None:
        self._states = list(states)
        self.reads = 0
        self.store = SimpleNamespace(kept=self._kept)

    def _kept(self) -> list[Any]:
        return [SimpleNamespace(anchor_version=one.version, digest=one.digest) for one in self._states]

    def find(self, version: int, digest: bytes | None, *, with_own: bool) -> Any:
        self.reads += 1
        fitting = [one for one in self._states if one.version == version and digest in (None, one.digest)]
        found = [*fitting, *self._states]
        return SimpleNamespace(state=found[0]) if found else None


def own(*states: AnchorState, initial: AnchorState | None = None) -> LocalCandidates:
    keeper: Any = Keeper(*states)
    return LocalCandidates(
        keeper, (lambda: initial) if initial else None, lambda state, _: state, is_first=initial is not None
    )


def kept(*states: AnchorState) -> tuple[KeptState, ...]:
    return tuple(KeptState(anchor_version=one.version, digest=one.digest) for one in states)


def test_of_two_states_of_a_version_the_one_with_the_digest_is_taken() -> None:
    undone, newer = state(5, 0.5), state(5)
    mine = own(newer, undone, state(4))
    assert mine.find(5, undone.digest) is undone
    assert mine.find(5, newer.digest) is newer
    assert mine.find(5, b"o" * 32) is None
    assert mine.find(7, None) is None


def test_the_newest_is_taken_where_nobody_knows_the_digest() -> None:
    newer = state(5)
    assert own(newer, state(5, 0.5)).find(5, None) is newer


def test_what_was_held_before_is_taken_without_reading() -> None:
    mine = own(state(5))
    mine.earlier = state(6)
    assert mine.find(6, mine.earlier.digest) is mine.earlier


def test_the_initial_state_is_the_last_resort() -> None:
    initial = state(0)
    mine = own(state(3), state(2), initial=initial)
    assert mine.find(0, None) is initial
    assert mine.find(0, b"o" * 32) is None
    assert mine.kept_states() == kept(state(3), state(2), initial)
    many = own(*[state(40 - at) for at in range(30)], initial=initial)
    assert len(many.kept_states()) == MAX_KEPT
    assert many.kept_states()[-1] == kept(initial)[0]
    assert own().kept_states() == ()
    assert LocalCandidates(None, None, lambda state, _: state, is_first=False).find(3, None) is None


def test_what_a_run_starts_from_is_read_when_it_is_needed_and_not_told_of() -> None:
    initial, reads = state(0), []

    def read() -> AnchorState:
        reads.append(initial)
        return initial

    mine = LocalCandidates(None, read, lambda state, _: state, is_first=False, initial_digest=initial.digest)
    assert mine.kept_states() == kept(initial)
    assert mine.find(0, b"o" * 32) is None
    assert mine.find(3, None) is None
    assert reads == []
    assert mine.find(0, initial.digest) is initial, "also by who has begun to train"


class Run:
    """The coordinator as a member sees it: nobody holds version 5; once version 4 is announced, the run goes back to
    it."""

    def __init__(self, goes_back_to: AnchorState) -> None:
        self._goes_back_to = goes_back_to
        self.view: Any = SimpleNamespace(phase="training", anchor_version=5, state_digest=None)
        self.client = self
        self.held: AnchorState | None = None
        self.told: list[tuple[KeptState, ...]] = []

    def hold_state(self, held: AnchorState) -> None:
        self.held = held

    def drop_state(self) -> None:
        self.held = None

    async def send_heartbeat(self) -> None:
        """The view is as it is."""

    async def report_kept(self, told: tuple[KeptState, ...]) -> None:
        assert self.held is None
        self.told.append(told)

    async def wait_for(self, predicate: Any, timeout_s: float) -> Any:
        back, verdict = self._goes_back_to, SimpleNamespace(reason="nobody holds it any more")
        self.view = SimpleNamespace(anchor_version=back.version, state_digest=back.digest, verdict=verdict)
        assert predicate(self.view)
        return self.view


class NoDownloads:
    async def drop(self) -> None:
        """There is none."""


def test_a_peer_tells_what_it_keeps_and_goes_back_with_the_run(caplog: pytest.LogCaptureFixture) -> None:
    run, before, initial = Run(state(4)), state(4), state(0)
    mine = own(state(5, 0.5), before, initial=initial)
    mine._checkpointer.store = SimpleNamespace(kept=lambda: kept(before))  # type: ignore[union-attr,assignment]
    run.view.anchor_version = 6
    caplog.set_level(logging.INFO)
    downloads: Any = NoDownloads()
    holder: Any = run
    found = run_virtual(acquire_state(holder, mine, (2, 4), downloads, None))
    assert found is before is run.held
    assert run.told == [kept(state(5, 0.5), before, initial)]
    assert "the run went back: nobody holds it any more" in caplog.text
    assert "nobody holds version 6 now" in caplog.text
    assert "version 5 is kept here" in caplog.text


def test_a_state_that_is_not_the_runs_is_let_go() -> None:
    """The member holds a state of the right version, but the run has another one, of rounds that were repeated."""
    run, right = Run(state(4)), state(4)
    mine = own(state(5), right)
    downloads: Any = NoDownloads()
    holder: Any = run
    assert run_virtual(acquire_state(holder, mine, (2, 4), downloads, None)) is right
    assert run.told == [kept(state(5), right)]
