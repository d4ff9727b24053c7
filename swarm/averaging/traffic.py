"""Who sends how much to whom in an exchange. Pure."""

from __future__ import annotations

from collections import Counter

from shoal.swarm.messages import RoundPlan


def shares(plan: RoundPlan, me: int) -> dict[int, float]:
    """Of all that a member sends while nothing fails, the share that goes to each other one; by index of the plan.

    In elements, as if contributions, partials and means were packed alike."""
    sent: Counter[int] = Counter()
    row = plan.members[me].row
    mates = [index for index, member in enumerate(plan.members) if member.row == row and index != me]
    for part in plan.parts:
        relays, size = plan.relays(part) or (part.owner,), part.stop - part.start
        collector = relays[row]
        if collector != me:
            sent[collector] += size
            continue
        for mate in mates:
            sent[mate] += size
        for other in relays if part.owner == me else (part.owner,):
            if other != me:
                sent[other] += size
    total = sent.total()
    return {member: size / total for member, size in sent.items()}
