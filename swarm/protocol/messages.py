"""All messages of the protocol, named by their direction, with the range of every field.

Messages are frozen and strict: ``wire.py`` refuses a wrong type, an unknown field or a value out of range, so handlers
never see one. Sequences are tuples, as that is what msgpack decodes them to.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from shoal.swarm.protocol.access_records import AccessRecord
from shoal.swarm.protocol.evaluations import EvaluationStatus, SignedEvaluation
from shoal.swarm.protocol.evidence import MAX_EVIDENCE_BYTES
from shoal.swarm.protocol.paths import Plane, RelayPass, SignedRelay
from shoal.swarm.protocol.progress import RunProgress
from shoal.swarm.protocol.rounds import MadeChunks, RunView, Verdict
from shoal.swarm.protocol.secure import (
    MOST_MEMBERS,
    Arrival,
    Consent,
    Members,
    Names,
    Revealed,
    Scales,
    SealedShares,
    SecureKeys,
    Sets,
    UnopenedSecret,
)
from shoal.swarm.protocol.timing import MAX_SPANS, MAX_TIMINGS, MemberTimes, PhaseSpan, RoundTiming
from shoal.swarm.protocol.types import (
    MAX_DELIVERIES,
    MAX_EPOCHS,
    MAX_KEPT,
    MAX_LAYERS,
    MAX_MEMBERS,
    MAX_PARTS,
    MAX_PATHS,
    MAX_RANGES,
    MAX_RUN_RELAYS,
    MAX_SECONDS,
    MAX_STAGES,
    MAX_STATUSES,
    MAX_TENSORS,
    MAX_TOKEN_BYTES,
    MAX_UNDONE_RANGES,
    MAX_UNMET,
    MAX_VERDICTS,
    RUN_MEMBERS,
    Amendments,
    Blob,
    Capability,
    Certificate,
    Changes,
    ClaimedAddresses,
    CostStatus,
    Count,
    Coverage,
    Delivery,
    DeviceInfo,
    DeviceUse,
    Digest,
    Dtype,
    FirstBatch,
    FrozenParameters,
    Headway,
    Host,
    Index,
    InviteId,
    InviteRole,
    InviteTerms,
    InviteUses,
    KeptState,
    Key,
    LayerSize,
    LeaveReason,
    Loss,
    MemberStatus,
    Message,
    NormClaim,
    Note,
    PathReport,
    PeerId,
    Phase,
    Port,
    Rate,
    Record,
    RelayLoad,
    RelayStatus,
    Role,
    SampleRange,
    Seconds,
    Shape,
    Signature,
    Stage,
    StageStatus,
    TensorForm,
    TensorSpec,
    Text,
    Trouble,
    UnixTime,
    WorkPhase,
)
from shoal.swarm.protocol.work_scores import SignedScore

Token = Annotated[bytes, Field(max_length=MAX_TOKEN_BYTES, repr=False)]
"""The secret of an invite, ``invite_token.py``."""

MAX_PAGE = 256
"""Most entries of an answer to the host; the rest is asked for with another command."""

EVIDENCE_PIECE_BYTES = 2**19
"""Largest piece of evidence in a message."""

RelayTicket = Annotated[bytes, Field(min_length=16, max_length=16, repr=False)]
"""Names the two ends of one relayed connection; good for one use."""

PROTOCOL_VERSION = 1
"""Incremented whenever a message changes its meaning; both sides must have the same version."""


# Peer to coordinator ------------------------------------------------------------------------------------


class PeerToCoordinatorJoinRun(Message):
    """Join a run. Strangers may make this request, ``GetRun`` and ``FindTrial``."""

    run: Annotated[str, Field(max_length=100)]
    certificate: Certificate
    name: Annotated[str, Field(max_length=64)]
    role: Role
    device: DeviceInfo
    addresses: ClaimedAddresses
    token: Token = b""


class PeerToCoordinatorFindTrial(Message):
    """Ask for a trial of a study to join. ``token``: of the study's invite."""

    token: Token = b""


class PeerToCoordinatorGetRun(Message):
    """Ask for the run file without joining, so that a newcomer knows the run before it joins."""

    run: Annotated[str, Field(max_length=100)]


class PeerToCoordinatorDescribeModel(Message):
    """Describe the model and data that this peer built from the run file.

    Without pins the first description defines the run's model and data, and later ones must agree. ``corpus_digest``
    and ``samples`` (of one epoch) are None before the data is known: an own training loop brings it with its first
    batch. ``frozen``: None for a model whose parameters are all trained. Nothing else is sent about a machine's data:
    no names, paths or sizes of files."""

    layout: Annotated[tuple[TensorSpec, ...], Field(min_length=1, max_length=MAX_TENSORS)]
    corpus_digest: Digest | None
    tokens_per_sample: Annotated[int, Field(ge=1, le=2**31)]
    samples: Annotated[int, Field(ge=1, le=2**62)] | None = None
    frozen: FrozenParameters | None = None

    @property
    def elements(self) -> int:
        """Number of trained parameters."""
        return sum(spec.elements for spec in self.layout)


class PeerToCoordinatorHeartbeat(Message):
    """Liveness and progress of a member.

    ``anchor_version`` and ``state_digest``: the state that the peer holds, if any. ``kept``: states that it could
    return to, newest first, of a peer that holds none yet or has diverged. ``roster_version``, ``verdict_chain``,
    ``plan_digest``: what the peer knows, so the answer can leave it out; the last is of the newest plan. ``diverged``:
    the state from which the peer's local work diverges; it waits for the decision in the view. ``paths``: connections
    with other members, those over relays first; ``unmet``: members with which this peer could make no connection;
    ``phase``: what its training thread does now; ``use``: of the machine, now and then."""

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
    plan_digest: Digest | None = None
    kept: Annotated[tuple[KeptState, ...], Field(max_length=MAX_KEPT)] = ()
    headway: Headway = Headway()
    diverged: KeptState | None = None
    paths: Annotated[tuple[PathReport, ...], Field(max_length=MAX_PATHS)] = ()
    unmet: Annotated[tuple[PeerId, ...], Field(max_length=MAX_UNMET)] = ()
    phase: WorkPhase = "waiting"
    use: DeviceUse | None = None


class PeerToCoordinatorRequestLease(Message):
    """Ask for samples to train on. ``tokens_done`` as in the heartbeat, so that the answer takes it into account.

    ``undone``: leased samples that were not trained on yet. A loop that fetches ahead asks for more while it has some;
    what it has says that it does not repeat a request whose answer was lost."""

    round: Count
    samples: Annotated[int, Field(ge=1, le=2**31)]
    tokens_done: Count
    undone: Annotated[tuple[SampleRange, ...], Field(max_length=MAX_UNDONE_RANGES)] = ()


class PeerToCoordinatorRoundReady(Message):
    """Report that local work has stopped and a contribution over these sample ranges is ready to be averaged.

    ``first``: its first batch, where that was trained from the anchor itself; validators measure its loss again.
    ``norms``: claimed norms of the contribution, sent before any of it (``averaging/norm_claims.py``). ``root``: of the
    tree over its encoded leaves (``averaging/merkle.py``), zeros where there is none. Under secure averaging there are
    no norms, and the root commits to a random number; ``scales`` are those that follow from the last committed round
    here, empty for a member that has none. ``signature``: of all that but the scales, by
    the peer's identity key (``statements.ContributionStatement``); it is needed where there is any weight."""

    round: Count
    anchor_version: Count
    state_digest: Digest
    weight_tokens: Count
    ranges: Annotated[tuple[SampleRange, ...], Field(max_length=MAX_RANGES)]
    loss: Loss | None
    first: FirstBatch | None = None
    norms: NormClaim = b""
    root: Digest = bytes(32)
    scales: Scales = b""
    signature: Signature = bytes(64)


class PeerToCoordinatorSecureStep(Message):
    """Post what a stage of a secure round asks for (``secure.SecureStage``), and ask for what is lacking here.

    ``plan``: digest of the plan; ``wants``: what the answer is to contain beside stage, senders and sets. All else is
    empty but for the stage that it belongs to; what was posted before is not changed by posting again."""

    round: Count
    plan: Digest
    keys: SecureKeys | None = None
    sealed: Annotated[tuple[SealedShares, ...], Field(max_length=32)] = ()
    arrived: Annotated[tuple[Arrival, ...], Field(max_length=2 * MOST_MEMBERS)] = ()
    consent: Signature | None = None
    revealed: Annotated[tuple[Revealed, ...], Field(max_length=2 * MOST_MEMBERS)] = ()
    unopened: Annotated[tuple[UnopenedSecret, ...], Field(max_length=16)] = ()
    wants: Literal["", "keys", "sealed", "consents", "revealed"] = ""


class MadePart(Record):
    """Signature of a part that this member has reduced, or of those chunks of it (``statements.PartStatement``)."""

    part: Annotated[int, Field(ge=0, lt=MAX_PARTS)]
    chunks: MadeChunks
    signature: Signature


class PeerToCoordinatorRoundReport(Message):
    """Report how the averaging ended here: the digest of each part's result, or None if it did not arrive.

    Members are given as indices of the plan. ``dropped``: members that are missing in some chunk of the results held
    here;
    ``failed`` the owners and row reducers that did not give us what they had to; ``undelivered`` the members whose
    contributions are missing in what we reduced ourselves; ``deliveries`` what others' links gave. ``made``: parts that
    we have reduced, in part or as a whole; their digests stand in ``digests``. ``times``: what our time went to since
    the end of the round before; None if that is not known. ``plan_digest``: of the plan that the peer knows."""

    round: Count
    digests: Annotated[tuple[Digest | None, ...], Field(max_length=MAX_PARTS)]
    dropped: Annotated[tuple[Index, ...], Field(max_length=MAX_MEMBERS)]
    failed: Annotated[tuple[Index, ...], Field(max_length=MAX_MEMBERS)] = ()
    undelivered: Annotated[tuple[Index, ...], Field(max_length=MAX_MEMBERS)] = ()
    deliveries: Annotated[tuple[Delivery, ...], Field(max_length=MAX_DELIVERIES)] = ()
    made: Annotated[tuple[MadePart, ...], Field(max_length=2 * RUN_MEMBERS)] = ()
    times: MemberTimes | None = None
    plan_digest: Digest | None = None
    trouble: Text


class PeerToCoordinatorGetWork(Message):
    """By a validator: ask for the samples of one member's contribution to one of the last committed rounds."""

    round: Count
    peer: PeerId


class PeerToCoordinatorScoreWork(Message):
    """By a validator: report the score of a member's contribution."""

    signed: SignedScore


class PeerToCoordinatorEvaluated(Message):
    """By a validator: report an evaluation of a version of the run's model. Each version is reported once."""

    signed: SignedEvaluation


class PeerToCoordinatorShowCapability(Message):
    """Report this peer's capability for the run's pipeline, and the size of each layer of the recipe."""

    capability: Capability
    layers: Annotated[tuple[LayerSize, ...], Field(min_length=1, max_length=MAX_LAYERS)]

    @model_validator(mode="after")
    def _consistent(self) -> PeerToCoordinatorShowCapability:
        if len(self.capability.layer_s) != len(self.layers):
            raise ValueError("layer_s: expected the seconds of each layer")
        return self


class PeerToCoordinatorDrive(Message):
    """Ask for samples to drive through the stages, about ``samples`` in total with those that this peer drives already.

    ``done``: samples of this round that it has driven to their end, at least those since its last request. The answer
    is a lease of all samples to drive, one range for each micro-batch; a repeated request has the same answer. Samples
    in the answer that were named as done have to be driven again, as a stage has lost them."""

    round: Count
    samples: Annotated[int, Field(ge=1, le=2**31)]
    done: Annotated[tuple[SampleRange, ...], Field(max_length=MAX_RANGES)]


class PeerToCoordinatorClaim(Message):
    """Claim samples in a stage's scope, so that their gradient counts in this replica and in no other."""

    round: Count
    ranges: Annotated[tuple[SampleRange, ...], Field(min_length=1, max_length=MAX_RANGES)]


class PeerToCoordinatorRelease(Message):
    """Release claimed samples that this replica of a stage will not finish; any replica may claim them."""

    round: Count
    ranges: Annotated[tuple[SampleRange, ...], Field(min_length=1, max_length=MAX_RANGES)]


class PeerToCoordinatorAccuseReplica(Message):
    """Accuse a replica of a stage of wrong work: tensors far larger than usual, or other values than other replicas
    compute. The coordinator acts only when the accused's neighbours agree (``PipelineRun.accuse``)."""

    accused: PeerId
    stage: Stage
    reason: Literal["size", "values"]


class PeerToCoordinatorShowAddresses(Message):
    """Report the ways to reach this member from now on; it may have been registered with a relay, or lost it."""

    addresses: ClaimedAddresses


class PeerToCoordinatorTryAddress(Message):
    """Ask to be dialed at an address that is not on the roster: by ``shoal doctor``, whose guest is no member yet."""

    addresses: Annotated[ClaimedAddresses, Field(max_length=1)]


class PeerToCoordinatorGetRelays(Message):
    """Ask for the run's relays, and for a pass to use them."""


class PeerToCoordinatorOfferRelay(Message):
    """Offer the relay at ``port`` of this member's own address to the run, for a while.

    The coordinator dials it, and says what does not work."""

    relay_key: Key
    port: Port


class PeerToCoordinatorRequestDial(Message):
    """Ask that another member, which cannot be reached, dials this one, which can."""

    peer: PeerId


class PeerToCoordinatorLeave(Message):
    """Leave the run; unfinished leases are free again at once. ``trouble``: the error that made the peer leave."""

    reason: LeaveReason
    trouble: Trouble = ""


class PeerToCoordinatorShowVerdict(Message):
    """Show the newest verdict known here to a coordinator in an earlier round, whose journal must be an old copy."""

    verdict: Verdict


class PeerToCoordinatorShowEvidence(Message):
    """Show a piece of packed evidence (``evidence.py``) that begins at ``start``; the pieces come in order.

    ``evidence``: the id of the whole, which has ``size_bytes``."""

    evidence: Digest
    size_bytes: Annotated[int, Field(ge=1, le=MAX_EVIDENCE_BYTES)]
    start: Annotated[int, Field(ge=0, lt=MAX_EVIDENCE_BYTES)]
    data: Annotated[bytes, Field(min_length=1, max_length=EVIDENCE_PIECE_BYTES, repr=False)]


class PeerToCoordinatorGetStatus(Message):
    """Ask for the run's status."""


class PeerToCoordinatorGetTimings(Message):
    """Ask where the time of the last rounds went, from round ``first`` on."""

    first: Count


class PeerToCoordinatorGetSpans(Message):
    """Ask for what a member did in one of the last rounds."""

    peer: PeerId
    round: Count


class PeerToCoordinatorSpans(Message):
    """Spans of what this member did in a round, with its own clock now; none of a round that it does not know."""

    spans: Annotated[tuple[PhaseSpan, ...], Field(max_length=MAX_SPANS)]
    now_s: Seconds

    def on_clock_of(self, now_s: float) -> tuple[PhaseSpan, ...]:
        """Return the spans on another clock, which shows ``now_s`` as the member's shows its own; within the range."""
        return tuple(
            one.model_copy(update={"start_s": min(max(0.0, one.start_s - self.now_s + now_s), MAX_SECONDS)})
            for one in self.spans
        )


class PeerToCoordinatorGetVerdicts(Message):
    """Ask for the verdicts from round ``first`` on. ``stage``: of that stage of a pipeline, whoever holds it; without
    it those of the scope that is asked."""

    first: Count
    stage: Stage | None = None


# Coordinator to peer ------------------------------------------------------------------------------------


class CoordinatorToPeerTrial(Message):
    """The study, in JSON, and one of its trials that may be joined now; ``number`` None: none at the moment, or
    (``has_ended``) none any more. ``values``: the trial's settings, in JSON; ``invite``: to its run."""

    study: Annotated[str, Field(max_length=400_000)]
    coordinator: Certificate
    has_ended: bool = False
    number: Annotated[int, Field(ge=0, le=10**6)] | None = None
    values: Annotated[str, Field(max_length=20_000)] = "{}"
    invite: Annotated[str, Field(max_length=4000, repr=False)] = ""


class CoordinatorToPeerRun(Message):
    """The run file as the host wrote it, in TOML. The peer checks its hash against the invite."""

    run_toml: Annotated[str, Field(max_length=200_000)]
    run_hash: Digest
    coordinator: Certificate


class CoordinatorToPeerJoinAccepted(Message):
    """The join was accepted; ``view`` is the first view of the run. ``run_hash``: of the run file hosted now.

    ``observed_host``: the address that this peer comes from, and its port, 0 over a relay; ``unreachable``: why it
    cannot be dialed there, or where else it wanted to be; empty where it can be."""

    peer: PeerId
    run_hash: Digest
    observed_host: Host
    observed_port: Annotated[int, Field(ge=0, le=65_535)]
    reachable: bool
    unreachable: Text = ""
    view: RunView


class CoordinatorToPeerAddresses(Message):
    """The reported addresses are on the roster. ``reachable``: whether the first one can be dialed."""

    reachable: bool


class CoordinatorToPeerAddressTried(Message):
    """Both ports were dialed; ``trouble``: what does not work, empty if both answer."""

    trouble: Text


class CoordinatorToPeerRelays(Message):
    """The run's relays, and a pass for them."""

    relays: Annotated[tuple[SignedRelay, ...], Field(max_length=MAX_RUN_RELAYS)]
    relay_pass: RelayPass


class CoordinatorToPeerRelayOffered(Message):
    """``trouble``: why the relay is not named to other members; empty if it is."""

    trouble: Text


class CoordinatorToPeerDial(Message):
    """Dial this member, and open a link to it: it asks for that, as it cannot dial you."""

    peer: PeerId


class CoordinatorToPeerView(Message):
    """The view of the run, sent on changes and in answer to heartbeats, readies and reports."""

    view: RunView


class CoordinatorToPeerSecureBoard(Message):
    """Posts of a secure round so far: stage, ``senders``, ``sets`` and ``names`` once they are fixed, and what
    was wanted.

    ``sealed``: for this member, by the senders of its group; ``revealed``: of the parts that this member owns;
    ``closed``: senders of groups whose sums cannot be opened."""

    round: Count
    stage: Annotated[int, Field(ge=0, le=5)]
    senders: Members = ()
    sets: Sets = ()
    names: Names = ()
    closed: Members = ()
    keys: Annotated[tuple[SecureKeys, ...], Field(max_length=MOST_MEMBERS)] = ()
    sealed: Annotated[tuple[SealedShares, ...], Field(max_length=32)] = ()
    consents: Annotated[tuple[Consent, ...], Field(max_length=MOST_MEMBERS)] = ()
    revealed: Annotated[tuple[Revealed, ...], Field(max_length=2 * MOST_MEMBERS * MOST_MEMBERS)] = ()


class CoordinatorToPeerModelAccepted(Message):
    """The described model and data agree with the run's."""


class CoordinatorToPeerLease(Message):
    """Samples that no other member trains on. Empty when there is nothing to do now; the view shows when there is."""

    ranges: Annotated[tuple[SampleRange, ...], Field(max_length=MAX_RANGES)]


class CoordinatorToPeerWork(Message):
    """Samples of a member's contribution; empty if the round is not among the last committed ones, or lacks the member.

    ``first``: what the member said of its first batch. ``carries``: the contribution also brings work that earlier
    rounds left out. ``doubted``: members in that round whose last scores were bad, which validators look at first."""

    ranges: Annotated[tuple[SampleRange, ...], Field(max_length=MAX_RANGES)]
    first: FirstBatch | None = None
    carries: bool = False
    doubted: Annotated[tuple[PeerId, ...], Field(max_length=MAX_MEMBERS)] = ()


class CoordinatorToPeerClaimed(Message):
    """The granted samples. The others are another live replica's; their gradients do not count here."""

    ranges: Annotated[tuple[SampleRange, ...], Field(max_length=MAX_RANGES)]


class CoordinatorToPeerSuperseded(Message):
    """Another process has joined with the same identity; this one has to stop."""


class CoordinatorToPeerVerdicts(Message):
    """A page of the run's history, oldest first and without gaps; empty at its end. ``more``: whether more follows."""

    verdicts: Annotated[tuple[Verdict, ...], Field(max_length=MAX_VERDICTS)]
    more: bool


class CoordinatorToPeerGetSpans(Message):
    """Ask a member what it did in one of the last rounds. Answer: ``PeerToCoordinatorSpans``."""

    round: Count


class CoordinatorToPeerSpans(Message):
    """Spans of what a member did in a round, on the coordinator's clock, which may be off by ``error_s``."""

    spans: Annotated[tuple[PhaseSpan, ...], Field(max_length=MAX_SPANS)]
    error_s: Seconds


class CoordinatorToPeerTimings(Message):
    """Times of the phases of those rounds that the coordinator remembers, oldest first."""

    rounds: Annotated[tuple[RoundTiming, ...], Field(max_length=MAX_TIMINGS)]


class CoordinatorToPeerReceipt(Message):
    """Outcome of evidence: ``incomplete`` until its last piece is here, then as in ``chunk_judge.Judgement``."""

    evidence: Digest
    judgement: Literal["incomplete", "guilty", "innocent", "void"]


class CoordinatorToPeerStatus(Message):
    """Summary of the run for ``shoal status``.

    ``rounds_undone``: rounds that were committed and then undone by a rollback; they are not in ``rounds_committed``.
    ``outlook``: a sentence on what the run waits for while nobody holds its newest state, otherwise empty.
    ``warning``: a sentence on losses that go wrong, with what to do, otherwise empty. ``evaluation``: held-out figures
    and texts. ``stopping``: why the open round is the last one, or was, beside the run file's limits; otherwise empty.
    ``coverage``: of the newest epochs, oldest first; empty while the length of an epoch is not known. ``stages``: of a
    pipeline, once they are planned. ``amendments``: those in effect, and those to come. ``relays``: those that run
    now. ``timing``: where the time of the last round went, and for whom the others waited in it. ``utilisation``:
    share of the members' time spent in compute over the last rounds, by their own words; ``goodput``: of the tokens
    trained since the coordinator's start, the share in committed rounds; None while nothing is known.
    ``journal``: why the coordinator's journal takes no writes at the moment, otherwise empty. ``progress``: how far the
    run is of its end; ``round_tokens``: target of a round. ``costs``: by what members and the
    run file say."""

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
    evaluation: EvaluationStatus = EvaluationStatus()
    stopping: Text = ""
    journal: Trouble = ""
    relays: Annotated[tuple[RelayStatus, ...], Field(max_length=MAX_RUN_RELAYS)] = ()
    coverage: Annotated[tuple[Coverage, ...], Field(max_length=MAX_EPOCHS)] = ()
    members: Annotated[tuple[MemberStatus, ...], Field(max_length=MAX_STATUSES)]
    stages: Annotated[tuple[StageStatus, ...], Field(max_length=MAX_STAGES)] = ()
    amendments: Amendments = ()
    timing: RoundTiming | None = None
    utilisation: Annotated[float, Field(ge=0, le=1)] | None = None
    goodput: Annotated[float, Field(ge=0, le=1)] | None = None
    progress: RunProgress = RunProgress()
    round_tokens: Count = 0
    costs: CostStatus = CostStatus()


# Host to its coordinator --------------------------------------------------------------------------------


class CreateInvite(Record):
    """Make an invite. ``for_s``: seconds for which newcomers may use it, 0 for ever.

    Answer: ``CoordinatorToHostInvite``."""

    kind: Literal["create invite"] = "create invite"
    role: InviteRole
    uses: InviteUses = 0
    for_s: Annotated[int, Field(ge=0, le=2**31)] = 0
    note: Note = ""


class ListInvites(Record):
    """Ask for the run's invites, without their tokens, from number ``first`` on.

    Answer: ``CoordinatorToHostInvites``."""

    kind: Literal["list invites"] = "list invites"
    first: Count = 0


class RevokeInvite(Record):
    """Let nobody new in by this invite. Answer: ``Acknowledged``."""

    kind: Literal["revoke invite"] = "revoke invite"
    id: InviteId


class ListMembers(Record):
    """Ask for the run's members, those that left, and banned and allowed peers, from number ``first`` on.

    Answer: ``CoordinatorToHostMembers``."""

    kind: Literal["list members"] = "list members"
    first: Count = 0


class KickMember(Record):
    """Remove a member, which may join again. Answer: ``Acknowledged``."""

    kind: Literal["kick member"] = "kick member"
    peer: PeerId
    note: Note = ""


class BanPeer(Record):
    """Ban an identity, and with ``network`` the network that it last came from. Answer: ``CoordinatorToHostBanned``."""

    kind: Literal["ban peer"] = "ban peer"
    peer: PeerId
    network: bool = False
    note: Note = ""


class AllowPeer(Record):
    """Lift an identity's ban, and put it on the list of those that may join. Answer: ``Acknowledged``."""

    kind: Literal["allow peer"] = "allow peer"
    peer: PeerId


class ListRecords(Record):
    """Ask for the run's access records from number ``first`` on. Answer: ``CoordinatorToHostRecords``."""

    kind: Literal["list records"] = "list records"
    first: Count = 0


class AmendRun(Record):
    """Change settings of the run, each a name and JSON, from ``at_round`` on; 0: from the next round.

    Answer: ``CoordinatorToHostAmended``."""

    kind: Literal["amend run"] = "amend run"
    changes: Annotated[Changes, Field(min_length=1)]
    at_round: Count = 0


HostCommand = (
    CreateInvite | ListInvites | RevokeInvite | ListMembers | KickMember | BanPeer | AllowPeer | ListRecords | AmendRun
)


class HostToCoordinatorCommand(Message):
    """A command of the run's host to its running coordinator.

    ``proof``: signature by the host's identity over the CURVE key of the connection (``host_proof``), which nobody else
    can use."""

    proof: Signature
    command: Annotated[HostCommand, Field(discriminator="kind")]


def host_proof(run_hash: bytes, curve_key: bytes) -> bytes:
    """The bytes that the host signs to command the coordinator of a run over a connection with this CURVE key."""
    return b"shoal host command, version 1\0" + run_hash + curve_key


class CoordinatorToHostInvite(Message):
    """An invite that was made, with its token."""

    terms: InviteTerms
    token: Token


class InviteState(Record):
    """An invite as ``shoal invite list`` shows it. ``joined``: number of identities that joined by it."""

    terms: InviteTerms
    made_s: UnixTime
    is_revoked: bool
    joined: Count


class CoordinatorToHostInvites(Message):
    """Some of the run's invites, in the order in which they were made; ``more``: whether others follow."""

    invites: Annotated[tuple[InviteState, ...], Field(max_length=MAX_PAGE)]
    more: bool


class MemberAccess(Record):
    """A peer as ``shoal members`` shows it. ``invite``: the id of the one that let it in; ``since_s``: Unix time of its
    last join, 0 for never; ``rounds``: committed ones with its work; ``has_credit``: whether that counts by now, and
    ``credit``: its share of the credit of all that are here; ``state``: what it does, or why it left; ``allowed``:
    whether it is on the host's list."""

    peer: PeerId
    name: Annotated[str, Field(max_length=64)]
    role: Role | Literal[""]
    alive: bool
    state: Text
    since_s: UnixTime
    invite: InviteId | Literal[""]
    network: Annotated[str, Field(max_length=255)]
    rounds: Count
    has_credit: bool
    credit: Annotated[float, Field(ge=0, le=1)]
    banned: bool
    banned_network: Annotated[str, Field(max_length=255)]
    allowed: bool
    note: Note


class CoordinatorToHostMembers(Message):
    """Some of the run's members and of others that the host decided on; ``more``: whether others follow."""

    members: Annotated[tuple[MemberAccess, ...], Field(max_length=MAX_PAGE)]
    more: bool


class CoordinatorToHostAmended(Message):
    """The amendments that were made, and the round that is open."""

    amendments: Amendments
    round: Count


class CoordinatorToHostRecords(Message):
    """A page of the run's access records, oldest first; ``more``: whether others follow."""

    records: Annotated[tuple[AccessRecord, ...], Field(max_length=MAX_PAGE)]
    more: bool


class CoordinatorToHostBanned(Message):
    """The ban is in force; ``removed``: the members that lost their places by it."""

    network: Annotated[str, Field(max_length=255)]
    removed: Annotated[tuple[PeerId, ...], Field(max_length=2 * MAX_MEMBERS)]


# Peer to peer -------------------------------------------------------------------------------------------


LinkName = Annotated[bytes, Field(min_length=8, max_length=8)]
StreamNumber = Annotated[int, Field(ge=0, lt=2**32)]


class PeerToPeerPing(Message):
    """Ask for a sign of life; the coordinator also uses it to test whether a new member can be reached."""


class PeerToPeerPong(Message):
    """Answer to a ping."""


class PeerToPeerOpenLink(Message):
    """Agree on keys for bulk frames, inside the CURVE channel. The opener then attaches its data connections.

    ``is_beside``: the opener keeps its last link, too, until the streams on it have ended."""

    link: LinkName
    secret: Key
    cipher: Literal["aes-256-gcm", "chacha20-poly1305"]
    is_beside: bool = False


class PeerToPeerLinkOpened(Message):
    """The acceptor's half of the secret, and the cipher that both sides use."""

    secret: Key
    cipher: Literal["aes-256-gcm", "chacha20-poly1305"]


class PeerToPeerOfferMemory(Message):
    """Stream control, by the opener of a link between processes of one machine: offer shared memory for frames.

    ``descriptor``: of the memory, in ``process``. ``token``: the first bytes of the memory."""

    process: Annotated[int, Field(ge=1, lt=2**31)]
    descriptor: Annotated[int, Field(ge=0, lt=2**31)]
    token: Key


class PeerToPeerMemoryOpened(Message):
    """Stream control: whether the offered memory was opened; if so, frames may lie there from now on."""

    is_open: bool


class PeerToPeerOpenStream(Message):
    """Stream control: send chunks ``first <= c < stop`` of ``blob``, each as soon as it is available."""

    stream: StreamNumber
    blob: Blob
    first: Annotated[int, Field(ge=0, lt=2**32)]
    stop: Annotated[int, Field(ge=0, lt=2**32)]
    credit: Annotated[int, Field(ge=1, le=1024)]


class PeerToPeerCloseStream(Message):
    """Stream control: send no more of a stream."""

    stream: StreamNumber


class PeerToPeerStreamEnded(Message):
    """Stream control: a stream that the receiver opened has ended early; ``code`` as in ``RequestFailed``.

    ``following``: the first chunk that is not sent; those before are on their way. ``retry_s``: when to ask again."""

    stream: StreamNumber
    code: Annotated[str, Field(max_length=64)]
    message: Text
    following: Index
    retry_s: Seconds = 0.0


class PeerToPeerOfferTensor(Message):
    """Offer a micro-batch's activation, or the gradient of one, in the scope of the receiver's stage.

    The packed tensor can be fetched as the blob of this kind and ``number``. The receiver acknowledges the offer or
    refuses it with ``Busy``. (``round``, ``start``, ``stop``): the micro-batch's samples. ``attempt``: number of
    this drive of the samples. ``size_bytes``: of the packed tensor, which the raw bytes of ``targets`` follow in a
    forward pass."""

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


class PeerToPeerCompareVerdict(Message):
    """Compare the verdict of a round by its chain hash."""

    round: Count
    chain: Digest


class PeerToPeerOtherVerdict(Message):
    """The answerer's verdict of that round if it is another one; None if it is the same, or not known here."""

    verdict: Verdict | None


class PeerToPeerShowVerdict(Message):
    """Show the verdict of a round for which the receiver has shown another one: both have the same proof then."""

    verdict: Verdict


class PeerToPeerNote(Message):
    """A hint that saves another peer of the pipeline time or memory; no result depends on it.

    ``cancel``: an offer to the receiver is withdrawn; ``abandoned``: the receiver's offer will not be used; ``taken``:
    the gradient that the receiver keeps was received; ``slot_free``: there is room for one more micro-batch. ``stage``:
    the receiver's; ``attempt`` as in the offer."""

    kind: Literal["cancel", "abandoned", "taken", "slot_free"]
    round: Count
    start: Count
    stop: Count
    stage: Stage
    attempt: Annotated[int, Field(ge=0, lt=2**31)]


class PeerToPeerConfirmTensors(Message):
    """Ask what the receiver exchanged with the member ``of`` for a micro-batch."""

    of: PeerId
    round: Count
    start: Count
    stop: Count


class PeerToPeerTensorsConfirmed(Message):
    """Digests of the packed activation that was taken from that member, and of the gradient sent back; None if there
    was none."""

    activation: Digest | None
    gradient: Digest | None


class PeerToPeerRepeatWork(Message):
    """Compute a micro-batch through the stages ``stage`` to ``last`` again, without counting it.

    The sender has the input as its blob ``activation`` with this ``number``, and the output's gradient as its blob
    ``repeated``; without ``backward`` only the output is wanted. Of stage 0 the input are the run's samples. ``seed``:
    of the sketches."""

    round: Count
    start: Count
    stop: Count
    stage: Stage
    last: Stage
    number: Count
    backward: bool
    seed: Annotated[bytes, Field(min_length=16, max_length=16)]


class PeerToPeerWorkRepeated(Message):
    """Sketches of the output and of the input's gradient, each empty if there is none, and the targets' digest if they
    were read here."""

    output: Annotated[bytes, Field(max_length=4096)]
    gradient: Annotated[bytes, Field(max_length=4096)]
    targets: Annotated[bytes, Field(max_length=32)]


# Client and relay ---------------------------------------------------------------------------------------
# Over TCP, each with its length before it. Once ``RelayToClientConnected`` was sent, all further bytes are the other
# client's.


class RelayToClientHello(Message):
    """The relay's key, a nonce to sign, and the address from which the client has connected.

    ``challenge``: a transport key, towards which a client proves that it holds its own."""

    relay_key: Key
    nonce: Digest
    challenge: Key
    load: RelayLoad
    observed_host: Host
    observed_port: Port


class ClientToRelayRegister(Message):
    """Be reachable over this relay, under the certificate's CURVE key, while this connection lasts.

    ``relay_pass``: None for a run's host, which may have to show the operator's ``token``. ``proof``: the identity's
    signature of ``paths.proof_bytes``; ``key_proof``: that the client holds the CURVE key, too. Anybody can certify
    somebody else's."""

    certificate: Certificate
    relay_pass: RelayPass | None
    proof: Signature
    key_proof: Digest
    token: Token = b""


class ClientToRelayConnect(Message):
    """Connect to the client that is registered under the CURVE key ``target``.

    Without a pass only to a run's host, for the control plane: newcomers have none yet."""

    target: Key
    plane: Plane
    certificate: Certificate | None = None
    relay_pass: RelayPass | None = None
    proof: Signature | None = None


class ClientToRelayAccept(Message):
    """Take the connection of the caller with this ticket."""

    ticket: RelayTicket


class RelayToClientRegistered(Message):
    """The client is registered."""


class RelayToClientCaller(Message):
    """Somebody wants to connect. ``caller_key``: its CURVE key, zeros for a newcomer. ``signature``: the relay's, of
    ``paths.introduction_bytes``."""

    ticket: RelayTicket
    plane: Plane
    caller_key: Key
    host: Host
    port: Port
    signature: Signature


class RelayToClientConnected(Message):
    """From here on the bytes are the other client's. ``host`` and ``port``: from where it has connected to the relay;
    both may dial each other there after ``dial_in_s``, when this message has reached both."""

    host: Host
    port: Port
    dial_in_s: Annotated[float, Field(ge=0, le=10)]


# Either way ---------------------------------------------------------------------------------------------


class Acknowledged(Message):
    """The request was carried out; the answer has no content."""


class RequestFailed(Message):
    """An error in place of a reply; ``code`` is a class name in ``errors.REMOTE_ERRORS``."""

    code: Annotated[str, Field(max_length=64)]
    message: Text


def _all_messages() -> dict[str, type[Message]]:
    return {cls.__name__: cls for cls in Message.__subclasses__()}


MESSAGES: dict[str, type[Message]] = _all_messages()
"""Every message class by its name on the wire."""
