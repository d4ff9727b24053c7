"""The ``[start]`` section of the run file: the checkpoint of another run that this run starts from.

Each tensor of the model has its own digest, so that a peer can check the stage that it holds, wherever the model is
cut."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Annotated

from pydantic import Field, StringConstraints

from shoal.swarm.protocol.types import MAX_DIMENSIONS, Count, Record, TensorSpec

Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Shape = Annotated[tuple[Annotated[int, Field(ge=0, le=2**40)], ...], Field(strict=False, max_length=MAX_DIMENSIONS)]


class StartTensor(Record):
    """A parameter's shape, and the digest (``tensor_hash``) of its values and its outer optimizer state."""

    shape: Shape
    sha256: Sha256


class StartSection(Record):
    """``[start]``, as `shoal host --from` writes it.

    ``run``, ``round``, ``state``: of the checkpoint, the last one its state's digest. ``tokens``: position in the
    learning-rate schedule and in the order of samples. ``outer_steps``: steps that the checkpoint's outer optimizer
    state has behind it; 0: the outer optimizer starts from zeros."""

    run: Annotated[str, Field(max_length=100)]
    round: Count
    state: Sha256
    tokens: Count = 0
    outer_steps: Count = 0
    tensors: Annotated[dict[Annotated[str, Field(max_length=500)], StartTensor], Field(min_length=1)]

    @property
    def source(self) -> str:
        """The checkpoint, in words."""
        return f"round {self.round} of {self.run}"

    @property
    def outlook(self) -> str:
        """Shown in ``shoal status`` while no member has the checkpoint."""
        return (
            f"the run starts from {self.source}, and no member has that checkpoint: a peer that has it must join with "
            "`shoal join INVITE --from FOLDER`"
        )

    def rows(self, slots: int) -> int:
        """Vectors that come from the checkpoint: the anchor, and those of an outer optimizer with ``slots``."""
        return 1 + (slots if self.outer_steps else 0)

    def difference(self, layout: Iterable[TensorSpec], *, whole: bool) -> str:
        """A sentence on the first tensor that differs from the checkpoint; empty if none does.

        ``whole``: the layout is that of the whole model and must have all tensors of the checkpoint."""
        named = {}
        for spec in layout:
            named[spec.name] = spec
            known = self.tensors.get(spec.name)
            if known is None:
                return f"it has {spec.name} {list(spec.shape)}, which the checkpoint lacks"
            if known.shape != spec.shape:
                return f"{spec.name} is {list(spec.shape)} here, and {list(known.shape)} in the checkpoint"
        if whole:
            for name, known in self.tensors.items():
                if name not in named:
                    return f"it lacks {name} {list(known.shape)}, which the checkpoint has"
        return ""

    def state_digest(self, layout: Iterable[TensorSpec]) -> bytes:
        """Digest of version 0 of the state of these tensors, in order. It follows from the run file alone."""
        named = [(spec.name, self.tensors[spec.name].sha256) for spec in layout]
        return hashlib.sha256(b"shoal start 1\0" + json.dumps(named).encode()).digest()


def tensor_hash(shape: tuple[int, ...], rows: int, values: Iterable[memoryview]) -> str:
    """SHA-256, in hexadecimal, of a tensor's values in ``rows`` vectors, one after the other, little-endian float32."""
    digest = hashlib.sha256(f"shoal start tensor 1 {list(shape)} {rows}\0".encode())
    for piece in values:
        digest.update(piece)
    return digest.hexdigest()
