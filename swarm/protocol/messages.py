"""Every message of the protocol, named by its direction, with the range of every field.

All are frozen and strict: a wrong type, an unknown field or a value out of range is refused when the bytes
are decoded (``wire.py``), so handlers never see one. Tuples, not lists: they are what msgpack decodes to.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from shoal.swarm.protocol.rounds import RunView, Verdict
from shoal.swarm.protocol.types import (
    MAX_DELIVERIES,
    MAX_EPOCHS,
    MAX_KEPT,
    MAX_LAYERS,
    MAX_MEMBERS,
    MAX_PARTS,
    MAX_RANGES,
    MAX_STAGES,
    MAX_TENSORS,
    MAX_VERDICTS,
    Blob,
    Capability,
    Certificate,
    ClaimedAddresses,
    Count,
    Coverage,
    Delivery,
    DeviceInfo,
    Digest,
    Dtype,
    Headway,
    Host,
    Index,
    KeptState,
    Key,
    LayerSize,
    LeaveReason,
    Loss,
    MemberStatus,
    Message,
    NormClaim,
    PeerId,
    Phase,
    Rate,
    Role,
    SampleRange,
    Seconds,
    Shape,
    Stage,
    StageStatus,
    TensorForm,
    TensorSpec,
    Text,
    Trouble,
)

PROTOCOL_VERSION = 1
"""Raised whenever a message changes meaning; both sides must agree exactly."""


# Peer to coordinator ------------------------------------------------------------------------------------


class PeerToCoordinatorJoinRun(Message):
    """One of the two requests that a stranger may make. ``addresses``: the ways in which it can be reached."""

    run: Annotated[str, Field(max_length=100)]
    certificate: Certificate
    name: Annotated[str, Field(max_length=64)]
    role: Role
    device: DeviceInfo
    addresses: ClaimedAddresses


class PeerToCoordinatorGetRun(Message):
    """Ask for the run file, without becoming a member: whoever joins knows before what it joins."""

    run: Annotated[str, Field(max_length=100)]


class PeerToCoordinatorDescribeModel(Message):
    """What this peer built from the run file; the run's first one defines it, later ones must agree.

    ``corpus_digest`` and ``samples`` (of one epoch) are None before the data is known: an own training loop brings
    them with its first batch. Nothing else is told of a machine's data: no names, paths or sizes of files."""

    layout: Annotated[tuple[TensorSpec, ...], Field(min_length=1, max_length=MAX_TENSORS)]
    corpus_digest: Digest | None
    tokens_per_sample: Annotated[int, Field(ge=1, le=2**31)]
    samples: Annotated[int, Field(ge=1, le=2**62)] | None = None

    @property
    def elements(self) -> int:
        """Of the whole model."""
        return sum(spec.elements for spec in self.layout)


class PeerToCoordinatorHeartbeat(Message):
    """Liveness and progress. ``anchor_version`` and ``state_digest`` say which state the peer holds, if any; ``kept``,
    of a peer that holds none yet, which ones it could go back to, newest first; ``roster_version`` and
    ``verdict_chain`` what the answer need not tell it again. ``diverged``: the state from which its local work is of no
    use any more; it waits for what the others say, and tells what it has ``kept`` as well."""

    round: Count
    activity: Annotated[str, Field(max_length=32)]
    anchor_version: Count | None
    state_digest: Digest | None
    tokens_done: Count
    tokens_per_s: Rate
    step_s: Seconds
    loss: Loss | None
    chunks_moved: Count
    bytes_sent: Count
    bytes_received: Count
    bandwidth_bps: Rate
    roster_version: Count
    verdict_chain: Digest | None = None
    kept: Annotated[tuple[KeptState, ...], Field(max_length=MAX_KEPT)] = ()
    headway: Headway = Headway()
    diverged: KeptState | None = None


class PeerToCoordinatorRequestLease(Message):
    """Ask for samples to train on; ``tokens_done`` as in the heartbeat, so that the answer is fresh."""

    round: Count
    samples: Annotated[int, Field(ge=1, le=2**31)]
    tokens_done: Count


class PeerToCoordinatorRoundReady(Message):
    """Local work has stopped; a contribution over these sample ranges is waiting to be averaged. ``norms``: what it
    claims of that contribution, before any of it is sent (``averaging/norm_claims.py``)."""

    round: Count
    anchor_version: Count
    state_digest: Digest
    weight_tokens: Count
    ranges: Annotated[tuple[SampleRange, ...], Field(max_length=MAX_RANGES)]
    loss: Loss | None
    norms: NormClaim = b""


class PeerToCoordinatorRoundReport(Message):
    """How the averaging ended here: the digest of every part's result bytes, or None where it did not arrive.

    ``dropped`` are the members (indices of the plan) that some chunk of the results that we hold does without;
    ``failed`` the owners and row reducers that did not give us what they had to; ``undelivered`` the members whose
    contributions are missing in what we reduced ourselves; ``deliveries`` what others' links gave."""

    round: Count
    digests: Annotated[tuple[Digest | None, ...], Field(max_length=MAX_PARTS)]
    dropped: Annotated[tuple[Index, ...], Field(max_length=MAX_MEMBERS)]
    failed: Annotated[tuple[Index, ...], Field(max_length=MAX_MEMBERS)] = ()
    undelivered: Annotated[tuple[Index, ...], Field(max_length=MAX_MEMBERS)] = ()
    deliveries: Annotated[tuple[Delivery, ...], Field(max_length=MAX_DELIVERIES)] = ()
    trouble: Text


class PeerToCoordinatorShowCapability(Message):
    """What this peer could do for the run's pipeline, and what each of the recipe's layers takes."""

    capability: Capability
    layers: Annotated[tuple[LayerSize, ...], Field(min_length=1, max_length=MAX_LAYERS)]

    @model_validator(mode="after")
    def _consistent(self) -> PeerToCoordinatorShowCapability:
        if len(self.capability.layer_s) != len(self.layers):
            raise ValueError("every layer has its seconds")
        return self


class PeerToCoordinatorDrive(Message):
    """Ask for samples to drive through the stages: about ``samples`` in hand in all, with those that this peer drives
    already. ``done``: those of this round that it has driven to their end, since it asked last at least. Answered with
    a lease of all that it is to drive, one range a micro-batch: the same question has the same answer. What it has
    named as done and stands there all the same is to be driven once more, as a stage has lost it."""

    round: Count
    samples: Annotated[int, Field(ge=1, le=2**31)]
    done: Annotated[tuple[SampleRange, ...], Field(max_length=MAX_RANGES)]


class PeerToCoordinatorClaim(Message):
    """In a stage's scope: the gradient of these samples shall count here, and in no other replica of the stage."""

    round: Count
    ranges: Annotated[tuple[SampleRange, ...], Field(min_length=1, max_length=MAX_RANGES)]


class PeerToCoordinatorRelease(Message):
    """In a stage's scope: what was claimed here will not be done here; any replica may claim it again."""

    round: Count
    ranges: Annotated[tuple[SampleRange, ...], Field(min_length=1, max_length=MAX_RANGES)]


class PeerToCoordinatorLeave(Message):
    """Going away on purpose; unfinished leases are free again at once. ``trouble``: of who could not go on."""

    reason: LeaveReason
    trouble: Trouble = ""


class PeerToCoordinatorShowVerdict(Message):
    """The newest verdict here, to a coordinator that speaks of an earlier round: its journal must be an old copy."""

    verdict: Verdict


class PeerToCoordinatorGetStatus(Message):
    """Ask for the run's status."""


class PeerToCoordinatorGetVerdicts(Message):
    """Ask for the verdicts from round ``first`` on."""

    first: Count


# Coordinator to peer ------------------------------------------------------------------------------------


class CoordinatorToPeerRun(Message):
    """The run file as its host wrote it: TOML text, whose hash the peer checks against its invite's."""

    run_toml: Annotated[str, Field(max_length=200_000)]
    run_hash: Digest
    coordinator: Certificate


class CoordinatorToPeerJoinAccepted(Message):
    """A member now, with the first view of the run. ``run_hash``: of the run file that is hosted by now."""

    peer: PeerId
    run_hash: Digest
    observed_host: Host
    reachable: bool
    view: RunView


class CoordinatorToPeerView(Message):
    """The view, pushed on change and in answer to heartbeats, readies and reports."""

    view: RunView


class CoordinatorToPeerModelAccepted(Message):
    """The model agrees with the run's."""


class CoordinatorToPeerLease(Message):
    """Samples that nobody else trains on. Empty: there is nothing to do right now, watch the view."""

    ranges: Annotated[tuple[SampleRange, ...], Field(max_length=MAX_RANGES)]


class CoordinatorToPeerClaimed(Message):
    """Those of the claimed samples that are this peer's. The others are another live replica's: pass them through."""

    ranges: Annotated[tuple[SampleRange, ...], Field(max_length=MAX_RANGES)]


class CoordinatorToPeerSuperseded(Message):
    """The same identity joined from another process: this one must stop."""


class CoordinatorToPeerVerdicts(Message):
    """A page of the run's history, oldest first, without gaps; ``more`` of it follows. Empty at its end."""

    verdicts: Annotated[tuple[Verdict, ...], Field(max_length=MAX_VERDICTS)]
    more: bool


class CoordinatorToPeerStatus(Message):
    """The run at a glance. ``rounds_undone``: committed ones that the run went back behind; they count as committed no
    longer. ``outlook``: a sentence on what the run waits for while nobody holds its newest state, else empty.
    ``warning``: a sentence on a loss that has risen far above what it was, else empty.
    ``coverage``: of the newest epochs, the oldest first; none while nobody has told how long one is. ``stages``: of a
    pipeline, once they are planned."""

    run: Annotated[str, Field(max_length=100)]
    run_hash: Digest
    round: Count
    phase: Phase
    closes_in_s: Seconds | None
    anchor_version: Count
    rounds_committed: Count
    rounds_aborted: Count
    rounds_undone: Count = 0
    tokens_committed: Count
    tokens_in_round: Count
    loss: Loss | None
    chain: Digest
    state_digest: Digest | None
    elapsed_s: Seconds
    outlook: Text = ""
    warning: Text = ""
    coverage: Annotated[tuple[Coverage, ...], Field(max_length=MAX_EPOCHS)] = ()
    members: Annotated[tuple[MemberStatus, ...], Field(max_length=MAX_MEMBERS * 4)]
    stages: Annotated[tuple[StageStatus, ...], Field(max_length=MAX_STAGES)] = ()


# Peer to peer -------------------------------------------------------------------------------------------


LinkName = Annotated[bytes, Field(min_length=8, max_length=8)]
StreamNumber = Annotated[int, Field(ge=0, lt=2**32)]


class PeerToPeerPing(Message):
    """Are you there? Also the coordinator's test whether a new member can be reached."""


class PeerToPeerPong(Message):
    """Yes."""


class PeerToPeerOpenLink(Message):
    """Agree on keys for bulk frames; travels inside CURVE. The opener then attaches its data socket."""

    link: LinkName
    secret: Key
    cipher: Literal["aes-256-gcm", "chacha20-poly1305"]


class PeerToPeerLinkOpened(Message):
    """The acceptor's half of the secret, and the cipher that both will use."""

    secret: Key
    cipher: Literal["aes-256-gcm", "chacha20-poly1305"]


class PeerToPeerOfferMemory(Message):
    """Over a link between processes of one machine, by whoever opened it: that descriptor of ours is memory in which
    frames can lie, and begins with the token."""

    process: Annotated[int, Field(ge=1, lt=2**31)]
    descriptor: Annotated[int, Field(ge=0, lt=2**31)]
    token: Key


class PeerToPeerMemoryOpened(Message):
    """Over a link: whether we could open what you have offered; if so, frames may lie there from now on."""

    is_open: bool


class PeerToPeerOpenStream(Message):
    """Over a link: send chunks ``first <= c < stop`` of ``blob``, as each becomes available."""

    stream: StreamNumber
    blob: Blob
    first: Annotated[int, Field(ge=0, lt=2**32)]
    stop: Annotated[int, Field(ge=0, lt=2**32)]
    credit: Annotated[int, Field(ge=1, le=1024)]


class PeerToPeerCloseStream(Message):
    """Over a link: send no more of that stream."""

    stream: StreamNumber


class PeerToPeerStreamEnded(Message):
    """Over a link: no chunk more comes in a stream that you opened, and why; ``code`` as in ``RequestFailed``."""

    stream: StreamNumber
    code: Annotated[str, Field(max_length=64)]
    message: Text


class PeerToPeerOfferTensor(Message):
    """In the scope of the receiver's stage: a micro-batch's activation, or the gradient for the one that it had sent,
    can be fetched here, packed, as the blob of that kind and ``number``. Acknowledged, or refused as ``Busy``.

    (``round``, ``start``, ``stop``): the micro-batch's samples; ``attempt``: which drive of them it is; ``size_bytes``:
    of the packed tensor. After it come the raw bytes of ``targets``, with the activations of a forward pass."""

    kind: Literal["activation", "gradient"]
    round: Count
    start: Count
    stop: Count
    attempt: Annotated[int, Field(ge=0, lt=2**31)]
    shape: Shape
    dtype: Dtype
    size_bytes: Count
    number: Count
    targets: TensorForm | None = None


class PeerToPeerNote(Message):
    """What saves another peer of the pipeline time or memory, and is not needed for a result: ``cancel`` of what was
    offered to it; ``abandoned``, what it had offered; ``taken``, the gradient that it keeps for us; ``room`` for one
    micro-batch more. ``stage``: the receiver's, whose input or output it is about; ``attempt`` as in the offer."""

    kind: Literal["cancel", "abandoned", "taken", "slot_free"]
    round: Count
    start: Count
    stop: Count
    stage: Stage
    attempt: Annotated[int, Field(ge=0, lt=2**31)]


# Either way ---------------------------------------------------------------------------------------------


class Acknowledged(Message):
    """Done; nothing more to say."""


class RequestFailed(Message):
    """The typed error in place of a reply; ``code`` is a class name in ``errors.REMOTE_ERRORS``."""

    code: Annotated[str, Field(max_length=64)]
    message: Text


def _all_messages() -> dict[str, type[Message]]:
    return {cls.__name__: cls for cls in Message.__subclasses__()}


MESSAGES: dict[str, type[Message]] = _all_messages()
"""Every message class by its name on the wire."""
