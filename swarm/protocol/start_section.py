"""The ``[start]`` section of the run file: the checkpoint of another run that this run starts from.

Each tensor of the whole model has a digest of its own, so that whoever holds a stage can check that stage alone,
wherever the model is cut.
"""

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
    """A parameter's shape, and the digest (``tensor_hash``) of its values and of the outer optimizer's for it."""

    shape: Shape
    sha256: Sha256


class StartSection(Record):
    """``[start]``, as `shoal host --from` writes it. ``run``, ``round``, ``state``: of the checkpoint, the last one its
    state's digest. ``tokens``: how far the learning rate's schedule and the order of the samples have come.
    ``outer_steps``: how many steps the outer optimizer's vectors have behind them; 0: they begin at zero."""

    run: Annotated[str, Field(max_length=100)]
    round: Count
    state: Sha256
    tokens: Count = 0
    outer_steps: Count = 0
    tensors: Annotated[dict[Annotated[str, Field(max_length=500)], StartTensor], Field(min_length=1)]

    @property
    def source(self) -> str:
        """The checkpoint, for people."""
        return f"round {self.round} of {self.run}"

    @property
    def outlook(self) -> str:
        """For people who wonder why nothing happens while nobody has it."""
        return (
            f"the run starts from {self.source}, and nobody here has that: one peer has to bring its checkpoint, with "
            "`shoal join INVITE --from FOLDER`"
        )

    def rows(self, slots: int) -> int:
        """How many vectors come from the checkpoint: the anchor, and those of an outer optimizer with ``slots``."""
        return 1 + (slots if self.outer_steps else 0)

    def difference(self, layout: Iterable[TensorSpec], *, whole: bool) -> str:
        """A sentence on the first tensor that is not as the checkpoint has it; empty when none is. ``whole``: the
        layout is the whole model's, and lacks nothing either."""
        named = {}
        for spec in layout:
            named[spec.name] = spec
            known = self.tensors.get(spec.name)
            if known is None:
                return f"it has {spec.name} {list(spec.shape)}, which the checkpoint has not"
            if known.shape != spec.shape:
                return f"{spec.name} is {list(spec.shape)} here, and {list(known.shape)} in the checkpoint"
        if whole:
            for name, known in self.tensors.items():
                if name not in named:
                    return f"it lacks {name} {list(known.shape)}, which the checkpoint has"
        return ""

    def state_digest(self, layout: Iterable[TensorSpec]) -> bytes:
        """That of version 0 of the state of these tensors, in their order. It follows from the run file, so nobody has
        to be believed."""
        named = [(spec.name, self.tensors[spec.name].sha256) for spec in layout]
        return hashlib.sha256(b"shoal start 1\0" + json.dumps(named).encode()).digest()


def tensor_hash(shape: tuple[int, ...], rows: int, values: Iterable[memoryview]) -> str:
    """SHA-256, in hexadecimal, of a tensor's values in each of so many vectors, float32 in little-endian order, one
    vector after the other."""
    digest = hashlib.sha256(f"shoal start tensor 1 {list(shape)} {rows}\0".encode())
    for piece in values:
        digest.update(piece)
    return digest.hexdigest()
