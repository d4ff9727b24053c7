"""A member's side of a secure round: what it posts at each stage, and what it refuses to go on with.

After Bonawitz et al. 2017, figure 4, with the consistency check against active servers. The coordinator carries the
messages and fixes sets; each part's owner adds up the masked contributions to it. Both together are the server of the
paper, and are trusted with nothing: this class checks what it is shown, freezes it when it sees it first, and refuses
to go on when it is shown something else.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from shoal.swarm.errors import SecureRefused
from shoal.swarm.protocol.messages import CoordinatorToPeerSecureBoard, PeerToCoordinatorSecureStep
from shoal.swarm.protocol.rounds import RoundPlan
from shoal.swarm.protocol.secure import (
    FEWEST_MEMBERS,
    Arrival,
    KeysStatement,
    MaskedPartStatement,
    Revealed,
    SealedShares,
    SecureKeys,
    SecureStage,
    SetsStatement,
    SignedSets,
    UnopenedSecret,
    commitment,
    first_scales,
)
from shoal.swarm.protocol.statements import PlanSigner, has_signed
from shoal.swarm.sample_ranges import Ranges
from shoal.swarm.secure import shamir
from shoal.swarm.secure.groups import MaskingGroup, draw_groups, most_strangers
from shoal.swarm.secure.opening import NO_SHARE
from shoal.swarm.secure.reveal_record import RevealRecord
from shoal.swarm.secure.round_keys import RoundKeys, are_shares, fault_of, share_digests
from shoal.swarm.secure.sum_names import keys_digest, name_of_part, names_of_sums


class SecureMember:
    """One member in one secure round. ``keys``: of all members, ``groups`` and ``group``: that of ours, once known;
    ``senders``: members whose shares were delivered; ``sets``: by part, whose contributions are summed; both are empty
    until they are fixed; ``names``: by part, of all that is summed. ``arrived``: what we have to say as an owner."""

    def __init__(
        self,
        plan: RoundPlan,
        signer: PlanSigner,
        nonce: bytes,
        record: RevealRecord,
        scales: bytes = b"",
        ranges: Ranges | None = None,
        known: Collection[str] = (),
    ) -> None:
        """``nonce``, ``scales``: what our ``ready`` has committed to, scales as they follow from the bytes of the last
        committed round, empty where these are not known here; ``ranges``: our samples; ``known``: peers that have long
        taken part, as far as this member has seen. Raises ``SecureRefused`` if this round had sets before, or for other
        scales."""
        assert plan.secure is not None
        if record.has(signer.plan.name):
            raise SecureRefused(f"round {plan.round} is planned again, after its sets were signed here")
        if scales and scales != plan.secure.scales:
            raise SecureRefused("the plan has other scales than those that follow from the last committed round")
        self.about = signer.plan
        self.me = [member.peer for member in plan.members].index(signer.peer)
        self.keys: tuple[SecureKeys, ...] = ()
        self.groups: list[MaskingGroup] = []
        self.senders: tuple[int, ...] = ()
        self.sets: tuple[tuple[int, ...], ...] = ()
        self.names: tuple[bytes, ...] = ()
        self.arrived: tuple[Arrival, ...] = ()
        self.unopened: list[UnopenedSecret] = []
        """Secrets that their dealers' shares do not give, as an owner has found."""
        self.has_shown_keys = False
        """Whether our random number has left, so that others may know the round's groups."""
        self._plan = plan
        self._sign: Callable[..., bytes] = signer.sign
        self._record = record
        self._known = frozenset(known)
        self._ranges = ranges or []
        self._secrets = RoundKeys(self.about, self.me, len(plan.parts), nonce)
        self._public = self._secrets.public(self._sign, has_scales=bool(scales))
        self._sealed: tuple[SealedShares, ...] = ()
        self._shares: dict[int, bytes] = {}
        self._is_masking = False
        self._consent: bytes | None = None
        self._is_certified = False
        self._revealed: tuple[Revealed, ...] | None = None

    @property
    def group(self) -> MaskingGroup:
        """Our masking group."""
        return next(group for group in self.groups if self.me in group.members)

    def senders_of(self, group: MaskingGroup) -> list[int]:
        """Return the members of a group whose shares were delivered."""
        return group.among(self.senders)

    @property
    def is_sender(self) -> bool:
        """Whether others have our shares, so that we may mask and send."""
        return self.me in self.senders

    # What we post

    def step(self, stage: int) -> PeerToCoordinatorSecureStep:
        """Return what to post at this stage, and to ask for."""
        post = PeerToCoordinatorSecureStep(round=self._plan.round, plan=self.about.plan)
        match stage:
            case SecureStage.KEYS:
                self.has_shown_keys = True
                return post.model_copy(update={"keys": self._public})
            case _ if not self.keys:
                return post.model_copy(update={"wants": "keys"})
            case SecureStage.SHARES:
                return post.model_copy(update={"sealed": self._sealed})
            case SecureStage.MASKS:
                wants = "sealed" if self._lacks_shares or not self.senders else ""
                return post.model_copy(update={"arrived": self.arrived, "wants": wants})
            case SecureStage.SETS:
                return post.model_copy(update={"consent": self._consent})
            case SecureStage.UNMASK | SecureStage.OPEN if self._revealed is None and self._consent is not None:
                return post.model_copy(update={"wants": "consents"})
            case SecureStage.UNMASK:
                return post.model_copy(update={"revealed": self._revealed or ()})
            case _:
                revealed, unopened = self._revealed or (), tuple(self.unopened[:16])
                return post.model_copy(update={"revealed": revealed, "unopened": unopened, "wants": "revealed"})

    @property
    def _lacks_shares(self) -> bool:
        return self.is_sender and not self._shares.keys() - {self.me}

    # What we are shown

    def take(self, board: CoordinatorToPeerSecureBoard) -> None:
        """Take what the coordinator shows. Raises ``SecureRefused``; ``StorageError`` of the record."""
        if board.keys and not self.keys:
            self._take_keys(board.keys)
        if self.keys and board.stage >= SecureStage.MASKS:
            self._take_senders(board.senders)
        if board.sealed and self._lacks_shares:
            self._take_shares(board.sealed)
        if self.senders and board.stage >= SecureStage.SETS:
            self._take_sets(board.sets, board.names)
        if board.consents and self._consent is not None and self._revealed is None:
            self._take_consents({one.member: one.signature for one in board.consents})

    def _take_keys(self, keys: Sequence[SecureKeys]) -> None:
        """Check and freeze the keys of all members, draw the groups, and deal our shares."""
        plan, secure = self._plan, self._plan.secure
        assert secure is not None
        if len(keys) != len(plan.members):
            raise SecureRefused("there are not the keys of all members of the plan")
        for index, (member, one) in enumerate(zip(plan.members, keys, strict=True)):
            data = KeysStatement(self.about, index, one).bytes_to_sign()
            if not has_signed(member.identity_key, member.peer, one.signature, data):
                raise SecureRefused(f"the keys of {member.peer} are not signed by it for this plan")
            if member.root != commitment(one.nonce, secure.scales if one.has_scales else b""):
                raise SecureRefused(f"{member.peer} shows another random number or scales than it had committed to")
            if fault := fault_of(one, len(plan.parts)):
                raise SecureRefused(f"{member.peer} shows {fault}")
        if keys[self.me] != self._public:
            raise SecureRefused("the keys shown as ours are others")
        shown = [key for one in keys for key in (one.share_key, *one.mask_keys)]
        if len(set(shown)) != len(shown):
            raise SecureRefused("two keys of a secure round are the same")
        self._check_scales(sum(one.has_scales for one in keys))
        self.groups = draw_groups([one.nonce for one in keys], self.about.plan, secure.group)
        self._check_company()
        dealt = self._secrets.deal(self.group)
        self._shares[self.me] = dealt[self.me]
        self._sealed = tuple(
            SealedShares(
                member=one,
                data=b"" if one == self.me else self._secrets.seal(shares, one, keys[one].share_key),
                digests=share_digests(shares),
            )
            for one, shares in dealt.items()
        )
        self.keys = tuple(keys)

    def _check_scales(self, holders: int) -> None:
        """Without scales of our own, believe in a run's first ones, or in what more than a third of the members have.

        They decide whose codes are rounded to nothing, so the host alone must not choose them."""
        secure = self._plan.secure
        assert secure is not None
        is_first = secure.scales == first_scales(secure.bits, len(secure.scales))
        if not self._public.has_scales and not is_first and 3 * holders <= len(self._plan.members):
            raise SecureRefused("the plan has scales that too few of its members have from the last committed round")

    def _check_company(self) -> None:
        """Refuse a group with strangers for a third of it or more, once we know enough members for a group."""
        peers = [self._plan.members[one].peer for one in self.group.members if one != self.me]
        strangers = [peer for peer in peers if peer not in self._known]
        if len(self._known) >= FEWEST_MEMBERS - 1 and len(strangers) > most_strangers(len(self.group.members)):
            raise SecureRefused(f"{len(strangers)} of {len(peers)} others of our group have hardly taken part before")

    def _take_senders(self, senders: tuple[int, ...]) -> None:
        """Freeze the members whose shares were delivered."""
        if self.senders:
            if senders != self.senders:
                raise SecureRefused("two sets of senders are shown in one round")
            return
        if list(senders) != sorted(set(senders)) or not senders or senders[-1] >= len(self._plan.members):
            raise SecureRefused("the senders are no members of the plan")
        if self.me in senders and len(self.group.among(senders)) < self.group.threshold:
            raise SecureRefused("too few members of our group have delivered their shares")
        self.senders = senders

    def _take_shares(self, sealed: Sequence[SealedShares]) -> None:
        """Open the shares that our group has sealed for us. Those that do not open, or are others than their dealer has
        shown digests of, are lacking: others have theirs."""
        senders = self.senders_of(self.group)
        by_sender = {one.member: one for one in sealed}
        if not set(senders) - {self.me} <= by_sender.keys():
            raise SecureRefused("shares were said to be delivered, and are not shown")
        for sender in senders:
            if sender != self.me:
                one = by_sender[sender]
                opened = self._secrets.unseal(one.data, sender, self.keys[sender].share_key)
                if opened is not None and share_digests(opened) == one.digests and are_shares(opened):
                    self._shares[sender] = opened
        if len(self._shares) < self.group.threshold:
            raise SecureRefused("too many members of our group have sealed shares that do not open")

    def masks(self, part: int) -> list[tuple[bytes, int]]:
        """Return the keys of the masks on our codes of a part. From now on our contribution counts as sent.

        Only for a sender that has its group's shares. Raises ``SecureRefused`` where another process with our identity
        has masked work on the same samples, and ``StorageError`` of the record. For a worker thread."""
        assert self.can_mask
        masks = self._secrets.masks(part, self.senders_of(self.group), [one.mask_keys[part] for one in self.keys])
        if not self._is_masking:
            self._record.spend(self._plan.state_digest, self._ranges)
            self._is_masking = True
        return masks

    @property
    def can_mask(self) -> bool:
        """Whether our contribution may be masked and sent: our shares are with the others, and theirs with us."""
        return self.is_sender and not self._lacks_shares

    def _take_sets(self, sets: tuple[tuple[int, ...], ...], names: tuple[bytes, ...]) -> None:
        """Freeze the sets; sign them if we take part. That is recorded first, and said only once."""
        if self.sets:
            if (sets, names) != (self.sets, self.names):
                raise SecureRefused("two collections of sets are shown in one round")
            return
        if not len(sets) == len(names) == len(self._plan.parts) or not any(sets):
            raise SecureRefused("the sets are not those of the plan's parts")
        for one in sets:
            if list(one) != sorted(set(one)) or not set(one) <= set(self.senders):
                raise SecureRefused("a set has members that have not delivered their shares")
            if self.is_sender and 0 < len(self.group.among(one)) < self.group.threshold:
                raise SecureRefused("a set has too few members of our group: their sum would say too much")
        self._check_names(sets, names)
        self.sets, self.names = sets, names
        if self.can_mask:
            statement = SetsStatement(self.about, self.senders, sets, names)
            self._record.write(self.about.name, statement.bytes_to_sign())
            self._consent = self._sign(statement)

    def _check_names(self, sets: Sequence[Sequence[int]], names: Sequence[bytes]) -> None:
        """Refuse names that are of other roots or keys than we have as an owner: we could not show what we summed."""
        keys = {one: keys_digest(self.about, one, self.keys[one]) for one in self.senders} if self.arrived else {}
        for one in self.arrived:
            roots = dict(zip(one.members, one.roots, strict=True))
            if set(sets[one.part]) <= roots.keys():
                roots = {member: roots[member] for member in sets[one.part]}
                mine = names_of_sums(self.about, one.part, self.groups, self.senders, roots, keys)
                if names[one.part] != name_of_part(mine):
                    raise SecureRefused("the sums of our part are named by other roots or keys than we have")

    def _take_consents(self, signatures: dict[int, bytes]) -> None:
        """Release our shares once enough of our group have signed the very same sets."""
        data = SetsStatement(self.about, self.senders, self.sets, self.names).bytes_to_sign()
        agreeing = [
            one
            for one in self.senders_of(self.group)
            if one in signatures
            and has_signed(self._plan.members[one].identity_key, self._plan.members[one].peer, signatures[one], data)
        ]
        if len(agreeing) < self.group.threshold:
            return  # not yet, or never: the part is void then
        self._is_certified = True
        self._revealed = tuple(
            Revealed(part=part, member=self.me, shares=self._opening(part, set(one)))
            for part, one in enumerate(self.sets)
            if self.group.among(one)
        )

    def _opening(self, part: int, included: set[int]) -> bytes:
        """Return our shares that open our group's sum of a part: of each sender one kind, by whether it is in."""
        opening = []
        for sender in self.senders_of(self.group):
            shares, kind = self._shares.get(sender), 0 if sender in included else 1
            at = (2 * part + kind) * shamir.SHARE_BYTES
            opening.append(NO_SHARE if shares is None else shares[at : at + shamir.SHARE_BYTES])
        return b"".join(opening)

    # What the verdict leaves

    def has_signed_others(self, signed: SignedSets) -> bool:
        """Whether we have signed other sets in this round than these."""
        ours, others = (self.senders, self.sets, self.names), (signed.senders, signed.sets, signed.names)
        return self._consent is not None and ours != others

    def sign_masked(self, part: int, root: bytes) -> bytes:
        """Sign the root over the masked chunks that we send to a part. For a worker thread."""
        return self._sign(MaskedPartStatement(self.about, part, self.me, root))

    @property
    def has_masked(self) -> bool:
        """Whether any of our contribution may have been sent."""
        return self._is_masking

    def is_spent(self, part: int) -> bool:
        """Whether our contribution to a part may be in a sum that somebody has opened, so that it may never be offered
        again: unless nothing was sent, or enough of our group have signed a set without us, which leaves no room for
        another one."""
        return self._is_masking and not (self._is_certified and self.me not in self.sets[part])
