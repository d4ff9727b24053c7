"""A committed round on the in-memory network whose means can be audited, with an owner that may lie."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from tests.fakes.codec_maps import get_codec_map
from tests.fakes.exchanges import Side, digests, make_sides, run_all
from tests.fakes.grids import IDENTITIES, plan_of
from tests.fakes.memory_network import MemoryNetwork

from shoal.swarm.averaging.chunk_judge import RunFacts, Shown, Subject, make_evidence
from shoal.swarm.averaging.inclusions import Inclusions
from shoal.swarm.averaging.reduction import Reduction
from shoal.swarm.coordinator.round_plan import chunk_elements, split
from shoal.swarm.protocol.identity import Identity
from shoal.swarm.protocol.rounds import Part, PartMaker, PlanMember, RoundPlan, Verdict
from shoal.swarm.protocol.statements import ChunkRanges, PartStatement
from shoal.swarm.protocol.verdict_chain import chain_hash, genesis, signed_bytes

HOST = Identity.generate()
MEMBERS = sorted((Identity.generate() for _ in range(3)), key=lambda one: one.peer_id)
RUN_HASH = b"r" * 32
ELEMENTS = 5 * 4096 + 123
"""Six chunks, the last one short; two for each member."""


GRID_ELEMENTS = 12 * 4096 + 123

Made = Mapping[int, ChunkRanges]


@dataclass
class AuditedRound:
    """A committed round; ``sides`` and their ``inclusions`` by member."""

    network: MemoryNetwork
    sides: list[Side]
    inclusions: list[Inclusions]
    verdict: Verdict

    @property
    def plan(self) -> RoundPlan:
        assert self.verdict.plan is not None
        return self.verdict.plan

    async def shown(self, subject: Subject, member: int) -> Shown:
        """What a member shows to auditors of what it has made."""
        store, kept = self.sides[0].store, self.inclusions[member]
        header, places = subject.header(store), kept.places
        members = subject.group(store).summed_directly(header)
        return Shown(
            {one: await kept.chunk(places.contribution(subject.chunk, one)) for one in members},
            {row: await kept.chunk(places.partial_sum(subject.chunk, row)) for row in header.reduced_rows},
        )

    def maker(self, part: int) -> int:
        """Return who has signed for a part."""
        made = self.verdict.makers[part]
        assert made is not None
        return made.member

    def mean(self, part: int, chunk: int) -> Subject:
        return Subject(part, chunk, None, self.sides[0].store[chunk])

    async def partial_sum(self, part: int, chunk: int, row: int) -> Subject:
        """Return a row's partial sum as the part's owner has got it."""
        shown = await self.shown(self.mean(part, chunk), self.maker(part))
        return Subject(part, chunk, row, shown.partial_sums[row])

    async def evidence(self, part: int, chunk: int, row: int | None = None) -> bytes:
        """Return the evidence on a chunk, or on a partial sum of it, whether it is right or wrong."""
        of = self.plan.parts[part]
        subject = self.mean(part, chunk) if row is None else await self.partial_sum(part, chunk, row)
        shown = await self.shown(subject, self.maker(part) if row is None else self.plan.row_reducers(of)[row])
        return make_evidence(self.verdict, subject, self.sides[0].store.bytes_of(of), shown)


def make_plan(mean: str = "weighted", rows: Sequence[Sequence[int]] = ()) -> RoundPlan:
    """``rows``: of a grid, whose members have the ``IDENTITIES`` of grids; without any, a flat group of ``MEMBERS``."""
    if rows:
        weights = [7 + at for at in range(sum(map(len, rows)))]
        return plan_of(weights, rows, GRID_ELEMENTS).model_copy(update={"mean": mean})
    chunk = chunk_elements(ELEMENTS, len(MEMBERS))
    return RoundPlan(
        round=3,
        anchor_version=1,
        state_digest=bytes(32),
        chunk_elements=chunk,
        members=tuple(
            PlanMember(peer=one.peer_id, weight_tokens=7 + at, identity_key=one.public_key)
            for at, one in enumerate(MEMBERS)
        ),
        parts=tuple(
            Part(owner=owner, start=start, stop=stop)
            for owner, start, stop in split(ELEMENTS, [1 / len(MEMBERS)] * len(MEMBERS), chunk)
        ),
        mean=mean,  # type: ignore[arg-type]
    )


def facts(codec: str, elements: int = ELEMENTS) -> RunFacts:
    return RunFacts(RUN_HASH, HOST.public_key, elements, get_codec_map(codec))


def signed(verdict: Verdict) -> Verdict:
    """Return the verdict with its hash and the host's signature."""
    chain = chain_hash(verdict)
    return verdict.model_copy(update={"chain": chain, "signature": HOST.sign(signed_bytes(chain))})


def signed_part(verdict: Verdict, part: int, made: Made, sides: Sequence[Side]) -> PartMaker:
    """Return the maker's signature of a part. ``made``: the ranges of chunks that it has made, by part, if not those
    that it says."""
    plan = verdict.plan
    assert plan is not None
    one, digest = plan.parts[part], verdict.digests[part]
    makers = [side for side in (sides[at] for at in (one.owner, *one.stand_ins)) if side.store.holds(one, digest)]
    member, said = next((side.exchange.me, side.exchange.made()[part]) for side in makers)
    maker = PartMaker(member=member, chunks=made.get(part, said), signature=bytes(64))
    unsigned = verdict.model_copy(update={"makers": (None,) * part + (maker,)})
    statement = PartStatement.of(unsigned, part)
    assert statement is not None
    identity = (IDENTITIES if plan.columns else MEMBERS)[member]
    return maker.model_copy(update={"signature": identity.sign(statement.bytes_to_sign())})


def change_a_bit(mean: memoryview) -> None:
    mean[-1] ^= 1


def lie(reduction: Reduction, change: Callable[[memoryview], None] = change_a_bit) -> None:
    """Make an owner, or row reducer, change each of its means."""
    real = reduction.put

    async def put(chunk: int, data: memoryview) -> None:
        changed = memoryview(bytearray(data))
        change(changed)
        reduction.made[chunk].result = changed
        await real(chunk, changed)

    reduction.put = put


async def committed_round(
    codec: str = "int8",
    liar: int | None = None,
    mean: str = "weighted",
    run_hash: bytes = RUN_HASH,
    made: Made = MappingProxyType({}),
    change: Callable[[memoryview], None] = change_a_bit,
    rows: Sequence[Sequence[int]] = (),
    before: Callable[[MemoryNetwork, list[Side]], object] = lambda network, sides: None,
) -> AuditedRound:
    """``liar``: an owner; ``before``: called before the exchange."""
    network, identities = MemoryNetwork(), IDENTITIES if rows else MEMBERS
    sides = make_sides(network, make_plan(mean, rows), codec, identities=identities, run_hash=run_hash)
    inclusions = [Inclusions(side.store, 1.0) for side in sides]
    for side, kept in zip(sides, inclusions, strict=True):
        side.exchange.keep_inclusions(kept)
    if liar is not None:
        lie(sides[liar].exchange.as_owner, change)
    before(network, sides)
    await run_all(sides)
    for member, kept in zip(identities, inclusions, strict=False):
        network.endpoints[member.peer_id].publish(kept.blob, kept)
    plan = sides[0].store.plan
    verdict = Verdict(
        round=plan.round,
        committed=True,
        reason="",
        anchor_version=2,
        plan=plan,
        digests=tuple(Counter(one).most_common(1)[0][0] for one in zip(*map(digests, sides), strict=True)),
        tokens=sum(one.weight_tokens for one in plan.members),
        tokens_total=1000,
        loss=None,
        ended_s=1.7e9,
        sent_bytes=0,
        run_hash=run_hash,
        previous_chain=genesis(run_hash),
        chain=bytes(32),
        signature=b"",
    )
    makers = tuple(signed_part(verdict, part, made, sides) for part in range(len(plan.parts)))
    return AuditedRound(network, sides, inclusions, signed(verdict.model_copy(update={"makers": makers})))
