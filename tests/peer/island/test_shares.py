"""Shares of a batch among the ranks of an island, and the gradient that they add up to."""

import numpy as np
import pytest
import torch
from tests.integration.harness import run_toml
from torch import Tensor, nn

from shoal.peer.island.group import Island
from shoal.peer.island.stages import RankShares, StageRanks
from shoal.peer.training.device import MemoryBytes
from shoal.peer.training.inner_loop import InnerLoop
from shoal.swarm.memory_account import account_of
from shoal.swarm.protocol.run_file import parse_run_file


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


def test_what_planners_count_of_an_island_that_holds_stages() -> None:
    """The image of the parameters is in the machine's memory besides; each group of ranks has its samples' part."""
    run = parse_run_file(run_toml(rounds=1, algorithm="virtual_batch"))
    lead, one = StageRanks(rank_of(0, 4, 2), {}), account_of(run).demand()
    here = lead.memory(run, MemoryBytes(10**9, 10**8))
    assert here.device == 2 * 10**8
    assert here.host == pytest.approx(10**9 * one.host / (one.host + 1.0))
    assert lead.memory(run, MemoryBytes(10**9, None)).host == pytest.approx(10**9 * one.shared / (one.shared + 1.0))


@pytest.mark.parametrize("divides", [True, False])
def test_rows_of_a_micro_batch(divides: bool) -> None:
    whole = torch.arange(10).view(5, 2)
    rows, share = RankShares(rank_of(1, 2, 1), divides=divides).of(whole)
    assert torch.equal(rows, whole[2:] if divides else whole)
    assert (share.samples, share.weight) == ((3, 1.2) if divides else (5, 1.0))
