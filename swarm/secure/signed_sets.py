"""Check of the sets that a verdict names, by anybody: whose masked contributions the means of a secure round are of."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from shoal.swarm.protocol.rounds import RoundPlan
from shoal.swarm.protocol.secure import SetsStatement, SignedSets, commitment, fewest_groups
from shoal.swarm.protocol.statements import PlanStatement, has_signed
from shoal.swarm.secure.groups import MaskingGroup, draw_groups


def groups_of(about: PlanStatement, plan: RoundPlan, signed: SignedSets) -> list[MaskingGroup]:
    """Return the masking groups that the members' random numbers give."""
    assert plan.secure is not None
    return draw_groups(signed.nonces, about.plan, plan.secure.group)


def fault_of(
    about: PlanStatement, plan: RoundPlan, signed: SignedSets, means: Sequence[Collection[int]] | None = None
) -> str:
    """Return what is wrong with the sets of a round's verdict, empty if nothing is.

    Each group whose sum is in a mean must have its threshold of signatures for these sets. With as many for other sets
    of the round, more than a third of the group have signed twice. ``means``: by part, the members of its committed
    mean; where they are not known here, all sums may be in one. For a worker thread."""
    secure = plan.secure
    assert secure is not None
    for member, nonce in zip(plan.members, signed.nonces, strict=True):
        if member.root not in (commitment(nonce, b""), commitment(nonce, secure.scales)):
            return f"{member.peer} had committed to another random number"
    if not len(signed.sets) == len(signed.names) == len(plan.parts):
        return "there is not a set for each part"
    if any(not _is_ordered(one) or not set(one) <= set(signed.senders) for one in [signed.senders, *signed.sets]):
        return "a set has others than the senders"
    groups, fewest = groups_of(about, plan, signed), fewest_groups(is_trimmed=plan.mean == "trimmed")
    for one in signed.sets:
        sums = [(group, mine) for group in groups if (mine := group.among(one))]
        if (one and len(sums) < fewest) or any(len(mine) < group.threshold for group, mine in sums):
            return "a set has too few members of a group, or too few groups"
    statement = SetsStatement(about, signed.senders, signed.sets, signed.names).bytes_to_sign()
    members = {one.member: plan.members[one.member] for one in signed.consents}
    agreed = [
        one.member
        for one in signed.consents
        if has_signed(members[one.member].identity_key, members[one.member].peer, one.signature, statement)
    ]
    included = sorted({one for each in means or signed.sets for one in each})
    for mean, one in zip(means or signed.sets, signed.sets, strict=True):
        if set(mean) != {each for group in groups if set(mine := group.among(one)) <= set(mean) for each in mine}:
            return "a mean is of others than a set has"
    lacking = [group for group in groups if group.among(included) and len(group.among(agreed)) < group.threshold]
    return f"{len(lacking)} of {len(groups)} groups have not signed for the sets" if lacking else ""


def _is_ordered(members: Sequence[int]) -> bool:
    return list(members) == sorted(set(members))
