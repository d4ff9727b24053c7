"""A committed round on the in-memory network whose means can be audited, with an owner that may lie."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from tests.fakes.codec_maps import get_codec_map
from tests.fakes.exchanges import Side, digests, make_sides, run_all
from tests.fakes.memory_network import MemoryNetwork

from shoal.swarm.averaging.chunk_judge import RunFacts, make_evidence
from shoal.swarm.averaging.inclusions import Inclusions
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


Made = Mapping[int, ChunkRanges]


@dataclass
class AuditedRound:
    """A committed round; ``sides`` and their ``inclusions`` by member."""

    network: MemoryNetwork
    sides: list[Side]
    inclusions: list[Inclusions]
    verdict: Verdict

    async def shown(self, chunk: int, owner: int) -> dict[int, memoryview]:
        """What an owner shows to auditors of one of its chunks."""
        members = range(len(self.sides))
        return {one: await self.inclusions[owner].chunk(chunk * len(self.sides) + one) for one in members}

    async def evidence(self, part: int, chunk: int) -> bytes:
        """Return the evidence on a chunk, whether it is right or wrong."""
        store, plan = self.sides[0].store, self.verdict.plan
        assert plan is not None
        owner = plan.parts[part].owner
        shown = await self.shown(chunk, owner)
        included = store.group.header(store[chunk]).included
        results = store.bytes_of(plan.parts[part])
        return make_evidence(self.verdict, part, chunk, results, {one: shown[one] for one in included})


def make_plan(mean: str = "weighted") -> RoundPlan:
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


def facts(codec: str) -> RunFacts:
    return RunFacts(RUN_HASH, HOST.public_key, ELEMENTS, get_codec_map(codec))


def signed(verdict: Verdict) -> Verdict:
    """Return the verdict with its hash and the host's signature."""
    chain = chain_hash(verdict)
    return verdict.model_copy(update={"chain": chain, "signature": HOST.sign(signed_bytes(chain))})


def signed_part(verdict: Verdict, part: int, made: Made) -> PartMaker:
    """Return the owner's signature of a part. ``made``: the ranges of chunks that it has made, by part, if not all."""
    plan = verdict.plan
    assert plan is not None
    one, size = plan.parts[part], plan.chunk_elements
    chunks = made.get(part, ((one.start // size, -(-one.stop // size)),))
    maker = PartMaker(member=one.owner, chunks=chunks, signature=bytes(64))
    unsigned = verdict.model_copy(update={"makers": (None,) * part + (maker,)})
    statement = PartStatement.of(unsigned, part)
    assert statement is not None
    return maker.model_copy(update={"signature": MEMBERS[one.owner].sign(statement.bytes_to_sign())})


def change_a_bit(mean: memoryview) -> None:
    mean[-1] ^= 1


def lie(side: Side, change: Callable[[memoryview], None]) -> None:
    """Make this owner change each of its means."""
    store = side.store

    async def put(chunk: int, data: memoryview) -> None:
        changed = memoryview(bytearray(data))
        change(changed)
        await store.put(chunk, changed)

    side.exchange.as_owner.put = put


async def committed_round(
    codec: str = "int8",
    liar: int | None = None,
    mean: str = "weighted",
    run_hash: bytes = RUN_HASH,
    made: Made = MappingProxyType({}),
    change: Callable[[memoryview], None] = change_a_bit,
) -> AuditedRound:
    network = MemoryNetwork()
    sides = make_sides(network, make_plan(mean), codec)
    inclusions = [Inclusions(side.store, 1.0) for side in sides]
    for side, kept in zip(sides, inclusions, strict=True):
        side.exchange.keep_inclusions(kept)
    if liar is not None:
        lie(sides[liar], change)
    await run_all(sides)
    for member, kept in zip(MEMBERS, inclusions, strict=True):
        network.endpoints[member.peer_id].publish(kept.blob, kept)
    plan = sides[0].store.plan
    verdict = Verdict(
        round=plan.round,
        committed=True,
        reason="",
        anchor_version=2,
        plan=plan,
        digests=tuple(digests(sides[0])),
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
    makers = tuple(signed_part(verdict, part, made) for part in range(len(plan.parts)))
    return AuditedRound(network, sides, inclusions, signed(verdict.model_copy(update={"makers": makers})))
