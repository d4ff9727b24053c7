"""Tests of the sample order in training/data: a permutation in every epoch, the same for any ranges."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.peer.training.data import MAX_LENGTH, SampleOrder

lengths = st.integers(1, 3000)
seeds = st.integers(0, 2**63 - 1)


@given(lengths, seeds, st.one_of(st.integers(0, 5), st.integers(0, 2**40)))
def test_every_epoch_visits_every_index_once(length: int, seed: int, epoch: int) -> None:
    order = SampleOrder(length, seed).indices(epoch * length, (epoch + 1) * length)
    assert order.dtype == np.int64
    assert np.array_equal(np.sort(order), np.arange(length))


@given(lengths, seeds, st.integers(0, 10**6), st.lists(st.integers(0, 700), min_size=1, max_size=5))
def test_a_range_is_the_same_in_one_piece_or_many(length: int, seed: int, start: int, parts: list[int]) -> None:
    order = SampleOrder(length, seed)
    edges = np.cumsum([start, *parts]).tolist()
    pieces = [order.indices(low, high) for low, high in pairwise(edges)]
    assert np.array_equal(np.concatenate(pieces), order.indices(start, edges[-1]))


@given(st.integers(100, 3000), seeds)
def test_seeds_and_epochs_differ(length: int, seed: int) -> None:
    first = SampleOrder(length, seed).indices(0, length)
    assert not np.array_equal(first, SampleOrder(length, seed + 1).indices(0, length))
    assert not np.array_equal(first, SampleOrder(length, seed).indices(length, 2 * length))


@pytest.mark.parametrize("length", [1000, 1024, 1025, 77_234])
def test_looks_shuffled(length: int) -> None:
    """Neighbours in the sequence are no neighbours in the data, and places do not correlate."""
    order = SampleOrder(length, 7).indices(0, length)
    assert abs(np.corrcoef(order, np.arange(length))[0, 1]) < 4 / np.sqrt(length)
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 4 / np.sqrt(length)
    assert np.abs(np.diff(order)).mean() == pytest.approx(length / 3, rel=0.1)


def test_first_index_is_uniform_over_seeds() -> None:
    """Chi-square over 12 cells, 11 degrees of freedom: beyond 35 is one in 4000."""
    counts = np.bincount([SampleOrder(12, seed).indices(0, 1)[0] for seed in range(2400)], minlength=12)
    assert ((counts - 200) ** 2 / 200).sum() < 35


def test_the_order_is_the_same_on_every_machine_and_in_every_version() -> None:
    """Peers of one run may have different versions of everything: these values never change."""
    assert SampleOrder(1000, 42).indices(0, 8).tolist() == GOLDEN_START
    assert SampleOrder(MAX_LENGTH, 2**63 - 1).indices(10**15, 10**15 + 2).tolist() == GOLDEN_FAR


GOLDEN_START = [709, 697, 860, 330, 793, 500, 284, 43]
GOLDEN_FAR = [4377231514665426039, 871676121818095412]


def test_one_sample_comes_again_and_again() -> None:
    assert SampleOrder(1, 3).indices(5, 100_000).tolist() == [0] * 99_995


def test_an_empty_range_is_empty() -> None:
    assert SampleOrder(10, 3).indices(7, 7).shape == (0,)


def test_the_end_of_a_huge_data_set_is_in_range() -> None:
    order = SampleOrder(MAX_LENGTH - 1, 1).indices(MAX_LENGTH - 5, MAX_LENGTH + 5)
    assert order.min() >= 0
    assert order.max() < MAX_LENGTH - 1
    assert len(set(order.tolist())) == 10


@pytest.mark.parametrize(("length", "seed"), [(0, 0), (-1, 0), (MAX_LENGTH + 1, 0), (5, -1), (5, 2**64)])
def test_refuses_bad_construction(length: int, seed: int) -> None:
    with pytest.raises(ValueError, match="expected"):
        SampleOrder(length, seed)


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (4, 3)])
def test_refuses_bad_ranges(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match="expected 0 <= start <= stop"):
        SampleOrder(5, 0).indices(start, stop)
