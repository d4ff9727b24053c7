import asyncio
from collections.abc import Sequence

import pytest
import torch
from tests.fakes.codec_maps import get_codec_map
from tests.fakes.exchanges import PATIENCE_S, Side, digests, make_sides, run_all, weighted_mean
from tests.fakes.means import MEAN_ATOL, weighted
from tests.fakes.memory_network import Fault, MemoryNetwork, Step, at, changed, stalled
from tests.fakes.virtual_clock import now_s, run_virtual, until
from torch import Tensor

from shoal.compression.error_feedback import ErrorFeedback
from shoal.compression.formats import CODEC_NAMES
from shoal.compression.range_reader import TensorReader
from shoal.swarm.averaging.allreduce import ExchangeResult
from shoal.swarm.averaging.chunk_header import ChunkHeader
from shoal.swarm.averaging.reduction import _WINDOW
from shoal.swarm.averaging.result_fetch import complete_part, fetch_part
from shoal.swarm.averaging.results import ResultStore, RoundMean, part_digest
from shoal.swarm.averaging.round_feedback import settle
from shoal.swarm.coordinator.round_plan import chunk_elements, split
from shoal.swarm.deadlines import Deadlines
from shoal.swarm.errors import BlobUnavailable, LinkError, StorageError
from shoal.swarm.protocol.rounds import Part, PlanMember, RoundPlan
from shoal.swarm.protocol.types import Blob

DEADLINES = Deadlines(PATIENCE_S)
ELEMENTS = 5 * 4096 + 123
"""Six chunks, the last one short."""

PEERS = [letter * 16 for letter in "abcdefgh"]


def make_plan(
    weights: Sequence[int], elements: int = ELEMENTS, shares: Sequence[float] | None = None, chunk: int | None = None
) -> RoundPlan:
    members = len(weights)
    chunk = chunk or chunk_elements(elements, members)
    parts = split(elements, shares or [1 / members] * members, chunk)
    return RoundPlan(
        round=3,
        anchor_version=1,
        state_digest=bytes(32),
        chunk_elements=chunk,
        members=tuple(PlanMember(peer=PEERS[index], weight_tokens=weight) for index, weight in enumerate(weights)),
        parts=tuple(Part(owner=owner, start=start, stop=stop) for owner, start, stop in parts),
    )


def with_stand_ins(plan: RoundPlan, stand_ins: tuple[int, ...]) -> RoundPlan:
    """The same with these for its first part."""
    first, *others = plan.parts
    return plan.model_copy(update={"parts": (first.model_copy(update={"stand_ins": stand_ins}), *others)})


@pytest.mark.parametrize("codec", CODEC_NAMES)
@pytest.mark.parametrize("members", [1, 2, 3, 5, 8])
def test_everybody_gets_the_same_weighted_mean(members: int, codec: str) -> None:
    async def main() -> None:
        plan = make_plan([7 * index + 1 for index in range(members)])
        sides = make_sides(MemoryNetwork(seed=members), plan, codec)
        await run_all(sides)
        means = [await side.commit() for side in sides]
        assert all(digests(side) == digests(sides[0]) for side in sides)
        assert all(torch.equal(mean, means[0]) for mean in means)
        assert all(side.outcome == ExchangeResult() for side in sides)
        expected = weighted_mean(sides, range(members))
        if codec in MEAN_ATOL:
            torch.testing.assert_close(means[0].double(), expected, atol=MEAN_ATOL[codec], rtol=0)
        weights = [member.weight_tokens for member in plan.members]
        kept = weighted([side.feedback.residual for side in sides], weights)
        torch.testing.assert_close(means[0].double() + kept, expected, atol=1e-5, rtol=0)

    run_virtual(main())


@pytest.mark.parametrize("elements", [1, 17, 4095, 4096, 4097, 3 * 4096, 40_001])
def test_any_size(elements: int) -> None:
    async def main() -> None:
        sides = make_sides(MemoryNetwork(), make_plan([3, 1, 2], elements), "int8")
        await run_all(sides)
        means = [await side.commit() for side in sides]
        assert all(torch.equal(mean, means[0]) for mean in means)
        torch.testing.assert_close(means[0].double(), weighted_mean(sides, range(3)), atol=5 / 127, rtol=0)

    run_virtual(main())


@pytest.mark.parametrize("shares", [[1.0, 0.0, 0.0], [0.0, 0.4, 0.6], [0.0, 0.0, 1.0]])
def test_members_may_own_nothing(shares: list[float]) -> None:
    async def main() -> None:
        sides = make_sides(MemoryNetwork(), make_plan([1, 1, 1], shares=shares))
        await run_all(sides)
        assert all(digests(side) == digests(sides[0]) for side in sides)
        assert None not in digests(sides[0])

    run_virtual(main())


@pytest.mark.parametrize("codec", ["int8", "bfloat16", "sign", "topk"])
def test_what_the_means_lack_is_in_the_residuals(codec: str) -> None:
    """Over several rounds: means times total weight, and weighted residuals, add up to the contributions."""

    async def main() -> None:
        network, weights = MemoryNetwork(), [3, 1, 4]
        feedbacks = [ErrorFeedback(ELEMENTS) for _ in weights]
        offered = torch.zeros(ELEMENTS, dtype=torch.float64)
        applied = torch.zeros(ELEMENTS, dtype=torch.float64)
        for number in range(5):
            plan = make_plan(weights).model_copy(update={"round": number})
            sides = make_sides(network, plan, codec, feedbacks)
            await run_all(sides)
            means = [await side.commit() for side in sides]
            applied += sum(weights) * means[0].double()
            for side, weight in zip(sides, weights, strict=True):
                offered += weight * side.brought.double()
        kept = sum(weight * one.residual.double() for one, weight in zip(feedbacks, weights, strict=True))
        torch.testing.assert_close(applied + kept, offered, atol=2e-4, rtol=0)
        assert isinstance(kept, Tensor)
        assert float(kept.abs().max()) > 1e-3
        # Neither do they pile up: one round's loss is all that is ever missing, where that is little.
        assert codec not in MEAN_ATOL or all(float(one.residual.abs().max()) < 0.5 for one in feedbacks)

    run_virtual(main())


# Contributors that fail ---------------------------------------------------------------------------------------


def without(fault: Fault | None, kill: bool = False) -> tuple[list[Side], float]:
    """Members 0 and 1 of three while the third fails: silent from the start, or by a fault."""

    async def main() -> tuple[list[Side], float]:
        network = MemoryNetwork()
        # The third one owns nothing, so that its failure leaves the parts whole.
        sides = make_sides(network, make_plan([1, 1, 2], shares=[0.5, 0.5, 0.0]))
        if fault is not None:
            network.faults.append(fault)
        if kill:
            network.kill(PEERS[2])
        await run_all(sides if not kill else sides[:2])
        return sides, now_s()

    return run_virtual(main())


@pytest.mark.parametrize("case", ["dead", "stalls", "stalls later"])
def test_a_silent_contributor_is_dropped_where_it_did_not_deliver(case: str) -> None:
    # The second owner's part is chunks 3 to 5.
    first = {"dead": 0, "stalls": 0, "stalls later": 4}[case]
    sides, took_s = without(None if case == "dead" else stalled("contribution", PEERS[2], first), case == "dead")
    assert PATIENCE_S < took_s < 2.5 * PATIENCE_S
    left_out = {2} if first == 0 else set()
    assert sides[0].outcome == ExchangeResult(left_out, undelivered=left_out)
    assert sides[1].outcome == ExchangeResult({2}, undelivered={2})
    mean, store = RoundMean(sides[0].store).whole(), sides[0].store
    assert torch.equal(mean, RoundMean(sides[1].store).whole())
    for chunk in range(store.chunks):
        start, stop = store.bounds(chunk)
        who = [0, 1, 2] if chunk < first else [0, 1]
        assert store.header(chunk).included == who
        torch.testing.assert_close(mean[start:stop].double(), weighted_mean(sides, who)[start:stop])


def test_the_dropped_contributor_keeps_what_was_left_out() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        sides = make_sides(network, make_plan([1, 1, 2], shares=[0.5, 0.5, 0.0]), "int8")
        network.faults.append(stalled("contribution", PEERS[2], 4))
        await run_all(sides)
        await sides[2].commit()
        kept, brought = sides[2].feedback.residual, sides[2].brought
        cut = sides[2].store.bounds(4)[0]
        assert torch.equal(kept[cut:], brought[cut:])
        assert 0 < float(kept[:cut].abs().max()) < 0.1

    run_virtual(main())


@pytest.mark.parametrize(
    "garbage",
    [lambda data: b"\xff" * len(data), lambda data: data[:-1], lambda data: b""],
    ids=["not numbers", "too short", "empty"],
)
def test_garbage_is_left_out_and_known_to_all(garbage: object) -> None:
    assert callable(garbage)
    sides, _ = without(changed("contribution", PEERS[2], garbage))
    assert sides[0].outcome == sides[1].outcome == ExchangeResult({2}, undelivered={2})
    assert sides[2].outcome == ExchangeResult()
    mean = RoundMean(sides[0].store).whole()
    assert all(torch.equal(RoundMean(side.store).whole(), mean) for side in sides)
    torch.testing.assert_close(mean.double(), weighted_mean(sides, [0, 1]))
    settle(sides[2].exchange, keep=True)
    assert torch.equal(sides[2].feedback.residual, sides[2].brought)


def test_a_chunk_that_was_wrong_is_fetched_again_while_the_coordinator_is_away() -> None:
    """Nobody is given up then; an owner that went on behind the chunk would wait for it for ever."""
    network, wrong = MemoryNetwork(), {0}

    async def fault(step: Step, payload: bytes) -> bytes:
        if step.blob.kind == "contribution" and step.holder == PEERS[2] and step.chunk in wrong:
            wrong.clear()
            return bytes(len(payload))
        return payload

    network.faults.append(fault)

    async def main() -> None:
        sides = make_sides(network, make_plan([1, 2, 3]), "int8", was_away=lambda since_s: True)
        async with asyncio.timeout(100.0):
            await run_all(sides)
        assert not wrong
        assert all(side.outcome == ExchangeResult() for side in sides)

    run_virtual(main())


def test_errors_that_the_other_side_chooses_do_no_harm() -> None:
    """A reply can carry any error of the protocol, also those that are no ``LinkError``."""

    async def fault(step: Step, payload: bytes) -> bytes:
        if step.holder == PEERS[2]:
            raise StorageError("ha")
        return payload

    sides, _ = without(fault)
    assert sides[0].outcome == sides[1].outcome == ExchangeResult({2}, undelivered={2})


def test_a_window_bounds_what_fast_contributors_hand_in() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        plan = make_plan([1, 1, 1], 100 * 4096, shares=[1.0, 0.0, 0.0], chunk=4096)
        sides = make_sides(network, plan)
        network.faults.append(stalled("contribution", PEERS[2], 10))
        async with asyncio.TaskGroup() as tasks:
            for side in sides:
                tasks.create_task(side.run())
            await asyncio.sleep(PATIENCE_S / 2)
            sent = [step.chunk for step in network.log if step.holder == PEERS[1] and step.blob.kind == "contribution"]
            assert 10 + _WINDOW <= max(sent) <= 10 + _WINDOW + 2
        assert sides[0].outcome == ExchangeResult({2}, undelivered={2})
        assert None not in digests(sides[1])

    run_virtual(main())


# Owners that fail ---------------------------------------------------------------------------------------------


def test_an_owner_that_dies_in_its_reduce_leaves_only_its_part_open() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        sides = make_sides(network, make_plan([1, 1, 1]))
        network.faults.append(at("result", PEERS[1], 3, lambda: network.kill(PEERS[1])))
        await run_all(sides)
        for side in (sides[0], sides[2]):
            assert side.outcome is not None
            assert PEERS[1] in side.outcome.trouble
            assert [digest is not None for digest in digests(side)] == [True, False, True]
        assert digests(sides[0]) == digests(sides[2])
        assert now_s() < 3.6 * PATIENCE_S

    run_virtual(main())


@pytest.mark.parametrize("liars", [{3}, {2}], ids=["owns nothing", "owns a part"])
def test_nobodys_word_alone_makes_a_dead_owners_results(liars: set[int]) -> None:
    async def main() -> None:
        network = MemoryNetwork()
        plan = with_stand_ins(make_plan([1, 1, 1, 1], shares=[1 / 3, 1 / 3, 1 / 3, 0.0]), (1,))
        sides = make_sides(network, plan)
        for liar in liars:
            network.endpoints[PEERS[liar]].publish(sides[liar].store.held, _Forged(sides[liar].store))
        network.kill(PEERS[0])
        await run_all(sides[1:])
        mean = RoundMean(sides[1].store).whole()
        assert all(digests(side) == digests(sides[1]) for side in sides[2:])
        torch.testing.assert_close(
            mean[: plan.parts[0].stop], weighted_mean(sides, [1, 2, 3])[: plan.parts[0].stop].float()
        )

    run_virtual(main())


def test_what_two_have_of_a_dead_owners_results_is_adopted() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        plan = with_stand_ins(make_plan([1, 1, 1, 1], shares=[1.0, 0.0, 0.0, 0.0]), (1,))
        sides = make_sides(network, plan, "int8")
        network.faults.append(stalled("result", PEERS[0], 0, to=PEERS[1]))
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(side.run()) for side in sides]
            await until(lambda: all(None not in digests(side) for side in (sides[2], sides[3])))
            network.kill(PEERS[0])
            running[0].cancel()
        assert digests(sides[1]) == digests(sides[0])
        assert not sides[1].exchange.as_stand_in
        assert sides[1].exchange.made() == {}, "it does not sign for what it has adopted"

    run_virtual(main())


def test_of_two_stand_ins_with_the_same_bytes_one_carries_the_error() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        plan = with_stand_ins(make_plan([1, 1, 1, 1]), (1, 2))
        sides, part = make_sides(network, plan, "int8"), plan.parts[0]

        async def fault(step: Step, payload: bytes) -> bytes:
            mine = step.chunk in sides[0].store.chunks_of(part)
            if mine and step.blob.kind in ("result", "held") and {step.holder, step.to} == {PEERS[1], PEERS[2]}:
                raise LinkError("the connection was lost")
            return payload

        network.faults.append(fault)
        network.kill(PEERS[0])
        await run_all(sides[1:])
        assert sides[1].store.digest(part) == sides[2].store.digest(part)
        assert all(side.exchange.as_stand_in for side in sides[1:3])
        mean, *_ = [await side.commit() for side in sides[1:]]
        kept = weighted([side.feedback.residual for side in sides[1:]], [1, 1, 1])
        made = slice(part.start, part.stop)
        expected = weighted_mean(sides, [1, 2, 3])
        torch.testing.assert_close((mean.double() + kept)[made], expected[made], atol=1e-5, rtol=0)

    run_virtual(main())


class _Forged:
    """As held results: a mean of everybody's that is not."""

    def __init__(self, store: ResultStore) -> None:
        self.chunks = store.chunks
        self._store = store

    async def chunk(self, index: int) -> memoryview:
        start, stop = self._store.bounds(index)
        header = self._store.group.pack_header(ChunkHeader([0, 1, 2, 3]))
        return memoryview(header + torch.full((stop - start,), 666.0).numpy().tobytes())


def test_results_can_be_had_from_whoever_has_them() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        plan = make_plan([1, 1, 1])
        sides = make_sides(network, plan)
        network.faults.append(at("result", PEERS[1], 3, lambda: network.kill(PEERS[1]), to=PEERS[2]))
        network.faults.append(stalled("result", PEERS[1], 2, to=PEERS[2]))
        await run_all(sides)
        part = plan.parts[1]
        assert [side.store.has(part) for side in sides] == [True, True, False]
        wanted = sides[0].store.digest(part)
        endpoint = network.endpoints[PEERS[2]]
        await complete_part(endpoint, sides[2].store, part, wanted, PEERS[:2], DEADLINES)
        assert sides[2].store.digest(part) == wanted

    run_virtual(main())


def test_an_owner_that_is_silent_is_not_waited_for_when_others_have_its_results() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        sides = make_sides(network, make_plan([1, 1, 1]))
        await run_all(sides)
        late, part, wanted = sides[2], sides[0].store.plan.parts[1], sides[0].store.digest(sides[0].store.plan.parts[1])
        late.store.forget(part)
        network.silent.add((PEERS[1], PEERS[2]))
        start_s = now_s()
        await complete_part(network.endpoints[PEERS[2]], late.store, part, wanted, PEERS[:2], DEADLINES)
        assert late.store.digest(part) == wanted
        assert now_s() - start_s < PATIENCE_S / 2

    run_virtual(main())


def test_whoever_is_still_making_results_is_waited_for() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        sides = make_sides(network, make_plan([1, 1, 1]))
        await run_all(sides)
        late, maker, part = sides[2].store, sides[0].store, sides[0].store.plan.parts[1]
        wanted, made = maker.digest(part), {index: maker[index] for index in maker.chunks_of(part)}
        late.forget(part)
        maker.forget(part)
        network.kill(PEERS[1])
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(complete_part(network.endpoints[PEERS[2]], late, part, wanted, PEERS[:2], DEADLINES))
            await asyncio.sleep(1.5 * PATIENCE_S)
            for index, result in made.items():
                await maker.put(index, result)
        assert late.digest(part) == wanted

    run_virtual(main())


def test_an_owner_of_two_faces_is_seen_by_the_digests() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        sides = make_sides(network, make_plan([1, 1, 1]))
        network.faults.append(changed("result", PEERS[1], lambda data: data[:-4] + bytes(4), to=PEERS[2]))
        await run_all(sides)
        assert digests(sides[0]) == digests(sides[1])
        assert digests(sides[2])[1] not in (None, digests(sides[0])[1])
        # Who has other bytes than the committed ones gets the right ones from the third, not from the owner.
        part, wanted = sides[0].store.plan.parts[1], sides[0].store.digest(sides[0].store.plan.parts[1])
        await complete_part(network.endpoints[PEERS[2]], sides[2].store, part, wanted, PEERS[:2], DEADLINES)
        assert digests(sides[2]) == digests(sides[0])

    run_virtual(main())


def test_looking_for_a_part_takes_no_longer_with_many_that_lack_it() -> None:
    async def took_s(members: int) -> float:
        network = MemoryNetwork()
        sides = make_sides(network, make_plan([1] * members, shares=[0.5, 0.5, *[0.0] * (members - 2)]))
        part = sides[0].store.plan.parts[0]
        for gone in PEERS[:2]:
            network.kill(gone)

        async def look(index: int) -> None:
            others = [peer for peer in PEERS[:members] if peer != PEERS[index]]
            with pytest.raises(LinkError):
                await complete_part(
                    network.endpoints[PEERS[index]], sides[index].store, part, bytes(32), others, DEADLINES
                )

        await asyncio.gather(*map(look, range(2, members)))
        return now_s()

    assert run_virtual(took_s(8)) < run_virtual(took_s(3)) + PATIENCE_S


def test_chunks_of_those_that_have_not_got_all_are_kept() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        sides = make_sides(network, make_plan([1, 1, 1, 1], shares=[1.0, 0.0, 0.0, 0.0]))
        await run_all(sides)
        late, part = sides[3].store, sides[0].store.plan.parts[0]
        wanted, made = late.digest(part), [late[index] for index in late.chunks_of(part)]
        for side in sides[1:]:
            side.store.forget(part)
        network.kill(PEERS[0])
        await sides[1].store.put(0, made[0])
        for index in range(1, len(made)):
            await sides[2].store.put(index, made[index])
        await complete_part(network.endpoints[PEERS[3]], late, part, wanted, PEERS[:3], DEADLINES)
        assert late.digest(part) == wanted

    run_virtual(main())


def test_one_wrong_chunk_among_others_spoils_nobody_elses() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        sides = make_sides(network, make_plan([1, 1, 1, 1], shares=[1.0, 0.0, 0.0, 0.0]))
        await run_all(sides)
        late, part = sides[3].store, sides[0].store.plan.parts[0]
        wanted = late.digest(part)
        for side in (sides[1], sides[3]):
            side.store.forget(part)
        await sides[1].store.put(0, memoryview(bytes(len(sides[0].store[0]))))
        network.kill(PEERS[0])
        await complete_part(network.endpoints[PEERS[3]], late, part, wanted, PEERS[:3], DEADLINES)
        assert late.digest(part) == wanted

    run_virtual(main())


def test_what_nobody_has_is_not_made_up() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        sides = make_sides(network, make_plan([1, 1]))
        await run_all(sides)
        part = sides[0].store.plan.parts[1]
        with pytest.raises(LinkError, match="other bytes"):
            await complete_part(network.endpoints[PEERS[0]], sides[0].store, part, bytes(32), PEERS[1:2], DEADLINES)
        assert not sides[0].store.has(part)

    run_virtual(main())


@pytest.mark.parametrize(
    "void",
    [
        lambda data: data[:1] + b"\xff" * (len(data) - 1),
        lambda data: data[:1],
        lambda data: b"\0" + data[1:],
        lambda data: b"\0",
    ],
    ids=["not numbers", "mean missing", "mask empty", "nobody"],
)
def test_result_bytes_without_a_mean_are_void_for_all(void: object) -> None:
    """A bad owner's bytes, once committed, still come to the same for everybody, and nobody's work is lost."""
    assert callable(void)

    async def main() -> None:
        sides = make_sides(MemoryNetwork(), make_plan([1, 1], shares=[1.0, 0.0]), "int8")
        await run_all(sides)
        for side in sides:
            await side.store.put(2, memoryview(void(bytes(side.store[2]))))
        means = [await side.commit() for side in sides]
        assert torch.equal(means[0], means[1])
        start, stop = sides[0].store.bounds(2)
        assert not bool(means[0][start:stop].any())
        assert bool(means[0][:start].any())
        for side in sides:
            assert torch.equal(side.feedback.residual[start:stop], side.brought[start:stop])

    run_virtual(main())


@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: data + b"x", lambda data: b""])
def test_result_chunks_of_other_sizes_are_refused(change: object) -> None:
    assert callable(change)

    async def main() -> None:
        network = MemoryNetwork()
        sides = make_sides(network, make_plan([1, 1]))
        network.faults.append(changed("result", PEERS[1], change))
        await run_all(sides)
        assert [digest is not None for digest in digests(sides[0])] == [True, False]
        assert sides[0].outcome is not None
        assert "does not fit" in sides[0].outcome.trouble

    run_virtual(main())


# After the round ----------------------------------------------------------------------------------------------


def test_streams_that_outlive_the_round_get_nothing_of_the_next() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        sides = make_sides(network, make_plan([1, 1]))
        await run_all(sides)
        source = network.endpoints[PEERS[0]].blobs[sides[0].exchange.blob]
        before = bytes(await source.chunk(5))
        await sides[0].commit()
        assert sides[0].exchange.blob not in network.endpoints[PEERS[0]].blobs
        sides[0].feedback.begin(TensorReader(torch.ones(ELEMENTS)))
        for chunk in (0, 5):
            with pytest.raises(BlobUnavailable):
                await source.chunk(chunk)
        sides[0].feedback.commit()
        assert torch.equal(sides[0].feedback.residual, torch.ones(ELEMENTS))
        assert before

    run_virtual(main())


def test_whoever_asks_an_owner_for_its_own_chunks_changes_nothing() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        sides = make_sides(network, make_plan([1, 1]), "topk")
        await run_all(sides)
        source = network.endpoints[PEERS[0]].blobs[sides[0].exchange.blob]
        for chunk in range(source.chunks):
            assert await source.chunk(chunk)
        means = [await side.commit() for side in sides]
        kept = weighted([side.feedback.residual for side in sides], [1, 1])
        torch.testing.assert_close(means[0].double() + kept, weighted_mean(sides, [0, 1]), atol=1e-5, rtol=0)

    run_virtual(main())


def test_owners_carry_what_their_means_lost_by_their_share_of_them() -> None:
    """Of the weight of those who are in it, once decayed."""

    async def residuals(decay: float) -> list[Tensor]:
        network, weights = MemoryNetwork(), [3, 1, 4]
        feedbacks = [ErrorFeedback(ELEMENTS, decay) for _ in weights]
        network.faults.append(changed("contribution", PEERS[2], lambda data: b"\xff" * len(data)))
        sides = make_sides(network, make_plan(weights, shares=[0.5, 0.5, 0.0]), "int8", feedbacks)
        await run_all(sides)
        mean, *_ = [await side.commit() for side in sides]
        kept = [side.feedback.residual for side in sides]
        assert torch.equal(kept[2], sides[2].brought)
        if decay == 1.0:
            found = mean.double() + weighted(kept[:2], weights[:2])
            torch.testing.assert_close(found, weighted_mean(sides, [0, 1]), atol=1e-6, rtol=0)
        return kept[:2]

    for whole, half in zip(run_virtual(residuals(1.0)), run_virtual(residuals(0.5)), strict=True):
        assert torch.equal(0.5 * whole, half)
        assert bool(half.any())


def test_an_owner_whose_bytes_are_not_the_committed_ones_carries_no_loss_of_theirs() -> None:

    async def main() -> None:
        plan = make_plan([3, 1])
        side, *_ = sides = make_sides(MemoryNetwork(), plan, "int8")
        await run_all(sides)
        store, source, chunk = side.store, side.exchange._source, 1
        start, stop = store.bounds(chunk)
        codec = store.codec_map.contribution(start, stop)
        served = (await source.chunk(chunk))[: codec.packed_bytes(stop - start)]
        sent = codec.decode(served, stop - start)
        others = bytearray(store[chunk])
        others[-1] ^= 1
        await store.put(chunk, memoryview(others))
        await side.commit()
        residual = side.feedback.residual
        assert torch.equal(residual[start:stop], side.brought[start:stop] - sent)
        assert 0 < float(residual[:start].abs().max()) < 0.1

    run_virtual(main())


def test_closing_a_store_ends_the_streams_that_wait_on_it() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        store = ResultStore(make_plan([1, 1]), get_codec_map("float32"))
        waiting = asyncio.create_task(store.chunk(0))
        await asyncio.sleep(1)
        assert not waiting.done()
        await store.close()
        with pytest.raises(BlobUnavailable):
            await waiting
        network.endpoint(PEERS[0]).publish(store.blob, store)
        other = ResultStore(store.plan, store.codec_map)
        with pytest.raises(BlobUnavailable):
            await fetch_part(network.endpoint(PEERS[1]), other, store.plan.parts[0], PEERS[0], 1.0)

    run_virtual(main())


def test_work_that_others_redo_is_not_kept() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        sides = make_sides(network, make_plan([1, 1, 2], shares=[0.5, 0.5, 0.0]))
        network.faults.append(stalled("contribution", PEERS[2], 0))
        await run_all(sides)
        RoundMean(sides[2].store).whole()
        settle(sides[2].exchange, keep=False)
        assert not bool(sides[2].feedback.residual.any())

    run_virtual(main())


def test_blobs_are_named_by_the_round() -> None:
    async def main() -> None:
        side = make_sides(MemoryNetwork(), make_plan([1]))[0]
        assert side.exchange.blob == Blob(kind="contribution", number=3, grid=side.store.plan.chunk_elements)
        assert side.store.blob == Blob(kind="result", number=3)

    run_virtual(main())


def test_results_are_digested_while_others_are_on_their_way() -> None:
    """With the last chunk of a part still missing, those before it are done already."""

    async def main() -> None:
        plan = make_plan([1, 1], 24 * 4096, chunk=4096)
        side, *_ = sides = make_sides(MemoryNetwork(), plan, "int8")
        last = side.store.chunks_of(plan.parts[1])[-1]
        put, digest_ahead = side.store.put, side.store.digest_ahead
        held_back, some_are_digested, loop = asyncio.Event(), asyncio.Event(), asyncio.get_running_loop()

        async def slowly(chunk: int, data: memoryview) -> None:
            if chunk == last:
                await held_back.wait()
            await put(chunk, data)

        def noting(part: Part, stop: int) -> None:
            assert stop <= last or part != plan.parts[1]
            digest_ahead(part, stop)
            if part == plan.parts[1]:
                loop.call_soon_threadsafe(some_are_digested.set)

        side.store.put, side.store.digest_ahead = slowly, noting  # type: ignore[method-assign]
        running = asyncio.create_task(run_all(sides))
        async with asyncio.timeout(5.0):
            await some_are_digested.wait()
        held_back.set()
        await running
        chunks = side.store.bytes_of(plan.parts[1])
        assert side.store.digest(plan.parts[1]) == part_digest(chunks)

    run_virtual(main())
