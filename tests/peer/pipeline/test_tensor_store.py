"""Tests of pipeline/tensor_store: results packed once, offers checked before the fetch, jobs dropped."""

import asyncio
from typing import Any

import pytest
import torch
from tests.fakes.memory_network import MemoryNetwork
from tests.fakes.virtual_clock import run_virtual
from tests.peer.devices import CPU, devices
from torch import Tensor

from shoal.compression.registry import get_codec
from shoal.peer.pipeline.tensor_io import ComputedTensor, Staging, TensorHeader
from shoal.peer.pipeline.tensor_store import CHUNK_BYTES, Parcel, TensorStore
from shoal.swarm.errors import LinkError, WireError
from shoal.swarm.pipeline.engine.effects import Fetch, MicroBatch, TensorKind
from shoal.swarm.protocol.messages import PeerToPeerOfferTensor
from shoal.swarm.protocol.types import Blob, TensorForm

MICRO_BATCH = MicroBatch(3, 8, 12)
JOB, THEIRS = 7, 99


def pair(device: torch.device = CPU) -> tuple[TensorStore, TensorStore, Any]:
    """Two peers, ``a`` and ``b``, and the endpoint of the first."""
    network = MemoryNetwork()
    staging = Staging(device, get_codec("float32"))
    first = network.endpoint("a")
    return TensorStore(first, staging), TensorStore(network.endpoint("b"), staging), first


def offer(parcel: Parcel, kind: TensorKind = "activation", **changes: Any) -> PeerToPeerOfferTensor:
    return PeerToPeerOfferTensor(
        **{
            "kind": kind,
            "round": MICRO_BATCH.round,
            "start": MICRO_BATCH.start,
            "stop": MICRO_BATCH.stop,
            "attempt": 1,
            "shape": parcel.form.shape,
            "dtype": parcel.form.dtype,
            "size_bytes": parcel.size_bytes,
            "number": JOB,
            "targets": parcel.targets and TensorForm(shape=parcel.targets.shape, dtype=parcel.targets.dtype),
        }
        | changes
    )


def fetch(kind: TensorKind = "activation") -> Fetch:
    return Fetch(kind, "a", JOB, THEIRS, MICRO_BATCH, 1)


async def parcel_of(tensors: TensorStore, kind: TensorKind = "activation") -> Parcel:
    parcel = await tensors.publish_packed(JOB, kind)
    assert parcel is not None
    return parcel


def made(values: int, device: torch.device = CPU) -> tuple[ComputedTensor, Tensor]:
    generator = torch.Generator().manual_seed(values)
    activation = torch.randn(4, values, generator=generator).to(device)
    return ComputedTensor.on_current_stream(activation), torch.randint(0, 256, (4, 5), generator=generator)


@pytest.mark.parametrize("values", [3, CHUNK_BYTES // 16, CHUNK_BYTES // 16 + 1, CHUNK_BYTES])
@devices
def test_an_activation_and_its_targets_arrive_as_they_were(values: int, device: torch.device) -> None:
    async def main() -> None:
        ours, theirs, _ = pair(device)
        activation, targets = made(values, device)
        ours.store_result(JOB, "activation", activation, targets)
        parcel = await parcel_of(ours)
        await theirs.fetch(fetch(), offer(parcel), 1.0)
        given, its_targets = theirs.received_input(THEIRS)
        assert given is not None
        assert its_targets is not None
        assert torch.equal(given, activation.tensor)
        assert torch.equal(its_targets, targets)

    run_virtual(main())


def test_targets_go_on_with_what_is_made_of_the_activation() -> None:
    async def main() -> None:
        ours, theirs, _ = pair()
        activation, targets = made(3)
        ours.store_result(JOB, "activation", activation, targets)
        await theirs.fetch(fetch(), offer(await parcel_of(ours)), 1.0)
        theirs.store_result(THEIRS, "activation", activation)
        parcel = await theirs.publish_packed(THEIRS, "activation")
        assert parcel is not None
        assert parcel.targets == TensorHeader.of(targets)

    run_virtual(main())


def test_a_gradient_takes_the_place_of_the_activation() -> None:
    async def main() -> None:
        ours, theirs, endpoint = pair()
        activation, targets = made(3)
        ours.store_result(JOB, "activation", activation, targets)
        await parcel_of(ours)
        ours.store_result(JOB, "gradient", ComputedTensor.on_current_stream(2 * activation.tensor))
        parcel = await parcel_of(ours, "gradient")
        assert parcel.targets is None
        await theirs.fetch(fetch("gradient"), offer(parcel, "gradient"), 1.0)
        gradient = theirs.received_gradient(THEIRS)
        assert gradient is not None
        assert torch.equal(gradient, 2 * activation.tensor)
        kept = {Blob(kind=kind, number=JOB) for kind in ("activation", "gradient")}
        assert kept <= set(endpoint.blobs), "the activation can be shown until the job is dropped"
        ours.drop(JOB)
        assert kept.isdisjoint(endpoint.blobs)

    run_virtual(main())


def test_what_is_dropped_while_it_is_packed_is_not_offered() -> None:
    async def main() -> None:
        ours, _, endpoint = pair()
        ours.store_result(JOB, "activation", *made(3))
        async with asyncio.TaskGroup() as tasks:
            packing = tasks.create_task(ours.publish_packed(JOB, "activation"))
            await asyncio.sleep(0)
            ours.drop(JOB)
        assert packing.result() is None
        assert not endpoint.blobs
        assert await ours.publish_packed(JOB, "activation") is None

    run_virtual(main())


def test_what_is_dropped_cannot_be_fetched_any_more() -> None:
    async def main() -> None:
        ours, theirs, endpoint = pair()
        ours.store_result(JOB, "activation", *made(3))
        ours.store_result(JOB + 1, "gradient", made(3)[0])
        parcel = await parcel_of(ours)
        await ours.publish_packed(JOB + 1, "gradient")
        ours.drop_all()
        assert not endpoint.blobs
        assert len(ours) == 0
        with pytest.raises(LinkError):
            await theirs.fetch(fetch(), offer(parcel), 1.0)

    run_virtual(main())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"shape": (4, 4)}, "expected"),
        ({"dtype": "int64"}, "expected"),
        ({"size_bytes": 49}, "expected 48"),
        ({"targets": None}, "targets"),
        ({"targets": TensorForm(shape=(4, 6), dtype="int64")}, "targets"),
    ],
)
def test_what_is_not_expected_is_refused(changes: dict[str, Any], says: str) -> None:
    async def main() -> None:
        ours, theirs, _ = pair()
        activation, targets = made(3)
        ours.store_result(JOB, "activation", activation, targets)
        parcel = await parcel_of(ours)
        theirs.check_offer(offer(parcel), (4, 3), TensorHeader.of(targets))
        with pytest.raises(WireError, match=says):
            theirs.check_offer(offer(parcel, **changes), (4, 3), TensorHeader.of(targets))

    run_virtual(main())


def test_a_chunk_of_another_size_than_offered_is_refused() -> None:
    async def main() -> None:
        ours, theirs, _ = pair()
        ours.store_result(JOB, "activation", *made(3))
        parcel = await parcel_of(ours)
        with pytest.raises(WireError, match="chunk 0"):
            await theirs.fetch(fetch(), offer(parcel, shape=(4, 4), size_bytes=64), 1.0)

    run_virtual(main())
