"""Vocabulary of the stage engine: its effects, and the offers and notes that peers exchange.

An event that answers an effect carries that effect, so that an answer to something given up is recognized.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shoal.swarm.sample_ranges import Ranges


@dataclass(frozen=True, order=True)
class MicroBatch:
    """Samples ``start <= s < stop`` of the run's sequence, in one round; it serves as its own id."""

    round: int
    start: int
    stop: int

    @property
    def samples(self) -> int:
        return self.stop - self.start


AttemptKey = tuple[MicroBatch, int]
"""One attempt of a peer at one micro-batch."""

TensorKind = Literal["activation", "gradient"]

Answer = Literal["accepted", "busy", "outdated"]
"""Answer to an offer.

Accepted: the tensor will be fetched, or is not needed any more. Busy: no slot for another forward; try another replica,
or again after the note ``slot_free``. Outdated: the round, attempt or stage is over."""


@dataclass(frozen=True)
class TensorOffer:
    """Offer of a tensor that ``sender`` keeps under ``number``.

    ``stage``: the receiving stage; an activation is its input, a gradient is that of its output. ``attempt``: counts
    the attempts of the activation's sender at this micro-batch; a gradient carries that of the activation it answers.
    """

    kind: TensorKind
    sender: str
    micro_batch: MicroBatch
    stage: int
    attempt: int
    number: int


NoteKind = Literal["cancel", "abandoned", "taken", "slot_free"]
"""Kind of a note between two neighbouring hops.

Cancel, to the next hop: this attempt and all earlier ones are given up. Abandoned, to the previous hop: its micro-batch
was given up here. Taken, to the next hop: the gradient has arrived and need not be kept. Slot free, to the previous
hop: after ``busy``, a slot is reserved for it. Notes save time or memory. They may get lost: no result depends on
them."""


@dataclass(frozen=True)
class PeerNote:
    """Note to ``peer`` as an effect, from ``peer`` as an event.

    Of ``slot_free`` only the kind counts. ``stage`` as in ``TensorOffer``."""

    kind: NoteKind
    peer: str
    micro_batch: MicroBatch
    stage: int
    attempt: int


# Effects ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reply:
    """Answer to an offer that is being handled."""

    offer: TensorOffer
    answer: Answer


@dataclass(frozen=True)
class Send:
    """Offer the tensor kept under ``number`` to a peer.

    Answered by ``refused`` or ``send_failed``; by nothing if the peer accepts.
    """

    kind: TensorKind
    peer: str
    micro_batch: MicroBatch
    stage: int
    attempt: int
    number: int


@dataclass(frozen=True)
class Fetch:
    """Fetch the tensor that ``peer`` keeps under ``number``, for the job ``job``."""

    kind: TensorKind
    peer: str
    number: int
    job: int
    micro_batch: MicroBatch
    stage: int


@dataclass(frozen=True)
class Claim:
    """Ask the coordinator whether this micro-batch's gradient may count here.

    Claims and releases of one stage reach it in their order, and each claim is answered in the end."""

    stage: int
    micro_batch: MicroBatch


@dataclass(frozen=True)
class Release:
    """Give claimed samples back, for others to claim."""

    stage: int
    round: int
    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class ComputeForward:
    """Compute forward from the input of ``from_stage`` through the span's last stage.

    The model's last stage ends with the loss. The output is kept under the job's number as an activation."""

    job: int
    micro_batch: MicroBatch
    from_stage: int


@dataclass(frozen=True)
class ComputeBackward:
    """Compute backward from the span's last stage to ``from_stage``.

    Parameter gradients of the stages in ``accumulate`` are added to the round's sums; those of other stages are
    discarded. Of the job only the input's gradient is kept, under its number."""

    job: int
    micro_batch: MicroBatch
    from_stage: int
    accumulate: frozenset[int]


@dataclass(frozen=True)
class Drop:
    """Forget what is kept for a job: input, graph, output, gradients; after a computation that still runs."""

    job: int


@dataclass(frozen=True)
class DropRound:
    """Forget all jobs and the accumulated gradients; after a computation that still runs."""

    round: int


@dataclass(frozen=True)
class AskToDrive:
    """Ask the coordinator for samples to drive.

    ``samples``: how many this peer could begin now; ``done``: ranges whose gradients came back since the last request.
    """

    round: int
    samples: int
    done: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class MicroBatchDone:
    """Completion of a driven micro-batch: it went through all stages and back."""

    micro_batch: MicroBatch


Compute = ComputeForward | ComputeBackward
Effect = Reply | Send | PeerNote | Fetch | Claim | Release | Compute | Drop | DropRound | AskToDrive | MicroBatchDone


def as_range(micro_batch: MicroBatch) -> Ranges:
    """Sample range of a micro-batch."""
    return [(micro_batch.start, micro_batch.stop)]
