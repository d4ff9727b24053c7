"""Tensors of a pipeline's peer by job: received ones, and packed ones that other peers may fetch.

Used on the event loop; packing and unpacking run in worker threads.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import dataclass, field

from torch import Tensor

from shoal.peer.pipeline.tensor_io import ComputedTensor, Staging, TensorHeader, pack, unpack
from shoal.swarm.aio import in_thread
from shoal.swarm.errors import BlobUnavailable, WireError
from shoal.swarm.pipeline.engine.effects import Fetch, Send, TensorKind
from shoal.swarm.protocol.messages import PeerToPeerOfferTensor
from shoal.swarm.protocol.types import Blob
from shoal.swarm.protocol.types import TensorForm as WireForm
from shoal.swarm.transport.node import Endpoint

CHUNK_BYTES = 2**20


@dataclass(frozen=True)
class Parcel:
    """Packed tensor, the first ``size_bytes`` of ``data``, then the targets' raw bytes, if any (a ``ChunkSource``)."""

    form: TensorHeader
    targets: TensorHeader | None
    size_bytes: int
    data: memoryview

    @property
    def chunks(self) -> int:
        return _chunks(self.data.nbytes)

    async def chunk(self, index: int) -> memoryview:
        if index >= self.chunks:
            raise BlobUnavailable(f"there are only {self.chunks} chunks")
        return self.data[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]


@dataclass
class _JobTensors:
    """Tensors of one job: ``given``, ``targets`` and ``gradient`` were received, ``made`` has yet to be packed."""

    given: Tensor | None = None
    targets: Tensor | None = None
    gradient: Tensor | None = None
    made: dict[TensorKind, ComputedTensor] = field(default_factory=dict)
    parcels: dict[TensorKind, Parcel] = field(default_factory=dict)
    packing: asyncio.Lock = field(default_factory=asyncio.Lock)


class TensorStore:
    """Store of tensors, by the engine's job number."""

    def __init__(self, endpoint: Endpoint, staging: Staging) -> None:
        self._endpoint = endpoint
        self._staging = staging
        self._kept: dict[int, _JobTensors] = {}

    def __len__(self) -> int:
        return len(self._kept)

    # Results, for other peers ---------------------------------------------------------------------------------

    def store_result(self, job: int, kind: TensorKind, tensor: ComputedTensor, targets: Tensor | None = None) -> None:
        """Store a job's result in place of its inputs and earlier results.

        The targets travel on with an activation: ``targets``, or those that came with the job's input.
        """
        earlier = self._kept.get(job, _JobTensors())
        if targets is None and kind == "activation":
            targets = earlier.targets
        self._retract(job)
        self._kept[job] = _JobTensors(targets=targets, made={kind: tensor})

    async def publish_packed(self, job: int, kind: TensorKind) -> Parcel | None:
        """Pack a result, once, and publish it for other peers to fetch; None if the job was dropped meanwhile.

        Raises ``CodecError`` if a value is infinite or not a number.
        """
        kept = self._kept.get(job)
        if kept is None:
            return None
        async with kept.packing:
            if kind in kept.made:
                made = kept.made[kind]
                kept.parcels[kind] = await in_thread(_packed, made, kept.targets, self._staging)
                del kept.made[kind]
            if self._kept.get(job) is not kept:
                return None
            parcel = kept.parcels[kind]
            self._endpoint.publish(Blob(kind=kind, number=job), parcel)
            return parcel

    # Inputs, from other peers ---------------------------------------------------------------------------------

    def check_offer(self, offer: PeerToPeerOfferTensor, shape: tuple[int, ...], targets: TensorHeader | None) -> None:
        """Raise ``WireError`` unless the offered tensor and its targets have the expected shapes and sizes."""
        form = _form(offer)
        form.check(shape)
        if offer.size_bytes != (expected := form.packed_bytes(self._staging.codec)):
            raise WireError(f"an offered tensor of {offer.size_bytes} bytes; expected {expected}")
        if _targets_form(offer) != targets:
            raise WireError(f"offered targets of the form {offer.targets}; expected {targets}")

    async def fetch(self, fetch: Fetch, offer: PeerToPeerOfferTensor, progress_s: float) -> float:
        """Fetch an offered tensor as the input or the gradient of ``fetch.job``, and return its root mean square.

        Raises ``LinkError``.

        ``progress_s``: the longest wait for the next chunk.
        """
        form, targets = _form(offer), _targets_form(offer)
        target_bytes = targets.packed_bytes(self._staging.codec) if targets else 0
        room = self._staging.allocate_host(offer.size_bytes + target_bytes)
        place = room.numpy().data

        def sink(chunk: int, size: int) -> memoryview:
            piece = place[chunk * CHUNK_BYTES : (chunk + 1) * CHUNK_BYTES]
            if size != piece.nbytes:
                raise WireError(f"chunk {chunk} of a tensor has {size} bytes; expected {piece.nbytes}")
            return piece

        blob, chunks = Blob(kind=fetch.kind, number=fetch.number), range(_chunks(place.nbytes))
        async with aclosing(self._endpoint.fetch(fetch.peer, blob, chunks, sink, progress_s)) as stream:
            async for _ in stream:
                pass
        tensor, size = await in_thread(self._staging.unpack_received, room[: offer.size_bytes], form)
        kept = self._kept.setdefault(fetch.job, _JobTensors())
        if fetch.kind == "gradient":
            kept.gradient = tensor
            return size
        kept.given = tensor
        if targets is not None:
            kept.targets = unpack(room[offer.size_bytes :], targets, self._staging.codec)
        return size

    def received_input(self, job: int) -> tuple[Tensor | None, Tensor | None]:
        """Return the input and the targets received for a job; None where this peer reads them itself."""
        kept = self._kept.get(job, _JobTensors())
        return kept.given, kept.targets

    def received_gradient(self, job: int) -> Tensor | None:
        """Return the gradient received for a job, if any."""
        return self._kept.get(job, _JobTensors()).gradient

    # ----------------------------------------------------------------------------------------------------------

    def drop(self, job: int) -> None:
        """Drop a job's tensors and retract its results."""
        if self._kept.pop(job, None) is not None:
            self._retract(job)

    def drop_all(self) -> None:
        for job in list(self._kept):
            self.drop(job)

    def _retract(self, job: int) -> None:
        self._endpoint.retract(Blob(kind="activation", number=job))
        self._endpoint.retract(Blob(kind="gradient", number=job))


def _packed(made: ComputedTensor, targets: Tensor | None, staging: Staging) -> Parcel:
    form = TensorHeader.of(made.tensor)
    data = staging.pack_result(made, None if targets is None else pack(targets.cpu(), staging.codec))
    targets_form = None if targets is None else TensorHeader.of(targets)
    return Parcel(form, targets_form, form.packed_bytes(staging.codec), data.numpy().data)


def _form(offer: PeerToPeerOfferTensor) -> TensorHeader:
    return TensorHeader(offer.shape, offer.dtype)


def _targets_form(offer: PeerToPeerOfferTensor) -> TensorHeader | None:
    return None if offer.targets is None else TensorHeader(offer.targets.shape, offer.targets.dtype)


def offer_of(send: Send, parcel: Parcel) -> PeerToPeerOfferTensor:
    """Return the message that offers a parcel to its receiver."""
    targets = parcel.targets
    return PeerToPeerOfferTensor(
        kind=send.kind,
        round=send.micro_batch.round,
        start=send.micro_batch.start,
        stop=send.micro_batch.stop,
        attempt=send.attempt,
        shape=parcel.form.shape,
        dtype=parcel.form.dtype,
        size_bytes=parcel.size_bytes,
        number=send.number,
        targets=None if targets is None else WireForm(shape=targets.shape, dtype=targets.dtype),
    )


def _chunks(size_bytes: int) -> int:
    return -(-size_bytes // CHUNK_BYTES)
