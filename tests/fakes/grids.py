"""Plans of two-level all-reduces, for tests."""

from collections.abc import Sequence

from tests.fakes.memory_coordinator import identity

from shoal.compression.codec_map import CodecMap
from shoal.swarm.averaging.chunk_header import Group
from shoal.swarm.averaging.leaf_grid import LeafGrid
from shoal.swarm.coordinator.round_plan import chunk_elements, plan_grid
from shoal.swarm.protocol.rounds import PlanMember, RoundPlan

IDENTITIES = sorted((identity(number) for number in range(1, 27)), key=lambda one: one.peer_id)
PEERS = [one.peer_id for one in IDENTITIES]


def plan_of(
    weights: Sequence[int],
    rows: Sequence[Sequence[int]],
    elements: int = 40 * 4096 + 123,
    can_own: Sequence[bool] | None = None,
    chunk: int | None = None,
) -> RoundPlan:
    """Of members ``PEERS``, as many as there are weights; all links are equally fast. One row: a flat group, without
    stand-ins."""
    members = len(weights)
    chunk = chunk or chunk_elements(elements, members)
    columns, parts = plan_grid(rows, [None] * members, can_own or [True] * members, elements, chunk)
    row_of = {member: row for row, those in enumerate(rows) for member in those}
    named = [
        PlanMember(
            peer=PEERS[member],
            identity_key=IDENTITIES[member].public_key,
            weight_tokens=weight,
            row=row_of[member],
        )
        for member, weight in enumerate(weights)
    ]
    return RoundPlan(
        round=3,
        anchor_version=1,
        state_digest=bytes(32),
        chunk_elements=chunk,
        members=tuple(named),
        parts=parts if len(rows) > 1 else tuple(part.model_copy(update={"column": 0}) for part in parts),
        columns=columns if len(rows) > 1 else (),
    )


def sent_bytes(plan: RoundPlan, codec_map: CodecMap) -> list[int]:
    """Return the bytes that each member sends in a round without failures: contributions, partial sums and results."""
    sent, group = [0] * len(plan.members), Group.of(plan)
    for part in plan.parts:
        row_reducers = plan.row_reducers(part) or (part.owner,)
        for start in range(part.start, part.stop, plan.chunk_elements):
            stop = min(start + plan.chunk_elements, part.stop)
            contribution = LeafGrid(plan.parts[-1].stop, codec_map).chunk_bytes(start, stop)
            result = group.result_bytes(codec_map.result(start, stop, len(group.members)), stop - start)
            for row, row_reducer in enumerate(row_reducers):
                those = group.row(row)
                for member in those.members:
                    if member != row_reducer:
                        sent[member] += contribution
                        sent[row_reducer] += result
                if row_reducer != part.owner:
                    sent[row_reducer] += those.result_bytes(
                        codec_map.result(start, stop, len(those.members)), stop - start
                    )
                    sent[part.owner] += result
    return sent
