"""Shards: rows and columns of whole parameters, and which rank writes what several hold."""

import pytest
import torch
from torch import Tensor

from shoal.peer.island.shards import Shard, held_part, row_order, who_holds
from shoal.peer.island.shared_image import as_image_parts


@pytest.mark.parametrize(
    "shard",
    [
        Shard(slice(2, 4), (slice(0, 5),)),
        Shard(slice(0, 6), (slice(1, 3),)),
        Shard(torch.tensor([5, 0, 3]), (slice(0, 5),)),
        Shard(torch.tensor([1, 4]), (slice(2, 5),)),
    ],
)
def test_a_shard_is_loaded_and_stored(shard: Shard) -> None:
    whole = torch.arange(30.0).view(6, 5)
    expected = whole[shard.rows][:, shard.columns[0]]
    held = torch.zeros(expected.shape)
    shard.load(held, whole)
    assert torch.equal(held, expected)
    other = torch.zeros(6, 5)
    shard.store(held, other)
    shard.load(held.zero_(), other)
    assert torch.equal(held, expected)
    assert other.sum() == expected.sum(), "nothing else is written"


def test_who_is_not_the_first_holder_writes_nothing() -> None:
    whole = torch.zeros(3)
    Shard(slice(0, 3), (), is_ours=False).store(torch.ones(3), whole)
    assert whole.sum() == 0


def test_a_scalar_and_an_empty_shard() -> None:
    whole, scalar = torch.tensor(3.0), torch.nn.Parameter(torch.tensor(0.0))
    Shard(slice(0, 1), ()).load(held_part(scalar), whole)
    assert scalar == 3.0
    Shard(slice(2, 2), ()).load(torch.empty(0), torch.zeros(2))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_rows_of_several_outputs_are_cut_inside_of_each(ranks: int) -> None:
    """As of queries, keys and values of eight heads, one row a head: each rank has the same heads of all three."""
    order = row_order(24, 3, ranks)
    assert sorted(order.tolist()) == list(range(24))
    for rank, rows in enumerate(order.view(ranks, -1)):
        heads = {int(row) % 8 for row in rows}
        assert heads == set(range(rank * 8 // ranks, (rank + 1) * 8 // ranks))
        assert [int(row) // 8 for row in rows] == sorted(int(row) // 8 for row in rows), "queries, keys, values"


def bounds(*numbers: int) -> Tensor:
    return torch.tensor([[number] for number in numbers])


def test_the_first_rank_with_a_shard_writes_it() -> None:
    by_rank = [bounds(0, 7), bounds(1, 7), bounds(0, 7)]
    assert who_holds(by_rank, 0) == [(True, 2), (True, 3)]
    assert who_holds(by_rank, 1) == [(True, 1), (False, 3)]
    assert who_holds(by_rank, 2) == [(False, 2), (False, 3)]


def test_parts_of_an_image_are_views_in_the_parameters_shapes() -> None:
    values = torch.zeros(10)
    first, second = as_image_parts([torch.empty(2, 3), torch.empty(4)], values)
    first[1, 0], second[3] = 1.0, 2.0
    assert values.tolist() == [0, 0, 0, 1, 0, 0, 0, 0, 0, 2]
