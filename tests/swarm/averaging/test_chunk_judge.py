"""Evidence proves a wrong mean, and whatever else is done to it proves nothing."""

import math
import tracemalloc
from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np
import pytest
from tests.fakes.audits import HOST, change_a_bit, committed_round, facts, signed
from tests.fakes.claims import claiming
from tests.fakes.codec_maps import get_codec_map
from tests.fakes.virtual_clock import run_virtual

from shoal.compression.formats import CODEC_NAMES
from shoal.compression.norms import RELATIVE_ERROR
from shoal.swarm.averaging.chunk_judge import _LEEWAY, RunFacts, _values, checked_contribution, judge
from shoal.swarm.averaging.norm_bounds import NormBounds
from shoal.swarm.averaging.norm_claims import claimed_squares, pack, ranges
from shoal.swarm.averaging.reduction import PartReducer
from shoal.swarm.averaging.results import ResultStore
from shoal.swarm.errors import WireError
from shoal.swarm.protocol.evidence import Evidence, ShownContribution, evidence_id, pack_evidence, unpack_evidence
from shoal.swarm.protocol.identity import Identity

PART, CHUNK = 1, 2


Change = Callable[[memoryview], None]


def evidence_of(
    codec: str = "int8", liar: int | None = None, mean: str = "weighted", change: Change = change_a_bit
) -> Evidence:
    async def main() -> Evidence:
        done = await committed_round(codec, liar, mean, change=change)
        return unpack_evidence(await done.evidence(PART, CHUNK))

    return run_virtual(main())


WRONG, RIGHT = evidence_of(liar=1), evidence_of()
FACTS = facts("int8")


@pytest.mark.parametrize("codec", CODEC_NAMES)
def test_an_honest_mean_is_innocent(codec: str) -> None:
    found = judge(pack_evidence(evidence_of(codec)), facts(codec))
    assert (found.word, found.round) == ("innocent", 3)


@pytest.mark.parametrize("mean", ["clip", "trimmed"])
def test_a_robust_mean_can_be_judged(mean: str) -> None:
    assert judge(pack_evidence(evidence_of(mean=mean)), FACTS).word == "innocent"
    assert judge(pack_evidence(evidence_of(liar=1, mean=mean)), FACTS).word == "guilty"


def test_a_made_up_mean_is_proven() -> None:
    found = judge(pack_evidence(WRONG), FACTS)
    plan = WRONG.verdict.plan
    assert plan is not None
    assert (found.word, found.maker) == ("guilty", plan.members[1].peer)


def scaled(factor: float) -> Change:
    """Return the lie of an owner that makes its mean so many times as long; of float32 values behind one byte."""

    def change(mean: memoryview) -> None:
        values = np.frombuffer(mean, dtype="<f4", offset=1)
        values *= np.float32(factor)

    return change


@pytest.mark.parametrize("factor", [-1.0, 1.001, 0.0, 1.5])
def test_the_bound_is_what_the_makers_own_work_could_move(factor: float) -> None:
    evidence = evidence_of("float32", 1, change=scaled(factor))
    found = judge(pack_evidence(evidence), facts("float32"))
    right = evidence_of("float32")
    store = ResultStore(right.verdict.plan, get_codec_map("float32"))  # type: ignore[arg-type]
    start, stop = store.bounds(CHUNK)
    mean = np.frombuffer(right.result, dtype="<f4", offset=1)
    members = right.verdict.plan.members  # type: ignore[union-attr]
    share = members[1].weight_tokens / sum(one.weight_tokens for one in members)
    claim = math.sqrt(store.norm_bounds.contribution(1, start, stop) / 1.01)  # the chunk is one claimed range
    moved = abs(factor - 1.0) * float(np.linalg.norm(mean.astype(np.float64)))
    assert found.word == "guilty"
    assert found.excess == pytest.approx(moved / (share * claim), rel=0.01)
    assert (found.excess > 1.0) == (factor in (-1.0, 0.0)), "the mean of random work is 1 / sqrt(3) as long as each"


def test_a_mean_that_does_not_decode_is_void_to_the_judge_as_to_members() -> None:
    plan = RIGHT.verdict.plan
    assert plan is not None
    store = ResultStore(plan, get_codec_map("float32"))
    assert not _values(store, store.group, CHUNK, memoryview(b"\x07" + np.full(4096, np.nan, "<f4").tobytes())).any()


def test_who_claims_nothing_may_move_nothing() -> None:
    plan = RIGHT.verdict.plan
    assert plan is not None
    idle = plan.model_copy(update={"members": (plan.members[0].model_copy(update={"norms": b""}), *plan.members[1:])})
    assert NormBounds(idle, get_codec_map("int8")).influence(0, [1, 2], 0, 4096) == 0.0


@pytest.mark.parametrize("elements", [5 * 4096 + 123, 70 * 4096 + 7, 200 * 4096 + 1])
@pytest.mark.parametrize("chunk", [4096, 3 * 4096, 10**6])
def test_over_all_chunks_it_is_that_of_the_whole_contribution(elements: int, chunk: int) -> None:
    plan = RIGHT.verdict.plan
    assert plan is not None
    parts = (plan.parts[0].model_copy(update={"start": 0, "stop": elements}),)
    drawn = np.random.default_rng(1).random(len(ranges(elements)))
    plan = plan.model_copy(update={"parts": parts, "members": plan.members[:1]})
    plan = claiming(plan, [pack(list(drawn))], [0.5])
    bounds = NormBounds(plan, get_codec_map("int8"))
    squares = [bounds.influence(0, [0], at, min(at + chunk, elements)) ** 2 for at in range(0, elements, chunk)]
    claimed = claimed_squares(plan.members[0].norms, elements).sum()
    assert sum(squares) == pytest.approx(0.25 * claimed)


@pytest.mark.parametrize(("above", "word"), [(1.0, "innocent"), (1.0 + 2.0**-20, "innocent"), (1.01, "guilty")])
def test_a_contribution_above_its_claim_may_not_be_in_a_mean(
    above: float, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for the last bits, in which sums of squares differ between machines."""
    evidence, real = RIGHT, PartReducer._is_claimed

    def is_claimed(self: PartReducer, member: int, square: float, bounds: tuple[int, int]) -> bool:
        largest = self._norm_bounds.contribution(member, *bounds) / _LEEWAY
        return real(self, member, largest * above, bounds)

    monkeypatch.setattr(PartReducer, "_is_claimed", is_claimed)
    assert judge(pack_evidence(evidence), FACTS).word == word


def test_a_stand_in_does_not_answer_for_chunks_that_it_adopted() -> None:
    """It signs for those that it has made itself, and proves nothing about the others."""

    async def main() -> Evidence:
        done = await committed_round(liar=1, made={PART: ((CHUNK + 1, CHUNK + 2),)})
        return unpack_evidence(await done.evidence(PART, CHUNK))

    assert judge(pack_evidence(run_virtual(main())), FACTS).word == "void"


def test_another_members_lie_proves_nothing_about_an_honest_one() -> None:
    assert judge(pack_evidence(evidence_of(liar=0)), FACTS).word == "innocent"


def changed(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


def changed_start(data: bytes) -> bytes:
    return bytes([data[0] ^ 1]) + data[1:]


def with_contribution(evidence: Evidence, change: Callable[[bytes], bytes]) -> Evidence:
    first, *others = evidence.contributions
    return evidence.model_copy(
        update={"contributions": (first.model_copy(update={"data": change(first.data)}), *others)}
    )


def with_verdict(evidence: Evidence, *, sign: bool = False, **fields: Any) -> Evidence:
    verdict = evidence.verdict.model_copy(update=fields)
    return evidence.model_copy(update={"verdict": signed(verdict) if sign else verdict})


def with_weight(evidence: Evidence, *, sign: bool = False) -> Evidence:
    plan = evidence.verdict.plan
    assert plan is not None
    first, *others = plan.members
    heavier = first.model_copy(update={"weight_tokens": first.weight_tokens + 1})
    return with_verdict(evidence, sign=sign, plan=plan.model_copy(update={"members": (heavier, *others)}))


def with_maker(evidence: Evidence, **fields: Any) -> Evidence:
    """The same, whatever the host signs."""
    makers = list(evidence.verdict.makers)
    maker = makers[PART]
    assert maker is not None
    makers[PART] = maker.model_copy(update=fields)
    return with_verdict(evidence, sign=True, makers=tuple(makers))


TAMPERED: dict[str, Callable[[Evidence], Evidence]] = {
    "the verdict's signature": lambda one: with_verdict(one, signature=changed(one.verdict.signature)),
    "the verdict's hash": lambda one: with_verdict(one, chain=changed(one.verdict.chain)),
    "a digest": lambda one: with_verdict(one, digests=tuple(map(changed, one.verdict.digests))),  # type: ignore[arg-type]
    "a weight": with_weight,
    "another run": lambda one: with_verdict(one, sign=True, run_hash=b"s" * 32),
    "an aborted round": lambda one: with_verdict(one, sign=True, committed=False),
    "a void part": lambda one: with_verdict(one, sign=True, digests=(None, None, None)),
    "too few digests": lambda one: with_verdict(one, sign=True, digests=one.verdict.digests[:2]),
    "no makers": lambda one: with_verdict(one, sign=True, makers=()),
    "no maker": lambda one: with_verdict(one, sign=True, makers=(None, None, None)),
    "another maker": lambda one: with_maker(one, member=0),
    "a maker that is not in the plan": lambda one: with_maker(one, member=3),
    "the maker's signature": lambda one: with_maker(one, signature=bytes(64)),
    "chunks that the maker did not sign for": lambda one: with_maker(one, chunks=((CHUNK, CHUNK + 1),)),
    "a plan that the maker did not sign for": lambda one: with_weight(one, sign=True),
    "no plan": lambda one: with_verdict(one, sign=True, plan=None),
    "another part": lambda one: one.model_copy(update={"part": 0}),
    "no part": lambda one: one.model_copy(update={"part": 3}),
    "another chunk": lambda one: one.model_copy(update={"chunk": CHUNK + 1}),
    "a chunk of another part": lambda one: one.model_copy(update={"chunk": 0}),
    "no chunk": lambda one: one.model_copy(update={"chunk": 10**6}),
    "the result": lambda one: one.model_copy(update={"result": changed(one.result)}),
    "the result's header": lambda one: one.model_copy(update={"result": changed_start(one.result)}),
    "a cut result": lambda one: one.model_copy(update={"result": one.result[:-1]}),
    "no result": lambda one: one.model_copy(update={"result": b""}),
    "the path": lambda one: one.model_copy(update={"path": changed(one.path)}),
    "a cut path": lambda one: one.model_copy(update={"path": one.path[:-1]}),
    "no path": lambda one: one.model_copy(update={"path": b""}),
    "a contribution": lambda one: with_contribution(one, changed_start),
    "a contribution's path": lambda one: with_contribution(one, changed),
    "a cut contribution": lambda one: with_contribution(one, lambda data: data[:-1]),
    "no contribution": lambda one: with_contribution(one, lambda data: b""),
    "a missing contribution": lambda one: one.model_copy(update={"contributions": one.contributions[1:]}),
    "no contributions": lambda one: one.model_copy(update={"contributions": ()}),
    "swapped contributions": lambda one: one.model_copy(update={"contributions": one.contributions[::-1]}),
    "a contribution twice": lambda one: one.model_copy(
        update={"contributions": (one.contributions[0], *one.contributions[:2])}
    ),
    "another member's contribution": lambda one: one.model_copy(
        update={
            "contributions": tuple(
                ShownContribution(member=at, data=one.contributions[-1 - at].data) for at in range(3)
            )
        }
    ),
}


@pytest.mark.parametrize("what", TAMPERED)
@pytest.mark.parametrize("evidence", [WRONG, RIGHT], ids=["of a lie", "of the truth"])
def test_tampered_evidence_is_void(evidence: Evidence, what: str) -> None:
    tampered = TAMPERED[what](evidence)
    assert tampered != evidence
    assert judge(pack_evidence(tampered), FACTS).word == "void"


@pytest.mark.parametrize(
    "other",
    [
        RunFacts(b"s" * 32, HOST.public_key, FACTS.elements, FACTS.codec_map),
        RunFacts(FACTS.run_hash, Identity.generate().public_key, FACTS.elements, FACTS.codec_map),
        RunFacts(FACTS.run_hash, HOST.public_key, FACTS.elements + 1, FACTS.codec_map),
        RunFacts(FACTS.run_hash, HOST.public_key, FACTS.elements, get_codec_map("float32")),
        RunFacts(FACTS.run_hash, HOST.public_key, FACTS.elements, FACTS.codec_map, stage=0),
    ],
    ids=["run", "host", "model", "codec", "stage"],
)
def test_evidence_of_another_run_is_void(other: RunFacts) -> None:
    assert judge(pack_evidence(WRONG), other).word == "void"


def test_evidence_has_one_encoding() -> None:
    data = pack_evidence(WRONG)
    assert pack_evidence(unpack_evidence(data)) == data
    assert evidence_id(data) != evidence_id(pack_evidence(RIGHT))
    size = int.from_bytes(data[:4], "big")
    fields = msgpack.unpackb(data[4 : 4 + size])
    other = data[:4] + msgpack.packb(dict(reversed(fields.items()))) + data[4 + size :]
    with pytest.raises(WireError, match="another way"):
        unpack_evidence(other)
    assert judge(other, FACTS).word == "void"


@pytest.mark.parametrize("change", [lambda data: data + b"x", lambda data: data[:-1]], ids=["longer", "shorter"])
def test_evidence_has_the_bytes_that_its_head_names(change: Callable[[bytes], bytes]) -> None:
    with pytest.raises(WireError):
        unpack_evidence(change(pack_evidence(WRONG)))


def test_many_small_objects_are_not_unpacked() -> None:
    """A byte of msgpack may become an empty map, of 64 bytes: 64 MiB of them would end a host."""
    maps = b"\xdc\x07\xff" + (b"\xdc\x07\xff" + b"\x80" * 2047) * 2047
    for data in (maps, len(maps).to_bytes(4, "big") + maps):
        tracemalloc.start()
        with pytest.raises(WireError, match="its head"):
            unpack_evidence(data)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert most < 2**20


def test_an_owner_may_have_measured_a_smaller_norm() -> None:
    """Norms are measured to within an error that depends on the machine: the owner's was at its member's claim, from
    below, and the judge's comes from above."""
    plan, measured = RIGHT.verdict.plan, {}
    assert plan is not None
    store = ResultStore(plan, FACTS.codec_map)
    start, stop = store.bounds(CHUNK)
    for one in RIGHT.contributions:
        claim = store.norm_bounds.contribution(one.member, start, stop)
        data = checked_contribution(store, CHUNK, one.member, memoryview(one.data))
        measured[bytes(data)] = claim / (1.0 - RELATIVE_ERROR) * (1.0 + RELATIVE_ERROR)
    codec = store.codec_map.contribution(start, stop)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(codec), "squared_norm", lambda _, packed, n: measured[bytes(packed)] * codec.growth**2)
        assert judge(pack_evidence(RIGHT), FACTS).word == "innocent"


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x80", b"\x90", bytes(1000), b"\xdf\xff\xff\xff\xff"])
def test_bytes_that_are_no_evidence_are_void(data: bytes) -> None:
    assert judge(data, FACTS).word == "void"


def test_a_stranger_cannot_make_the_judge_allocate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.swarm.protocol.evidence.MAX_EVIDENCE_BYTES", 1000)
    with pytest.raises(WireError, match="too large"):
        unpack_evidence(bytes(1001))
    with pytest.raises(WireError, match="too large"):
        pack_evidence(WRONG)
