"""What all peers of a run hold alike: anchor and outer optimizer state of one version, and its file."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from shoal.swarm.averaging.outcomes import Carried
from shoal.swarm.errors import StateFileError, StorageError

CHUNK_BYTES = 2**20
"""States are hashed and sent in pieces of so many bytes, the last one shorter."""

DIGEST_BYTES = 32
_CHUNKS_A_THREAD = 8  # a thread for less than 8 MiB would cost more than it saves
_FORMAT = "shoal-state-2"
_saving = threading.Lock()


@dataclass(frozen=True)
class State:
    """``values``: (1 + slots, n) float32 on the CPU, the anchor and the outer optimizer's vectors. Never changed
    in place, so it can be served while the next one is being made. ``version``: committed rounds behind it."""

    values: Tensor
    version: int
    digest: bytes
    chunk_digests: bytes
    """SHA-256 of each chunk, one after the other: 32 bytes each."""

    @classmethod
    def make(cls, anchor: Tensor, outer: Tensor, version: int) -> State:
        """``anchor`` (n,), ``outer`` (slots, n). Hashes everything."""
        return cls.of(torch.cat([anchor.unsqueeze(0), outer]), version)

    @classmethod
    def of(cls, values: Tensor, version: int) -> State:
        chunk_digests = _chunk_digests(bytes_of(values))
        return cls(values, version, state_digest(version, tuple(values.shape), chunk_digests), chunk_digests)

    @property
    def anchor(self) -> Tensor:
        return self.values[0]

    @property
    def outer(self) -> Tensor:
        return self.values[1:]


def state_digest(version: int, shape: tuple[int, ...], chunk_digests: bytes) -> bytes:
    """The digest of a state whose chunks have these digests: whoever has the run's can check the list by it, and then
    every chunk by itself."""
    return hashlib.sha256(f"shoal state 2 {version} {shape}\0".encode() + chunk_digests).digest()


def _chunk_digests(data: memoryview) -> bytes:
    chunks = chunks_in(data.nbytes)

    def digest(chunk: int) -> bytes:
        return chunk_digest(data[chunk * CHUNK_BYTES : (chunk + 1) * CHUNK_BYTES])

    threads = min(torch.get_num_threads(), chunks // _CHUNKS_A_THREAD)
    if threads < 2:
        return b"".join(map(digest, range(chunks)))
    with ThreadPoolExecutor(threads) as pool:
        return b"".join(pool.map(digest, range(chunks)))


def chunk_digest(data: memoryview) -> bytes:
    return hashlib.sha256(data).digest()


def chunks_in(size_bytes: int) -> int:
    return -(-size_bytes // CHUNK_BYTES)


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
    digest.update(bytes_of(carried.residual))
    return digest.hexdigest()


def _text_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def bytes_of(values: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    return values.numpy().data.cast("B")
