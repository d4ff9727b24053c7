"""Tests of transfers in pipeline/tensor_io: a GPU's streams wait for each other only where they must."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tests.peer.devices import devices
from tests.peer.layered_models import Key, Line, batch_of, gpt
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from shoal.compression.formats import CodecError
from shoal.compression.registry import get_codec
from shoal.peer.pipeline.tensor_io import ComputedTensor, Staging, TensorHeader, pack, unpack
from shoal.peer.training.device import autocast
from shoal.peer.training.device_streams import moved
from shoal.swarm.errors import WireError

CODECS = ("float32", "bfloat16", "int8")
SHAPE = (4, 256, 64)
A_WHILE = 10**8
"""Cycles: some hundredths of a second."""


@pytest.fixture
def worker() -> Iterator[ThreadPoolExecutor]:
    """Where the event loop has things packed and unpacked."""
    with ThreadPoolExecutor(1) as pool:
        yield pool


def staging_on(device: torch.device, codec: str = "float32") -> Staging:
    return Staging(device, get_codec(codec))


def values(seed: int = 0) -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))


def keep_busy(device: torch.device) -> None:
    """Whatever is begun on this stream from now on is done later."""
    if device.type == "cuda":
        torch.cuda._sleep(A_WHILE)


@devices
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_and_values_are_those_of_the_cpu(device: torch.device, codec: str, dtype: torch.dtype) -> None:
    staging, given = staging_on(device, codec), values().to(dtype)
    tail = torch.arange(5, dtype=torch.uint8)
    expected = pack(given, staging.codec)
    on_device = ComputedTensor.on_current_stream(given.to(device))
    assert torch.equal(staging.pack_result(on_device), expected)
    assert torch.equal(staging.pack_result(on_device, tail), torch.cat([expected, tail]))
    room = staging.allocate_host(len(expected) + 3)
    room[: len(expected)] = expected
    found, _ = staging.unpack_received(room[: len(expected)], TensorHeader.of(given))
    assert found.device.type == device.type
    assert torch.equal(found.cpu(), unpack(expected, TensorHeader.of(given), staging.codec))


@devices
def test_what_is_packed_is_what_was_computed_before(device: torch.device, worker: ThreadPoolExecutor) -> None:
    """Not what is there when the worker thread looks, nor after what has been begun since."""
    staging, given = staging_on(device), values()
    source = given.to(device)
    staging.pack_result(
        ComputedTensor.on_current_stream(source)
    )  # kernels are loaded and memory is taken the first time, which takes longer
    with staging.computing():
        one = torch.zeros(SHAPE, device=device)
        keep_busy(device)
        one.copy_(source)
        made = ComputedTensor.on_current_stream(one)
        keep_busy(device)
        after = ComputedTensor.on_current_stream(one)
        packed = worker.submit(staging.pack_result, made).result()
        assert after.ready is None or not after.ready.query(), "it did not wait for what was begun since"
        assert torch.equal(packed, pack(given, staging.codec))


@devices
def test_memory_that_is_still_read_is_not_given_out(device: torch.device, worker: ThreadPoolExecutor) -> None:
    staging, given = staging_on(device), [values(1), values(2)]
    form = TensorHeader.of(given[0])
    packed = [staging.pack_result(ComputedTensor.on_current_stream(one.to(device))) for one in given]
    worker.submit(staging.unpack_received, packed[1], form).result()  # memory that is there to be used again
    with staging.computing():
        arrived, _ = worker.submit(staging.unpack_received, packed[0], form).result()
        keep_busy(device)
        doubled = arrived * 2
        del arrived
        after, _ = worker.submit(staging.unpack_received, packed[1], form).result()
        assert torch.equal(doubled.cpu(), given[0] * 2)
        assert torch.equal(after.cpu(), given[1])


@devices
def test_host_memory_is_pinned_for_a_gpu_and_used_again(device: torch.device, worker: ThreadPoolExecutor) -> None:
    staging, form, in_flight = staging_on(device), TensorHeader(SHAPE, "float32"), 3
    on_gpu = device.type == "cuda"
    given, parcels, places = values().to(device), [], set()
    for _ in range(50):
        parcels.append(worker.submit(staging.pack_result, ComputedTensor.on_current_stream(given)).result())
        room = staging.allocate_host(form.packed_bytes(staging.codec)).copy_(parcels[-1])
        assert torch.equal(worker.submit(staging.unpack_received, room, form).result()[0], given)
        assert parcels[-1].is_pinned() == room.is_pinned() == on_gpu
        places |= {parcels[-1].data_ptr(), room.data_ptr()}
        del parcels[:-in_flight], room
    if on_gpu:  # elsewhere it is the memory of all, and not kept
        assert len(places) <= 2 * (in_flight + 1)


@devices
def test_after_an_error_all_goes_on(device: torch.device, worker: ThreadPoolExecutor) -> None:
    staging, given = staging_on(device, "int8"), values()
    form, expected = TensorHeader.of(given), pack(given, get_codec("int8"))
    for _ in range(3):
        with pytest.raises(CodecError):
            worker.submit(
                staging.pack_result, ComputedTensor.on_current_stream(torch.full(SHAPE, torch.nan, device=device))
            ).result()
        with pytest.raises(WireError):
            worker.submit(staging.unpack_received, torch.full_like(expected, 255), form).result()
        with pytest.raises(WireError):
            worker.submit(staging.unpack_received, expected[:-4], form).result()
        assert torch.equal(
            worker.submit(staging.pack_result, ComputedTensor.on_current_stream(given.to(device))).result(), expected
        )


@devices
def test_what_is_computed_inside_and_outside_is_in_order(device: torch.device) -> None:
    """Models are built before, and looked at afterwards."""
    staging, one = staging_on(device), torch.zeros(SHAPE, device=device)
    for number in range(3):
        keep_busy(device)
        one += 1
        with staging.computing():
            one *= 2
            keep_busy(device)
            one += number
        assert float(one[0, 0, 0]) == [2.0, 7.0, 18.0][number]


@devices
def test_what_a_driver_reads_is_moved_as_it_is(device: torch.device) -> None:
    batch = torch.arange(40).view(4, 10)
    for given in (batch, batch[:, 1:], batch[:, :-1]):
        found = moved(given, device)
        assert found.device.type == device.type
        assert torch.equal(found.cpu(), given)
        assert (found is given) == (device.type == "cpu"), "on the CPU nothing is copied"


@devices
def test_moving_does_not_wait_for_what_was_begun(device: torch.device) -> None:
    given = torch.arange(2.0**21)  # so much that the driver would not take a copy of its own
    for is_measured in (False, True):  # memory is taken the first time, which waits
        keep_busy(device)
        begun = ComputedTensor.on_current_stream(torch.zeros(1, device=device))
        found = moved(given, device)
        assert not is_measured or begun.ready is None or not begun.ready.query()
        assert torch.equal(found.cpu(), given)


@devices
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("activations", ["float32", "int8"])
def test_recomputing_changes_no_bit(device: torch.device, precision: str, activations: str) -> None:
    """With attention that adds up in the same order each time: others' backward passes on GPUs do not."""
    recipe, found = gpt(), []
    for recompute in (False, True):
        cast = autocast(device, precision)
        line = Line(recipe, (0, 3, 6), [(0, 0), (1, 1)], activations, device, recompute=recompute, autocast=cast)
        with sdpa_kernel(SDPBackend.MATH):
            losses = [
                line.drive(Key(0, at, at + 2), batch_of(recipe.training_data(), at, at + 2), (0, 1)) for at in (0, 2, 4)
            ]
        found.append((losses, torch.cat(line.means())))
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])
