"""Tests of training/anchor: a state copies its vectors, and its digest covers everything."""

import hashlib

import pytest
import torch

from shoal.peer.training.anchor import AnchorState, state_digest

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
    state = make_state(5, size=5 * 2**18 + 7)  # eleven chunks, the last one short
    data = state.values.numpy().tobytes()
    digests = b"".join(hashlib.sha256(data[at : at + 2**20]).digest() for at in range(0, len(data), 2**20))
    assert state.chunk_digests == digests
    assert state.digest == hashlib.sha256(b"shoal state 2 5 (2, 1310727)\0" + digests).digest()
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
