"""Plan of a round: owners of parts, sized by their links' rates, in one flat group or in rows and columns.

Parts lie on a grid of chunks and are sized by what each owner's link can carry. In a flat group every member sends each
part to its owner and gets the mean back. A group that would be too large is a two-level all-reduce: a grid of R rows
gives the exact mean over all N members in one round with about 2 sqrt(N) connections a member. Each row reduces every
part at one of its members, the part's *row reducer*; one of a part's row reducers, its owner, adds up the rows' sums
and gives the mean back to the others. Each member moves the same bytes as in a flat group, 2 (N - 1) / N of its
contribution. After the 2D-torus all-reduce of Mikami et al. 2018, "Massively Distributed SGD: ImageNet/ResNet-50
Training in a Flash" (arXiv:1811.05233), here with rows of unequal size.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median_high
from typing import Any

from shoal.swarm.coordinator.membership import Member
from shoal.swarm.coordinator.reachability import choose_group
from shoal.swarm.protocol.messages import PeerToCoordinatorRoundReady
from shoal.swarm.protocol.rounds import Part, PlanMember, RoundPlan, leaf_elements, scale_block
from shoal.swarm.protocol.run_file import AveragingSection
from shoal.swarm.protocol.secure import FEWEST_MEMBERS, MOST_MEMBERS, SecurePlan, excess_weights, first_scales
from shoal.swarm.protocol.types import MAX_STAND_INS
from shoal.swarm.secure.groups import most_strangers

CHUNK_ELEMENTS = 2**20
"""Elements of the largest chunk, for codecs that say nothing else: 4 MiB of float32. Every chunk costs event loops and
kernels some steps, each of which finds the caches full of it."""

_ODDLY_SLOW = 20
"""A link that is slower than the usual one by more than this factor has no influence on the chunks' size."""


@dataclass(frozen=True)
class PlanRules:
    """Rules of a run for its plans. ``group_size``: members of the largest flat group; ``seed``: of the grids, and of
    the turns in which parts are owned; ``chunk_elements``: elements that the run's codec packs into the largest
    chunk."""

    group_size: int
    seed: int
    chunk_elements: int = CHUNK_ELEMENTS


@dataclass(frozen=True)
class PlanLayout:
    """Shape of a plan, with members as indices. ``row_of``: the row of each member; ``columns``: of each column its row
    reducer in every row; empty for a flat group."""

    chunk_elements: int
    row_of: tuple[int, ...]
    columns: tuple[tuple[int, ...], ...]
    parts: tuple[Part, ...]


def plan_round(
    number: int,
    state: tuple[int, bytes],
    elements: int,
    ready: Mapping[str, PeerToCoordinatorRoundReady],
    members: Mapping[str, Member],
    rules: PlanRules,
) -> RoundPlan | None:
    """Plan a round of all members that have work on the agreed ``state``, (version, digest), and can meet; None if none
    has any.

    Members are ordered by peer id, which fixes the order of summation.
    """
    anchor_version, digest = state
    peers = sorted(
        peer for peer, one in ready.items() if one.weight_tokens and peer in members and one.state_digest == digest
    )
    if not peers:
        return None
    group = choose_group(members, peers, rules.group_size, fewest_rows(len(peers), rules.group_size))
    peers = [peer for peer in peers if peer not in group.apart]
    bandwidths_bps = [members[peer].bandwidth_bps or None for peer in peers]
    layout = lay_out(
        elements,
        bandwidths_bps,
        [peer in group.owners for peer in peers],
        replace(rules, seed=rules.seed << 64 | number),
        can_stand_in=[members[peer].can_own and peer not in group.shunned for peer in peers],
        counting=[members[peer].has_credit for peer in peers],
    )
    return RoundPlan(
        round=number,
        anchor_version=anchor_version,
        state_digest=digest,
        chunk_elements=layout.chunk_elements,
        members=tuple(
            PlanMember(
                peer=peer,
                row=row,
                identity_key=members[peer].entry.certificate.identity_key,
                **_offered(ready[peer]),
            )
            for peer, row in zip(peers, layout.row_of, strict=True)
        ),
        parts=layout.parts,
        columns=layout.columns,
    )


def draw_secure(
    ready: Mapping[str, PeerToCoordinatorRoundReady],
    credited: Collection[str],
    averaging: AveragingSection,
    blocks: int,
    seed: int,
) -> tuple[dict[str, PeerToCoordinatorRoundReady], bytes]:
    """Return what the members of a secure round have offered, and its scales, one for each of so many blocks; who is
    not among them brings its work to the next one.

    ``credited``: those with credit, or all where nobody has any. Where these are enough for a group, fewer than a third
    of any group are others: whoever can invent members must not fill one with them, and members refuse such groups."""
    working = sorted(peer for peer, one in ready.items() if one.weight_tokens)
    if decisive := [ready[peer].weight_tokens for peer in working if peer in credited]:
        # All weights are cut to some times the lightest one, so the light ones bring more of their work later.
        heaviest = sorted((ready[peer].weight_tokens for peer in working), reverse=True)[: averaging.fewest_members]
        least = min(-(-median_high(decisive) // 2), heaviest[-1])
        working = [peer for peer in working if ready[peer].weight_tokens >= least]
    scales, working = _agreeing({peer: ready[peer].scales for peer in working}, credited, averaging, blocks)
    known = [peer for peer in working if peer in credited]
    others = [peer for peer in working if peer not in credited]
    draw = random.Random(seed)
    if len(known) >= FEWEST_MEMBERS:
        most = (len(known) - 1) // 2  # of others
        if len(known) + min(len(others), most) >= 2 * averaging.secure_group:
            most = min(most, most_strangers(averaging.secure_group))
        others = draw.sample(others, min(len(others), most))
    members = draw.sample([*known, *others], min(len(known) + len(others), MOST_MEMBERS))
    return {peer: ready[peer] for peer in members}, scales


def _agreeing(
    told: Mapping[str, bytes], credited: Collection[str], averaging: AveragingSection, blocks: int
) -> tuple[bytes, list[str]]:
    """Return the scales of a secure round, and the members that it can have with them.

    Those that have no scales believe in what more than a third of a round's members have (``secure/member.py``), or in
    a run's first ones; those that have any believe in nothing else."""
    holders: dict[bytes, list[str]] = {}
    for peer, scales in sorted(told.items()):
        holders.setdefault(scales if len(scales) == blocks else b"", []).append(peer)
    empty = sorted(holders.pop(b"", []), key=lambda peer: peer not in credited)
    first = first_scales(averaging.code_bits, blocks)
    choices = [(scales, [*mine, *empty[: 2 * len(mine) - 1]]) for scales, mine in sorted(holders.items())]
    choices.append((first, [*holders.get(first, []), *empty]))

    def worth(choice: tuple[bytes, list[str]]) -> tuple[bool, int, int, bool]:
        scales, members = choice
        weight = sum(peer in credited for peer in members)
        return len(members) >= averaging.fewest_members, weight, len(members), scales in holders

    scales, members = max(choices, key=worth)
    return scales, sorted(members)


def as_secure(plan: RoundPlan, averaging: AveragingSection, scales: bytes) -> RoundPlan:
    """Return the plan of a flat group with masked contributions and without stand-ins."""
    block = scale_block(plan.parts[-1].stop)
    secure = SecurePlan(bits=averaging.code_bits, group=averaging.secure_group, block=block, scales=scales)
    parts = tuple(part.model_copy(update={"stand_ins": ()}) for part in plan.parts)
    above = excess_weights([one.weight_tokens for one in plan.members])
    members = tuple(
        one.model_copy(update={"uncounted": excess}) for one, excess in zip(plan.members, above, strict=True)
    )
    return plan.model_copy(update={"secure": secure, "parts": parts, "members": members})


def as_expected(expected: RoundPlan | None, ready: Mapping[str, PeerToCoordinatorRoundReady]) -> RoundPlan | None:
    """Return the expected plan with the real weights; None if the members with work, or their states, are others."""
    working = {peer: one for peer, one in ready.items() if one.weight_tokens}
    if expected is None or sorted(working) != [member.peer for member in expected.members]:
        return None
    if any(one.state_digest != expected.state_digest for one in working.values()):
        return None
    members = [member.model_copy(update=_offered(ready[member.peer])) for member in expected.members]
    return expected.model_copy(update={"members": tuple(members)})


def _offered(ready: PeerToCoordinatorRoundReady) -> dict[str, Any]:
    """Return what a plan says of a member's contribution."""
    said = {"weight_tokens": ready.weight_tokens, "norms": ready.norms, "root": ready.root}
    return said | {"signature": ready.signature}


def lay_out(
    elements: int,
    bandwidths_bps: Sequence[float | None],
    can_own: Sequence[bool],
    rules: PlanRules,
    *,
    can_stand_in: Sequence[bool] = (),
    counting: Sequence[bool] = (),
) -> PlanLayout:
    """Lay out one flat group of up to ``rules.group_size`` members; a grid, drawn from the seed, of more.

    In a flat group the parts go round among the owners with the seed: whom an owner leaves out is in the mean of the
    same elements a round later, from its residual, as another owns them then.
    ``can_stand_in``: members of a flat group that may stand in for owners besides those that ``can_own``;
    ``counting``: members whose links decide on the chunks' size, if any of them is known; empty for all."""
    counted_bps = [bps for bps, counts in zip(bandwidths_bps, counting, strict=False) if counts] or bandwidths_bps
    chunk = chunk_elements(elements, len(can_own), _slowest_usual(counted_bps), rules.chunk_elements)
    rows = plan_rows(can_own, rules.group_size, rules.seed)
    if len(rows) > 1:
        columns, parts = plan_grid(rows, bandwidths_bps, can_own, elements, chunk)
        row_of = {member: row for row, members in enumerate(rows) for member in members}
        return PlanLayout(chunk, tuple(row_of[member] for member in range(len(can_own))), columns, parts)
    shares = owner_shares(bandwidths_bps, can_own)
    able = [any(one) for one in zip(can_own, can_stand_in, strict=True)] if can_stand_in else can_own
    stand_ins = StandIns(shares, able)
    turned = [owner for owner, share in enumerate(shares) if share]
    turn = rules.seed % len(turned)
    turned = turned[turn:] + turned[:turn]
    parts = tuple(
        Part(owner=turned[place], start=start, stop=stop, stand_ins=stand_ins.of(turned[place], MAX_STAND_INS))
        for place, start, stop in split(elements, [shares[owner] for owner in turned], chunk)
    )
    return PlanLayout(chunk, (0,) * len(can_own), (), parts)


def _slowest_usual(bandwidths_bps: Sequence[float | None]) -> float | None:
    """Return the slowest known link that is not oddly slow, as a single false or extreme figure must not cut
    everybody's chunks to pieces."""
    known = [bps for bps in bandwidths_bps if bps]
    return min((bps for bps in known if bps * _ODDLY_SLOW >= median_high(known)), default=None)


# Rows and columns -------------------------------------------------------------------------------------------


def fewest_rows(members: int, group_size: int) -> int:
    """Return the number of rows, provided that enough members can own parts."""
    return 1 if members <= group_size else max(-(-members // group_size), math.isqrt(members))


def plan_rows(can_own: Sequence[bool], group_size: int, seed: int) -> list[list[int]]:
    """Arrange the members, 0 .. n - 1, in rows of about ``group_size`` at most, whose sizes differ by at most one.

    One row if all fit into it; otherwise about as many rows as columns, filled from a permutation drawn from ``seed``:
    members share a row with others in every round, so that nobody has a slow or hostile neighbour for long. Every row
    gets as many members that can own parts as any other, and at least one: where these are few, rows are longer.
    """
    members = range(len(can_own))
    if len(members) <= group_size:
        return [list(members)]
    draw = random.Random(seed)
    able = draw.sample(members, len(members))
    able.sort(key=lambda member: not can_own[member])  # stable, so the order within both kinds stays as drawn
    rows = min(fewest_rows(len(members), group_size), sum(can_own) or len(members))
    return [sorted(able[row::rows]) for row in range(rows)]


def plan_grid(
    rows: Sequence[Sequence[int]],
    bandwidths_bps: Sequence[float | None],
    can_own: Sequence[bool],
    elements: int,
    chunk: int,
) -> tuple[tuple[tuple[int, ...], ...], tuple[Part, ...]]:
    """Plan the columns of a grid, as the row reducers of each in every row, and its parts in the order of elements.

    In each row, the j-th fastest of the members that can own is the row reducer of column j, so that fast members meet
    fast ones; a row with fewer of them than columns takes some twice, and one with none takes all its members. A
    column's share is that of its slowest row reducer. Within it, each row reducer that can own makes the mean of an
    equal share, with the others as stand-ins.
    """
    fastest = []
    for row in rows:
        able = [member for member in row if can_own[member]] or list(row)
        fastest.append(sorted(able, key=lambda member: (-(bandwidths_bps[member] or 0.0), member)))
    columns = [tuple(row[column % len(row)] for row in fastest) for column in range(max(map(len, fastest)))]
    slowest = [min((bps for member in column if (bps := bandwidths_bps[member])), default=None) for column in columns]
    parts = []
    for column, start, stop in split(elements, owner_shares(slowest, [True] * len(columns)), chunk):
        able = [member for member in columns[column] if can_own[member]] or list(columns[column])
        for number, first, last in split(stop - start, [1 / len(able)] * len(able), chunk):
            # Rotated, so that the remainders of all columns do not fall on the first row.
            at = (number + column) % len(able)
            stand_ins = (*able[at + 1 :], *able[:at])[:MAX_STAND_INS]
            part = Part(owner=able[at], stand_ins=stand_ins, column=column, start=start + first, stop=start + last)
            parts.append(part)
    return tuple(columns), tuple(parts)


# Chunks, shares and parts -----------------------------------------------------------------------------------

_SMALL_CHUNK_ELEMENTS, _USUAL_CHUNK_ELEMENTS = 2**16, 2**19
"""Chunks smaller than the first cost more than their bytes do; those larger than the second keep a slow link busy for
long."""

_MOST_A_MEMBER, _FEWEST_A_MEMBER = 8, 4
"""Chunks a member: the most while it is unknown how slow a link there is; the fewest cost processors least, which fast
links wait for."""

_CHUNK_S, _MOST_CHUNKS = 0.01, 1024

FAST_BPS = 5e8
"""Bandwidth from which on processors set the pace, and more chunks cost them more than they gain."""


def chunk_elements(elements: int, members: int, slowest_bps: float | None = None, most: int = CHUNK_ELEMENTS) -> int:
    """Return the elements a chunk: ``most``, or fewer for small models, so that every member gets a few chunks.

    Fewer, too, for links that are slow or may be: every owner's last chunk arrives when all other work is done. The
    number of chunks is about a multiple of the members, so that equal shares stay equal. The result is a
    whole number of leaves, which contributions are encoded by.
    """
    coarse = math.ceil(elements / (members * _FEWEST_A_MEMBER))
    wanted = min(most, coarse)
    if not slowest_bps:
        fine = math.ceil(elements / (members * _MOST_A_MEMBER))
        wanted = min(wanted, max(fine, _SMALL_CHUNK_ELEMENTS), _USUAL_CHUNK_ELEMENTS)
    elif slowest_bps < FAST_BPS:
        # At a byte an element, as with int8; but never so many chunks that they cost more than the link.
        wanted = min(wanted, CHUNK_ELEMENTS, max(int(slowest_bps * _CHUNK_S / 8), math.ceil(elements / _MOST_CHUNKS)))
    a_member = math.ceil(elements / (members * wanted))
    leaf = leaf_elements(elements)
    leaves, largest = math.ceil(elements / leaf), math.ceil(elements / (members * a_member) / leaf)
    largest = min(largest, max(1, most // leaf))
    # Down to half of it, the size that gives the member with most chunks the fewest leaves.
    sizes = range(largest, largest // 2, -1)
    return leaf * min(sizes, key=lambda size: math.ceil(math.ceil(leaves / size) / members) * size)


def owner_shares(bandwidths_bps: Sequence[float | None], can_own: Sequence[bool]) -> list[float]:
    """Return each member's share of the elements, summing to 1, such that the slowest member is done earliest.

    A member with share w of V bytes sends, and receives, (1 - w) V for the others' parts and (n - 1) w V for its own,
    so it needs (1 + (n - 2) w) V / b seconds at bandwidth b (the objective of Ryabinin et al. 2021, "Moshpit SGD",
    arXiv:2103.03239). The best shares let all owners finish at one moment T, w = (T b - 1) / (n - 2), and leave out
    members that need longer than that for the others' parts alone. Unknown bandwidth counts as the median of those that
    can own. If nobody can own, all members do: a group of one needs no link.
    """
    n = len(can_own)
    known = sorted(bps for bps, able in zip(bandwidths_bps, can_own, strict=True) if bps and able)
    median = known[len(known) // 2] if known else 1.0
    speeds = {index: bandwidths_bps[index] or median for index in range(n) if can_own[index]}
    if not speeds:
        return [1 / n] * n
    largest = max(speeds.values())
    speeds = {index: speed / largest for index, speed in speeds.items()}
    if n <= 2:  # both send V, however it is shared
        total = sum(speeds.values())
        return [speeds.get(index, 0.0) / total for index in range(n)]
    fastest = sorted(speeds, key=lambda index: (-speeds[index], index))
    together, count, moment = 0.0, 0, math.inf
    for index in fastest:
        if speeds[index] * moment <= 1.0:
            break
        together += speeds[index]
        count += 1
        moment = (n - 2 + count) / together
    shares = {index: (moment * speeds[index] - 1.0) / (n - 2) for index in fastest[:count]}
    return [max(0.0, shares.get(index, 0.0)) for index in range(n)]


class StandIns:
    """Order of the members that reduce a part when its owner fails, for all parts of a flat group.

    The owner of most comes first, as it has the best link. The stand-ins of successive owners begin with successive
    members, so that the death of one owner does not burden the same member as that of the next. If nobody can own, all
    members can.
    """

    def __init__(self, shares: Sequence[float], can_own: Sequence[bool]) -> None:
        able = [index for index, one in enumerate(can_own) if one] or range(len(can_own))
        self._able = sorted(able, key=lambda index: (-shares[index], index))
        self._places = {index: place for place, index in enumerate(self._able)}

    def of(self, owner: int, most: int) -> tuple[int, ...]:
        """Return up to ``most`` stand-ins of an owner, in their order."""
        place = self._places.get(owner)
        first, others = (owner, len(self._able)) if place is None else (place + 1, len(self._able) - 1)
        return tuple(self._able[(first + step) % len(self._able)] for step in range(min(most, others)))


def split(elements: int, shares: Sequence[float], chunk: int) -> list[tuple[int, int, int]]:
    """Tile ``elements`` into ``(owner, start, stop)`` on the grid of chunks, by largest remainder.

    Owners come in order; one whose share rounds to no chunk is left out.
    """
    chunks = math.ceil(elements / chunk)
    exact = [share * chunks for share in shares]
    counts = [math.floor(value) for value in exact]
    by_remainder = sorted(range(len(shares)), key=lambda index: (counts[index] - exact[index], index))
    for index in by_remainder[: chunks - sum(counts)]:
        counts[index] += 1
    parts, at = [], 0
    for owner, count in enumerate(counts):
        if count:
            parts.append((owner, at * chunk, min((at + count) * chunk, elements)))
            at += count
    return parts
