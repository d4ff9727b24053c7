"""What a pipeline peer's engine asks for, and what peers say to each other: the words of ``stage.py``.

An event that answers an effect carries that effect, so that an answer to something given up is known as such.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shoal.swarm.sample_ranges import Ranges


@dataclass(frozen=True, order=True)
class MicroBatch:
    """Samples ``start <= s < stop`` of the run's sequence, in one round. It is its own id."""

    round: int
    start: int
    stop: int

    @property
    def samples(self) -> int:
        return self.stop - self.start


TensorKind = Literal["activation", "gradient"]

Answer = Literal["accepted", "busy", "outdated"]
"""To an offer. Accepted: it will be fetched, or it is not needed any more. Busy: no room for one more forward, try
another replica, or again when we say that there is room. Outdated: of a round, an attempt or a stage that is over."""


@dataclass(frozen=True)
class TensorOffer:
    """From ``sender``: it keeps a tensor under ``number``. ``stage``: the receiver's, whose input an activation is, or
    of whose output a gradient is. ``attempt``: of the activation's sender at this micro-batch; a gradient has that of
    the activation that it answers."""

    kind: TensorKind
    sender: str
    micro_batch: MicroBatch
    stage: int
    attempt: int
    number: int


NoteKind = Literal["cancel", "abandoned", "taken", "slot_free"]
"""Cancel, to the next hop: we gave up this attempt and all before. Abandoned, to the one before: we gave up what it had
sent us. Taken, to the next hop: we have the gradient, it need not keep it. Room, to the one before: after ``busy``, we
hold a place open. Each saves time or memory; none is needed for a result, so they may get lost."""


@dataclass(frozen=True)
class PeerNote:
    """To ``peer`` as an effect, from ``peer`` as an event. Of a ``room`` only the kind counts. ``stage`` as in
    ``TensorOffer``."""

    kind: NoteKind
    peer: str
    micro_batch: MicroBatch
    stage: int
    attempt: int


# Effects ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reply:
    """To an offer, as it is being answered."""

    offer: TensorOffer
    answer: Answer


@dataclass(frozen=True)
class Send:
    """Offer what we keep under ``number`` to a peer. Ends in ``refused``, ``send_failed`` or, accepted, in silence."""

    kind: TensorKind
    peer: str
    micro_batch: MicroBatch
    stage: int
    attempt: int
    number: int


@dataclass(frozen=True)
class Fetch:
    """Get the tensor that ``peer`` keeps under ``number``, for our job ``job``."""

    kind: TensorKind
    peer: str
    number: int
    job: int
    micro_batch: MicroBatch
    stage: int


@dataclass(frozen=True)
class Claim:
    """Ask the coordinator whether this micro-batch's gradient may count here. Claims and releases of one stage reach it
    in their order, and each claim is answered in the end."""

    stage: int
    micro_batch: MicroBatch


@dataclass(frozen=True)
class Release:
    """Give claimed samples back to others."""

    stage: int
    round: int
    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class ComputeForward:
    """From the input of ``from_stage`` through our last stage; the last stage of all ends with the loss. The output is
    kept under the job's number as an activation."""

    job: int
    micro_batch: MicroBatch
    from_stage: int


@dataclass(frozen=True)
class ComputeBackward:
    """Back from our last stage to ``from_stage``. The parameters' gradients of the stages in ``accumulate`` are added
    to what the round has, those of others thrown away. The input's gradient is kept under the job's number, and nothing
    else of the job."""

    job: int
    micro_batch: MicroBatch
    from_stage: int
    accumulate: frozenset[int]


@dataclass(frozen=True)
class Drop:
    """Whatever is kept under our number: input, graph, output, gradients. After a computation that still runs."""

    job: int


@dataclass(frozen=True)
class DropRound:
    """All that is kept, and the gradients that were accumulated. After a computation that still runs."""

    round: int


@dataclass(frozen=True)
class AskToDrive:
    """``samples``: that we could drive now; ``done``: those that came back since the last time."""

    round: int
    samples: int
    done: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class MicroBatchDone:
    """A micro-batch of ours went through all stages and back."""

    micro_batch: MicroBatch


Compute = ComputeForward | ComputeBackward
Effect = Reply | Send | PeerNote | Fetch | Claim | Release | Compute | Drop | DropRound | AskToDrive | MicroBatchDone


def as_range(micro_batch: MicroBatch) -> Ranges:
    return [(micro_batch.start, micro_batch.stop)]
