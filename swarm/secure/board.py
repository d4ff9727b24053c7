"""The coordinator's side of a secure round: it carries what members post to each other, and fixes sets once.

It is trusted with nothing that is secret: shares pass it sealed until they open a sum, and masked contributions never
pass it. Members check what it fixes (``member.py``). Nothing of this is journaled: to a coordinator that starts again
members post the same once more, and go on where the same sets follow from it; else the round is lost.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from shoal.swarm.errors import WireError
from shoal.swarm.protocol.messages import CoordinatorToPeerSecureBoard, PeerToCoordinatorSecureStep
from shoal.swarm.protocol.rounds import RoundPlan
from shoal.swarm.protocol.secure import (
    SHARE_DIGEST_BYTES,
    Consent,
    KeysStatement,
    Revealed,
    SealedShares,
    SecureKeys,
    SecureStage,
    SetsStatement,
    SignedSets,
    UnopenedSecret,
    commitment,
    fewest_groups,
)
from shoal.swarm.protocol.statements import PlanStatement, has_signed
from shoal.swarm.secure.groups import MaskingGroup, draw_groups
from shoal.swarm.secure.opening import NO_SHARE, recovered, shares_of
from shoal.swarm.secure.round_keys import SEALING_BYTES, fault_of, share_digest
from shoal.swarm.secure.shamir import SHARE_BYTES, unpack_share
from shoal.swarm.secure.sum_names import keys_digest, name_of_part, names_of_sums


@dataclass(frozen=True)
class SecureFailure:
    """A secure round that cannot go on. ``missing``: members, as indices of the plan, that did not post."""

    reason: str
    missing: tuple[int, ...] = ()


class SecureBoard:
    """State of one secure round. Moments are on the coordinator's clock."""

    def __init__(self, plan: RoundPlan, about: PlanStatement, patience_s: float, now_s: float) -> None:
        assert plan.secure is not None
        self.stage = SecureStage.KEYS
        self.senders: tuple[int, ...] = ()
        self.sets: tuple[tuple[int, ...], ...] = ()
        self.names: tuple[bytes, ...] = ()
        self.since_s = now_s
        """Time at which the stage began."""
        self._plan = plan
        self._about = about
        self._patience_s = patience_s
        self._fewest_groups = fewest_groups(is_trimmed=plan.mean == "trimmed")
        self._index = {member.peer: index for index, member in enumerate(plan.members)}
        self._keys: dict[int, SecureKeys] = {}
        self._groups: list[MaskingGroup] = []
        self._sealed: dict[int, dict[int, SealedShares]] = {}
        self._arrived: dict[int, dict[int, bytes]] = {}
        """By part, the members whose masked contributions have arrived, with the root of each."""
        self._consents: dict[int, bytes] = {}
        self._revealed: dict[int, dict[int, bytes]] = {}
        self._unopened: dict[int, set[int]] = {}
        self._judged: set[UnopenedSecret] = set()
        self._wrong_dealers: set[int] = set()
        self._closed: tuple[tuple[int, int], tuple[int, ...]] = ((-1, 0), ())
        self._wrong_revealers: set[int] = set()
        self._is_told_again = False

    @property
    def may_be_masked(self) -> bool:
        """Whether masked contributions may have left their members."""
        return self._is_told_again or self.stage >= SecureStage.MASKS

    def forget(self) -> None:
        """Note that this is the board of a coordinator that has started again: members may be further."""
        self._is_told_again = True

    # What members post

    def is_of(self, step: PeerToCoordinatorSecureStep) -> bool:
        """Whether a post is for this round and plan. An earlier plan's may come after a start of the coordinator."""
        return (step.round, step.plan) == (self._plan.round, self._about.plan)

    def check(self, peer: str, step: PeerToCoordinatorSecureStep) -> None:
        """Check the signatures of a post: for a worker thread. Raises ``WireError``."""
        member, plan = self._index[peer], self._plan
        identity, statement = plan.members[member].identity_key, None
        if step.keys is not None:
            statement = KeysStatement(self._about, member, step.keys).bytes_to_sign()
            assert plan.secure is not None
            scales = plan.secure.scales if step.keys.has_scales else b""
            if commitment(step.keys.nonce, scales) != plan.members[member].root:
                raise WireError("a member's random number or scales are not those that it has committed to")
            if fault := fault_of(step.keys, len(plan.parts)):
                raise WireError(f"a member shows {fault}")
            if not has_signed(identity, peer, step.keys.signature, statement):
                raise WireError("the keys of a secure round must be signed by their member")
        if step.consent is not None and self.sets:
            statement = SetsStatement(self._about, self.senders, self.sets, self.names).bytes_to_sign()
            if not has_signed(identity, peer, step.consent, statement):
                raise WireError("a member has signed other sets than the round's")

    def take(self, peer: str, step: PeerToCoordinatorSecureStep) -> bool:
        """Take a checked post; returns whether it was new. What a member has posted before stays."""
        member, is_new = self._index[peer], False
        if step.keys is not None and member not in self._keys and self.stage == SecureStage.KEYS:
            shown = {step.keys.share_key, *step.keys.mask_keys}
            if any(not shown.isdisjoint((one.share_key, *one.mask_keys)) for one in self._keys.values()):
                raise WireError("a member shows another one's key")
            self._keys[member] = step.keys
            is_new = True
        if step.sealed and member not in self._sealed and self.stage == SecureStage.SHARES:
            self._sealed[member] = self._checked_shares(member, step.sealed)
            is_new = True
        if step.arrived and self.stage == SecureStage.MASKS:
            for one in step.arrived:
                if one.part >= len(self._plan.parts) or self._plan.parts[one.part].owner != member:
                    raise WireError("only a part's owner says what has arrived there")
                if len(one.roots) != len(one.members):
                    raise WireError("there is a root for each member whose contribution has arrived")
                if one.part not in self._arrived:
                    self._arrived[one.part] = dict(zip(one.members, one.roots, strict=True))
                    is_new = True
        if step.consent is not None and member not in self._consents and self.stage >= SecureStage.SETS:
            self._consents[member] = step.consent
            is_new = True
        if step.revealed and member not in self._revealed and self.stage >= SecureStage.UNMASK:
            if any(one.member != member for one in step.revealed):
                raise WireError("a member reveals its own shares alone")
            self._revealed[member] = self._fitting(member, step.revealed)
            is_new = True
        if self.stage >= SecureStage.UNMASK:
            self._judge(member, step.unopened)
        return is_new

    def _checked_shares(self, member: int, sealed: Sequence[SealedShares]) -> dict[int, SealedShares]:
        shares, secrets = {one.member: one for one in sealed}, 2 * len(self._plan.parts)
        if len(shares) != len(sealed) or shares.keys() != set(self._group_of(member).members):
            raise WireError("shares are for all members of one's group")
        if any(len(one.digests) != secrets * SHARE_DIGEST_BYTES for one in sealed):
            raise WireError("shares have a digest each")
        if any(len(one.data) > SHARE_BYTES * secrets + SEALING_BYTES for one in sealed):
            raise WireError("sealed shares are larger than those of all parts")
        return shares

    def _fitting(self, member: int, revealed: Sequence[Revealed]) -> dict[int, bytes]:
        """Return a member's shares by part, without those that are others than their dealers have shown digests of.

        Who reveals such a share is to blame, as it should have noticed when it was dealt it."""
        group, kept = self._group_of(member), {}
        senders = group.among(self.senders)
        if [one.part for one in revealed] != [part for part, one in enumerate(self.sets) if group.among(one)]:
            raise WireError("a member reveals shares for some parts of its group's sums only")
        for one in revealed:
            if len(one.shares) != len(senders) * SHARE_BYTES:
                raise WireError("a member reveals other shares than those of a part's senders")
            shares = []
            for place, dealer in enumerate(senders):
                share = one.shares[place * SHARE_BYTES : (place + 1) * SHARE_BYTES]
                secret = 2 * one.part + (dealer not in self.sets[one.part])
                shown = self._sealed[dealer][member].digests[secret * SHARE_DIGEST_BYTES :][:SHARE_DIGEST_BYTES]
                if share == NO_SHARE:
                    self._unopened.setdefault(dealer, set()).add(member)
                elif share_digest(share) != shown or unpack_share(share) is None:
                    self._wrong_revealers.add(member)
                    share = NO_SHARE
                shares.append(share)
            kept[one.part] = b"".join(shares)
        for dealer, without in self._unopened.items():
            if len(without) > len(group.members) - group.threshold and dealer in group.members:
                self._wrong_dealers.add(dealer)
        return kept

    def _judge(self, owner: int, unopened: Sequence[UnopenedSecret]) -> None:
        """Find dealers whose secrets enough shares that fit do not give: theirs to blame, whatever an owner says."""
        for one in unopened:
            if one.part >= len(self.sets) or one.dealer not in self.senders or one in self._judged:
                continue
            if self._plan.parts[one.part].owner != owner:
                raise WireError("only a part's owner says what cannot be opened there")
            self._judged.add(one)
            group = self._group_of(one.dealer)
            revealed = {member: parts[one.part] for member, parts in self._revealed.items() if one.part in parts}
            shares = shares_of(group, group.among(self.senders).index(one.dealer), revealed)
            if len(shares) >= group.threshold:
                is_in, keys = one.dealer in self.sets[one.part], self._keys[one.dealer]
                if recovered(shares, group.threshold, keys, one.part, is_in=is_in) is None:
                    self._wrong_dealers.add(one.dealer)

    @property
    def closed(self) -> tuple[int, ...]:
        """Senders of the groups whose sums nobody can open: too few have revealed shares, or a dealer's are wrong."""
        known = len(self._revealed), len(self._wrong_dealers)
        if self._closed[0] != known:
            closed = [one for group in self._groups if self._is_closed(group) for one in group.among(self.senders)]
            self._closed = known, tuple(sorted(closed))
        return self._closed[1]

    def _is_closed(self, group: MaskingGroup) -> bool:
        senders = group.among(self.senders)
        if self._wrong_dealers.intersection(senders):
            return True
        for part in range(len(self.sets)):
            revealed = {one: parts[part] for one, parts in self._revealed.items() if part in parts}
            fitting = [len(shares_of(group, place, revealed)) for place in range(len(senders))]
            if group.among(self.sets[part]) and min(fitting) < group.threshold:
                return True
        return False

    @property
    def to_blame(self) -> set[int]:
        """Members that have dealt or revealed wrong shares, or that signed and revealed none where sums stay closed."""
        wrong = self._wrong_dealers | self._wrong_revealers
        if self.stage < SecureStage.OPEN:
            return wrong
        silent = {one for one in self.closed if one in self._consents and one not in self._revealed}
        return wrong | {one for one in silent if self._is_certified(self._group_of(one))}

    def _is_certified(self, group: MaskingGroup) -> bool:
        """Whether enough of a group have signed the sets for all of them to reveal their shares."""
        return len(group.among(list(self._consents))) >= group.threshold

    def _group_of(self, member: int) -> MaskingGroup:
        return next(group for group in self._groups if member in group.members)

    # What is decided

    def advance(self, now_s: float, live: Collection[str], progress_s: float) -> SecureFailure | None:
        """Begin the next stage if it is due; returns why the round cannot go on, if so.

        ``live``: the members that are here; ``progress_s``: when contributions last moved."""
        here = {self._index[peer] for peer in live}
        waited_s = now_s - self.since_s
        match self.stage:
            case SecureStage.KEYS:
                return self._after_keys(here, waited_s, now_s)
            case SecureStage.SHARES if here <= self._sealed.keys() or waited_s > self._patience_s:
                return self._fix_senders(now_s)
            case SecureStage.MASKS:
                owners = {part.owner for part in self._plan.parts}
                posted = {self._plan.parts[part].owner for part in self._arrived}
                overdue_s = min(waited_s, now_s - progress_s)
                if here & owners <= posted or overdue_s > 2.5 * self._patience_s:
                    return self._fix_sets(now_s)
            case SecureStage.SETS:
                signed, senders = self._consents.keys(), here & set(self.senders)
                enough = self._enough(signed) and waited_s > self._patience_s / 2
                if senders <= signed or enough or waited_s > 2 * self._patience_s:
                    self._begin(SecureStage.UNMASK, now_s)
            case SecureStage.UNMASK:
                if self._enough(self._revealed.keys()) or waited_s > 2 * self._patience_s:
                    self._begin(SecureStage.OPEN, now_s)
        return None

    def _after_keys(self, here: Collection[int], waited_s: float, now_s: float) -> SecureFailure | None:
        missing = set(range(len(self._plan.members))) - self._keys.keys()
        if not missing:
            secure = self._plan.secure
            assert secure is not None
            nonces = [self._keys[one].nonce for one in range(len(self._plan.members))]
            self._groups = draw_groups(nonces, self._about.plan, secure.group)
            self._begin(SecureStage.SHARES, now_s)
        elif missing - set(here) or waited_s > self._patience_s:
            # All or nobody: whoever may withhold its random number when it knows the others' chooses between draws.
            return SecureFailure("not all members have shown their keys for the secure round", tuple(sorted(missing)))
        return None

    def _fix_senders(self, now_s: float) -> SecureFailure | None:
        senders = self._of_enough_groups(self._sealed)
        if not senders:
            return SecureFailure("too few members have delivered their shares")
        self.senders = senders
        self._begin(SecureStage.MASKS, now_s)
        return None

    def _of_enough_groups(self, members: Collection[int]) -> tuple[int, ...]:
        """Return those of these members of whose group there are enough; nobody if too few groups are left for the
        plan's kind of mean."""
        groups = [mine for group in self._groups if len(mine := group.among(list(members))) >= group.threshold]
        return tuple(sorted(one for mine in groups for one in mine)) if len(groups) >= self._fewest_groups else ()

    def _fix_sets(self, now_s: float) -> SecureFailure | None:
        sets, names = [], []
        keys = {one: keys_digest(self._about, one, self._keys[one]) for one in self.senders}
        for part in range(len(self._plan.parts)):
            arrived = self._arrived.get(part, {})
            included = self._of_enough_groups(arrived.keys() & set(self.senders))
            roots = {one: arrived[one] for one in included}
            sets.append(included)
            names.append(name_of_part(names_of_sums(self._about, part, self._groups, self.senders, roots, keys)))
        if not any(sets):
            return SecureFailure("too few masked contributions have arrived for any part")
        self.sets, self.names = tuple(sets), tuple(names)
        self._begin(SecureStage.SETS, now_s)
        return None

    def _enough(self, members: Collection[int]) -> bool:
        """Whether each group that has any member in a set has its threshold among these members."""
        included = {one for each in self.sets for one in each}
        groups = [group for group in self._groups if group.among(list(included))]
        return all(len(group.among(list(members))) >= group.threshold for group in groups)

    def _begin(self, stage: SecureStage, now_s: float) -> None:
        self.stage, self.since_s = stage, now_s

    def signed(self) -> SignedSets | None:
        """Return the fixed sets with the signatures that there are for them; None before they are fixed."""
        if not self.sets:
            return None
        nonces = tuple(self._keys[one].nonce for one in sorted(self._keys))
        consents = tuple(Consent(member=one, signature=by) for one, by in sorted(self._consents.items()))
        return SignedSets(nonces=nonces, senders=self.senders, sets=self.sets, names=self.names, consents=consents)

    # What members see

    def show(self, peer: str, wants: str) -> CoordinatorToPeerSecureBoard:
        """Return what a member sees of the round."""
        member, stage = self._index[peer], self.stage
        shown = CoordinatorToPeerSecureBoard(
            round=self._plan.round, stage=stage, senders=self.senders, sets=self.sets, names=self.names
        )
        if stage >= SecureStage.OPEN:
            shown = shown.model_copy(update={"closed": self.closed})
        if wants == "keys" and stage >= SecureStage.SHARES and len(self._keys) == len(self._plan.members):
            return shown.model_copy(update={"keys": tuple(self._keys[one] for one in sorted(self._keys))})
        if wants == "sealed" and stage >= SecureStage.MASKS:
            senders = [one for one in self._group_of(member).among(self.senders) if one != member]
            sealed = [self._sealed[one][member].model_copy(update={"member": one}) for one in senders]
            return shown.model_copy(update={"sealed": tuple(sealed)})
        if wants == "consents" and stage >= SecureStage.UNMASK:
            signed = self.signed()
            return shown.model_copy(update={"consents": signed.consents if signed is not None else ()})
        if wants == "revealed" and stage >= SecureStage.OPEN:
            owned = [index for index, part in enumerate(self._plan.parts) if part.owner == member]
            revealed = tuple(
                Revealed(part=part, member=one, shares=parts[part])
                for one, parts in sorted(self._revealed.items())
                for part in owned
                if part in parts
            )
            return shown.model_copy(update={"revealed": revealed})
        return shown
