"""A checkpoint's manifest: what its files are, by size and digest, and of which run and round; signed by its peer.

The file holds its own canonical JSON and no other bytes: keys sorted, no spaces, ASCII. What is signed (Ed25519,
RFC 8032) is ``shoal checkpoint, version 1``, a zero byte, and the canonical JSON of everything but ``signature``.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue, StringConstraints, ValidationError, model_validator

from shoal.peer.checkpoints.source import Source, refuse
from shoal.swarm.errors import StateFileError
from shoal.swarm.identity import Identity, peer_id, verify_signature
from shoal.swarm.messages import MAX_TENSORS, Count, Record, TensorSpec
from shoal.swarm.run_file import RunName

MANIFEST = "manifest.json"
OWN_FILE = "peer.safetensors"
VERDICTS_FILE = "verdicts.msgpack"
_CONTEXT = b"shoal checkpoint, version 1\0"
_MAX_BYTES = 64 * 2**20
_FILE_NAME = r"^((anchor|outer)-[0-9]{5}-of-[0-9]{5}\.safetensors|peer\.safetensors|verdicts\.msgpack)$"

Hex32 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Hex64 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{128}$")]
FileName = Annotated[str, StringConstraints(pattern=_FILE_NAME)]
FileEntry = tuple[Count, Hex32]
"""Bytes and SHA-256 of a file."""


class About(Record):
    """What a checkpoint is of. ``recipe``: its config, None for own training loops; ``layout``: the anchor's tensors in
    their order; ``outer_vectors``: how many the outer optimizer keeps; ``chain``: of the verdict of ``round``;
    ``tokens``: committed up to it, which is the learning rate's position. Digests and keys are hexadecimal."""

    run: RunName
    run_hash: Hex32
    run_toml: Annotated[str, Field(max_length=200_000)]
    recipe: dict[str, JsonValue] | None
    layout: Annotated[tuple[TensorSpec, ...], Field(min_length=1, max_length=MAX_TENSORS)]
    outer_vectors: Annotated[int, Field(ge=0, le=16)]
    round: Count
    anchor_version: Count
    state_digest: Hex32
    chain: Hex32
    tokens: Count
    coordinator_key: Hex32

    @property
    def elements(self) -> int:
        return sum(spec.elements for spec in self.layout)


class Manifest(About):
    """``files``: bytes and SHA-256 by name; ``identity_key`` and ``signature`` of the peer that wrote it."""

    format: Literal[1]
    files: Annotated[dict[FileName, FileEntry], Field(max_length=MAX_TENSORS)]
    identity_key: Hex32
    signature: Hex64

    @model_validator(mode="after")
    def _consistent(self) -> Manifest:
        if len({spec.name for spec in self.layout}) != len(self.layout):
            raise ValueError("layout: every tensor is named once")
        vector = 4 * self.elements
        for kind, expected in (("anchor", vector), ("outer", vector * self.outer_vectors)):
            names = self.names(kind)
            if names != [shard_name(kind, index, len(names)) for index in range(len(names))]:
                raise ValueError(f"files: the shards of {kind} are numbered from 1, none is missing")
            if sum(self.files[name][0] for name in names) < expected:
                raise ValueError(f"files: those of {kind} are too small for {expected} bytes of the layout")
        return self

    @classmethod
    def sign(cls, about: About, files: dict[str, FileEntry], identity: Identity) -> Manifest:
        fields = {**about.model_dump(), "layout": about.layout, "format": 1, "files": files}
        fields["identity_key"] = identity.public_key.hex()
        unsigned = cls(**fields, signature=128 * "0")
        return cls(**fields, signature=identity.sign(unsigned.signed_bytes).hex())

    @property
    def signed_bytes(self) -> bytes:
        return _CONTEXT + _canonical(self.model_dump(mode="json", exclude={"signature"}))

    @property
    def file_bytes(self) -> bytes:
        """What the file holds."""
        return _canonical(self.model_dump(mode="json"))

    @property
    def peer(self) -> str:
        return peer_id(bytes.fromhex(self.identity_key))

    def names(self, kind: Literal["anchor", "outer"] | str) -> list[str]:
        """The shards of that kind, in their order."""
        return sorted(name for name in self.files if name.startswith(f"{kind}-"))


def shard_name(kind: str, index: int, count: int) -> str:
    """``index`` from 0."""
    return f"{kind}-{index + 1:05}-of-{count:05}.safetensors"


def read_manifest(source: Source, run_hash: bytes | None = None) -> Manifest:
    """A checkpoint's manifest, its signature checked; the files are not.

    Raises ``StateFileError`` naming file, field and what was expected; also for another run than ``run_hash``.
    """
    place, data = source.place(MANIFEST), source.read(MANIFEST, _MAX_BYTES)
    try:
        manifest = Manifest.model_validate_json(data)
        canonical = manifest.file_bytes
    except (ValueError, RecursionError) as error:
        raise StateFileError(f"{place}: {_first_problem(error)}") from error
    if canonical != data:
        raise refuse(place, "its bytes", "the canonical JSON of its content", "another spelling")
    key, signature = bytes.fromhex(manifest.identity_key), bytes.fromhex(manifest.signature)
    if not verify_signature(key, signature, manifest.signed_bytes):
        raise refuse(place, "signature", f"that of peer {manifest.peer} over all other fields", "another")
    if run_hash is not None and manifest.run_hash != run_hash.hex():
        raise refuse(place, "run_hash", run_hash.hex(), manifest.run_hash)
    return manifest


def read_file(source: Source, name: str, entry: FileEntry) -> bytes:
    """The content of a file that the manifest names, checked: the bytes that were hashed are the bytes returned.

    Raises ``StateFileError``."""
    size_bytes, digest = entry
    place, data = source.place(name), source.read(name, size_bytes)
    if len(data) != size_bytes:
        raise refuse(place, "size", f"{size_bytes} bytes", "more" if len(data) > size_bytes else f"{len(data)} bytes")
    found = hashlib.sha256(data).hexdigest()
    if found != digest:
        raise refuse(place, "SHA-256", digest, found)
    return data


def _canonical(content: Any) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def _first_problem(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return f"not a manifest: {type(error).__name__}"
    if error.error_count() > 100:
        return f"not a manifest: {error.error_count()} problems"
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    field = ".".join(str(step)[:100] for step in first["loc"])
    text = re.sub(r"^Value error, ", "", first["msg"])
    return ascii(f"{'field ' + field + ': ' if field else ''}{text}")[1:-1][:400]
