"""Order of samples in blocks: every sample once an epoch, and few blocks in any range."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.peer.data.block_order import WINDOW_BLOCKS, BlockOrder


@given(
    samples=st.lists(st.integers(1, 30), min_size=1, max_size=40),
    seed=st.integers(0, 2**64 - 1),
    first=st.integers(0, 10**6),
    epoch=st.integers(0, 3),
)
def test_every_sample_comes_once_an_epoch(samples: list[int], seed: int, first: int, epoch: int) -> None:
    order = BlockOrder(np.array(samples), seed, first)
    start = epoch * order.length + -first % order.length
    assert sorted(order.indices(start, start + order.length)) == list(range(order.length))


@settings(max_examples=25)
@given(start=st.integers(0, 5000), size=st.integers(0, 300))
def test_pieces_give_the_same_as_the_whole(start: int, size: int) -> None:
    order, samples = BlockOrder(np.full(30, 40), 7), BlockOrder(np.full(30, 40), 7)
    whole = order.indices(start, start + size)
    single = [int(samples.indices(at, at + 1)[0]) for at in range(start, start + size)]
    assert whole.tolist() == single


def test_a_lease_lies_in_few_blocks_and_a_window_is_mixed() -> None:
    order = BlockOrder(np.full(500, 100), 3)
    for start in range(0, 50_000, 777):
        blocks = set(order.indices(start, start + 256) // 100)
        assert len(blocks) <= 2 * WINDOW_BLOCKS
    window = order.indices(0, WINDOW_BLOCKS * 100) // 100
    assert len(set(window)) == WINDOW_BLOCKS
    assert len(set(window[:50])) > WINDOW_BLOCKS / 2


def test_seed_and_epoch_change_blocks_and_samples() -> None:
    samples = np.full(50, 20)
    first, other = BlockOrder(samples, 1).indices(0, 1000), BlockOrder(samples, 2).indices(0, 1000)
    assert (first != other).mean() > 0.9
    assert (BlockOrder(samples, 1).indices(1000, 2000) != first).mean() > 0.9
    blocks = first[:: 20 * WINDOW_BLOCKS] // 20
    assert not (np.diff(blocks) > 0).all()


def test_the_order_is_the_same_on_every_machine() -> None:
    assert BlockOrder(np.array([3, 5, 4]), 42).indices(0, 12).tolist() == GOLDEN


GOLDEN = [0, 5, 2, 8, 9, 6, 10, 1, 7, 4, 3, 11]


def test_random_samples_lie_in_few_blocks() -> None:
    order = BlockOrder(np.full(500, 100), 3)
    drawn = order.random(np.random.default_rng(1), 200)
    assert len(set(drawn // 100)) <= 4
    assert len(set(drawn)) > 100
    assert 0 <= drawn.min() <= drawn.max() < order.length
    assert (drawn == order.random(np.random.default_rng(1), 200)).all()


def test_a_range_is_checked() -> None:
    with pytest.raises(ValueError, match="expected 0 <= start <= stop"):
        BlockOrder(np.array([3]), 1).indices(2, 1)
