"""Tests of training/device_streams: copies through a ring of pinned memory, their order, and the pace of a thread."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tests.fakes.copy_queues import ThreadQueue, thread_streams
from torch import Tensor

from shoal.compression.range_reader import whole_vector
from shoal.peer.training import device_streams, tensor_sequence
from shoal.peer.training.device_streams import DirectStreams, Pacer, RingStreams, streams_of
from shoal.peer.training.tensor_sequence import TensorSequence

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_sequence, "_PIECE", 7)
    monkeypatch.setattr(device_streams, "MOST_ELEMENTS", 7)


@pytest.fixture(params=["direct", "ring"])
def streams(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies as on a CPU, and as on a GPU by threads in place of its copy engines."""
    if request.param == "ring":
        ring = thread_streams()[0]
        monkeypatch.setattr(tensor_sequence, "streams_of", lambda device: ring)


def tensors() -> list[Tensor]:
    draws = torch.Generator().manual_seed(1)
    return [
        torch.randn(3, 4, generator=draws).t(),
        torch.randn(2, 5, 4, generator=draws)[:, ::2],
        torch.randn(9, generator=draws).to(torch.bfloat16),
        torch.randn(6, generator=draws).to(torch.float64),
        torch.randn((), generator=draws),
    ]


@pytest.mark.usefixtures("streams")
def test_values_come_and_go_in_pieces_by_many_threads() -> None:
    sequence = TensorSequence(tensors())
    values = torch.randn(sequence.elements, generator=torch.Generator().manual_seed(2))
    sequence.write(values)
    reader, found = sequence.settled(), torch.empty(sequence.elements)
    ranges = [(start, min(start + 5, sequence.elements)) for start in range(0, sequence.elements, 5)]
    with ThreadPoolExecutor(8) as pool:  # more threads than there are slots
        list(pool.map(lambda one: reader.read(*one, found[slice(*one)]), ranges))
    assert torch.equal(found, sequence.rounded(values))


@pytest.mark.usefixtures("streams")
def test_a_new_base_keeps_the_work_and_is_exact_without_any() -> None:
    sequence = TensorSequence(tensors())
    before, anchor = sequence.copy(), torch.arange(float(sequence.elements)) / 3
    sequence.rebase(before, anchor)
    assert torch.equal(whole_vector(sequence), sequence.rounded(anchor))
    before, old = sequence.copy(), whole_vector(sequence)
    sequence.write(old + 1)
    worked = whole_vector(sequence)
    sequence.rebase(before, 2 * anchor)
    assert torch.equal(whole_vector(sequence), sequence.rounded((worked - old) + 2 * anchor))


def test_a_settled_reader_waits_for_its_own_moment_only() -> None:
    """Reads of a contribution must not wait for the training that goes on."""
    may_copy = threading.Event()
    streams, out, _ = thread_streams(ThreadQueue(may_copy))
    moment = streams.mark()
    source, found = torch.arange(20.0), torch.zeros(20)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(
            streams.read, [(source[at : at + 7], found[at : at + 7]) for at in range(0, 20, 7)], moment
        )
        with pytest.raises(TimeoutError):
            reading.result(0.05)
        assert torch.equal(found, torch.zeros(20)), "nothing is taken from a slot before its copy has ended"
        may_copy.set()
        reading.result(5)
    assert torch.equal(found, source)
    assert out.copied == 3


def test_pinned_memory_stays_as_it_is_and_is_given_back_after_an_error() -> None:
    streams, _, _ = thread_streams()
    held = streams._ring

    def blocks() -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(3):
            yield torch.ones(7), torch.zeros(7)
        raise RuntimeError("the source fails")

    for _ in range(3):
        with pytest.raises(RuntimeError, match="the source fails"):
            streams.write(blocks())
        with pytest.raises(RuntimeError, match="the source fails"):
            streams.read(blocks())
    made = device_streams._SLOTS - held._left_to_make
    assert len(held._free) == made <= device_streams._IN_FLIGHT


def test_pinned_memory_that_there_was_not_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> Tensor:
        raise RuntimeError("no memory to pin")

    ring = device_streams._Ring(pin_memory=False)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", refused)
        for _ in range(8):
            with pytest.raises(RuntimeError):
                ring.take(wait=False)
    assert ring.take(wait=False) is not None, "whoever waited would wait for ever"


def test_a_slot_is_used_again_only_after_its_copy() -> None:
    may_copy = threading.Event()
    streams, _, into = thread_streams(incoming=ThreadQueue(may_copy))
    source, found = torch.arange(70.0), torch.zeros(70)
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(streams.write, [(source[at : at + 7], found[at : at + 7]) for at in range(0, 70, 7)])
        with pytest.raises(TimeoutError):
            writing.result(0.05)
        may_copy.set()
        writing.result(5)
    assert torch.equal(found, source)
    assert into.copied == 10


def test_a_thread_is_one_step_ahead_of_its_device_at_most() -> None:
    may_go = threading.Event()
    queue = ThreadQueue(may_go)
    streams = RingStreams(CPU, _Queued(queue), ThreadQueue(), ThreadQueue(), pin_memory=False)
    pacer = Pacer(streams)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(_queue_step, queue, pacer)
        first.result(5)
        second = pool.submit(_queue_step, queue, pacer)
        with pytest.raises(TimeoutError):
            second.result(0.05)
        may_go.set()
        second.result(5)


class _Queued:
    """Computations of a thread that its device does later."""

    def __init__(self, queue: ThreadQueue) -> None:
        self.mark, self.follow = queue.mark, queue.follow


def _queue_step(queue: ThreadQueue, pacer: Pacer) -> None:
    queue.copy(torch.zeros(1), torch.ones(1))
    pacer.note_step()


def test_a_cpu_is_copied_by_the_calling_thread_and_its_marks_tell_time() -> None:
    streams = streams_of(CPU)
    assert isinstance(streams, DirectStreams)
    assert streams is streams_of(CPU)
    earlier, later = streams.mark(), streams.mark()
    assert later.is_reached()
    assert later.seconds_since(earlier) >= 0
