"""Tests of training/deferred_copy: copies that several threads make, complete before the tensors change."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tests.fakes.copy_queues import ThreadQueue, thread_streams
from torch import Tensor

from shoal.peer.training import deferred_copy, tensor_sequence
from shoal.peer.training.deferred_copy import DeferredCopy
from shoal.peer.training.device_streams import RingStreams


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_sequence, "_PIECE", 7)
    monkeypatch.setattr(deferred_copy, "_TOGETHER", 2)


def use(streams: RingStreams, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deferred_copy, "streams_of", lambda device: streams)


def tensors() -> dict[str, Tensor]:
    draws = torch.Generator().manual_seed(1)
    return {
        "columns": torch.randn(4, 5, generator=draws).t(),
        "low": torch.randn(40, generator=draws).to(torch.bfloat16),
        "bytes": torch.arange(30, dtype=torch.uint8).view(5, 6)[:, ::2],
        "step": torch.tensor(3.0),
        "none": torch.zeros(0, 3),
    }


@pytest.mark.parametrize("streams", ["direct", "ring"])
def test_copies_are_of_the_tensors_type_and_values(monkeypatch: pytest.MonkeyPatch, streams: str) -> None:
    if streams == "ring":
        use(thread_streams()[0], monkeypatch)
    held = tensors()
    copying = DeferredCopy(held)
    copying.complete()
    expected = {name: one.clone() for name, one in held.items()}
    for one in held.values():
        one.zero_()
    copying.complete()
    assert copying.copies.keys() == expected.keys()
    for name, one in copying.copies.items():
        assert one.dtype == expected[name].dtype
        assert torch.equal(one, expected[name])


def test_a_thread_copies_what_no_other_has_begun_and_waits_for_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """The training thread, when the thread that copies for it is slow, or has not begun at all."""
    may_copy = threading.Event()
    streams, out, _ = thread_streams(ThreadQueue(may_copy))
    use(streams, monkeypatch)
    held = {"weights": torch.arange(70.0)}
    copying = DeferredCopy(held)
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(copying.complete) for _ in range(2)]
        with pytest.raises(TimeoutError):
            both[0].result(0.05)
        assert not both[1].done(), "nobody goes on before all is copied"
        may_copy.set()
        for one in both:
            one.result(5)
    held["weights"].zero_()
    assert torch.equal(copying.copies["weights"], torch.arange(70.0))
    assert out.copied == 10, "each piece once"


def test_copies_are_read_behind_the_work_that_was_queued_before_and_no_later_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    streams, out, _ = thread_streams()
    use(streams, monkeypatch)
    asked: list[object] = []
    monkeypatch.setattr(out, "follow", asked.append)
    copying = DeferredCopy({"weights": torch.ones(30)})
    (mark,) = copying._after.values()
    copying.complete()
    assert set(asked) == {mark}


def test_what_a_thread_could_not_copy_is_left_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    streams, out, _ = thread_streams()
    use(streams, monkeypatch)
    copying = DeferredCopy({"weights": torch.arange(70.0)})
    with monkeypatch.context() as patch:
        patch.setattr(out, "copy", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            copying.complete()
    copying.complete()
    assert torch.equal(copying.copies["weights"], torch.arange(70.0))
