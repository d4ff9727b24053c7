"""Shares of a batch among the ranks of an island, and the gradient that they add up to."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from shoal.peer.island.group import Island
from shoal.peer.training.inner_loop import InnerLoop


def rank_of(place: int, ranks: int, tensor_parallel: int) -> Island:
    island = object.__new__(Island)  # without the other ranks
    island._place, island.ranks, island.tensor_parallel = place, ranks, tensor_parallel
    return island


@pytest.mark.parametrize("samples", [1, 2, 3, 7, 8])
@pytest.mark.parametrize(("ranks", "tensor_parallel"), [(3, 1), (4, 2), (1, 1)])
def test_each_sample_counts_once(samples: int, ranks: int, tensor_parallel: int) -> None:
    indices, groups = np.arange(10, 10 + samples), ranks // tensor_parallel
    counted: list[int] = []
    for place in range(groups):
        mine, share = Island.share_of(rank_of(place, ranks, tensor_parallel), indices)
        assert len(mine) == max(1, share.samples), "a rank without samples takes part with one"
        assert share.samples <= share.most
        assert share.weight == pytest.approx(share.samples * groups / samples)
        counted += mine[: share.samples].tolist()
        assert share.samples == rank_of(place, ranks, tensor_parallel).samples_by_group(samples)[place]
    assert counted == indices.tolist()


@pytest.mark.parametrize("samples", [1, 4, 5, 7])
def test_the_mean_of_the_ranks_gradients_is_that_of_the_batch(samples: int) -> None:
    batch, ranks = torch.randn(samples, 3, generator=torch.Generator().manual_seed(1)), 3

    def loss(model: nn.Module, one: Tensor) -> Tensor:
        return model(one).square().mean()

    passes: list[int] = []

    def gradient(part: Tensor, place: int | None) -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        model.register_forward_hook(lambda *_: passes.append(place if place is not None else -1))
        loop = InnerLoop(model, loss, lambda: torch.autocast("cpu", enabled=False), 2)
        share = None
        if place is not None:
            mine, share = Island.share_of(rank_of(place, ranks, 1), np.arange(samples))
            part = part[torch.from_numpy(mine)]
        total = loop.backward(part, share)
        assert model.weight.grad is not None
        return model.weight.grad, total * (share.weight if share is not None else 1.0)

    alone, mean_loss = gradient(batch, None)
    parts = [gradient(batch, place) for place in range(ranks)]
    assert torch.allclose(sum(one for one, _ in parts) / ranks, alone, atol=1e-6)
    assert torch.allclose(sum(one for _, one in parts) / ranks, mean_loss, atol=1e-6)
    assert len({passes.count(place) for place in range(ranks)}) == 1, "all ranks make as many passes"
