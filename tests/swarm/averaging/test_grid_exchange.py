"""Exchanges in a grid: the same means as in one group, for fewer connections, also when members fail."""

import asyncio
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
import torch
from tests.fakes.codec_maps import get_codec_map
from tests.fakes.exchanges import PATIENCE_S, Side, digests, make_sides, run_all, weighted_mean
from tests.fakes.grids import PEERS, plan_of, sent_bytes
from tests.fakes.means import MEAN_ATOL, weighted
from tests.fakes.memory_network import MemoryNetwork, at, changed, stalled
from tests.fakes.virtual_clock import now_s, run_virtual, until
from torch import Tensor

from shoal.compression.error_feedback import ErrorFeedback
from shoal.compression.formats import CODEC_NAMES
from shoal.compression.robust_mean import Method, clipped_mean, trimmed_mean
from shoal.swarm.averaging.allreduce import ExchangeResult
from shoal.swarm.averaging.chunk_header import ChunkHeader
from shoal.swarm.averaging.result_fetch import complete_part
from shoal.swarm.deadlines import Deadlines
from shoal.swarm.protocol.rounds import Part, RoundPlan, leaf_elements

SQUARE = [[0, 5, 10, 15], [1, 4, 11, 14], [2, 7, 8, 13], [3, 6, 9, 12]]
UNEVEN = [[0, 3, 6], [1, 4], [2, 5]]
WEIGHTS = [7 * index % 5 + 1 for index in range(16)]
"""Of sixteen members."""


def for_chaos(grid: str, codec: str) -> tuple[pytest.MarkDecorator, ...]:
    """Mark all cases of sixteen members but those of int8, which take seconds each, for `make chaos`."""
    return (pytest.mark.matrix,) if grid == "4x4" and codec != "int8" else ()


def grid(rows: Sequence[Sequence[int]], elements: int = 30 * 4096 + 123) -> RoundPlan:
    return plan_of(WEIGHTS[: sum(map(len, rows))], rows, elements)


def conserved(sides: Sequence[Side], mean: Tensor) -> None:
    """What was applied and what is carried add up to what was offered."""
    weights = [member.weight_tokens for member in sides[0].store.plan.members]
    kept = weighted([side.feedback.residual for side in sides], weights) * sum(weights)
    applied = torch.zeros_like(kept)
    store = sides[0].store
    for chunk in range(store.chunks):
        start, stop = store.bounds(chunk)
        applied[start:stop] = mean[start:stop].double() * store.group.weight(store.header(chunk).included)
    offered = weighted_mean(sides, range(len(sides))) * sum(weights)
    torch.testing.assert_close(applied + kept, offered, atol=1e-4, rtol=0)


@pytest.mark.parametrize("rows", [SQUARE, UNEVEN, [[0], [1]], [[0, 1, 2, 3, 4]]], ids=["4x4", "3+2+2", "1+1", "flat"])
def test_uplinks_are_shared_as_the_bytes_go(rows: Sequence[Sequence[int]]) -> None:
    async def main() -> None:
        network, plan = MemoryNetwork(), grid(rows, 400 * 4096)
        sides = make_sides(network, plan)
        running = asyncio.create_task(run_all(sides))
        await until(lambda: all(network.endpoints[member.peer].uplink_shares for member in plan.members))
        shares = {member.peer: network.endpoints[member.peer].uplink_shares for member in plan.members}
        await running
        for sender, towards in shares.items():
            moved = {to: size for (one, to), size in network.moved_bytes.items() if one == sender}
            assert towards == pytest.approx({to: size / sum(moved.values()) for to, size in moved.items()}, rel=0.01)
        for side in sides:
            await side.commit()
        assert not any(network.endpoints[member.peer].uplink_shares for member in plan.members)

    run_virtual(main())


@pytest.mark.parametrize(
    ("rows", "codec"),
    [
        pytest.param(rows, codec, id=f"{name}-{codec}", marks=for_chaos(name, codec))
        for rows, name in [(SQUARE, "4x4"), (UNEVEN, "3+2+2"), ([[0], [1]], "1+1"), ([[0, 2], [1]], "2+1")]
        for codec in CODEC_NAMES
    ],
)
def test_everybody_gets_the_same_weighted_mean(rows: list[list[int]], codec: str) -> None:
    async def main() -> None:
        sides = make_sides(MemoryNetwork(seed=len(rows)), grid(rows), codec)
        await run_all(sides)
        means = [await side.commit() for side in sides]
        assert all(digests(side) == digests(sides[0]) for side in sides)
        assert all(torch.equal(mean, means[0]) for mean in means)
        assert all(side.outcome == ExchangeResult() for side in sides)
        if codec in MEAN_ATOL:
            # Three encodings instead of two: contributions, the rows' means, and the mean of those.
            expected = weighted_mean(sides, range(len(sides)))
            torch.testing.assert_close(means[0].double(), expected, atol=1.5 * MEAN_ATOL[codec], rtol=0)
        conserved(sides, means[0])

    run_virtual(main())


@pytest.mark.parametrize("mean", ["clip", "trimmed"])
@pytest.mark.parametrize(
    ("rows", "codec"),
    [
        pytest.param(rows, codec, id=f"{name}-{codec}", marks=for_chaos(name, codec))
        for rows, name in [(SQUARE, "4x4"), (UNEVEN, "3+2+2"), ([range(7)], "flat")]
        for codec in ("float32", "int8")
    ],
)
def test_everybody_gets_the_same_robust_mean(mean: Method, rows: Sequence[Sequence[int]], codec: str) -> None:
    """Of each row, and then of the rows; the same bytes in another order of arrival, and nothing above a bound."""

    async def main(seed: int) -> list[bytes | None]:
        weights = [1 + index % 5 for index in range(sum(map(len, rows)))]
        plan = plan_of(weights, rows).model_copy(update={"mean": mean})
        sides = make_sides(MemoryNetwork(seed), plan, codec)
        await run_all(sides)
        means = [await side.commit() for side in sides]
        assert all(torch.equal(one, means[0]) for one in means)
        assert all(side.outcome == ExchangeResult() for side in sides)
        if codec == "float32":
            of_row = [
                combined(mean, [sides[one].brought for one in row], [weights[one] for one in row]) for row in rows
            ]
            torch.testing.assert_close(
                means[0], combined(mean, of_row, [sum(weights[one] for one in row) for row in rows]), atol=1e-3, rtol=0
            )
            assert all(float(side.feedback.residual.norm()) == 0 for side in sides)
        return digests(sides[0])

    assert run_virtual(main(1)) == run_virtual(main(2)) != []


def combined(mean: Method, values: Sequence[torch.Tensor], weights: Sequence[int]) -> torch.Tensor:
    """The mean, of the whole vectors where values matter alone, else leaf by leaf."""
    if len(values) == 1:
        return values[0]
    combine, size = trimmed_mean if mean == "trimmed" else clipped_mean, leaf_elements(values[0].numel())
    leaves = [
        combine(leaf, [float(one) for one in weights], [1.0] * len(weights))
        for leaf in zip(*(one.split(size) for one in values), strict=True)
    ]
    return torch.cat(leaves)


def test_the_same_contributions_give_the_same_bytes() -> None:
    async def main(seed: int) -> list[bytes | None]:
        sides = make_sides(MemoryNetwork(seed), grid(UNEVEN), "int8")
        await run_all(sides)
        return digests(sides[0])

    assert run_virtual(main(1)) == run_virtual(main(2)) != []


def test_a_row_in_which_nobody_can_own() -> None:
    async def main() -> None:
        plan = plan_of([1] * 6, [[0, 1, 2], [3, 4, 5]], can_own=[True] * 3 + [False] * 3)
        sides = make_sides(MemoryNetwork(), plan)
        await run_all(sides)
        means = [await side.commit() for side in sides]
        assert {part.owner for part in plan.parts} == {0, 1, 2}
        torch.testing.assert_close(means[5].double(), weighted_mean(sides, range(6)), atol=1e-6, rtol=0)

    run_virtual(main())


def moved(plan: RoundPlan, codec: str) -> tuple[list[int], list[int]]:
    """Of each member, the bytes that it sends, and the number of its partners."""

    async def main() -> tuple[list[int], list[int]]:
        network = MemoryNetwork()
        await run_all(make_sides(network, plan, codec))
        sent = [0] * len(plan.members)
        partners: list[set[str]] = [set() for _ in plan.members]
        for (sender, receiver), size in network.moved_bytes.items():
            sent[PEERS.index(sender)] += size
            partners[PEERS.index(sender)].add(receiver)
            partners[PEERS.index(receiver)].add(sender)
        return sent, [len(those) for those in partners]

    return run_virtual(main())


@pytest.mark.parametrize("codec", [pytest.param("float32", marks=pytest.mark.matrix), "int8"])
def test_sixteen_peers_need_six_partners_and_no_more_bytes(codec: str) -> None:
    elements = 16 * 8 * 4096
    square, flat, codec_map = grid(SQUARE, elements), plan_of(WEIGHTS, [range(16)], elements), get_codec_map(codec)
    sent, partners = moved(square, codec)
    flat_sent, flat_partners = moved(flat, codec)
    assert (sent, flat_sent) == (sent_bytes(square, codec_map), sent_bytes(flat, codec_map))
    assert max(partners) == 6
    assert min(flat_partners) == 15
    assert max(sent) <= 1.05 * max(flat_sent)
    assert max(flat_sent) <= 1.05 * 2 * 15 / 16 * elements * {"float32": 4, "int8": 1}[codec]


# Error feedback -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "codec", ["int8", "topk", *(pytest.param(codec, marks=pytest.mark.matrix) for codec in ("bfloat16", "sign"))]
)
def test_what_the_means_lack_is_in_the_residuals(codec: str) -> None:
    """Over several rounds in other grids: means times total weight, and weighted residuals, add up to what came."""

    async def main() -> None:
        network, members = MemoryNetwork(), 7
        plan = grid(UNEVEN)
        weights = [member.weight_tokens for member in plan.members]
        feedbacks = [ErrorFeedback(plan.parts[-1].stop) for _ in weights]
        offered, applied = torch.zeros(2, plan.parts[-1].stop, dtype=torch.float64)
        for number, order in enumerate(itertools.islice(itertools.permutations(range(members)), 0, 3000, 750)):
            rows = [sorted(order[row::3]) for row in range(3)]
            sides = make_sides(network, grid(rows).model_copy(update={"round": number}), codec, feedbacks)
            await run_all(sides)
            means = [await side.commit() for side in sides]
            applied += sum(weights) * means[0].double()
            for side, weight in zip(sides, weights, strict=True):
                offered += weight * side.brought.double()
        kept = sum(weight * one.residual.double() for one, weight in zip(feedbacks, weights, strict=True))
        assert isinstance(kept, Tensor)
        torch.testing.assert_close(applied + kept, offered, atol=1e-3, rtol=0)
        assert float(kept.abs().max()) > 1e-3
        assert codec not in MEAN_ATOL or all(float(one.residual.abs().max()) < 0.5 for one in feedbacks)

    run_virtual(main())


def test_whose_partial_was_not_used_is_in_the_mean_as_everybody() -> None:
    """The owner says so in the results: the row reducer then carries no error of its partial."""

    async def main() -> None:
        network, plan = MemoryNetwork(), grid(UNEVEN)
        part, row_reducer = a_part(plan)
        network.faults.append(changed("partial", PEERS[row_reducer], lambda data: b"\xff" * len(data)))
        sides = make_sides(network, plan, "int8")
        await run_all(sides)
        means = [await side.commit() for side in sides]
        header = sides[0].store.header(sides[0].store.chunks_of(part).start)
        assert plan.members[row_reducer].row not in header.reduced_rows
        assert row_reducer not in header.included
        assert sides[part.owner].outcome is not None
        assert sides[part.owner].outcome.failed == {row_reducer}
        conserved(sides, means[0])

    run_virtual(main())


def test_a_row_reducer_that_is_in_a_mean_by_itself_is_in_it_as_it_was_encoded() -> None:
    """Whoever made the bytes may have asked it, too: only the flag tells."""

    async def main() -> None:
        plan = grid(UNEVEN)
        part, row_reducer = a_part(plan)
        sides = make_sides(MemoryNetwork(), plan, "int8")
        await run_all(sides)
        side, chunk = sides[row_reducer], part.start // plan.chunk_elements
        group, result = side.store.group, side.store[chunk]
        header = group.header(result)
        assert plan.members[row_reducer].row in header.reduced_rows
        unflagged = group.pack_header(ChunkHeader(header.included)) + bytes(result[group.header_bytes :])
        await side.store.put(chunk, memoryview(unflagged))
        start, stop = side.store.bounds(chunk)
        codec = side.store.codec_map.contribution(start, stop)
        served = (await side.exchange._source.chunk(chunk))[: codec.packed_bytes(stop - start)]
        sent = codec.decode(served, stop - start)
        await side.commit()
        assert torch.equal(side.feedback.residual[start:stop], side.brought[start:stop] - sent)

    run_virtual(main())


# Members that fail ----------------------------------------------------------------------------------------------


def a_part(plan: RoundPlan, number: int = 0) -> tuple[Part, int]:
    """A part, and its row reducer in another row than its owner's."""
    part = plan.parts[number]
    return part, next(row_reducer for row_reducer in plan.row_reducers(part) if row_reducer != part.owner)


def living(sides: Sequence[Side], *dead: int) -> list[Side]:
    return [side for index, side in enumerate(sides) if index not in dead]


def row_mate(plan: RoundPlan, member: int) -> int:
    """Somebody else of the same row."""
    row = plan.members[member].row
    return next(index for index, other in enumerate(plan.members) if other.row == row and index != member)


def first_sent(plan: RoundPlan, kind: str, member: int, part: Part) -> int:
    """The chunk that a member's death begins with: of that part, or, of its contribution, of one that another of its
    row collects."""
    parts = [part] if kind != "contribution" else [one for one in plan.parts if member not in plan.row_reducers(one)]
    return parts[0].start // plan.chunk_elements


def fails(plan: RoundPlan, part: Part, **faults: int) -> tuple[list[Side], list[Tensor], float]:
    """Members, by the kind of chunk that they are about to send when they are killed; after the patience they are not
    in the roster any more. All others end the round, and settle. Returns these, their means, and how many seconds the
    exchange took."""

    async def main() -> tuple[list[Side], list[Tensor], float]:
        network = MemoryNetwork()
        sides = make_sides(network, plan, "int8")

        def kill(member: int) -> None:
            network.kill(PEERS[member])
            tasks[member].cancel()
            asyncio.get_running_loop().call_later(PATIENCE_S, notice)

        def notice() -> None:
            for endpoint in network.endpoints.values():
                endpoint.roster = {peer for peer, one in network.endpoints.items() if one.alive}

        for kind, member in faults.items():
            first = first_sent(plan, kind, member, part)
            network.faults.append(at(kind, PEERS[member], first, functools.partial(kill, member)))
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(side.run()) for side in sides]
        dead = {index for index in range(len(sides)) if not network.endpoints[PEERS[index]].alive}
        assert dead == set(faults.values())
        took_s, alive = now_s(), living(sides, *dead)
        assert all(None not in digests(side) for side in alive)
        await vote(network, alive)
        return alive, [await side.commit() for side in alive], took_s

    return run_virtual(main())


async def vote(network: MemoryNetwork, sides: Sequence[Side]) -> None:
    """Everybody gets what most hold of each part: bytes that a dead owner gave to one member alone are made anew."""
    for part, held in zip(sides[0].store.plan.parts, zip(*map(digests, sides), strict=True), strict=True):
        wanted = Counter(held).most_common(1)[0][0]
        assert wanted is not None
        peers = [side.store.plan.members[side.exchange.me].peer for side in sides]
        for side, peer in zip(sides, peers, strict=True):
            others = [one for one in peers if one != peer]
            await complete_part(network.endpoints[peer], side.store, part, wanted, others, Deadlines(PATIENCE_S))


def check_means(plan: RoundPlan, alive: Sequence[Side], means: Sequence[Tensor]) -> None:
    """The mean of a chunk is that of its members, and what the living brought is in it or in their residuals."""
    store = alive[0].store
    brought = {PEERS.index(side.store.plan.members[side.exchange.me].peer): side for side in alive}
    everybody = make_sides(MemoryNetwork(), plan)  # what the dead brought
    for chunk in range(store.chunks):
        start, stop = store.bounds(chunk)
        included = store.header(chunk).included
        expected = weighted_mean(everybody, included)[start:stop]
        torch.testing.assert_close(means[0][start:stop].double(), expected, atol=1.5 * MEAN_ATOL["int8"], rtol=0)
        for member, side in brought.items():
            if member not in included:
                assert torch.equal(side.feedback.residual[start:stop], side.brought[start:stop])
            else:
                share = store.group.weight(store.group.members) / side.store.group.weights[member]
                assert float(side.feedback.residual[start:stop].abs().max()) < 0.1 * share
    assert all(torch.equal(mean, means[0]) for mean in means)


@pytest.mark.parametrize("rows", [pytest.param(SQUARE, marks=pytest.mark.matrix), UNEVEN], ids=["4x4", "3+2+2"])
@pytest.mark.parametrize("kind", ["contribution", "partial", "result"])
def test_a_row_reducer_that_dies_costs_its_row_nothing(kind: str, rows: list[list[int]]) -> None:
    plan = grid(rows)
    part, row_reducer = a_part(plan)
    alive, means, took_s = fails(plan, part, **{kind: row_reducer})
    check_means(plan, alive, means)
    included = alive[0].store.header(part.start // plan.chunk_elements).included
    assert set(included) >= set(range(len(plan.members))) - {row_reducer}
    assert took_s < 1.5 * PATIENCE_S


@pytest.mark.parametrize("kind", ["contribution", "result"])
def test_a_row_reducer_of_another_row_stands_in_for_a_dead_owner(kind: str) -> None:
    plan = grid(UNEVEN)
    part, _ = a_part(plan)
    alive, means, _ = fails(plan, part, **{kind: part.owner})
    check_means(plan, alive, means)
    assert set(alive[0].store.header(part.start // plan.chunk_elements).included) >= set(range(7)) - {part.owner}


@pytest.mark.parametrize("kinds", [("contribution", "result"), ("result", "contribution"), ("result", "partial")])
def test_owner_and_row_reducer_at_once(kinds: tuple[str, str]) -> None:
    plan = grid(UNEVEN)
    part, row_reducer = a_part(plan)
    alive, means, _ = fails(plan, part, **{kinds[0]: part.owner, kinds[1]: row_reducer})
    check_means(plan, alive, means)
    included = alive[0].store.header(part.start // plan.chunk_elements).included
    assert set(included) >= set(range(7)) - {part.owner, row_reducer}


def test_results_that_a_row_reducer_has_outlive_their_owner() -> None:
    """They are adopted, so that the dead owner's own work is in them."""
    plan = grid(UNEVEN)
    part, row_reducer = a_part(plan)
    chunks = range(part.start // plan.chunk_elements, -(-part.stop // plan.chunk_elements))

    async def main() -> None:
        network = MemoryNetwork()
        sides = make_sides(network, plan, "int8")
        for other in set(range(7)) - {row_reducer, part.owner}:
            network.faults.append(stalled("result", PEERS[part.owner], chunks.start, to=PEERS[other]))
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(side.run()) for side in sides]
            await until(lambda: sides[row_reducer].store.has(part))
            network.kill(PEERS[part.owner])
            tasks[part.owner].cancel()
        for side in living(sides, part.owner):
            assert digests(side)[0] == digests(sides[part.owner])[0]

    run_virtual(main())


def test_a_silent_contributor_is_dropped_once_for_all() -> None:
    async def main() -> None:
        plan = grid(UNEVEN)
        part, row_reducer = a_part(plan)
        silent = row_mate(plan, row_reducer)
        network = MemoryNetwork()
        network.faults.append(stalled("contribution", PEERS[silent], 0))
        sides = make_sides(network, plan)
        await run_all(sides)
        assert now_s() < 2 * PATIENCE_S, "nobody is waited for a second time"
        means = [await side.commit() for side in sides]
        chunk = part.start // plan.chunk_elements
        assert sides[0].store.header(chunk).included == [index for index in range(7) if index != silent]
        assert silent in sides[0].store.left_out()
        assert all(side.outcome is not None and not side.outcome.failed for side in sides)
        conserved(sides, means[0])

    run_virtual(main())


@pytest.mark.parametrize(
    "garbage",
    [lambda data: b"\xff" * len(data), lambda data: data[:-1], lambda data: b"\0", lambda data: b""],
    ids=["not numbers", "too short", "nobody", "empty"],
)
def test_a_corrupted_partial_is_not_used(garbage: Callable[[bytes], bytes]) -> None:
    async def main() -> None:
        plan = grid(UNEVEN)
        part, row_reducer = a_part(plan)
        network = MemoryNetwork()
        network.faults.append(changed("partial", PEERS[row_reducer], garbage, to=PEERS[part.owner]))
        sides = make_sides(network, plan)
        await run_all(sides)
        means = [await side.commit() for side in sides]
        for chunk in sides[0].store.chunks_of(part):
            assert sides[0].store.header(chunk).included == [index for index in range(7) if index != row_reducer]
        assert sides[part.owner].outcome is not None
        assert sides[part.owner].outcome.failed == {row_reducer}
        conserved(sides, means[0])

    run_virtual(main())


def test_partials_that_go_bad_on_the_way() -> None:
    """What came before stays; the rest of the row comes from its members, also when no more partials come."""

    async def main() -> None:
        plan = plan_of([1] * 4, [[0, 1], [2, 3]], elements=64 * 4096)
        part, row_reducer = a_part(plan)
        chunks = range(part.start // plan.chunk_elements, -(-part.stop // plan.chunk_elements))
        bad = chunks[2]
        network = MemoryNetwork()

        async def fault(step: object, payload: bytes) -> bytes:
            kind, chunk = step.blob.kind, step.chunk  # type: ignore[attr-defined]
            if kind == "partial" and step.holder == PEERS[row_reducer] and chunk > bad:  # type: ignore[attr-defined]
                await asyncio.Event().wait()
            return b"\xff" * len(payload) if (kind, chunk) == ("partial", bad) else payload

        network.faults.append(fault)  # type: ignore[arg-type]
        sides = make_sides(network, plan)
        await run_all(sides)
        assert now_s() < PATIENCE_S, "nobody waits for more of them"
        means = [await side.commit() for side in sides]
        headers = [sides[0].store.header(chunk) for chunk in chunks]
        row = plan.members[row_reducer].row
        assert [row in header.reduced_rows for header in headers] == [chunk < bad for chunk in chunks]
        assert [row_reducer in header.included for header in headers] == [chunk < bad for chunk in chunks]
        assert all(set(header.included) >= set(range(4)) - {row_reducer} for header in headers)
        conserved(sides, means[0])

    run_virtual(main())


def test_a_row_reducer_that_is_silent_is_named_by_its_owners_and_its_row() -> None:
    async def main() -> None:
        plan = grid(SQUARE)
        part, row_reducer = a_part(plan)
        network = MemoryNetwork()
        network.faults.append(stalled("partial", PEERS[row_reducer], 0))
        network.faults.append(stalled("result", PEERS[row_reducer], 0))
        sides = make_sides(network, plan)
        await run_all(sides)
        others = living(sides, row_reducer)
        assert all(digests(side) == digests(others[0]) for side in others)
        row = plan.members[row_reducer].row
        named = {
            index for index, side in enumerate(sides) if side.outcome is not None and row_reducer in side.outcome.failed
        }
        assert part.owner in named
        assert {index for index, member in enumerate(plan.members) if member.row == row} - {row_reducer} <= named

    run_virtual(main())


def test_whoever_waits_for_a_row_reducer_waits_longer_than_that_one() -> None:
    deadlines = Deadlines(PATIENCE_S)
    assert deadlines.contribution_s < deadlines.partial_s
    assert deadlines.partial_s + deadlines.contribution_s < deadlines.grid_result_s
    assert deadlines.grid_result_s < deadlines.row_result_s < deadlines.report_s
