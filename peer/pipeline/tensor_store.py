"""Tensors of a pipeline's peer by job: received ones, and packed ones that other peers may fetch.

Used on the event loop; packing and unpacking run in worker threads.
"""

from __future__ import annotations

import asyncio
import hashlib
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Literal, get_args

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

BlobKind = Literal["activation", "gradient", "returned", "repeated"]
_KINDS: tuple[BlobKind, ...] = get_args(BlobKind)


@dataclass(frozen=True)
class Parcel:
    """Packed tensor, the first ``size_bytes`` of ``data``, then the targets' raw bytes, if any (a ``ChunkSource``).

    ``digest``: of all of ``data``."""

    form: TensorHeader
    targets: TensorHeader | None
    size_bytes: int
    data: memoryview
    digest: bytes

    @property
    def chunks(self) -> int:
        return _chunks(self.data.nbytes)

    async def chunk(self, index: int) -> memoryview:
        if index >= self.chunks:
            raise BlobUnavailable(f"there are only {self.chunks} chunks")
        return self.data[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]


@dataclass
class _JobTensors:
    """Tensors of one job: ``given``, ``targets`` and ``gradient`` were received, ``made`` has yet to be packed.

    ``given_digest``: of the packed input with its targets."""

    given: Tensor | None = None
    targets: Tensor | None = None
    gradient: Tensor | None = None
    given_digest: bytes = b""
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

        The targets travel on with an activation: ``targets``, or those that came with the job's input. What was sent
        to the next stage and what came back from there can be fetched until the job is dropped, for comparison.
        """
        earlier = self._kept.get(job, _JobTensors())
        if targets is None and kind == "activation":
            targets = earlier.targets
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
            self._endpoint.publish(_blob(kind, job), parcel)
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
        await self._fetch_into(place, fetch.peer, _blob(fetch.kind, fetch.number), progress_s)
        tensor, size = await in_thread(self._staging.unpack_received, room[: offer.size_bytes], form)
        digest = await in_thread(_digest, place)
        kept = self._kept.setdefault(fetch.job, _JobTensors())
        if fetch.kind == "gradient":
            kept.gradient = tensor
            self._endpoint.publish(_blob("returned", fetch.job), Parcel(form, None, place.nbytes, place, digest))
            return size
        kept.given, kept.given_digest = tensor, digest
        if targets is not None:
            kept.targets = unpack(room[offer.size_bytes :], targets, self._staging.codec)
        return size

    async def fetch_packed(self, peer: str, kind: BlobKind, number: int, size_bytes: int, progress_s: float) -> Tensor:
        """Fetch packed bytes from another peer, (size_bytes,) uint8 on the host. Raises ``LinkError``."""
        room = self._staging.allocate_host(size_bytes)
        await self._fetch_into(room.numpy().data, peer, _blob(kind, number), progress_s)
        return room

    async def _fetch_into(self, place: memoryview, peer: str, blob: Blob, progress_s: float) -> None:
        def sink(chunk: int, size: int) -> memoryview:
            piece = place[chunk * CHUNK_BYTES : (chunk + 1) * CHUNK_BYTES]
            if size != piece.nbytes:
                raise WireError(f"chunk {chunk} of a tensor has {size} bytes; expected {piece.nbytes}")
            return piece

        chunks = range(_chunks(place.nbytes))
        async with aclosing(self._endpoint.fetch(peer, blob, chunks, sink, progress_s)) as stream:
            async for _ in stream:
                pass

    def publish_repeated(self, job: int, packed: Tensor) -> None:
        """Publish the output's gradient with which other replicas compute a job again."""
        form = TensorHeader((packed.numel(),), "uint8")
        self._endpoint.publish(_blob("repeated", job), Parcel(form, None, packed.numel(), packed.numpy().data, b""))

    def retract_repeated(self, job: int) -> None:
        self._endpoint.retract(_blob("repeated", job))

    def output(self, job: int) -> Parcel:
        """Return the packed output of a job, which waits for its gradient."""
        return self._kept[job].parcels["activation"]

    def input_digest(self, job: int) -> bytes:
        """Return the digest of a job's packed input with its targets."""
        return self._kept[job].given_digest

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
        for kind in _KINDS:
            self._endpoint.retract(_blob(kind, job))


def _packed(made: ComputedTensor, targets: Tensor | None, staging: Staging) -> Parcel:
    form = TensorHeader.of(made.tensor)
    data = staging.pack_result(made, None if targets is None else pack(targets.cpu(), staging.codec))
    targets_form = None if targets is None else TensorHeader.of(targets)
    place = data.numpy().data
    return Parcel(form, targets_form, form.packed_bytes(staging.codec), place, _digest(place))


def _digest(data: memoryview) -> bytes:
    return hashlib.sha256(data).digest()


def _blob(kind: BlobKind, number: int) -> Blob:
    return Blob(kind=kind, number=number)


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
