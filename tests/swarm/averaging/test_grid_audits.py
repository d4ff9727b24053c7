"""Audits in grids: means are checked against signed partial sums, and these against committed contributions."""

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.fakes.audited_member import Audited
from tests.fakes.audits import GRID_ELEMENTS, AuditedRound, committed_round, facts, lie, signed
from tests.fakes.exchanges import Side
from tests.fakes.grids import PEERS
from tests.fakes.memory_network import MemoryNetwork, Step, stalled
from tests.fakes.memory_network import changed as changed_on_its_way
from tests.fakes.swarm import run_toml, swarm, together
from tests.fakes.virtual_clock import run_virtual

from shoal.swarm.averaging import reduction
from shoal.swarm.averaging.allreduce import AllReduce
from shoal.swarm.averaging.auditor import Auditor, auditable
from shoal.swarm.averaging.chunk_judge import Judgement, judge
from shoal.swarm.averaging.norm_bounds import NormBounds
from shoal.swarm.averaging.outcome import Committed
from shoal.swarm.averaging.partial_sums import sign_partial_sum
from shoal.swarm.averaging.reduction import Reduction
from shoal.swarm.deadlines import Deadlines
from shoal.swarm.protocol.evidence import Evidence, pack_evidence, unpack_evidence
from shoal.swarm.protocol.rounds import Part, RoundPlan

ROWS = [[0, 3], [1, 4], [2, 5]]
Before = Callable[[MemoryNetwork, list[Side]], object]


def nothing(network: MemoryNetwork, sides: list[Side]) -> None:
    """Everybody is honest."""


def places(plan: RoundPlan) -> tuple[int, int, int, int]:
    """Return a part that member 0 neither owns nor collects for, a chunk of it, another row, and its row reducer."""
    for number, part in enumerate(plan.parts):
        if 0 not in plan.row_reducers(part):
            row = next(row for row in range(len(ROWS)) if row != plan.members[part.owner].row)
            return number, part.start // plan.chunk_elements, row, plan.row_reducers(part)[row]
    raise AssertionError("member 0 collects for all parts")


def part_of(plan: RoundPlan) -> Part:
    return plan.parts[places(plan)[0]]


def grid_round(before: Before = nothing, codec: str = "int8", mean: str = "weighted") -> AuditedRound:
    return run_virtual(committed_round(codec, mean=mean, rows=ROWS, before=before))


def found(done: AuditedRound, codec: str = "int8") -> tuple[Judgement, Judgement]:
    """Judge the mean of a chunk, and a partial sum that it includes."""
    number, chunk, row, _ = places(done.plan)

    async def main() -> tuple[Judgement, Judgement]:
        known = facts(codec, GRID_ELEMENTS)
        return judge(await done.evidence(number, chunk), known), judge(await done.evidence(number, chunk, row), known)

    return run_virtual(main())


def lying_owner(network: MemoryNetwork, sides: list[Side]) -> None:
    lie(sides[part_of(sides[0].store.plan).owner].exchange.as_owner)


def lying_row_reducer(network: MemoryNetwork, sides: list[Side]) -> None:
    lie(sides[places(sides[0].store.plan)[3]].exchange.as_row_reducer)


# The judge ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("codec", "mean"),
    [("int8", "weighted"), ("float32", "weighted"), ("int8", "trimmed")],
)
def test_honest_means_and_partial_sums_are_innocent(codec: str, mean: str) -> None:
    done = grid_round(codec=codec, mean=mean)
    number, chunk, row, row_reducer = places(done.plan)
    assert row in done.sides[0].store.group.header(done.sides[0].store[chunk]).reduced_rows
    of_mean, of_sum = found(done, codec)
    assert (of_mean.word, of_mean.maker) == ("innocent", PEERS[done.plan.parts[number].owner])
    assert (of_sum.word, of_sum.maker) == ("innocent", PEERS[row_reducer])


def test_a_lying_row_reducer_is_guilty_and_the_owner_that_included_its_sum_is_not() -> None:
    done = grid_round(lying_row_reducer)
    of_mean, of_sum = found(done)
    assert of_mean.word == "innocent"
    assert (of_sum.word, of_sum.maker) == ("guilty", PEERS[places(done.plan)[3]])
    assert 0.0 < of_sum.excess < 1.0, "it has changed one bit"


def test_a_lying_owner_is_guilty_and_its_row_reducers_are_not() -> None:
    done = grid_round(lying_owner)
    of_mean, of_sum = found(done)
    assert (of_mean.word, of_mean.maker) == ("guilty", PEERS[part_of(done.plan).owner])
    assert of_sum.word == "innocent"


def test_an_owner_is_not_judged_by_another_partial_sum_than_it_was_given() -> None:
    """A row reducer may sign two of one chunk."""
    done = grid_round()
    number, chunk, row, row_reducer = places(done.plan)
    signer, group = done.sides[row_reducer].exchange.signer, done.sides[0].store.group.row(row)

    async def main() -> tuple[Evidence, Evidence]:
        on_mean = unpack_evidence(await done.evidence(number, chunk))
        shown = {one.row: bytearray(one.data) for one in on_mean.partial_sums}
        shown[row][-1] ^= 1
        sign_partial_sum(signer, row, group, chunk, memoryview(shown[row]))
        sums = tuple(one.model_copy(update={"data": bytes(shown[one.row])}) for one in on_mean.partial_sums)
        on_sum = unpack_evidence(await done.evidence(number, chunk, row))
        other = on_sum.model_copy(update={"result": bytes(shown[row])})
        return on_mean.model_copy(update={"partial_sums": sums}), other

    of_mean, of_sum = (judge(pack_evidence(one), facts("int8", GRID_ELEMENTS)) for one in run_virtual(main()))
    assert of_mean.word == "void"
    assert (of_sum.word, of_sum.maker) == ("guilty", PEERS[row_reducer])


def test_an_owner_may_not_include_what_no_row_reducer_has_signed(monkeypatch: pytest.MonkeyPatch) -> None:
    def forge(network: MemoryNetwork, sides: list[Side]) -> None:
        """The owner of all parts makes the partial sum up that it includes."""
        monkeypatch.setattr(reduction, "is_signed", lambda *_: True)

        async def fault(step: Step, payload: bytes) -> bytes:
            return payload[:-1] + bytes([payload[-1] ^ 1]) if step.blob.kind == "partial" else payload

        network.faults.append(fault)

    done = grid_round(forge)
    number, chunk, *_ = places(done.plan)
    evidence = run_virtual(done.evidence(number, chunk))
    of_mean = judge(evidence, facts("int8", GRID_ELEMENTS))
    assert (of_mean.word, of_mean.maker) == ("guilty", PEERS[part_of(done.plan).owner])


def test_an_honest_owner_sums_a_row_itself_whose_partial_sums_are_not_signed() -> None:
    def forge(network: MemoryNetwork, sides: list[Side]) -> None:
        row_reducer = PEERS[places(sides[0].store.plan)[3]]
        network.faults.append(changed_on_its_way("partial", row_reducer, changed))

    done = grid_round(forge)
    number, chunk, row, row_reducer = places(done.plan)
    header = done.sides[0].store.group.header(done.sides[0].store[chunk])
    assert row not in header.reduced_rows
    assert {one for one in ROWS[row] if one != row_reducer} < set(header.included)
    of_mean = judge(run_virtual(done.evidence(number, chunk)), facts("int8", GRID_ELEMENTS))
    assert (of_mean.word, of_mean.maker) == ("innocent", PEERS[part_of(done.plan).owner])


def test_an_owner_may_not_include_a_partial_sum_above_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    def huge(network: MemoryNetwork, sides: list[Side]) -> None:
        plan = sides[0].store.plan
        exchange: AllReduce = sides[places(plan)[3]].exchange
        put = exchange.as_row_reducer.put

        async def enlarged(chunk: int, data: memoryview) -> None:
            start, stop = sides[0].store.bounds(chunk)
            group = exchange.as_row_reducer.group
            codec = sides[0].store.codec_map.result(start, stop, len(group.members))
            values = codec.decode(data[group.header_bytes :], stop - start) * 1000.0
            packed = codec.encode(values).numpy().tobytes()
            await put(chunk, memoryview(bytearray(bytes(data[: group.header_bytes]) + packed)))

        exchange.as_row_reducer.put = enlarged
        context.setattr(NormBounds, "partial_sum", lambda *_: float("inf"))
        context.setattr(NormBounds, "mean", lambda *_, **__: float("inf"))

    with monkeypatch.context() as context:
        done = grid_round(huge)
    of_mean, of_sum = found(done)
    assert (of_mean.word, of_mean.maker) == ("guilty", PEERS[part_of(done.plan).owner])
    assert of_sum.word == "guilty"


HONEST, FALSE_SUM, FALSE_MEAN = grid_round(), grid_round(lying_row_reducer), grid_round(lying_owner)
KNOWN = facts("int8", GRID_ELEMENTS)


def changed(data: bytes, at: int = -1) -> bytes:
    new = bytearray(data)
    new[at] ^= 1
    return bytes(new)


def with_sum(one: Evidence, change: Callable[[bytes], bytes]) -> Evidence:
    first, *others = one.partial_sums
    return one.model_copy(update={"partial_sums": (first.model_copy(update={"data": change(first.data)}), *others)})


def with_contribution(one: Evidence, change: Callable[[bytes], bytes]) -> Evidence:
    first, *others = one.contributions
    return one.model_copy(update={"contributions": (first.model_copy(update={"data": change(first.data)}), *others)})


def signature_at(one: Evidence) -> int:
    """The first byte of a partial sum's signature."""
    plan = one.verdict.plan
    assert plan is not None
    return (sum(member.row == one.row for member in plan.members) + 7) // 8


def other_plan(one: Evidence) -> Evidence:
    plan = one.verdict.plan
    assert plan is not None
    heavier = plan.members[0].model_copy(update={"weight_tokens": 1000})
    other = plan.model_copy(update={"members": (heavier, *plan.members[1:])})
    return one.model_copy(update={"verdict": signed(one.verdict.model_copy(update={"plan": other}))})


OF_MEANS: dict[str, Callable[[Evidence], Evidence]] = {
    "a partial sum": lambda one: with_sum(one, changed),
    "a partial sum's signature": lambda one: with_sum(one, lambda data: changed(data, 2)),
    "a cut partial sum": lambda one: with_sum(one, lambda data: data[:-1]),
    "no partial sum": lambda one: with_sum(one, lambda data: b""),
    "a missing partial sum": lambda one: one.model_copy(update={"partial_sums": one.partial_sums[1:]}),
    "no partial sums": lambda one: one.model_copy(update={"partial_sums": ()}),
    "swapped partial sums": lambda one: one.model_copy(update={"partial_sums": one.partial_sums[::-1]}),
    "a partial sum twice": lambda one: one.model_copy(
        update={"partial_sums": (one.partial_sums[0], *one.partial_sums)}
    ),
    "a contribution": lambda one: with_contribution(one, lambda data: changed(data, 0)),
    "no contributions": lambda one: one.model_copy(update={"contributions": ()}),
    "the name of the partial sums": lambda one: one.model_copy(update={"result": changed(one.result, 2)}),
    "as a partial sum": lambda one: one.model_copy(update={"row": 0}),
}
OF_SUMS: dict[str, Callable[[Evidence], Evidence]] = {
    "the partial sum": lambda one: one.model_copy(update={"result": changed(one.result)}),
    "its signature": lambda one: one.model_copy(update={"result": changed(one.result, signature_at(one))}),
    "its members": lambda one: one.model_copy(update={"result": changed(one.result, 0)}),
    "a cut partial sum": lambda one: one.model_copy(update={"result": one.result[:-1]}),
    "its header alone": lambda one: one.model_copy(update={"result": one.result[: signature_at(one) + 64]}),
    "nothing": lambda one: one.model_copy(update={"result": b""}),
    "another row": lambda one: one.model_copy(update={"row": (one.row or 0) - 1 if one.row else 1}),
    "no row": lambda one: one.model_copy(update={"row": len(ROWS)}),
    "as a mean": lambda one: one.model_copy(update={"row": None}),
    "another chunk": lambda one: one.model_copy(update={"chunk": one.chunk + 1}),
    "another part": lambda one: one.model_copy(update={"part": one.part - 1 if one.part else 1}),
    "a path": lambda one: one.model_copy(update={"path": bytes(32)}),
    "a contribution": lambda one: with_contribution(one, lambda data: changed(data, 0)),
    "a missing contribution": lambda one: one.model_copy(update={"contributions": one.contributions[1:]}),
    "another plan": other_plan,
    "the host's signature": lambda one: one.model_copy(
        update={"verdict": one.verdict.model_copy(update={"signature": bytes(64)})}
    ),
}


@pytest.mark.parametrize("what", OF_MEANS)
@pytest.mark.parametrize("done", [FALSE_MEAN, HONEST], ids=["of a lie", "of the truth"])
def test_tampered_evidence_on_a_mean_is_void(done: AuditedRound, what: str) -> None:
    number, chunk, *_ = places(done.plan)
    evidence = unpack_evidence(run_virtual(done.evidence(number, chunk)))
    tampered = OF_MEANS[what](evidence)
    assert tampered != evidence
    assert judge(pack_evidence(tampered), KNOWN).word == "void"


@pytest.mark.parametrize("what", OF_SUMS)
@pytest.mark.parametrize("done", [FALSE_SUM, HONEST], ids=["of a lie", "of the truth"])
def test_tampered_evidence_on_a_partial_sum_is_void(done: AuditedRound, what: str) -> None:
    number, chunk, row, _ = places(done.plan)
    evidence = unpack_evidence(run_virtual(done.evidence(number, chunk, row)))
    tampered = OF_SUMS[what](evidence)
    assert tampered != evidence
    assert judge(pack_evidence(tampered), KNOWN).word == "void"


# Auditors -----------------------------------------------------------------------------------------------------


async def audited(done: AuditedRound, rounds: int = 2) -> tuple[Auditor, list[Judgement]]:
    """Let the first member audit the round some times, as if it were as many rounds."""
    accused: list[Judgement] = []

    async def accuse(evidence: bytes) -> None:
        accused.append(judge(evidence, KNOWN))

    auditor = Auditor(done.network.endpoints[PEERS[0]], PEERS[0], 1.0, Deadlines(6.0), accuse, random.Random(1))
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(auditor.run())
        for _ in range(rounds):
            for kept in done.inclusions:
                kept._streams.clear()
            auditor.offer(done.sides[0].store, done.verdict)
            await asyncio.sleep(10.0)
        running.cancel()
    return auditor, accused


def test_honest_members_of_a_grid_are_accused_of_nothing() -> None:
    async def main() -> None:
        done = await committed_round(rows=ROWS)
        auditor, accused = await audited(done)
        checkable = list(auditable(done.sides[0].store, done.verdict, PEERS[0]))
        assert auditor.audited > len(checkable) > 8, "means and partial sums"
        assert accused == []
        assert auditor.accused(3) == set()

    run_virtual(main())


@pytest.mark.parametrize("liar", [lying_owner, lying_row_reducer])
def test_auditors_of_a_grid_name_the_liar_and_nobody_else(liar: Before) -> None:
    async def main() -> None:
        done = await committed_round(rows=ROWS, before=liar)
        auditor, accused = await audited(done, rounds=3)
        who = part_of(done.plan).owner if liar is lying_owner else places(done.plan)[3]
        assert {(one.word, one.maker) for one in accused} == {("guilty", PEERS[who])}
        assert auditor.accused(3) == set()

    run_virtual(main())


def hiding(kind: str) -> Before:
    """The row reducer shows nothing, or the owner shows no partial sums."""

    def before(network: MemoryNetwork, sides: list[Side]) -> None:
        plan = sides[0].store.plan
        members = len(plan.members)
        who = part_of(plan).owner if kind == "owner" else places(plan)[3]

        async def fault(step: Step, payload: bytes) -> bytes:
            is_sum = step.chunk % (members + len(ROWS)) >= members
            is_hidden = step.blob.kind == "included" and step.holder == PEERS[who]
            return b"" if is_hidden and (is_sum or kind != "owner") else payload

        network.faults.append(fault)

    return before


@pytest.mark.parametrize("kind", ["owner", "row reducer"])
def test_who_hides_what_it_included_is_named_in_reports(kind: str) -> None:
    async def main() -> None:
        done = await committed_round(rows=ROWS, before=hiding(kind))
        auditor, accused = await audited(done, rounds=3)
        who = part_of(done.plan).owner if kind == "owner" else places(done.plan)[3]
        assert accused == []
        assert auditor.accused(3) == {PEERS[who]}

    run_virtual(main())


# Members that fail ----------------------------------------------------------------------------------------------


def silent_row_reducer(network: MemoryNetwork, sides: list[Side]) -> None:
    network.faults.append(stalled("partial", PEERS[places(sides[0].store.plan)[3]], 0))


def silent_owner(network: MemoryNetwork, sides: list[Side]) -> None:
    network.faults.append(stalled("result", PEERS[part_of(sides[0].store.plan).owner], 0))


@pytest.mark.parametrize("silent", [silent_row_reducer, silent_owner])
def test_means_without_a_row_reducer_or_owner_can_be_audited(silent: Before) -> None:
    """The row's members are summed directly; a stand-in answers for what it has made, its own row's sum included."""

    async def main() -> None:
        done = await committed_round(rows=ROWS, before=silent)
        store, (number, chunk, row, row_reducer) = done.sides[0].store, places(done.plan)
        header = store.group.header(store[chunk])
        if silent is silent_owner:
            maker = done.maker(number)
            assert maker != part_of(done.plan).owner
            assert done.plan.members[maker].row in header.reduced_rows
        else:
            assert row not in header.reduced_rows
            assert {one for one in ROWS[row] if one != row_reducer} < set(header.included)
        assert judge(await done.evidence(number, chunk), KNOWN).word == "innocent"
        auditor, accused = await audited(done)
        assert auditor.audited
        assert accused == []

    run_virtual(main())


# Whole rounds -----------------------------------------------------------------------------------------------------

MEMBERS, SWARM_ELEMENTS = 6, 13 * 4096 + 17


@pytest.mark.parametrize("liar", [None, 1])
def test_a_run_in_grids_finds_who_makes_partial_sums_up_and_accuses_nobody_else(
    liar: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    real: Any = Reduction.run

    async def run(self: Reduction, *arguments: Any) -> None:
        if self.context.endpoint is swarm_endpoints.get(liar) and len(self.group.rows) == 1:
            lie(self)
        await real(self, *arguments)

    swarm_endpoints: dict[int | None, object] = {}
    monkeypatch.setattr(Reduction, "run", run)

    async def main() -> None:
        toml = run_toml(60, "int8", group_size=3) + "[audit]\nshare = 1.0\n"
        async with swarm(MEMBERS, toml, SWARM_ELEMENTS, make=Audited) as members:
            if liar is not None:
                swarm_endpoints[liar] = members[liar].endpoint
            for number in range(3):
                plays = [one.play(torch.randn(SWARM_ELEMENTS) * 0.1, 10) for one in members.members]
                outcomes = await together(*plays)
                assert all(
                    isinstance(one, Committed) and one.verdict.plan and one.verdict.plan.columns for one in outcomes
                )
                await asyncio.sleep(5.0)
                assert members[0].view.round == number + 1
            judged = [one for member in members.members for one in member.found]  # type: ignore[attr-defined]
            assert {(one.word, one.maker) for one in judged} == (
                set() if liar is None else {("guilty", members[liar].peer)}
            )
            auditors = [member.averager.auditor for member in members.members]
            assert all(one is not None and one.audited and one.accused(2) == set() for one in auditors)

    run_virtual(main())
