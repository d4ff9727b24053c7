"""Scores of members' committed work, each signed by the validator that made it."""

from __future__ import annotations

from typing import Annotated, Literal

import msgpack
from pydantic import Field

from shoal.swarm.protocol.identity import verify_signature
from shoal.swarm.protocol.types import Count, Digest, Loss, PeerId, Record

_CONTEXT = b"shoal score of work, version 1\0"

Finding = Literal["helps", "unclear", "harms", "empty", "copied", "wrong gradient", "wrong loss", "withheld"]
"""``helps``, ``harms``: the contribution alone lowers or raises the loss on random samples, beyond chance; ``unclear``:
neither; ``empty``: next to nothing for the work that is claimed; ``copied``: another member's of this round or an
earlier one; ``wrong gradient``: not that of its samples; ``wrong loss``: its first batch has another loss at the anchor
than its member said; ``withheld``: its member did not show it."""

BAD: frozenset[Finding] = frozenset({"harms", "empty", "copied", "wrong gradient", "wrong loss", "withheld"})
"""Findings that count against a member."""


class Gain(Record):
    """Mean decrease of the loss, in nats a token, over groups of samples, and its standard error."""

    mean: Loss
    error: Annotated[float, Field(ge=0, le=1e30)]


class WorkScore(Record):
    """Score of one member's contribution to a committed round.

    ``chain``: of the round's verdict, which covers run, plan and root. ``on_random``, ``on_leased``: gains at the
    round's anchor by the contribution alone, scaled as in the round, on random samples and on the member's own; None
    where they were not measured. ``seed``: the random samples follow from it, so others can measure again.
    ``copied_from``: whose contribution it is. ``deviation``: of a gradient from the one computed again, relative to
    that. ``claimed_loss``, ``loss``: of its first batch at the anchor, as the member said and as it is."""

    round: Count
    chain: Digest
    peer: PeerId
    finding: Finding
    on_random: Gain | None = None
    on_leased: Gain | None = None
    seed: Count = 0
    copied_from: PeerId | Literal[""] = ""
    deviation: Annotated[float, Field(ge=0, le=1e30)] | None = None
    claimed_loss: Loss | None = None
    loss: Loss | None = None

    @property
    def signed_bytes(self) -> bytes:
        """The bytes that the validator signs."""
        packed: bytes = msgpack.packb(self.model_dump())
        return _CONTEXT + packed


class SignedScore(Record):
    """A score and its validator's identity key and signature, which prove who found what."""

    score: WorkScore
    validator_key: Digest
    signature: Annotated[bytes, Field(min_length=64, max_length=64)]

    @property
    def is_signed(self) -> bool:
        """Whether the signature is the validator's."""
        return verify_signature(self.validator_key, self.signature, self.score.signed_bytes)
