"""Manifest of a checkpoint: its files by size and digest, and which run and round it is of; signed by its peer.

The file is its own canonical JSON and nothing else: sorted keys, no spaces, ASCII, ``stage`` and ``parts`` only where
they are given. The signature (Ed25519, RFC 8032) is over ``shoal checkpoint, version 1``, a zero byte, and the
canonical JSON of all fields but ``signature``."""

from __future__ import annotations

import hashlib
import json
import re
from itertools import accumulate
from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue, StringConstraints, ValidationError, model_validator

from shoal.peer.checkpoints.source import CheckpointSource, refusal
from shoal.swarm.errors import StateFileError
from shoal.swarm.protocol.identity import Identity, peer_id, verify_signature
from shoal.swarm.protocol.run_file import RunName
from shoal.swarm.protocol.types import MAX_STAGES, MAX_TENSORS, Count, Record, Stage, TensorSpec

MANIFEST = "manifest.json"
OWN_FILE = "peer.safetensors"
RESIDUAL_FILE = "residual.safetensors"
OWN_FILES = (OWN_FILE, RESIDUAL_FILE)
"""Files of the peer's own state, which copies for others lack."""

VERDICTS_FILE = "verdicts.msgpack"
_CONTEXT = b"shoal checkpoint, version 1\0"
_MAX_BYTES = 64 * 2**20
_NUMBERED = "-[0-9]{5}-of-[0-9]{5}"
_FILE_NAME = rf"^((anchor|outer){_NUMBERED}\.safetensors|(peer|residual)\.safetensors|verdicts(|{_NUMBERED})\.msgpack)$"

Hex32 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Hex64 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{128}$")]
FileName = Annotated[str, StringConstraints(pattern=_FILE_NAME)]
FileEntry = tuple[Count, Hex32]
"""Bytes and SHA-256 of a file."""


class StageAbout(Record):
    """Number of a pipeline's stage, from 0, and the number of stages."""

    number: Stage
    stages: Annotated[int, Field(ge=1, le=MAX_STAGES)]

    @model_validator(mode="after")
    def _consistent(self) -> StageAbout:
        if self.number >= self.stages:
            raise ValueError(f"number: stages are numbered from 0, and there are {self.stages}")
        return self


class StagePart(Record):
    """One stage's share of a whole model: ``elements`` of each vector, after those of the stages before it.

    With the digest of that stage's state, and the ``chain`` of its verdict of the round."""

    elements: Annotated[int, Field(ge=1, le=2**62)]
    state_digest: Hex32
    chain: Hex32


class CheckpointAbout(Record):
    """Description of a checkpoint's run and model.

    ``recipe``: its config, None for own training loops; ``layout``: the anchor's tensors in their order;
    ``outer_vectors``: number of the outer optimizer's vectors; ``chain``: of the verdict of ``round``; ``tokens``:
    committed up to it, which is the position of the learning-rate schedule. Digests and keys are hexadecimal.

    ``stage``: of a pipeline, the one stage in this checkpoint. ``parts``: of a pipeline, the stages of this whole model
    in their order; ``chain`` is then what ties the stages' verdicts of ``round`` together (``Verdict.together``)."""

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
    stage: StageAbout | None = None
    parts: Annotated[tuple[StagePart, ...], Field(min_length=1, max_length=MAX_STAGES)] | None = None

    @property
    def elements(self) -> int:
        return sum(spec.elements for spec in self.layout)

    @property
    def run_folder(self) -> str:
        """Name of the run's folder on peers and at URLs."""
        return f"{self.run}-{self.run_hash[:8]}"


class Manifest(CheckpointAbout):
    """``files``: bytes and SHA-256 by name; ``identity_key`` and ``signature``: of the peer that wrote the
    checkpoint."""

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
        self._check_parts()
        return self

    def _check_parts(self) -> None:
        verdicts = {name for name in self.files if name.startswith("verdicts")}
        if not verdicts <= set(self.verdicts_files):
            raise ValueError(f"files: verdicts are in {', '.join(self.verdicts_files)[:200]}, and nowhere else")
        if self.parts is None:
            return
        if self.stage is not None:
            raise ValueError("parts: a stage alone has none")
        ends = set(accumulate(spec.elements for spec in self.layout))
        if self.elements != sum(part.elements for part in self.parts):
            raise ValueError(f"parts: are not the {self.elements} elements of the layout")
        if not ends.issuperset(accumulate(part.elements for part in self.parts)):
            raise ValueError("parts: each has whole tensors of the layout")

    @classmethod
    def sign(cls, about: CheckpointAbout, files: dict[str, FileEntry], identity: Identity) -> Manifest:
        fields = {**dict(about), "format": 1, "files": files}
        fields["identity_key"] = identity.public_key.hex()
        unsigned = cls(**fields, signature=128 * "0")
        return cls(**fields, signature=identity.sign(unsigned.signed_bytes).hex())

    @property
    def signed_bytes(self) -> bytes:
        return _CONTEXT + canonical_json(self._content("signature"))

    @property
    def file_bytes(self) -> bytes:
        return canonical_json(self._content())

    @property
    def verdicts_files(self) -> tuple[str, ...]:
        """Names of the verdicts' files: one of the run or the stage, or one of each stage of a whole model."""
        if self.parts is None:
            return (VERDICTS_FILE,)
        return tuple(stage_verdicts_name(stage, len(self.parts)) for stage in range(len(self.parts)))

    def _content(self, *left_out: str) -> Any:
        nothing = [name for name in ("stage", "parts") if getattr(self, name) is None]
        return self.model_dump(mode="json", exclude={*left_out, *nothing})

    @property
    def peer(self) -> str:
        return peer_id(bytes.fromhex(self.identity_key))

    def names(self, kind: Literal["anchor", "outer"] | str) -> list[str]:
        """Names of the shards of that kind, in their order."""
        return sorted(name for name in self.files if name.startswith(f"{kind}-"))


def shard_name(kind: str, index: int, count: int) -> str:
    """Name of shard ``index``, from 0."""
    return f"{kind}-{index + 1:05}-of-{count:05}.safetensors"


def stage_verdicts_name(stage: int, stages: int) -> str:
    """Name of the file with the verdicts of a stage, from 0, in a checkpoint of a whole pipeline."""
    return f"verdicts-{stage + 1:05}-of-{stages:05}.msgpack"


def read_manifest(source: CheckpointSource, run_hash: bytes | None = None) -> Manifest:
    """Read a checkpoint's manifest and check its signature; the files are not checked.

    Raises ``StateFileError`` naming file, field and what was expected, also for another run than ``run_hash``."""
    place, data = source.place(MANIFEST), source.read(MANIFEST, _MAX_BYTES)
    try:
        manifest = Manifest.model_validate_json(data)
        canonical = manifest.file_bytes
    except (ValueError, RecursionError) as error:
        raise StateFileError(f"{place}: {_first_problem(error)}") from error
    if canonical != data:
        raise refusal(place, "its bytes", "the canonical JSON of its content", "another spelling")
    key, signature = bytes.fromhex(manifest.identity_key), bytes.fromhex(manifest.signature)
    if not verify_signature(key, signature, manifest.signed_bytes):
        raise refusal(place, "signature", f"that of peer {manifest.peer} over all other fields", "another")
    if run_hash is not None and manifest.run_hash != run_hash.hex():
        raise refusal(place, "run_hash", run_hash.hex(), manifest.run_hash)
    return manifest


def read_file(source: CheckpointSource, name: str, entry: FileEntry) -> bytes:
    """Read a file that the manifest names, and check its size and digest. Raises ``StateFileError``."""
    size_bytes, digest = entry
    place, data = source.place(name), source.read(name, size_bytes)
    if len(data) != size_bytes:
        raise refusal(place, "size", f"{size_bytes} bytes", "more" if len(data) > size_bytes else f"{len(data)} bytes")
    found = hashlib.sha256(data).hexdigest()
    if found != digest:
        raise refusal(place, "SHA-256", digest, found)
    return data


def canonical_json(content: Any) -> bytes:
    """The one JSON text of ``content``: sorted keys, no spaces, ASCII."""
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
