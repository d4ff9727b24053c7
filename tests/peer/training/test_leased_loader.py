"""Tests of training/leased_loader: batches of leased samples, loaded ahead by torch's DataLoader."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.peer.training import leased_loader
from shoal.peer.training.data import LeasedSamples, SampleOrder
from shoal.peer.training.leased_loader import LeasedLoader, check_is_no_worker, workers_context
from shoal.swarm.errors import UserError
from shoal.swarm.sample_ranges import from_wire

LOSS = torch.tensor(1.0)
LENGTH = 1000


class Numbers:
    """Sample ``i`` is the number i."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> int:
        return index


def doubled(batch: list[int]) -> Tensor:
    return 2 * torch.tensor(batch)


class Leases:
    """Leases of 8 samples; ``most``: that can be had. ``asked``: samples asked for."""

    def __init__(self, most: int) -> None:
        self.samples = LeasedSamples(1)
        self.most = most
        self.asked: list[int] = []
        self._given = 0

    def more(self, samples: int) -> None:
        self.asked.append(samples)
        if self._given < self.most:
            self.samples.add_lease(8 * self._given, 8 * self._given + 8)
            self._given += 1


def loader(leases: Leases, **options: Any) -> LeasedLoader:
    options = {"batch_size": 4, "num_workers": 0, "collate_fn": None, "pin_memory": False, **options}
    return LeasedLoader(options.pop("dataset", Numbers()), order(), leases.samples, leases.more, **options)


def order() -> SampleOrder:
    return SampleOrder(LENGTH, 3)


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_come_in_the_runs_order_until_there_are_no_more_leases(workers: int) -> None:
    leases = Leases(3)
    loading = loader(leases, num_workers=workers, collate_fn=doubled)
    got: list[int] = []
    for expected in (24, 40):
        for batch in loading:
            got += (batch // 2).tolist()
            assert leases.samples.finish_batch(LOSS) == 4
        assert got == order().indices(0, expected).tolist()
        leases.most = 5  # and the workers go on
    assert from_wire(leases.samples.done_ranges()) == [(0, 40)]


def test_workers_load_ahead_and_what_they_loaded_is_not_trained_yet() -> None:
    leases = Leases(10)
    loading = loader(leases, num_workers=2)
    assert leases.asked == [], "nothing is leased while the workers start"
    batches = iter(loading)
    next(batches)
    assert leases.asked[0] == 20, "for the batch itself and two for each worker"
    assert leases.samples.in_hand >= 20
    assert leases.samples.batches_given == 1
    with pytest.raises(UserError, match="has 4 samples"):
        leases.samples.finish(5, LOSS)
    assert leases.samples.finish_batch(LOSS) == 4


@pytest.mark.parametrize("workers", [0, 1])
def test_batches_whose_lease_is_lost_while_they_are_loaded_are_left_out(workers: int) -> None:
    leases = Leases(2)
    batches = iter(loader(leases, num_workers=workers))
    first = next(batches)
    leases.samples.drop_all()
    leases.most = 3
    rest = torch.cat([*batches]).tolist()
    assert first.tolist() == order().indices(0, 4).tolist()
    assert rest == order().indices(16 if workers else 8, 24).tolist()
    counted = [leases.samples.finish_batch(LOSS) for _ in range(1 + len(rest) // 4)]
    assert counted == [0] + [4] * (len(rest) // 4)
    assert leases.samples.batches_given == 0


def test_what_workers_cannot_get_is_said() -> None:
    with pytest.raises(UserError, match=r"collate_fn cannot be sent to worker processes .* num_workers=0"):
        loader(Leases(1), num_workers=1, collate_fn=lambda batch: batch)
    with pytest.raises(UserError, match="expected batch_size >= 1"):
        loader(Leases(1), batch_size=0)


def test_workers_are_never_forked() -> None:
    assert workers_context().get_start_method() in ("forkserver", "spawn")


def test_a_worker_that_would_join_the_run_again_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    check_is_no_worker()
    process = leased_loader.multiprocessing.current_process()
    monkeypatch.setattr(process, "_inheriting", True, raising=False)
    with pytest.raises(UserError, match="__main__"):
        check_is_no_worker()


def test_batches_span_leases_and_only_the_last_one_is_smaller() -> None:
    leases = Leases(2)
    batches = [batch.tolist() for batch in loader(leases, batch_size=5)]
    assert [len(one) for one in batches] == [5, 5, 5, 1]
    assert list(itertools.chain(*batches)) == order().indices(0, 16).tolist()
    assert leases.samples.undone() == [(0, 16)]
    assert [leases.samples.finish_batch(LOSS) for _ in batches] == [5, 5, 5, 1]
    assert from_wire(leases.samples.done_ranges()) == [(0, 16)]
