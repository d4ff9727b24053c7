"""What all peers of a run hold alike: anchor and outer optimizer state of one version; shared, fetched, saved."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import threading
from collections.abc import Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from shoal.swarm.averaging.outcomes import Carried
from shoal.swarm.errors import LinkError, ShoalError, StateFileError, StorageError, WireError
from shoal.swarm.messages import Blob
from shoal.swarm.tasks import task_scope
from shoal.swarm.transport import Endpoint

_CHUNK_BYTES = 2**20
_ASKED_AT_ONCE = 16
_FORMAT = "shoal-state-1"
_saving = threading.Lock()


@dataclass(frozen=True)
class State:
    """``values``: (1 + slots, n) float32 on the CPU, the anchor and the outer optimizer's vectors. Never changed
    in place, so it can be served while the next one is being made. ``version``: committed rounds behind it."""

    values: Tensor
    version: int
    digest: bytes

    @classmethod
    def make(cls, anchor: Tensor, outer: Tensor, version: int) -> State:
        """``anchor`` (n,), ``outer`` (slots, n). Hashes everything."""
        return cls.of(torch.cat([anchor.unsqueeze(0), outer]), version)

    @classmethod
    def of(cls, values: Tensor, version: int) -> State:
        digest = hashlib.sha256(f"shoal state {version} {tuple(values.shape)}\0".encode())
        digest.update(_bytes_of(values))
        return cls(values, version, digest.digest())

    @property
    def anchor(self) -> Tensor:
        return self.values[0]

    @property
    def outer(self) -> Tensor:
        return self.values[1:]


class StateSource:
    """A state as chunks of 1 MiB, offered to joiners (a ``ChunkSource``)."""

    def __init__(self, state: State) -> None:
        self._data = _bytes_of(state.values)
        self.chunks = -(-self._data.nbytes // _CHUNK_BYTES)

    async def chunk(self, index: int) -> memoryview:
        return self._data[index * _CHUNK_BYTES : (index + 1) * _CHUNK_BYTES]


def state_blob(version: int) -> Blob:
    return Blob(kind="state", number=version)


async def fetch_state(
    endpoint: Endpoint,
    donors: Sequence[str],
    version: int,
    digest: bytes,
    shape: tuple[int, int],
    progress_s: float,
) -> State:
    """The state of that version and digest from the donor that is the first to send some of it, else from another one.

    ``shape``: (1 + slots, n). Raises the last ``LinkError`` when no donor has it.
    """
    trouble = LinkError(f"nobody in the run offers the state of version {version} yet")
    values = torch.empty(shape)
    data = _bytes_of(values)
    chunks = -(-data.nbytes // _CHUNK_BYTES)

    def sink(chunk: int, size: int) -> memoryview:
        place = data[chunk * _CHUNK_BYTES : (chunk + 1) * _CHUNK_BYTES]
        if place.nbytes != size:
            raise WireError(f"a state chunk of {size} bytes does not fit")
        return place

    if len(donors) > 1:
        first = await _first_to_send(endpoint, donors, state_blob(version), min(_CHUNK_BYTES, data.nbytes), progress_s)
        donors = sorted(donors, key=lambda one: one != first) if first else ()
    for donor in donors:
        try:
            async with aclosing(endpoint.fetch(donor, state_blob(version), range(chunks), sink, progress_s)) as stream:
                async for _ in stream:
                    pass
        except ShoalError as error:  # the donor's errors come out of here, too
            trouble = LinkError(f"{donor}: {error}")
            continue
        state = await asyncio.to_thread(State.of, values, version)
        if state.digest == digest:
            return state
        trouble = LinkError(f"{donor} has another state of version {version} than the run agreed on")
    raise trouble


async def _first_to_send(
    endpoint: Endpoint, donors: Sequence[str], blob: Blob, first_bytes: int, progress_s: float
) -> str | None:
    """Whoever of them is the first to send the first chunk; None when nobody does.

    All at once, but for the very many: to wait for one that is dead, or has nothing yet itself, after the other would
    take longer than a round, and then the others have a newer state."""
    answers: asyncio.Queue[str | None] = asyncio.Queue()

    def sink(chunk: int, size: int) -> memoryview:
        if size != first_bytes:
            raise WireError(f"a state chunk of {size} bytes does not fit")
        return memoryview(bytearray(size))

    async def ask(donor: str) -> None:
        found = None
        with suppress(ShoalError):
            async with aclosing(endpoint.fetch(donor, blob, range(1), sink, progress_s)) as stream:
                async for _ in stream:
                    found = donor
        answers.put_nowait(found)

    for at in range(0, len(donors), _ASKED_AT_ONCE):
        async with task_scope() as tasks:
            asked = [tasks.create_task(ask(donor)) for donor in donors[at : at + _ASKED_AT_ONCE]]
            first = None
            for _ in asked:
                first = first or await answers.get()
            for task in asked:
                task.cancel()
        if first:
            return first
    return None


def save_state(path: Path, state: State, about: dict[str, Any], carried: Carried | None = None) -> None:
    """Write a safetensors file, replacing atomically. ``about``: JSON-able, for ``load_state`` and export;
    ``carried``: this peer's own, for ``load_carried``.

    Raises ``StorageError`` when the disk refuses; an earlier file is left as it was.
    """
    header = {"format": _FORMAT, "version": str(state.version), "digest": state.digest.hex()}
    header["about"] = json.dumps(about)
    header["about_digest"] = _text_digest(header["about"])
    tensors = {"values": state.values}
    if carried is not None:
        tensors["residual"] = carried.residual
        header["residual_weight"] = str(carried.weight_tokens)
        header["residual_digest"] = _carried_digest(carried)
    temporary = path.with_name(f".{path.name}.new")
    with _saving:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file(tensors, temporary, header)
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
            temporary.replace(path)
        except (OSError, SafetensorError) as error:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise StorageError(f"{path}: the state cannot be saved: {error}") from error


def load_state(path: Path) -> tuple[State, dict[str, Any]]:
    """Raises ``StateFileError`` when the file is missing, truncated, or not what it says it is."""
    try:
        with safe_open(path, "pt") as file:
            header = file.metadata() or {}
            if header.get("format") != _FORMAT:
                raise StateFileError(f"{path}: not a Shoal state file (format: expected {_FORMAT})")
            values = file.get_tensor("values")
        about = json.loads(header["about"])
        version, digest, about_digest = int(header["version"]), header["digest"], header["about_digest"]
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        if isinstance(error, StateFileError):
            raise
        raise StateFileError(f"{path}: not a whole Shoal state file: {error}") from error
    if values.dtype != torch.float32 or values.dim() != 2 or not isinstance(about, dict):
        raise StateFileError(f"{path}: field values: expected a (k, n) float32 tensor")
    state = State.of(values, version)
    if (state.digest.hex(), _text_digest(header["about"])) != (digest, about_digest):
        raise StateFileError(f"{path}: its content does not match its digest; it is damaged")
    return state, about


def load_carried(path: Path) -> Carried | None:
    """What ``save_state`` was given; None for nothing. Raises ``StateFileError`` when it is damaged."""
    try:
        with safe_open(path, "pt") as file:
            header = file.metadata() or {}
            if "residual_digest" not in header:
                return None
            carried = Carried(file.get_tensor("residual"), int(header["residual_weight"]))
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise StateFileError(f"{path}: not a whole Shoal state file: {error}") from error
    if carried.residual.dtype != torch.float32 or carried.residual.dim() != 1:
        raise StateFileError(f"{path}: field residual: expected a (n,) float32 tensor")
    if _carried_digest(carried) != header["residual_digest"]:
        raise StateFileError(f"{path}: its residual does not match its digest; it is damaged")
    return carried


def _carried_digest(carried: Carried) -> str:
    digest = hashlib.sha256(f"shoal residual {carried.weight_tokens}\0".encode())
    digest.update(_bytes_of(carried.residual))
    return digest.hexdigest()


def _text_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _bytes_of(values: Tensor) -> memoryview:
    return values.numpy().data.cast("B")
