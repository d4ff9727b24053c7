"""Members and board of one secure round in one process, without a network: their codes are given as lanes."""

import hashlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
from tests.fakes.memory_coordinator import identity

from shoal.swarm.errors import SecureRefused
from shoal.swarm.protocol.messages import CoordinatorToPeerSecureBoard, PeerToCoordinatorSecureStep
from shoal.swarm.protocol.rounds import Part, PlanMember, RoundPlan, scale_block
from shoal.swarm.protocol.secure import Arrival, SecurePlan, SecureStage, commitment, first_scales
from shoal.swarm.protocol.statements import PlanSigner, PlanStatement, RoundName, Statement, plan_digest
from shoal.swarm.secure.board import SecureBoard
from shoal.swarm.secure.masks import Lanes, add_masks
from shoal.swarm.secure.member import SecureMember
from shoal.swarm.secure.opening import Unopened, masks_of, secrets_of
from shoal.swarm.secure.reveal_record import RevealRecord
from shoal.swarm.secure.round_keys import fresh_nonce
from shoal.swarm.secure.sum_names import keys_digest, name_of_part, names_of_sums

LANES, PATIENCE_S = 16, 6.0

Change = Callable[[CoordinatorToPeerSecureBoard], CoordinatorToPeerSecureBoard]


def secure_plan(
    identities: Sequence[object],
    nonces: Sequence[bytes],
    parts: int,
    scales: bytes = b"",
    holders: int = 0,
    group: int = 8,
    mean: str = "weighted",
) -> RoundPlan:
    """Return a plan of equal members, with these scales, which the first ``holders`` have, or a run's first ones, in
    which the first members own a part each."""
    assert scale_block(parts * 4096) == 4096
    number, of_plan = 3, scales or first_scales(8, parts)
    members = tuple(
        PlanMember(
            peer=one.peer_id,  # type: ignore[attr-defined]
            weight_tokens=100,
            root=commitment(nonce, scales if index < holders else b""),
            identity_key=one.public_key,  # type: ignore[attr-defined]
        )
        for index, (one, nonce) in enumerate(zip(identities, nonces, strict=True))
    )
    step = 4096
    return RoundPlan(
        round=number,
        anchor_version=0,
        state_digest=bytes(32),
        chunk_elements=step,
        members=members,
        parts=tuple(Part(owner=one, start=one * step, stop=(one + 1) * step) for one in range(parts)),
        mean=mean,  # type: ignore[arg-type]
        secure=SecurePlan(bits=8, group=group, block=step, scales=of_plan),
    )


@dataclass
class Scene:
    """``silent``: members that post nothing from some stage on, by index; ``lies``: what the coordinator shows to a
    member instead; ``forged``: what a member posts instead; ``known``: to all members, ``scales``: of the plan, which
    the first ``holders`` have. ``codes``: of all members, (members, parts, lanes); ``sent``: what left them masked."""

    n: int = 5
    parts: int = 2
    group: int = 8
    mean: str = "weighted"
    silent: dict[int, int] = field(default_factory=dict)
    lies: dict[int, Change] = field(default_factory=dict)
    records: dict[int, RevealRecord] = field(default_factory=dict)
    known: Collection[str] = ()
    scales: bytes = b""
    holders: int = 0
    forged: dict[int, Callable[[PeerToCoordinatorSecureStep], PeerToCoordinatorSecureStep]] = field(
        default_factory=dict
    )

    def __post_init__(self) -> None:
        self.identities = sorted((identity(one + 1) for one in range(self.n)), key=lambda one: one.peer_id)
        self.nonces = [fresh_nonce() for _ in range(self.n)]
        self.plan = secure_plan(
            self.identities, self.nonces, self.parts, self.scales, self.holders, self.group, self.mean
        )
        self.about = PlanStatement(RoundName(b"r" * 32, None, self.plan.round), plan_digest(self.plan))
        self.board = SecureBoard(self.plan, self.about, PATIENCE_S, 0.0)
        self.members = [
            self.member(one, nonce, self.scales if one < self.holders else b"") for one, nonce in enumerate(self.nonces)
        ]
        self.codes = np.random.default_rng(0).integers(-127, 128, (self.n, self.parts, LANES)).astype(np.int16)
        self.sent: dict[tuple[int, int], Lanes] = {}
        self.refused: dict[int, Exception] = {}
        self.steps: list[tuple[int, PeerToCoordinatorSecureStep]] = []
        self.now_s = 0.0

    def member(self, index: int, nonce: bytes, scales: bytes = b"") -> SecureMember:
        who = self.identities[index]

        def sign(statement: Statement) -> bytes:
            return who.sign(statement.bytes_to_sign())

        record = self.records.setdefault(index, RevealRecord(None))
        signer = PlanSigner(who.peer_id, self.about, sign)
        return SecureMember(self.plan, signer, nonce, record, scales, known=self.known)

    @property
    def peers(self) -> list[str]:
        return [one.peer_id for one in self.identities]

    def live(self) -> list[str]:
        return [peer for one, peer in enumerate(self.peers) if self.board.stage < self.silent.get(one, 99)]

    def post(self, index: int, change: Change | None = None) -> None:
        """Have a member post once and take the answer, which ``change`` may forge."""
        member = self.members[index]
        step = self.forged.get(index, lambda step: step)(member.step(self.board.stage))
        self.steps.append((index, step))
        self.receive(index, step)
        shown = self.board.show(self.peers[index], step.wants)
        change = change or self.lies.get(index)
        try:
            member.take(change(shown) if change else shown)
        except SecureRefused as error:
            self.refused[index] = error

    def receive(self, index: int, step: PeerToCoordinatorSecureStep) -> None:
        """Have the board check and take a post."""
        self.board.check(self.peers[index], step)
        self.board.take(self.peers[index], step)

    def send(self, index: int) -> None:
        """Mask and send what a member has, as far as it may."""
        member = self.members[index]
        for part in range(self.parts):
            if member.can_mask and (index, part) not in self.sent:
                lanes = self.codes[index, part].view(np.uint16).copy()
                add_masks(lanes, member.masks(part))
                self.sent[index, part] = lanes

    def turn(self, without: Collection[int] = ()) -> None:
        """Have all post, send, say what arrived, and the board go on."""
        for one in range(self.n):
            if one not in without and one not in self.refused and self.board.stage < self.silent.get(one, 99):
                self.post(one)
                if self.board.stage == SecureStage.MASKS:
                    self.send(one)
        self.now_s += 0.1
        self.board.advance(self.now_s, self.live(), self.now_s)

    def arrive(self, part: int, members: Collection[int] | None = None) -> None:
        owner = self.members[self.plan.parts[part].owner]
        here = sorted(one for one in range(self.n) if (one, part) in self.sent) if members is None else sorted(members)
        others = tuple(one for one in owner.arrived if one.part != part)
        owner.arrived = tuple(
            sorted(
                (*others, Arrival(part=part, members=tuple(here), roots=self.roots(part, here))),
                key=lambda one: one.part,
            )
        )

    def roots(self, part: int, members: Collection[int]) -> tuple[bytes, ...]:
        """Stand for roots over what is sent."""
        return tuple(hashlib.sha256(self.codes[one, part].tobytes()).digest() for one in members)

    def names(self, sets: Sequence[Sequence[int]]) -> tuple[bytes, ...]:
        """Names of all that is summed, by part, of what was sent."""
        member, named = self.members[0], []
        keys = {one: keys_digest(self.about, one, member.keys[one]) for one in member.senders}
        for part, included in enumerate(sets):
            roots = dict(zip(included, self.roots(part, included), strict=True))
            named.append(name_of_part(names_of_sums(self.about, part, member.groups, member.senders, roots, keys)))
        return tuple(named)

    def until(self, stage: SecureStage, turns: int = 12, *, arrive: bool = True) -> None:
        for _ in range(turns):
            if self.board.stage >= stage:
                return
            if self.board.stage == SecureStage.MASKS and arrive and self.sent:
                for part in range(self.parts):
                    if self.board.stage < self.silent.get(self.plan.parts[part].owner, 99):
                        self.arrive(part)
            self.turn()
        assert self.board.stage >= stage, f"stuck at {self.board.stage!r}, refused: {self.refused}"

    def open(self, part: int) -> np.ndarray | None:
        """Return the opened sum of a part as its owner gets it: the sum of all groups."""
        owner, shown = self.plan.parts[part].owner, {}
        for one in self.board.show(self.peers[owner], "revealed").revealed:
            if one.part == part:
                shown[one.member] = one.shares
        member, included, total = self.members[owner], self.board.sets[part], np.zeros(LANES, np.int64)
        for group in member.groups:
            mine, senders = group.among(included), member.senders_of(group)
            secrets = secrets_of(part, group, senders, mine, member.keys, shown) if mine else {}
            if isinstance(secrets, Unopened):
                return None
            lanes = np.zeros(LANES, np.uint16)
            for one in mine:
                lanes += self.sent[one, part]
            add_masks(lanes, masks_of(self.about, part, mine, member.keys, secrets))
            total += lanes.view(np.int16)
        return total

    def sum_of(self, part: int, members: Collection[int]) -> np.ndarray:
        return self.codes[list(members), part].astype(np.int64).sum(0)
