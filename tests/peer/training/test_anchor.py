"""Tests of training/anchor: a state copies its vectors, and its digest covers everything."""

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from blake3 import blake3
from tests.fakes.outer_steps import TensorMean
from torch import Tensor

from shoal.peer.training.anchor import AnchorState, Change, state_digest

SIZE = 300_000
"""Elements: the state below takes three chunks, the last one short."""


def make_state(version: int = 3, seed: int = 0, size: int = SIZE) -> AnchorState:
    generator = torch.Generator().manual_seed(seed)
    return AnchorState.make(torch.randn(size, generator=generator), torch.randn(1, size, generator=generator), version)


@pytest.mark.parametrize("slots", [0, 1, 2])
def test_a_state_holds_copies_of_anchor_and_slots_in_that_order(slots: int) -> None:
    anchor, outer = torch.arange(5.0), 10.0 + torch.arange(5.0 * slots).view(slots, 5)
    state = AnchorState.make(anchor, outer, 1)
    anchor_was, outer_was = anchor.clone(), outer.clone()
    anchor.zero_()
    outer.zero_()
    assert torch.equal(state.anchor, anchor_was)
    assert torch.equal(state.outer, outer_was)
    assert state.values.is_contiguous()


def test_the_digest_covers_everything() -> None:
    base = make_state()
    assert base.digest == make_state().digest == AnchorState.of(base.values, 3).digest
    assert torch.equal(torch.cat([base.anchor.unsqueeze(0), base.outer]), base.values)
    other = base.values.clone()
    other[1, -1] += 1e-3
    negative = base.values.clone()
    negative[0, 0] = 0.0
    positive = negative.clone()
    negative[0, 0] = -0.0
    states = [base, make_state(4), AnchorState.of(other, 3), AnchorState.of(base.values.view(4, -1), 3)]
    states += [AnchorState.of(negative, 3), AnchorState.of(positive, 3)]
    assert len({state.digest for state in states}) == len(states)


def test_the_digest_is_a_hash_of_chunk_hashes() -> None:
    state = make_state(5, size=5 * 2**18 + 7)  # six chunks, the last one short
    chunks = [state.values[:, at : at + 2**18].numpy().tobytes() for at in range(0, state.elements, 2**18)]
    digests = b"".join(blake3(chunk).digest() for chunk in chunks)
    assert len(chunks) == 6
    assert state.chunk_digests == digests
    assert state.digest == blake3(b"shoal state 3 5 (2, 1310727)\0" + digests).digest()
    assert state.digest == state_digest(5, (2, 1310727), digests)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_any_number_of_threads_gives_the_same_digest(threads: int) -> None:
    values, before = torch.randn(2, 10 * 2**18 + 1), torch.get_num_threads()
    expected = AnchorState.of(values, 1).digest
    torch.set_num_threads(threads)
    try:
        assert AnchorState.of(values, 1).digest == expected
    finally:
        torch.set_num_threads(before)


# The next version -----------------------------------------------------------------------------------------------


def add(start: int, values: Tensor, piece: Tensor) -> None:
    values.add_(piece)


def stepped(state: AnchorState, piece: int, change: Change = add) -> AnchorState:
    mean = TensorMean(torch.ones(state.elements), piece)
    return state.step(state.version + 1, mean.pieces(), change)


@pytest.mark.parametrize("piece", [1000, 2**18, 2**18 + 1, SIZE])
def test_the_next_version_is_in_the_same_memory_with_the_digest_of_its_values(piece: int) -> None:
    before = make_state()
    values, expected = before.values, before.values + 1
    after = stepped(before, piece)
    assert (after.version, after.values.data_ptr()) == (4, values.data_ptr())
    assert torch.equal(after.values, expected)
    as_expected = AnchorState.of(expected, 4)
    assert (after.digest, after.chunk_digests) == (as_expected.digest, as_expected.chunk_digests)
    assert after.is_current


def test_a_state_that_was_overwritten_keeps_its_digest_and_gives_no_values_out() -> None:
    before = make_state()
    digest = before.digest
    after = stepped(before, 1000)
    assert (before.version, before.digest) == (3, digest)
    assert not before.is_current
    assert before.read(0, 10) is None
    with pytest.raises(AssertionError, match="version 3 has been overwritten"):
        _ = before.values
    with pytest.raises(AssertionError, match="version 3 has been overwritten"):
        stepped(before, 1000)
    assert before.current is not None
    assert before.current.digest == after.digest
    before.release()
    assert after.is_current, "the memory is not its own any more"


def test_what_is_read_during_a_step_is_of_one_version() -> None:
    state, seen = make_state(size=1000), []
    before = state.values.clone()

    def change(start: int, values: Tensor, piece: Tensor) -> None:
        values.add_(piece)
        first = 100 * len(seen)
        found = [state.read(start, start + 100) for start in range(0, 1000, 100)]
        seen.append(first)
        for start, values_read in zip(range(0, 1000, 100), found, strict=True):
            if start <= first:
                assert values_read is None, "some of it has been overwritten"
            else:
                assert values_read is not None
                assert torch.equal(values_read, before[:, start : start + 100])
        assert state.read(first + 50, first + 150) is None

    after = stepped(state, 100, change)
    assert len(seen) == 10
    found = after.read(0, 1000)
    assert found is not None
    assert torch.equal(found, before + 1)


class Reader:
    """Guard that reads what is about to be overwritten."""

    def __init__(self, state: AnchorState) -> None:
        self.state = state
        self.found: list[Tensor] = []
        assert state.add_guard(self)

    def before_overwrite(self, start: int, stop: int) -> None:
        values = self.state.read(start, stop)
        assert values is not None
        self.found.append(values)


def test_guards_are_called_before_their_version_is_overwritten_and_never_again() -> None:
    state = make_state(size=1000)
    before = state.values.clone()
    reader, other = Reader(state), Reader(state)
    state.remove_guard(other)
    after = stepped(stepped(state, 100), 300)
    assert torch.equal(torch.cat(reader.found, dim=1), before)
    assert other.found == []
    assert not state.add_guard(reader)
    assert torch.equal(after.values, before + 1 + 1)


@pytest.mark.parametrize("good", [0, 1, 5])
def test_a_step_that_fails_leaves_the_old_state_or_none(good: int) -> None:
    state = make_state(size=1000)
    before = state.values.clone()

    def pieces() -> Iterator[tuple[int, int, Tensor]]:
        for start in range(0, 100 * good, 100):
            yield start, start + 100, torch.ones(100)
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        state.step(4, pieces(), add)
    assert state.is_current == (good == 0)
    if good == 0:
        assert torch.equal(state.values, before)
    else:
        assert state.current is None


def test_states_are_freed_without_the_garbage_collector() -> None:
    state = make_state(size=1000)
    kept = weakref.ref(state.values)
    after = stepped(state, 100)
    gc.disable()
    try:
        del state, after
        assert kept() is None
    finally:
        gc.enable()
