"""The ``[pins]`` section of the run file: the model, data and first state that every member must have.

Without pins the first member to join defines the run's model, data and first state, and all later members have to trust
it. The host's machine, or another one that the host trusts, computes the pins beforehand (``peer/cli/prepare.py``).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Annotated

from pydantic import Field, StringConstraints, model_validator

from shoal.swarm.errors import CorpusError, ModelMismatch
from shoal.swarm.protocol.messages import PeerToCoordinatorDescribeModel
from shoal.swarm.protocol.start_section import Sha256
from shoal.swarm.protocol.types import (
    MAX_LAYERS,
    MAX_TENSORS,
    FrozenParameters,
    Record,
    TensorSpec,
)

Elements = Annotated[int, Field(ge=0, le=2**40)]

PackageVersion = Annotated[
    str,
    StringConstraints(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,62}[A-Za-z0-9])?==[A-Za-z0-9][A-Za-z0-9._+!-]{0,62}$"),
]
"""A package and its version, which may be a part of a command that people are told to give."""

_ADVICE = "install the same releases of shoal and of the recipe as on the machine that prepared the run"

FIRST_STATE_OUTLOOK = (
    "no member has the first state that the run file pins yet; if all members compute a different one, join from the "
    "machine that prepared the run, or from one with the same versions of PyTorch and of the recipe"
)
"""Shown in ``shoal status`` while the run waits."""


class PinnedLayer(Record):
    """One layer of a pipeline's model; pinned one by one, as the model may be cut into stages between any two layers.

    ``tensors``, ``elements``: of its trainable parameters; ``layout``: their digest (``layout_digest``)."""

    tensors: Annotated[int, Field(ge=0, le=MAX_TENSORS)]
    elements: Elements
    layout: Sha256


class PinsSection(Record):
    """``[pins]``, as `shoal prepare` and `shoal host` write it.

    ``layout``: digest of the layout of all parameters (``layout_digest``), of which there are ``elements``.
    ``tokens_per_sample``, ``samples``, ``corpus``: of the training data, the last one its SHA-256; absent where members
    bring their own data. ``frozen_elements``, ``frozen``: number and digest of the parameters that are not trained;
    absent where there are none, and in a pipeline. ``state``: digest of version 0 of the state; absent where the run
    starts from a checkpoint, which ``[start]`` pins, and in a pipeline, whose stages are not cut yet. ``layers``: of a
    pipeline. ``package``, ``package_digest``: the package of the recipe and a digest of its files
    (``peer/recipes/packages.py``), absent for Shoal's own recipes and where it is in editable mode; ``package_wheel``:
    SHA-256 of its wheel, where that is known."""

    layout: Sha256
    elements: Annotated[int, Field(ge=1, le=2**40)]
    tokens_per_sample: Annotated[int, Field(ge=1, le=2**62)]
    samples: Annotated[int, Field(ge=1, le=2**62)] | None = None
    corpus: Sha256 | None = None
    frozen_elements: Annotated[int, Field(ge=1, le=2**44)] | None = None
    frozen: Sha256 | None = None
    state: Sha256 | None = None
    layers: Annotated[tuple[PinnedLayer, ...], Field(strict=False, min_length=1, max_length=MAX_LAYERS)] | None = None
    package: PackageVersion | None = None
    package_digest: Sha256 | None = None
    package_wheel: Sha256 | None = None

    @model_validator(mode="after")
    def _consistent(self) -> PinsSection:
        if self.layers is not None and sum(layer.elements for layer in self.layers) != self.elements:
            raise ValueError(f"layers: expected {self.elements} elements in all of them, as elements says")
        if self.layers is not None and self.state is not None:
            raise ValueError("state: expected for a whole model only, and layers for a pipeline only")
        if (self.frozen is None) != (self.frozen_elements is None):
            raise ValueError("frozen, frozen_elements: expected both or neither")
        if (self.package is None) != (self.package_digest is None):
            raise ValueError("package, package_digest: expected both or neither")
        return self

    @property
    def frozen_parameters(self) -> FrozenParameters | None:
        if self.frozen is None or self.frozen_elements is None:
            return None
        return FrozenParameters(elements=self.frozen_elements, digest=bytes.fromhex(self.frozen))

    def check_model(self, model: PeerToCoordinatorDescribeModel) -> None:
        """Check the description of a whole model. Raises ``ModelMismatch`` or ``CorpusError``."""
        self.check_layout(model.layout)
        if difference := frozen_difference(self.frozen_parameters, model.frozen):
            raise ModelMismatch(f"this model is not the run's: {difference}")
        self.check_data(model.tokens_per_sample, model.corpus_digest, model.samples)

    def check_layout(self, layout: Sequence[TensorSpec]) -> None:
        """Check the layout of a whole model. Raises ``ModelMismatch``."""
        if layout_digest(layout) != self.layout:
            found = sum(spec.elements for spec in layout)
            raise ModelMismatch(
                "this model is not the run's: names or shapes of its parameters differ from those that the run "
                f"file pins ({found:,} parameters here, {self.elements:,} in the run); {_ADVICE}"
            )

    def check_stage(self, model: PeerToCoordinatorDescribeModel, layers: Sequence[PinnedLayer]) -> None:
        """Check the description of the stage with these layers. Raises ``ModelMismatch`` or ``CorpusError``."""
        at = 0
        for layer in layers:
            if layout_digest(model.layout[at : at + layer.tensors]) != layer.layout:
                raise ModelMismatch(f"this stage's layers differ from those that the run file pins; {_ADVICE}")
            at += layer.tensors
        if at != len(model.layout):
            raise ModelMismatch(f"this stage has {len(model.layout)} tensors here and {at} in the run file; {_ADVICE}")
        self.check_data(model.tokens_per_sample, model.corpus_digest, model.samples)

    def check_data(self, tokens_per_sample: int, corpus: bytes | None, samples: int | None) -> None:
        """Check the data; None is unknown and not checked. Raises ``ModelMismatch`` or ``CorpusError``."""
        if tokens_per_sample != self.tokens_per_sample:
            raise ModelMismatch(
                f"this model has {tokens_per_sample} tokens a sample, the run's has {self.tokens_per_sample}; {_ADVICE}"
            )
        told = (corpus.hex() if corpus else None, samples)
        if any(None not in pair and pair[0] != pair[1] for pair in zip((self.corpus, self.samples), told, strict=True)):
            raise CorpusError(
                "this machine's data differs from the data whose digest the run file pins: use the same files, and the "
                "same Python version as on the machine that prepared the run"
            )


def layout_digest(layout: Iterable[TensorSpec]) -> str:
    """SHA-256, in hexadecimal, of the tensors' names and shapes in order."""
    named = [(spec.name, spec.shape) for spec in layout]
    return hashlib.sha256(b"shoal layout 1\0" + json.dumps(named).encode()).hexdigest()


def frozen_difference(expected: FrozenParameters | None, found: FrozenParameters | None) -> str:
    """Return a sentence on frozen parameters that differ; empty if they are the same."""
    if expected == found:
        return ""
    return (
        f"its frozen parameters differ: {found or 'none'} here, {expected or 'none'} in the run; load the same base "
        "model, in the same revision, as the other members"
    )
