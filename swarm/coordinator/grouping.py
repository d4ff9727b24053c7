"""Plan of a round: who averages what with whom, everybody in one flat group, or in a grid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median_high

from shoal.swarm.coordinator.grid import fewest_rows, plan_parts, plan_rows
from shoal.swarm.coordinator.membership import Member, weightiest, witnesses
from shoal.swarm.coordinator.partition import CHUNK_ELEMENTS, StandIns, chunk_elements, owner_shares, split
from shoal.swarm.coordinator.trust import owners
from shoal.swarm.protocol.messages import PeerToCoordinatorRoundReady
from shoal.swarm.protocol.rounds import Part, PlanMember, RoundPlan
from shoal.swarm.protocol.types import MAX_STAND_INS

_ODDLY_SLOW = 20
"""By so many times slower than the usual link: chunks are not made for it."""


@dataclass(frozen=True)
class Rules:
    """What a run says of its groups: up to how many are a flat one, the seed of grids, and how many elements its codec
    packs into the largest chunk."""

    group_size: int
    seed: int
    chunk_elements: int = CHUNK_ELEMENTS


@dataclass(frozen=True)
class Layout:
    """A plan's shape, with members as indices: each one's row; of each column its row reducer in every row, none in a
    flat group; and the parts."""

    chunk_elements: int
    row_of: tuple[int, ...]
    columns: tuple[tuple[int, ...], ...]
    parts: tuple[Part, ...]


def plan_round(
    number: int,
    anchor_version: int,
    elements: int,
    ready: Mapping[str, PeerToCoordinatorRoundReady],
    members: Mapping[str, Member],
    rules: Rules,
) -> RoundPlan | None:
    """Everybody who has work on the common state; None when nobody has.

    Members are ordered by peer id, which fixes the order of summation.
    """
    working = {peer: one for peer, one in ready.items() if one.weight_tokens and peer in members}
    said = {peer: working[peer].state_digest for peer in witnesses(members, working, anchor_version)}
    digest = weightiest(said, members)
    if digest is None:
        return None
    peers = sorted(peer for peer, one in working.items() if one.state_digest == digest)
    bandwidths_bps = [members[peer].bandwidth_bps or None for peer in peers]
    layout = lay_out(
        elements,
        bandwidths_bps,
        owners(members, peers, fewest_rows(len(peers), rules.group_size)),
        replace(rules, seed=rules.seed << 64 | number),
        can_stand_in=[members[peer].can_own for peer in peers],
        counting=[members[peer].has_record for peer in peers],
    )
    return RoundPlan(
        round=number,
        anchor_version=anchor_version,
        state_digest=digest,
        chunk_elements=layout.chunk_elements,
        members=tuple(
            PlanMember(peer=peer, weight_tokens=ready[peer].weight_tokens, row=row, norms=ready[peer].norms)
            for peer, row in zip(peers, layout.row_of, strict=True)
        ),
        parts=layout.parts,
        columns=layout.columns,
    )


def as_expected(expected: RoundPlan | None, ready: Mapping[str, PeerToCoordinatorRoundReady]) -> RoundPlan | None:
    """The plan that was expected with the weights that there are, if it is just its members who bring something."""
    working = {peer: one for peer, one in ready.items() if one.weight_tokens}
    if expected is None or sorted(working) != [member.peer for member in expected.members]:
        return None
    if any(one.state_digest != expected.state_digest for one in working.values()):
        return None
    members = [
        member.model_copy(update={"weight_tokens": ready[member.peer].weight_tokens, "norms": ready[member.peer].norms})
        for member in expected.members
    ]
    return expected.model_copy(update={"members": tuple(members)})


def lay_out(
    elements: int,
    bandwidths_bps: Sequence[float | None],
    can_own: Sequence[bool],
    rules: Rules,
    *,
    can_stand_in: Sequence[bool] = (),
    counting: Sequence[bool] = (),
) -> Layout:
    """One flat group of up to ``rules.group_size`` members; of more a grid, which the seed decides on.

    ``can_stand_in``: of a flat group, who may besides those who ``can_own``; ``counting``: for whose links chunks are
    made, if any of them are; all for empty ones."""
    counted_bps = [bps for bps, counts in zip(bandwidths_bps, counting, strict=False) if counts] or bandwidths_bps
    chunk = chunk_elements(elements, len(can_own), _slowest(counted_bps), rules.chunk_elements)
    rows = plan_rows(can_own, rules.group_size, rules.seed)
    if len(rows) == 1:
        shares = owner_shares(bandwidths_bps, can_own)
        able = [any(one) for one in zip(can_own, can_stand_in, strict=True)] if can_stand_in else can_own
        stand_ins = StandIns(shares, able)
        flat = tuple(
            Part(owner=owner, start=start, stop=stop, stand_ins=tuple(stand_ins.of(owner, MAX_STAND_INS)))
            for owner, start, stop in split(elements, shares, chunk)
        )
        return Layout(chunk, (0,) * len(can_own), (), flat)
    grid = plan_parts(rows, bandwidths_bps, can_own, elements, chunk)
    row_of = {member: row for row, members in enumerate(rows) for member in members}
    parts = tuple(
        Part(
            owner=one.owner,
            stand_ins=one.stand_ins[:MAX_STAND_INS],
            column=one.column,
            start=one.start,
            stop=one.stop,
        )
        for one in grid.parts
    )
    return Layout(chunk, tuple(row_of[member] for member in range(len(can_own))), grid.columns, parts)


def _slowest(bandwidths_bps: Sequence[float | None]) -> float | None:
    """Of the links that are no oddities: what one member says of itself, or one that is next to nothing, is not to cut
    everybody's chunks to pieces."""
    known = [bps for bps in bandwidths_bps if bps]
    return min((bps for bps in known if bps * _ODDLY_SLOW >= median_high(known)), default=None)
