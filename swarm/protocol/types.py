"""Types and records of which messages consist, with the range of every field: peers, their addresses, samples."""

from __future__ import annotations

import base64
import math
from itertools import pairwise
from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, model_validator

from shoal.swarm.protocol.addresses import MAX_ADDRESSES, join_host_port

MAX_MEMBERS = 16_384
"""Most members that a plan can name. Runs take fewer (``RUN_MEMBERS``), simulations do not."""

RUN_MEMBERS = 4096
"""Most members of a role in a run: the view of a newcomer, with plan, verdict and roster of so many, fits a message."""

MAX_STATUSES = 2 * RUN_MEMBERS
"""Most members in a status, those that have left included."""

MAX_PARTS = 2 * MAX_MEMBERS  # rows of unequal size have some more parts than members
MAX_STAND_INS = 3
MAX_CHUNK_ELEMENTS = 2**22
MAX_RANGES = 4096
MAX_UNDONE_RANGES = 512
MAX_TENSORS = 65_536
MAX_LAYERS = 4096
MAX_STAGES = 256
MAX_DIMENSIONS = 16
MAX_DELIVERIES = 16
MAX_DETOURS = 64
MAX_MADE_RANGES = 16
MAX_VERDICTS = 256
MAX_KEPT = 16
MAX_PATHS = 32
MAX_TOLD_PATHS = 4
MAX_RELAYS = 4
MAX_RUN_RELAYS = 8
MAX_EPOCHS = 16
MAX_UNMET = 32
MAX_TROUBLE = 1000
MAX_CLAIM_BYTES = 128
MAX_INVITE_USES = 4096
MAX_TOKEN_BYTES = 128
MAX_AMENDMENTS = 64
MAX_SECONDS = 1e9
MAX_RATE = 1e18
"""The largest rate that a message has room for. What one member claims may be as much."""


PeerId = Annotated[str, StringConstraints(pattern=r"^[a-z2-7]{16}$")]
"""Sixteen base32 characters of the SHA-256 of an Ed25519 public key (``identity.peer_id``)."""

Digest = Annotated[bytes, Field(min_length=32, max_length=32)]
Key = Annotated[bytes, Field(min_length=32, max_length=32)]
Signature = Annotated[bytes, Field(min_length=64, max_length=64)]
"""An Ed25519 signature."""
NormClaim = Annotated[bytes, Field(max_length=MAX_CLAIM_BYTES)]
"""Norms of a contribution by range, as ``averaging/norm_claims.py`` packs them; empty for a contribution of zeros."""
Text = Annotated[str, Field(max_length=2000)]
Host = Annotated[str, Field(min_length=1, max_length=255)]
Port = Annotated[int, Field(ge=1, le=65_535)]
Count = Annotated[int, Field(ge=0, le=2**62)]
Seconds = Annotated[float, Field(ge=0, le=MAX_SECONDS)]
UnixTime = Annotated[float, Field(ge=0, le=1e12)]
"""Seconds since 1970, UTC."""
Rate = Annotated[float, Field(ge=0, le=MAX_RATE)]
Loss = Annotated[float, Field(ge=-1e30, le=1e30)]
Shape = Annotated[tuple[Count, ...], Field(max_length=MAX_DIMENSIONS)]
Dtype = Annotated[str, Field(max_length=32)]
Role = Literal["trainer", "contributor", "validator", "follower", "observer"]
"""``trainer``: trains and reduces parts; ``contributor``: trains but reduces nothing; ``validator``: follows the anchor
and scores contributions, with an invite for that; ``follower``: follows the anchor; ``observer``: reads the run and is
not recorded."""
InviteRole = Literal["trainer", "contributor", "validator", "observer"]
"""Most that an invite admits to; ``validator``: scoring, and what observers may; ``observer``: followers of the anchor
and guests."""
LeaveReason = Literal["done", "starts afresh", "observed", "diverged", "failed", "paused"]
Trouble = Annotated[str, Field(max_length=MAX_TROUBLE)]
"""The error that made a member leave, and what to do about it."""
Index = Annotated[int, Field(ge=0, lt=MAX_MEMBERS)]
Stage = Annotated[int, Field(ge=0, lt=MAX_STAGES)]
Scope = Annotated[int, Field(ge=0, le=MAX_STAGES)]
"""0: the run; s + 1: its stage s, whose replicas average with each other like a run of their own."""

Column = Annotated[tuple[Index, ...], Field(max_length=MAX_MEMBERS)]
DivergenceWord = Literal["", "go on", "at fault", "unrecoverable"]
"""Decision on a member whose local work from a state diverges. ``go on``: the state is not, or no longer, the run's;
``at fault``: the members with most of the work continue from it; ``unrecoverable``: theirs diverges too, and there is
no earlier state to go back to."""
Phase = Literal["waiting", "training", "closing", "averaging", "ended"]
WorkPhase = Literal["compute", "data", "packing", "exchange", "waiting", "applying", "checkpoint"]
"""What a member's time goes to: local steps, waiting for data, encoding a contribution, moving bytes, waiting for
others (for the plan, for owners, for the verdict), the outer step, and the checkpoint as far as training waits for it.
"""
WORK_PHASES: tuple[WorkPhase, ...] = get_args(WorkPhase)


class Record(BaseModel):
    """Base of everything that is read from the network, a journal or a run file.

    Records are frozen and strict: no unknown fields, no conversions, no infinite floats and no NaN."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


class Message(Record):
    """A record that is sent on its own; its class name is its type on the wire."""


SettingName = Annotated[str, StringConstraints(pattern=r"^[a-z_]{1,32}\.[a-z_]{1,32}$")]
SettingValue = Annotated[str, Field(min_length=1, max_length=1200)]
"""JSON of a value, in its one spelling."""

Changes = Annotated[tuple[tuple[SettingName, SettingValue], ...], Field(max_length=32)]
"""Settings that differ from the run file, sorted by name."""


class Amendment(Record):
    """A setting's value from a round on (``amendments.py``)."""

    at_round: Annotated[int, Field(ge=1, le=2**62)]
    key: SettingName
    value: SettingValue

    @property
    def text(self) -> str:
        """For people."""
        return f"{self.key} = {self.value} from round {self.at_round} on"


Amendments = Annotated[tuple[Amendment, ...], Field(max_length=MAX_AMENDMENTS)]


InviteId = Annotated[str, StringConstraints(pattern=r"^[a-z2-7]{8}$")]
"""Eight base32 characters, 40 bits: a name, no secret."""

InviteUses = Annotated[int, Field(ge=0, le=MAX_INVITE_USES)]

Note = Annotated[str, Field(max_length=200)]
"""A remark of the host, for people."""


class InviteTerms(Record):
    """Terms of an invite. ``uses``: identities that may join by it; ``expires_s``: Unix time from which nobody new
    may; both are 0 for no limit."""

    id: InviteId
    role: InviteRole
    uses: InviteUses = 0
    expires_s: Annotated[int, Field(ge=0, lt=2**32)] = 0
    note: Note = ""


class SampleRange(Record):
    """Samples ``start <= s < stop`` of the run's endless, permuted sequence of samples."""

    start: Count
    stop: Count


class FirstBatch(Record):
    """Claim of a member about its first batch after the anchor: samples and their mean ``loss``, in nats a token, at
    the anchor itself, so that it can be measured again."""

    samples: SampleRange
    loss: Loss


class Certificate(Record):
    """An identity's signature of the CURVE key that one of its processes uses."""

    identity_key: Key
    curve_key: Key
    signature: Annotated[bytes, Field(min_length=64, max_length=64)]


MAX_PRICE = 1e6
Price = Annotated[float, Field(ge=0, le=MAX_PRICE)]
"""What devices cost an hour, in the run's currency."""

DeviceTime = Annotated[float, Field(ge=0, le=1e18)]
"""Seconds of all devices of a run together."""

Cost = Annotated[float, Field(ge=0, le=1e30)]
"""In the run's currency."""

MAX_DEVICE_W = 5000.0
"""Most that is believed of a GPU's power: some times what the largest takes today."""

Energy = Annotated[float, Field(ge=0, le=1e18)]
"""Joules of all GPUs of a run together."""


class DeviceInfo(Record):
    """The device that a member trains on, for people to read. ``count``: how many of it an island has;
    ``price_per_hour``: what all of them cost, as their owner says, None where nothing is said."""

    kind: Annotated[str, Field(max_length=16)]
    name: Annotated[str, Field(max_length=100)]
    memory_bytes: Count
    count: Annotated[int, Field(ge=1, le=1024)] = 1
    price_per_hour: Price | None = None

    @property
    def model(self) -> str:
        """Name of one of the devices."""
        return self.name.removeprefix(f"{self.count} x ")


class Address(Record):
    """One way to reach a peer or the coordinator.

    ``public``: its ports can be dialed at ``host``; ``mapped``: they can, as its router forwards them; ``relayed``: it
    is registered with the relay at ``host`` and ``control_port``, whose key ``relay_key`` is if that is known.

    ``host`` may be empty in a join, and stands for the address that the coordinator sees. ``data_port`` is None for a
    coordinator, which has no data plane, and for a relay, which has one port for both."""

    kind: Literal["public", "mapped", "relayed"] = "public"
    host: Annotated[str, Field(max_length=255)]
    control_port: Port
    data_port: Port | None = None
    relay_key: Key | None = None

    def __str__(self) -> str:
        return join_host_port(self.host, self.control_port)

    @property
    def is_relayed(self) -> bool:
        return self.kind == "relayed"


def _check_ways(addresses: tuple[Address, ...]) -> tuple[Address, ...]:
    if addresses[0].is_relayed:
        raise ValueError("a peer's first address is one that may be dialed")
    if any(address.data_port is None for address in addresses if not address.is_relayed):
        raise ValueError("a peer's address has a data port")
    if any((address.relay_key is not None) != address.is_relayed for address in addresses):
        raise ValueError("a relay has a key, and no other address has one")
    return addresses


def _require_hosts(addresses: tuple[Address, ...]) -> tuple[Address, ...]:
    if not all(address.host for address in addresses):
        raise ValueError("a member's address has a host")
    return addresses


ClaimedAddresses = Annotated[
    tuple[Address, ...], Field(min_length=1, max_length=MAX_ADDRESSES), AfterValidator(_check_ways)
]
"""The ways to reach a peer, as it names them itself: the preferred one first, relays last."""

Addresses = Annotated[ClaimedAddresses, AfterValidator(_require_hosts)]
"""The ways to reach a member, the preferred one first, relays last."""


class RosterEntry(Record):
    """All that one member must know to connect to another.

    ``reachable``: the coordinator has dialed both ports of its first address, and both have answered. The others can
    meet a member that is not ``reachable`` where it dials them, or over its relays."""

    peer: PeerId
    certificate: Certificate
    name: Annotated[str, Field(max_length=64)]
    role: Role
    addresses: Addresses
    reachable: bool

    @property
    def address(self) -> Address:
        """The preferred address that can be dialed, if the member is ``reachable``."""
        return self.addresses[0]

    @property
    def relays(self) -> tuple[Address, ...]:
        """The relays with which the member is registered."""
        return tuple(address for address in self.addresses if address.is_relayed)

    @property
    def can_be_met(self) -> bool:
        """Whether every other member can open a connection to this one, directly or over a relay."""
        return self.reachable or bool(self.relays)


class RosterDelta(Record):
    """Changes of a roster from version ``since`` on: new and changed entries, and peers that left."""

    since: Count
    changed: Annotated[tuple[RosterEntry, ...], Field(max_length=2 * MAX_MEMBERS)]
    removed: Annotated[tuple[PeerId, ...], Field(max_length=2 * MAX_MEMBERS)]


class TensorSpec(Record):
    """One parameter of the model. Its type is each peer's own affair: the anchor is float32."""

    name: Annotated[str, Field(max_length=500)]
    shape: Shape

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


class FrozenParameters(Record):
    """A model's parameters that are not trained: how many elements, and the digest of their names, shapes and float32
    values (``frozen_parameters``)."""

    elements: Annotated[int, Field(ge=1, le=2**44)]
    digest: Digest

    def __str__(self) -> str:
        return f"{self.elements:,} ({self.digest.hex()[:16]})"


class TensorForm(Record):
    """Shape and dtype of a tensor that is sent as raw bytes."""

    shape: Shape
    dtype: Dtype


class KeptState(Record):
    """A state that a peer could return to: it is on its disk, or can be rebuilt."""

    anchor_version: Count
    digest: Digest


class Coverage(Record):
    """Counts of an epoch's samples: committed, leased to members, and returned by members that left.

    Returned samples are free again. The rest has not been leased yet."""

    epoch: Count
    samples: Count
    committed: Count
    leased: Count
    returned: Count


class LayerSize(Record):
    """Sizes of a layer, for one micro-batch: its float32 parameters, its packed output, and what autograd keeps."""

    parameters_bytes: Count
    activation_bytes: Count
    kept_bytes: Count


class Capability(Record):
    """Capability of a peer in a pipeline: memory, speed and link.

    ``host_bytes``: the machine's; ``device_bytes``: a GPU's own, None for a device that computes in the machine's
    memory. ``layer_s``: seconds of each layer's forward and backward pass of a micro-batch."""

    host_bytes: Count
    device_bytes: Count | None
    layer_s: Annotated[tuple[Seconds, ...], Field(max_length=MAX_LAYERS)]
    bandwidth_bps: Rate
    rtt_s: Seconds


class Headway(Record):
    """Progress of a pipeline's peer.

    ``prepared``: share of its stages' layers that is built or, in a stage's scope, of the state that is present.
    ``computed``: forward and backward passes that its process has done. ``has_work``: whether one is waiting.
    ``plan_version``: version of the spans that it knows, in the run's own scope."""

    prepared: Annotated[float, Field(ge=0, le=1)] = 0.0
    computed: Count = 0
    has_work: bool = False
    plan_version: Count = 0


class AssignedSpan(Record):
    """The stages ``first <= s <= last`` that a peer holds.

    ``rate``: micro-batches a second that the plan expects of it, 0 if unknown. ``recomputes``: whether it recomputes
    activations that it has no memory to keep."""

    peer: PeerId
    first: Stage
    last: Stage
    rate: Rate = 0.0
    recomputes: bool = False


class PipelineView(Record):
    """Stages of a pipeline and the peers that hold them; each change has a higher ``version``.

    Stage s has the layers ``boundaries[s] <= l < boundaries[s + 1]``. Spans are ordered by peer id; peers without a
    stage have none."""

    boundaries: Annotated[tuple[Count, ...], Field(min_length=2, max_length=MAX_STAGES + 1)]
    spans: Annotated[tuple[AssignedSpan, ...], Field(max_length=MAX_MEMBERS)]
    version: Count

    @model_validator(mode="after")
    def _consistent(self) -> PipelineView:
        if self.boundaries[0] != 0 or any(one >= two for one, two in pairwise(self.boundaries)):
            raise ValueError("boundaries: expected to rise from layer 0 on")
        if any(one.peer >= two.peer for one, two in pairwise(self.spans)):
            raise ValueError("spans: expected in order of peer ids, one for each peer")
        if any(not span.first <= span.last < len(self.boundaries) - 1 for span in self.spans):
            raise ValueError("spans: expected stages of the run")
        return self


class StageStatus(Record):
    """One stage of a pipeline in ``shoal status``, with the layers ``first_layer <= l < stop_layer``.

    ``parameters_bytes``: of the layers, in float32. ``replicas``: peers that hold the newest state; ``coming``: peers
    that were assigned the stage and do not hold it yet. ``tokens_per_s``, ``capacity_tokens_per_s``: what all replicas
    report, and what their capabilities allow. ``queue``: samples claimed in this round and not done yet.
    ``state_digest``: of the newest state, once it is agreed on. ``outlook``: a sentence on what the stage waits for
    while nobody holds that state, otherwise empty. ``is_bottleneck``: no stage has less capacity, and some have
    more."""

    first_layer: Count
    stop_layer: Count
    parameters_bytes: Count
    replicas: Annotated[tuple[PeerId, ...], Field(max_length=MAX_MEMBERS)]
    coming: Annotated[tuple[PeerId, ...], Field(max_length=MAX_MEMBERS)] = ()
    tokens_per_s: Rate
    capacity_tokens_per_s: Rate = 0.0
    tokens_in_round: Count = 0
    queue: Count
    state_digest: Digest | None = None
    outlook: Text = ""
    is_bottleneck: bool


class PhaseTimes(Record):
    """Seconds of a member's time by phase."""

    compute: Seconds = 0.0
    data: Seconds = 0.0
    packing: Seconds = 0.0
    exchange: Seconds = 0.0
    waiting: Seconds = 0.0
    applying: Seconds = 0.0
    checkpoint: Seconds = 0.0

    def of(self, phase: WorkPhase) -> float:
        """Return the seconds of a phase."""
        seconds: float = getattr(self, phase)
        return seconds

    @property
    def total_s(self) -> float:
        """Sum over all phases."""
        return sum(self.of(phase) for phase in WORK_PHASES)


class DeviceUse(Record):
    """Use of a member's machine now: of its GPU, as far as that tells, and of the processor and the memory.

    ``gpu``, ``cpu``: busy share, 0 to 1; ``power_w``: of the GPU; ``energy_j``: what the GPU has taken since the member
    began to measure. Of an island the GPU is that of rank 0."""

    gpu: Annotated[float, Field(ge=0, le=1)] | None = None
    gpu_used_bytes: Count | None = None
    power_w: Annotated[float, Field(ge=0, le=MAX_DEVICE_W)] | None = None
    energy_j: Annotated[float, Field(ge=0, le=1e15)] | None = None
    cpu: Annotated[float, Field(ge=0, le=1)]
    memory_used_bytes: Count


class Delivery(Record):
    """Rate at which a member of the plan delivered to the reporting one, in bits a second."""

    member: Index
    bps: Annotated[float, Field(ge=1, le=1e18)]


PathKind = Literal["direct", "reversed", "punched", "relayed"]
"""How two members are connected: one dialed the other's address; the other one dialed, as it was asked to; both dialed
each other through their NATs at the same moment; or over a relay."""


class PathReport(Record):
    """A member's path to another one. ``rtt_s``: its round trip, 0 if unknown."""

    peer: PeerId
    kind: PathKind
    rtt_s: Seconds = 0.0


class RelayLoad(Record):
    """Load of a relay, in its own words. ``busy``: the share of what it may carry, 0 to 1."""

    busy: Annotated[float, Field(ge=0, le=1)] = 0.0
    clients: Count = 0
    links: Count = 0
    carried_bytes: Count = 0


class RelayStatus(Record):
    """A relay of the run in ``shoal status``. ``peer``: the member that offers it, None for the host's; ``load``: None
    while that is not known."""

    host: Host
    port: Port
    peer: PeerId | None = None
    load: RelayLoad | None


class MemberStatus(Record):
    """One member in ``shoal status``.

    ``share``: of all committed tokens, 0 to 1; ``credit``: of the credit of all that are here, which is its weight in
    what they decide, 0 for a newcomer. ``stages``: the first and the last one that it was assigned, in a
    pipeline. ``left``: why it left; ``trouble``: the error that made it leave. ``unusual``: rounds in which its
    contribution was above its bound or next to nothing. ``suspended_rounds``: rounds for which its work still does not
    count, for that, or as the run was rolled back behind rounds that it may have spoilt. ``relayed``: whether others
    reach it over a relay, where it is not ``reachable``; ``paths``: some of those over which it is connected to others.
    ``wall``: why it cannot take part, as it can meet none of those that it would have to; otherwise empty. ``times``:
    what its training thread did in the last round that it reported, by its own word. ``tokens_per_s``: speed of its
    steps; ``steady_tokens_per_s``: tokens of the newest round that it took part in over that round's wall time, 0
    before the first one; ``use``: of its machine, by its own word. ``present_s``: time that it was here, ``round_s`` of
    it in the newest round that has ended; ``price_per_hour``: by its own word, else by the run file's table, and
    ``cost``: of its time at that price; None without (``costs.py``). ``energy_j``: what its GPU has taken while it was
    here, by its own word and within bounds, ``round_energy_j`` of it in the newest round that has ended; None where
    nothing measures it."""

    peer: PeerId
    name: Annotated[str, Field(max_length=64)]
    device: DeviceInfo
    activity: Annotated[str, Field(max_length=32)]
    alive: bool
    synced: bool
    reachable: bool
    relayed: bool = False
    paths: Annotated[tuple[PathReport, ...], Field(max_length=MAX_TOLD_PATHS)] = ()
    tokens_per_s: Rate
    steady_tokens_per_s: Rate = 0.0
    tokens_committed: Count
    share: Annotated[float, Field(ge=0, le=1)]
    credit: Annotated[float, Field(ge=0, le=1)]
    loss: Loss | None
    bytes_sent: Count
    bytes_received: Count
    stages: tuple[Stage, Stage] | None = None
    left: Annotated[str, Field(max_length=64)] = ""
    trouble: Trouble = ""
    unusual: Count = 0
    suspended_rounds: Count = 0
    wall: Text = ""
    times: PhaseTimes | None = None
    use: DeviceUse | None = None
    role: Role = "trainer"
    present_s: Seconds = 0.0
    round_s: Seconds = 0.0
    price_per_hour: Price | None = None
    cost: Cost | None = None
    energy_j: Energy | None = None
    round_energy_j: Energy | None = None

    @property
    def counts_time(self) -> bool:
        """Whether its time is in the run's cost: work of it is committed, or it checks that of others."""
        return self.tokens_committed > 0 or self.role == "validator"


class CostStatus(Record):
    """Cost of a run, and the energy that it took (``costs.py``), by the claims of its members and the prices in its
    run file.

    Of the members whose time counts: ``device_s``: of all their devices; ``unpriced_device_s``: of those without a
    price; ``cost`` of the others, ``round_cost``: in the newest round that has ended; ``million_tokens_cost``: of so
    many committed tokens; all three None while nobody has a price. ``provider_cost``: of the same time at the prices in
    the run file, those of ``provider``, without ``provider_unlisted_device_s``, for whose devices it has none.
    ``energy_j``: of the GPUs of ``metered_members``, the others' is not known; ``round_energy_j``: in the newest round
    that has ended; ``token_energy_j``: for each committed token; None while nobody measures it."""

    currency: Annotated[str, Field(max_length=8)] = "USD"
    device_s: DeviceTime = 0.0
    unpriced_device_s: DeviceTime = 0.0
    members: Count = 0
    priced_members: Count = 0
    cost: Cost | None = None
    round_cost: Cost | None = None
    million_tokens_cost: Cost | None = None
    provider: Annotated[str, Field(max_length=100)] = ""
    provider_cost: Cost | None = None
    provider_unlisted_device_s: DeviceTime = 0.0
    metered_members: Count = 0
    energy_j: Energy | None = None
    round_energy_j: Energy | None = None
    token_energy_j: Energy | None = None


class Blob(Record):
    """Name of bytes that a member offers in chunks.

    ``contribution``: of the member to a round; ``committed``: the same by leaf, after the round, for validators;
    ``partial``: a row reducer's means of its row, for the owners;
    ``result``: means of a round, each as soon as it is held here; ``held``: the means held now, empty for the others;
    ``included``: what went into means and partial sums made there (``averaging/inclusions.py``); ``state``: anchor
    and outer optimizer state of an anchor version; ``state_lossless``: the same, compressed; ``state_digests``: digests
    of its chunks; ``anchor_bfloat16`` and its digests: the rounded anchor; ``probe``: random bytes to measure a link;
    ``activation`` and ``gradient``: a tensor offered for a micro-batch; ``returned``: the gradient that a member got
    for its activation of that number; ``repeated``: one with which others are to compute again; ``start``: a tensor of
    the checkpoint that the run starts from, by its index among the sorted names. ``grid``: elements in a chunk of a
    contribution, which may have been cut for a plan that was not used. ``scope``: of the run or stage, as their rounds
    and anchor versions have the same numbers.
    """

    kind: Literal[
        "contribution",
        "committed",
        "partial",
        "result",
        "held",
        "included",
        "state",
        "state_lossless",
        "state_digests",
        "anchor_bfloat16",
        "anchor_bfloat16_digests",
        "probe",
        "activation",
        "gradient",
        "returned",
        "repeated",
        "start",
    ]
    number: Count
    grid: Annotated[int, Field(ge=0, le=MAX_CHUNK_ELEMENTS)] = 0
    scope: Scope = 0


def id_text(data: bytes) -> str:
    """The text of an invite's id of five bytes."""
    return base64.b32encode(data).decode().lower()


def id_bytes(text: str) -> bytes:
    """The five bytes of an invite's id."""
    return base64.b32decode(text.upper())
