"""Tests of training/data: leased samples in their states, batches, and fingerprints of datasets."""

import itertools
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.peer.training.data import LeasedSamples, fingerprint, take_batch
from shoal.swarm.errors import UserError
from shoal.swarm.protocol.types import FirstBatch, SampleRange
from shoal.swarm.sample_ranges import from_wire, merge

LOSS = torch.tensor(2.0)


def samples(*leases: tuple[int, int], tokens: int = 10) -> LeasedSamples:
    made = LeasedSamples(tokens)
    for lease in leases:
        made.add_lease(*lease)
    return made


def test_batches_come_from_one_lease_at_a_time_and_in_order() -> None:
    work = samples((0, 5), (20, 22))
    taken = []
    while (bounds := work.next_batch(2)) is not None:
        assert work.in_hand
        taken.append(bounds)
        assert work.finish_batch(LOSS) == bounds[1] - bounds[0]
    assert taken == [(0, 2), (2, 4), (4, 5), (20, 22)]
    assert from_wire(work.done_ranges()) == [(0, 5), (20, 22)]
    assert (work.left, work.in_hand, work.tokens_done, work.tokens_trained) == (0, False, 70, 70)


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=6),
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 20)), max_size=40),
)
def test_no_sample_is_lost_or_done_twice(sizes: list[int], steps: list[tuple[int, int]]) -> None:
    """However far ahead a loop fetches and however it accumulates, samples are done in order."""
    starts = np.cumsum([0, *sizes]).tolist()
    work = samples(*itertools.pairwise(starts), tokens=1)
    done = 0
    for size, finishes in steps:
        work.next_batch(size)
        finishes = min(finishes, work.in_hand)
        if finishes:
            assert work.finish(finishes, LOSS) == finishes
            done += finishes
        assert work.left + work.in_hand + work.in_round == sum(sizes)
        assert from_wire(work.done_ranges()) == merge([(0, done)])
        assert work.undone() == merge([(done, sum(sizes))])


def test_batches_of_a_loop_that_has_ended_come_again() -> None:
    work = samples((0, 8), (20, 24))
    assert [work.next_batch(4), work.next_batch(4), work.next_batch(2)] == [(0, 4), (4, 8), (20, 22)]
    work.finish_batch(LOSS)
    work.put_back()
    assert (work.in_hand, work.left) == (0, 8)
    assert [work.next_batch(9), work.next_batch(9), work.next_batch(9)] == [(4, 8), (20, 22), (22, 24)]


def test_several_batches_in_hand_are_done_in_their_order() -> None:
    work = samples((0, 12))
    for _ in range(3):
        work.next_batch(4)
    assert work.finish_batch(LOSS) == 4
    assert work.finish(6, torch.tensor(4.0)) == 6
    assert from_wire(work.done_ranges()) == [(0, 10)]
    assert (work.in_hand, work.undone(), work.steps) == (2, [(10, 12)], 2)
    assert work.mean_loss() == (4 * 2.0 + 6 * 4.0) / 10
    assert work.finish_batch(1.5) == 2


def test_batches_in_hand_whose_lease_was_lost_come_to_their_step_and_do_not_count() -> None:
    """A loop that fetches ahead trains on them after the resync."""
    work = samples((0, 8))
    for _ in range(2):
        work.next_batch(4)
    work.drop_all()
    assert (work.in_hand, work.undone()) == (0, [])
    work.add_lease(0, 4)
    work.next_batch(4)
    assert [work.finish_batch(LOSS), work.finish(6, LOSS)] == [0, 2]
    assert (from_wire(work.done_ranges()), work.steps, work.tokens_trained) == ([(0, 2)], 1, 20)


def test_a_loop_cannot_count_samples_that_it_does_not_have() -> None:
    work = samples((0, 8))
    work.take(4)
    for tried in (lambda: work.finish_batch(LOSS), lambda: work.finish(1, LOSS), lambda: work.finish(0, LOSS)):
        with pytest.raises(UserError, match=r"session\.step"):
            tried()
    assert work.in_hand == 4


def test_a_batch_that_is_lost_while_it_is_loaded_is_never_seen() -> None:
    work = samples((0, 8))
    work.next_batch(4)
    second = work.take(4)
    assert second is not None
    work.drop_all()
    work.discard(second)
    assert (work.batches_given, work.finish_batch(LOSS), work.batches_given) == (1, 0, 0)


def test_what_is_done_under_an_exchange_is_for_the_next_round() -> None:
    work = samples((0, 8))
    work.next_batch(4)
    work.finish_batch(torch.tensor(2.0))
    work.offer_to_round()
    assert (work.tokens_done, work.done_ranges(), work.mean_loss()) == (0, (), None)
    work.next_batch(2)
    work.finish_batch(torch.tensor(5.0))
    work.drop_offered()
    assert (from_wire(work.done_ranges()), work.mean_loss()) == ([(4, 6)], 5.0)


def test_what_a_round_did_without_goes_into_the_next_one_with_what_is_done_since() -> None:
    work = samples((0, 8))
    work.next_batch(4)
    work.finish_batch(torch.tensor(2.0))
    work.offer_to_round()
    work.next_batch(2)
    work.finish_batch(torch.tensor(5.0))
    work.take_back()
    assert (from_wire(work.done_ranges()), work.tokens_done, work.mean_loss()) == ([(0, 6)], 60, 3.0)
    work.offer_to_round()
    work.drop_offered()
    work.take_back()
    assert work.in_round == 0, "committed is committed"


def test_a_commit_keeps_what_is_left_and_a_fresh_start_keeps_nothing() -> None:
    work = samples((0, 8))
    work.next_batch(4)
    work.finish_batch(LOSS)
    work.offer_to_round()
    work.drop_offered()
    assert (work.left, work.tokens_done, work.done_ranges(), work.mean_loss()) == (4, 0, (), None)
    assert work.tokens_trained == 40
    work.next_batch(2)
    work.drop_all()
    assert (work.left, work.in_hand, work.tokens_done, work.next_batch(1)) == (0, False, 0, None)


def test_losses_are_weighted_by_samples() -> None:
    work = samples((0, 4))
    assert work.mean_loss() is None
    assert work.recent_loss() is None
    for size, loss in ((3, 1.0), (1, 5.0)):
        work.next_batch(size)
        work.finish_batch(torch.tensor(loss, requires_grad=True))
    assert work.mean_loss() == 2.0
    assert work.recent_loss() == 1.0


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_is_none(loss: float) -> None:
    work = samples((0, 4))
    work.next_batch(4)
    work.finish_batch(torch.tensor(loss))
    assert work.mean_loss() is None
    assert work.recent_loss() is None


def test_a_step_needs_a_batch() -> None:
    with pytest.raises(UserError, match="without a batch in hand"):
        samples((0, 4)).finish_batch(LOSS)


# Whose data it is ---------------------------------------------------------------------------------------------


def make_data(label: Any = 3, length: int = 50) -> list[Any]:
    return [{"x": torch.full((2, 2), float(index)), "y": (label, [np.arange(index)])} for index in range(length)]


def test_the_same_data_has_the_same_fingerprint() -> None:
    assert fingerprint(make_data()) == fingerprint(make_data())
    assert len(fingerprint(make_data())) == 32


def test_other_data_has_another() -> None:
    changed = make_data()
    changed[0]["x"] = changed[0]["x"] + 1
    last = make_data()
    last[-1]["y"] = (3, [np.arange(48)])
    all_of_them = [make_data(), make_data(4), make_data(length=49), changed, last, []]
    assert len({fingerprint(data) for data in all_of_them}) == len(all_of_them)


def test_the_order_of_keys_does_not_matter() -> None:
    assert fingerprint([{"a": 1, "b": 2}]) == fingerprint([{"b": 2, "a": 1}])


def test_numpy_scalars_are_their_bytes() -> None:
    """Their text differs between releases of NumPy."""
    assert fingerprint([np.float32(0.5)]) == fingerprint([np.array(0.5, dtype=np.float32)])


def test_tensors_of_any_kind_can_be_hashed() -> None:
    kinds = [
        torch.tensor(1.0),
        torch.tensor([True, False]),
        torch.ones(3, dtype=torch.bfloat16),
        torch.arange(6).view(2, 3).t(),
        torch.ones(2, requires_grad=True),
    ]
    assert len({fingerprint([kind]) for kind in kinds}) == len(kinds)


def test_the_fingerprint_is_the_same_in_another_process() -> None:
    program = (
        "import torch, numpy as np\nfrom shoal.peer.training.data import fingerprint\n"
        "print(fingerprint([{'x': torch.ones(2), 'y': ('a', 1, np.int64(3))}]).hex())"
    )
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env={"PYTHONPATH": ".src"}
    )
    assert found.stdout.strip() == fingerprint([{"x": torch.ones(2), "y": ("a", 1, np.int64(3))}]).hex()


def test_batches_are_collated_or_made_by_the_dataset() -> None:
    class Own:
        def __len__(self) -> int:
            return 9

        def __getitem__(self, index: int) -> Any:
            raise AssertionError

        def batch(self, indices: Any) -> str:
            return f"own {indices.tolist()}"

    collated = take_batch([(torch.tensor(float(index)), index) for index in range(9)], np.array([4, 1]))
    assert torch.equal(collated[0], torch.tensor([4.0, 1.0]))
    assert torch.equal(collated[1], torch.tensor([4, 1]))
    assert take_batch(Own(), np.array([4, 1])) == "own [4, 1]"


def test_the_first_batch_from_the_anchor_is_remembered_until_the_next_anchor() -> None:
    samples = LeasedSamples(tokens_per_sample=2)
    samples.add_lease(8, 20)

    def train(loss: float) -> None:
        assert samples.next_batch(4) is not None
        samples.finish_batch(torch.tensor(loss))

    train(9.0)
    assert samples.first_batch() is None, "nobody has said that it was from the anchor"
    samples.restart_from_anchor()
    assert samples.first_batch() is None
    train(3.5)
    train(1.0)
    first = FirstBatch(samples=SampleRange(start=12, stop=16), loss=3.5)
    assert samples.first_batch() == first
    samples.offer_to_round()
    samples.take_back()
    assert samples.first_batch() == first, "the round was aborted, and the anchor is the same"
    samples.drop_all()
    assert samples.first_batch() is None
    samples.add_lease(30, 34)
    samples.restart_from_anchor()
    train(float("inf"))
    assert samples.first_batch() is None
