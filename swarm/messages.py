"""Every message of the protocol, named by direction, with the range of every field.

All are frozen and strict: a wrong type, an unknown field or a value out of range is refused when the bytes
are decoded (``wire.py``), so handlers never see one. Tuples, not lists: they are what msgpack decodes to.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

PROTOCOL_VERSION = 2
"""Raised whenever a message changes meaning; both sides must agree exactly."""

MAX_MEMBERS = 1024
MAX_PARTS = 2 * MAX_MEMBERS  # rows of unequal size have some more parts than members
MAX_STAND_INS = 3
MAX_RANGES = 4096
MAX_TENSORS = 65_536
MAX_DELIVERIES = 16
MAX_VERDICTS = 256
MAX_KEPT = 16
MAX_EPOCHS = 16

PeerId = Annotated[str, StringConstraints(pattern=r"^[a-z2-7]{16}$")]
"""Sixteen base32 characters of the SHA-256 of an Ed25519 public key (``identity.peer_id``)."""

Digest = Annotated[bytes, Field(min_length=32, max_length=32)]
Key = Annotated[bytes, Field(min_length=32, max_length=32)]
Text = Annotated[str, Field(max_length=2000)]
Host = Annotated[str, Field(min_length=1, max_length=255)]
Port = Annotated[int, Field(ge=1, le=65_535)]
Count = Annotated[int, Field(ge=0, le=2**62)]
Seconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
UnixTime = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]
"""Seconds since 1970, UTC."""
Rate = Annotated[float, Field(ge=0, le=1e18, allow_inf_nan=False)]
Loss = Annotated[float, Field(ge=-1e30, le=1e30, allow_inf_nan=False)]
Role = Literal["trainer", "contributor", "validator", "observer"]
"""``trainer``: trains and reduces parts; ``contributor``: trains, and reduces nothing; ``validator``: follows the
anchor and brings nothing; ``observer``: looks at the run and is not recorded."""
Index = Annotated[int, Field(ge=0, lt=MAX_MEMBERS)]
Column = Annotated[tuple[Index, ...], Field(max_length=MAX_MEMBERS)]
Phase = Literal["waiting", "training", "closing", "averaging", "ended"]


class Record(BaseModel):
    """A value inside messages; frozen, strict, no unknown fields."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class Message(Record):
    """A record that travels on its own; its class name is its type on the wire."""


class SampleRange(Record):
    """Samples ``start <= s < stop`` of the run's endless, permuted sequence of samples."""

    start: Count
    stop: Count


class Certificate(Record):
    """An identity's signature under the CURVE key that one of its processes uses."""

    identity_key: Key
    curve_key: Key
    signature: Annotated[bytes, Field(min_length=64, max_length=64)]


class DeviceInfo(Record):
    """What a member trains on, for people to read."""

    kind: Annotated[str, Field(max_length=16)]
    name: Annotated[str, Field(max_length=100)]
    memory_bytes: Count


class RosterEntry(Record):
    """Everything that one member must know to talk to another."""

    peer: PeerId
    certificate: Certificate
    name: Annotated[str, Field(max_length=64)]
    role: Role
    host: Host
    control_port: Port
    data_port: Port
    reachable: bool


class TensorSpec(Record):
    """One parameter of the model."""

    name: Annotated[str, Field(max_length=500)]
    shape: Annotated[tuple[Count, ...], Field(max_length=16)]
    dtype: Annotated[str, Field(max_length=32)]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


class KeptState(Record):
    """A state that a peer could go back to: it is on its disk, or can be made again."""

    anchor_version: Count
    digest: Digest


class Coverage(Record):
    """What has become of one epoch's samples: committed, with somebody (``leased``), or given back by somebody who went
    and free again (``returned``). The rest has not been given out yet."""

    epoch: Count
    samples: Count
    committed: Count
    leased: Count
    returned: Count


class PlanMember(Record):
    """One contributor of a round. ``weight_tokens`` is its share in the weighted mean; a flat group is all row 0."""

    peer: PeerId
    weight_tokens: Annotated[int, Field(ge=1, le=2**62)]
    row: Index = 0


class Part(Record):
    """Elements ``start <= i < stop`` of the contribution, reduced by ``members[owner]``; when that fails, by the
    first of ``stand_ins`` that can. ``column``: whose relays collect for the owner, in a grid."""

    owner: Index
    stand_ins: Annotated[tuple[Index, ...], Field(max_length=MAX_STAND_INS)] = ()
    column: Index = 0
    start: Count
    stop: Count


class RoundPlan(Record):
    """Who reduces what in a round. Members are ordered by peer id, parts by start; parts tile all elements, on the grid
    of chunks.

    ``columns``: none in a flat group; in a grid, of each column its relay in every row: the member of that row that
    sums its row's contributions to the column's parts, and passes their means on to it. Many parts share a column."""

    round: Count
    anchor_version: Count
    state_digest: Digest
    chunk_elements: Annotated[int, Field(ge=1, le=2**19)]
    members: Annotated[tuple[PlanMember, ...], Field(min_length=1, max_length=MAX_MEMBERS)]
    parts: Annotated[tuple[Part, ...], Field(min_length=1, max_length=MAX_PARTS)]
    columns: Annotated[tuple[Column, ...], Field(max_length=MAX_MEMBERS)] = ()

    @model_validator(mode="after")
    def _consistent(self) -> RoundPlan:
        if any(one.peer >= two.peer for one, two in pairwise(self.members)):
            raise ValueError("members are ordered by peer id, each named once")
        starts = [0, *(part.stop for part in self.parts[:-1])]
        for part, start in zip(self.parts, starts, strict=True):
            if part.start != start or part.start >= part.stop or part.start % self.chunk_elements:
                raise ValueError("parts tile the elements from 0 on, each beginning with a chunk")
        row_of = [member.row for member in self.members]
        rows = list(range(1 + max(row_of)))
        if set(row_of) != set(rows) or bool(self.columns) != (len(rows) > 1):
            raise ValueError("a plan of several rows has members in each of them, and columns")
        if any([row_of[one] if one < len(row_of) else None for one in column] != rows for column in self.columns):
            raise ValueError("a column has one relay in every row, in their order")
        owners = [set(column) for column in self.columns] or [set(range(len(row_of)))]
        for part in self.parts:
            if part.column >= len(owners) or not {part.owner, *part.stand_ins} <= owners[part.column]:
                raise ValueError("owners and stand-ins are relays of the part's column, or members of the flat group")
        return self

    def relays(self, part: Part) -> tuple[int, ...]:
        """Of each row, who collects it for this part; the owner for its own row. None in a flat group."""
        return self.columns[part.column] if self.columns else ()


class Verdict(Record):
    """The one end of a round, journaled before it is announced and signed by the coordinator.

    ``chain`` is SHA-256 over the previous chain and this verdict's content (``verdicts.chain_hash``);
    ``digests`` are those of the parts' result bytes, in the plan's order, None for a void part: nobody's mean is
    applied there, and what was offered is offered again. Empty when aborted;
    ``run_hash`` says of which run it is, as a host may have several;
    ``tokens`` are this round's, ``tokens_total`` all committed ones up to and with it; ``ended_s`` is the coordinator's
    word for when that was; ``sent_bytes`` are what members said that they sent since the verdict before.
    ``anchor_version`` is the run's from now on: one more when committed, the same when aborted, and lower where an
    aborted round ends with the run going back; ``tokens_total`` goes back with it.
    """

    round: Count
    committed: bool
    reason: Text
    anchor_version: Count
    plan: RoundPlan | None
    digests: Annotated[tuple[Digest | None, ...], Field(max_length=MAX_PARTS)]
    tokens: Count
    tokens_total: Count
    loss: Loss | None
    ended_s: UnixTime
    sent_bytes: Count
    run_hash: Digest = bytes(32)
    previous_chain: Digest
    chain: Digest
    signature: Annotated[bytes, Field(max_length=64)]


class RunView(Record):
    """What one member has to know of the run right now; sent on change and with every heartbeat.

    It is a state, not an event: a member that missed ten of them and reads the eleventh knows all it needs.
    ``epoch`` (the coordinator's start) and ``sequence`` order the views: an older one is ignored.
    ``verdict`` is left out when the member has said that it knows the one with this ``verdict_chain``, None before the
    first: of a large swarm it is nearly all of a view.
    """

    epoch: Count
    sequence: Count
    round: Count
    anchor_version: Count
    phase: Phase
    closes_in_s: Seconds | None
    plan: RoundPlan | None
    verdict: Verdict | None
    verdict_chain: Digest | None
    state_digest: Digest | None
    tokens_committed: Count
    tokens_in_round: Count
    members: Count
    must_resync: bool
    roster_version: Count
    roster: Annotated[tuple[RosterEntry, ...], Field(max_length=MAX_MEMBERS * 2)] | None


# Peer to coordinator ------------------------------------------------------------------------------------


class PeerToCoordinatorJoinRun(Message):
    """The one request that a stranger may make. ``host`` is empty to be known by the address we come from."""

    run: Annotated[str, Field(max_length=100)]
    certificate: Certificate
    name: Annotated[str, Field(max_length=64)]
    role: Role
    device: DeviceInfo
    host: Annotated[str, Field(max_length=255)]
    control_port: Port
    data_port: Port


class PeerToCoordinatorDescribeModel(Message):
    """What this peer built from the run file; the run's first one defines it, later ones must agree.

    ``corpus_digest`` and ``samples`` (of one epoch) are None before the data is known: an own training loop brings
    them with its first batch."""

    layout: Annotated[tuple[TensorSpec, ...], Field(min_length=1, max_length=MAX_TENSORS)]
    corpus_digest: Digest | None
    corpus_about: Text
    tokens_per_sample: Annotated[int, Field(ge=1, le=2**31)]
    samples: Annotated[int, Field(ge=1, le=2**62)] | None = None


class PeerToCoordinatorHeartbeat(Message):
    """Liveness and progress. ``anchor_version`` and ``state_digest`` say which state the peer holds, if any; ``kept``,
    of a peer that holds none yet, which ones it could go back to, newest first; ``roster_version`` and
    ``verdict_chain`` what the answer need not tell it again."""

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


class PeerToCoordinatorRequestLease(Message):
    """Ask for samples to train on; ``tokens_done`` as in the heartbeat, so that the answer is fresh."""

    round: Count
    samples: Annotated[int, Field(ge=1, le=2**31)]
    tokens_done: Count


class PeerToCoordinatorRoundReady(Message):
    """Local work has stopped; a contribution over these sample ranges is waiting to be averaged."""

    round: Count
    anchor_version: Count
    state_digest: Digest
    weight_tokens: Count
    ranges: Annotated[tuple[SampleRange, ...], Field(max_length=MAX_RANGES)]
    loss: Loss | None


class Delivery(Record):
    """How fast a member of the plan delivered to whoever reports it, bits a second."""

    member: Index
    bps: Annotated[float, Field(ge=1, le=1e18, allow_inf_nan=False)]


class PeerToCoordinatorRoundReport(Message):
    """How the averaging ended here: the digest of every part's result bytes, or None where it did not arrive.

    ``dropped`` are the members (indices of the plan) that some chunk of the results that we hold does without;
    ``failed`` the owners and relays that did not give us what they had to; ``deliveries`` what others' links gave."""

    round: Count
    digests: Annotated[tuple[Digest | None, ...], Field(max_length=MAX_PARTS)]
    dropped: Annotated[tuple[Index, ...], Field(max_length=MAX_MEMBERS)]
    failed: Annotated[tuple[Index, ...], Field(max_length=MAX_MEMBERS)] = ()
    deliveries: Annotated[tuple[Delivery, ...], Field(max_length=MAX_DELIVERIES)] = ()
    trouble: Text


class PeerToCoordinatorLeave(Message):
    """Going away on purpose; unfinished leases are free again at once."""

    reason: Text


class PeerToCoordinatorShowVerdict(Message):
    """The newest verdict here, to a coordinator that speaks of an earlier round: its journal must be an old copy."""

    verdict: Verdict


class PeerToCoordinatorGetStatus(Message):
    """Ask for the run's status."""


class PeerToCoordinatorGetVerdicts(Message):
    """Ask for the verdicts from round ``first`` on."""

    first: Count


# Coordinator to peer ------------------------------------------------------------------------------------


class CoordinatorToPeerJoinAccepted(Message):
    """The run as its host wrote it (TOML text, hash checked by the peer), and the first view of it."""

    peer: PeerId
    run_toml: Annotated[str, Field(max_length=200_000)]
    run_hash: Digest
    coordinator: Certificate
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


class CoordinatorToPeerSuperseded(Message):
    """The same identity joined from another process: this one must stop."""


class CoordinatorToPeerVerdicts(Message):
    """A page of the run's history, oldest first, without gaps; ``more`` of it follows. Empty at its end."""

    verdicts: Annotated[tuple[Verdict, ...], Field(max_length=MAX_VERDICTS)]
    more: bool


class MemberStatus(Record):
    """One line of ``shoal status``. ``share`` is the member's part of all committed tokens, 0 to 1."""

    peer: PeerId
    name: Annotated[str, Field(max_length=64)]
    device: DeviceInfo
    activity: Annotated[str, Field(max_length=32)]
    alive: bool
    synced: bool
    reachable: bool
    tokens_per_s: Rate
    tokens_committed: Count
    share: Annotated[float, Field(ge=0, le=1)]
    loss: Loss | None
    bytes_sent: Count
    bytes_received: Count


class CoordinatorToPeerStatus(Message):
    """The run at a glance. ``rounds_undone``: committed ones that the run went back behind; they count as committed no
    longer. ``outlook``: a sentence on what the run waits for while nobody holds its newest state, else empty.
    ``coverage``: of the newest epochs, the oldest first; none while nobody has told how long one is."""

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
    coverage: Annotated[tuple[Coverage, ...], Field(max_length=MAX_EPOCHS)] = ()
    members: Annotated[tuple[MemberStatus, ...], Field(max_length=MAX_MEMBERS * 4)]


# Peer to peer -------------------------------------------------------------------------------------------


class PeerToPeerPing(Message):
    """Are you there? Also the coordinator's test whether a new member can be reached."""


class PeerToPeerPong(Message):
    """Yes."""


class PeerToPeerOpenLink(Message):
    """Agree on keys for bulk frames; travels inside CURVE. The opener then attaches its data socket."""

    link: Annotated[bytes, Field(min_length=8, max_length=8)]
    secret: Key
    cipher: Literal["aes-256-gcm", "chacha20-poly1305"]


class PeerToPeerLinkOpened(Message):
    """The acceptor's half of the secret, and the cipher that both will use."""

    secret: Key
    cipher: Literal["aes-256-gcm", "chacha20-poly1305"]


class Blob(Record):
    """The name of chunked bytes that a member offers.

    ``contribution``: what it brings to the round; ``partial``: a relay's means of its row, for the owners; ``result``:
    means of a round, each as soon as it is held here; ``held``: the same as they are now, empty where there is none
    yet; ``state``: anchor and outer optimizer state of an anchor version; ``state_lossless``: the same, packed;
    ``state_digests``: those of its chunks; ``anchor_bfloat16`` and its digests: the anchor rounded; ``probe``: random
    bytes, to learn what a link carries.
    """

    kind: Literal[
        "contribution",
        "partial",
        "result",
        "held",
        "state",
        "state_lossless",
        "state_digests",
        "anchor_bfloat16",
        "anchor_bfloat16_digests",
        "probe",
    ]
    number: Count


class PeerToPeerOpenStream(Message):
    """Send chunks ``first <= c < stop`` of ``blob`` over ``link``, as each becomes available."""

    stream: Annotated[int, Field(ge=0, lt=2**31)]
    link: Annotated[bytes, Field(min_length=8, max_length=8)]
    blob: Blob
    first: Annotated[int, Field(ge=0, lt=2**32)]
    stop: Annotated[int, Field(ge=0, lt=2**32)]
    credit: Annotated[int, Field(ge=1, le=1024)]


class PeerToPeerStreamOpened(Message):
    """Chunks are coming."""


class PeerToPeerCloseStream(Message):
    """Stop sending. No reply."""

    stream: Annotated[int, Field(ge=0, lt=2**31)]
    link: Annotated[bytes, Field(min_length=8, max_length=8)]


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
