"""Evaluations of the run's model on held-out data, each signed by the validator that made it."""

from __future__ import annotations

from typing import Annotated, Literal

import msgpack
from pydantic import AfterValidator, Field

from shoal.swarm.errors import WireError
from shoal.swarm.protocol.identity import peer_id, verify_signature
from shoal.swarm.protocol.types import Count, Digest, Loss, PeerId, Record, Seconds, Signature, UnixTime

_CONTEXT = b"shoal evaluation, version 1\0"

MAX_SOURCES = 16
MAX_TEXTS = 4
MAX_PROMPT, MAX_TEXT = 200, 1000
"""Characters of a prompt and of what a model has written after it."""

MAX_EVALUATORS = 8
"""Most validators whose figures for one version are compared; those of further ones are not needed."""

MAX_FIGURES, MAX_SAMPLED = 256, 12
"""Figures in a status, and versions with texts in it."""


def plain_text(text: str, limit: int) -> str:
    """Remove what is no plain text: control characters but line breaks, marks that turn the direction of writing,
    characters that no font has. ``limit``: characters that are kept."""
    return "".join(one for one in text if one == "\n" or one.isprintable())[:limit]


def plain_line(text: str, limit: int) -> str:
    """Remove what is no plain text, and make one line of it."""
    return plain_text(" ".join(text.splitlines()), limit)


def _require_plain(text: str) -> str:
    if text != plain_text(text, len(text)):
        raise ValueError("expected plain text without control characters")
    return text


def _require_line(text: str) -> str:
    if text != plain_line(text, len(text)):
        raise ValueError("expected one line of plain text without control characters")
    return text


PlainText = Annotated[str, AfterValidator(_require_plain)]
PlainLine = Annotated[str, AfterValidator(_require_line)]


class TextSample(Record):
    """What the model writes after a prompt."""

    prompt: Annotated[PlainText, Field(max_length=MAX_PROMPT)]
    text: Annotated[PlainText, Field(max_length=MAX_TEXT)]


Texts = Annotated[tuple[TextSample, ...], Field(max_length=MAX_TEXTS)]


class SourceLoss(Record):
    """Mean loss, in nats a token, on the held-out samples of one source of the data. ``samples``: how many those are.

    The perplexity is e to the power of the loss."""

    name: Annotated[PlainLine, Field(min_length=1, max_length=64)]
    loss: Loss
    samples: Count


Sources = Annotated[tuple[SourceLoss, ...], Field(max_length=MAX_SOURCES)]
Accuracy = Annotated[float, Field(ge=0, le=1)]


class Evaluation(Record):
    """Evaluation of one version of the anchor.

    ``state_digest``: of that version's state; ``loss``: mean over the held-out samples, in nats a token, None where it
    is no finite number; ``samples``: how many those are; ``accuracy``: share of the tokens (or labels) that the model
    finds likeliest; ``took_s``: how long it took."""

    version: Count
    state_digest: Digest
    loss: Loss | None
    samples: Annotated[int, Field(ge=1, le=2**31)]
    accuracy: Accuracy | None = None
    sources: Sources = ()
    texts: Texts = ()
    took_s: Seconds = 0.0

    def signed_bytes(self, run_hash: bytes) -> bytes:
        """The bytes that a validator of this run signs."""
        packed: bytes = msgpack.packb(self.model_dump())
        return _CONTEXT + run_hash + packed


class SignedEvaluation(Record):
    """An evaluation and its validator's identity key and signature, which prove who measured what."""

    evaluation: Evaluation
    validator_key: Digest
    signature: Signature

    @property
    def validator(self) -> str:
        """Id of the validator."""
        return peer_id(self.validator_key)

    def is_signed(self, run_hash: bytes) -> bool:
        """Whether the signature is the validator's, for this run."""
        return verify_signature(self.validator_key, self.signature, self.evaluation.signed_bytes(run_hash))


# In the run's status ----------------------------------------------------------------------------------------

FigureStanding = Literal["claim", "agreed", "disputed"]
"""``claim``: of a single validator; ``agreed``: most of two validators or more have measured the same; ``disputed``:
they have not, and no figure of theirs is used."""


class ClaimedLoss(Record):
    """The loss that one validator has measured; None for no finite number."""

    validator: PeerId
    loss: Loss | None


class HeldOutFigure(Record):
    """What validators say of one version.

    ``round``: that made it, ``tokens``: committed by then; ``at_s``: when the last validator reported; ``loss``: the
    figure to use, None where it is disputed or no finite number; ``counts``: whether enough validators stand behind it
    (``[evaluation] validators``) to end the run; ``claims``: of each validator; ``accuracy``, ``sources``: of one whose
    loss is used."""

    version: Count
    round: Count
    tokens: Count
    at_s: UnixTime
    loss: Loss | None
    standing: FigureStanding
    counts: bool
    claims: Annotated[tuple[ClaimedLoss, ...], Field(min_length=1, max_length=MAX_EVALUATORS)]
    accuracy: Accuracy | None = None
    sources: Sources = ()


class VersionTexts(Record):
    """Texts of one version, by the word of one validator."""

    version: Count
    round: Count
    validator: PeerId
    texts: Texts


class EvaluationStatus(Record):
    """Held-out figures of a run, oldest first, the newest ones of them; texts of the newest versions and of a few old
    ones; and what the validators have signed of the newest version, which proves its figures."""

    figures: Annotated[tuple[HeldOutFigure, ...], Field(max_length=MAX_FIGURES)] = ()
    texts: Annotated[tuple[VersionTexts, ...], Field(max_length=MAX_SAMPLED)] = ()
    newest: Annotated[tuple[SignedEvaluation, ...], Field(max_length=MAX_EVALUATORS)] = ()


def newest_used(status: EvaluationStatus) -> HeldOutFigure | None:
    """Return the newest figure that is to be used; None while there is none."""
    return next((one for one in reversed(status.figures) if one.loss is not None), None)


def check_evaluations(status: EvaluationStatus, run_hash: bytes) -> None:
    """Check that the newest figure is what its validators have signed. Raises ``WireError``."""
    if not status.figures:
        return
    newest = status.figures[-1]
    signed = {
        one.validator: one.evaluation.loss
        for one in status.newest
        if one.evaluation.version == newest.version and one.is_signed(run_hash)
    }
    for claim in newest.claims:
        if claim.validator not in signed or signed[claim.validator] != claim.loss:
            raise WireError(
                f"the host shows a held-out loss of version {newest.version} that the validator {claim.validator} "
                "did not sign: ask both"
            )
