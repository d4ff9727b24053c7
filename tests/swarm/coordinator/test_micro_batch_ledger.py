"""Tests of micro_batch_ledger: which micro-batches are driven, and fair parts."""

from __future__ import annotations

from shoal.swarm.coordinator.micro_batch_ledger import Batch, MicroBatchLedger, fair_samples

BATCH = Batch(0, 40, 2)


def test_a_part_is_as_large_as_a_driver_is_fast() -> None:
    finished = {"fast": 30, "slow": 10}
    assert fair_samples(finished, "fast", 40, 2) == 30
    assert fair_samples(finished, "slow", 40, 2) == 10


def test_a_part_is_of_whole_micro_batches_and_never_none() -> None:
    finished = {"fast": 97, "slow": 3}
    assert fair_samples(finished, "slow", 40, 4) == 4
    assert fair_samples(finished, "slow", 1, 4) == 4
    assert fair_samples({"a": 1, "b": 1}, "a", 10, 4) == 8


def test_there_is_no_part_before_a_driver_has_finished_anything() -> None:
    drives = MicroBatchLedger()
    drives.take("a", [(0, 8)], [])
    assert drives.fair_samples("a", BATCH) is None
    drives.take("a", [], [(0, 2)])
    assert drives.fair_samples("a", BATCH) == 38
    assert drives.fair_samples("b", BATCH) is None


def test_what_others_drive_is_left_too() -> None:
    drives = MicroBatchLedger(finished={"a": 10, "b": 10})
    drives.take("a", [(0, 20)], [])
    drives.take("b", [(20, 36)], [])
    assert drives.fair_samples("b", BATCH) == 20


def test_what_is_missing_at_the_end_is_for_whoever_is_there() -> None:
    drives = MicroBatchLedger(finished={"a": 1, "b": 99})
    drives.take("b", [(0, 40)], [])
    assert drives.fair_samples("a", BATCH) is None


def test_a_driver_that_is_gone_has_no_part_and_earlier_rounds_count_less() -> None:
    drives = MicroBatchLedger(finished={"a": 8, "b": 4})
    drives.lose("b")
    drives = drives.next_round()
    assert drives.finished == {"a": 4}
    assert drives.fair_samples("a", BATCH) == 40
    drives.take("a", [(0, 4)], [])
    drives.take("a", [], [(0, 4)])
    assert drives.finished == {"a": 8}
