"""Roles of members in the attacked round, in one group and in a two-level all-reduce."""

from tests.chaos.attack import Attack

from shoal.swarm.protocol.rounds import RoundPlan


def cast(plan: RoundPlan) -> dict[str, str]:
    """Peers by role, of the first part. The ``witness`` is one more member that gets its results from the owner; the
    ``laggard`` is one that nobody waits for."""
    roles = _cast_grid(plan) if plan.columns else _cast_group(plan)
    return {role: plan.members[member].peer for role, member in roles.items()}


def _cast_group(plan: RoundPlan) -> dict[str, int]:
    part = plan.parts[0]
    owner, stand_in = part.owner, part.stand_ins[0]
    (contributor,) = set(range(len(plan.members))) - {one.owner for one in plan.parts}
    (witness,) = {one.owner for one in plan.parts} - {owner, stand_in}
    return {"owner": owner, "stand-in": stand_in, "contributor": contributor, "witness": witness, "laggard": witness}


def _cast_grid(plan: RoundPlan) -> dict[str, int]:
    """Of two rows, the contributor is in the one that is not the owner's, as the row reducer, who is the stand-in."""
    part = plan.parts[0]
    row_reducers = {row_reducer for one in plan.parts for row_reducer in plan.row_reducers(one)}
    row = plan.members[part.owner].row
    rows = [[index for index, one in enumerate(plan.members) if one.row == number] for number in (row, 1 - row)]
    (row_reducer,) = set(plan.row_reducers(part)) - {part.owner}
    (contributor,) = set(rows[1]) - row_reducers
    (witness,) = set(rows[0]) & row_reducers - {part.owner}
    (laggard,) = set(rows[0]) - row_reducers
    return {
        "owner": part.owner,
        "row reducer": row_reducer,
        "stand-in": row_reducer,
        "contributor": contributor,
        "witness": witness,
        "laggard": laggard,
    }


def other_end(plan: RoundPlan, attack: Attack) -> str:
    """Role at the other end of the attacked link, where only one is: somebody who exchanges much with the victim."""
    match attack.role:
        case "contributor":
            return "row reducer" if plan.columns else "owner"
        case "row reducer":
            # To the owner it sends results of its own, too: if these are wrong, they are what it has made.
            return "contributor" if attack.fault == "corrupted bytes to one" else "owner"
    return "witness"
