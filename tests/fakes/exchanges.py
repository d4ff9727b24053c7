"""Members of one exchange on the in-memory network, without a coordinator."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from tests.fakes.claims import claiming, honest
from tests.fakes.codec_maps import get_codec_map
from tests.fakes.grids import IDENTITIES
from tests.fakes.means import weighted
from tests.fakes.memory_network import MemoryNetwork
from torch import Tensor

from shoal.compression.error_feedback import ErrorFeedback
from shoal.compression.range_reader import TensorReader
from shoal.swarm.averaging.allreduce import AllReduce, ExchangeResult
from shoal.swarm.averaging.buffer_pool import BufferPool
from shoal.swarm.averaging.contribution import EncodedContribution, encode_leaves
from shoal.swarm.averaging.leaf_grid import LeafGrid
from shoal.swarm.averaging.results import HeldResults, ResultStore, RoundMean
from shoal.swarm.averaging.round_feedback import settle
from shoal.swarm.deadlines import Deadlines
from shoal.swarm.protocol.identity import Identity
from shoal.swarm.protocol.rounds import RoundPlan
from shoal.swarm.protocol.statements import PlanSigner, PlanStatement, RoundName, Statement, plan_digest

PATIENCE_S = 6.0
RUN_HASH = b"r" * 32


@dataclass
class Side:
    """One member of an exchange. ``brought`` is a copy of its contribution."""

    store: ResultStore
    feedback: ErrorFeedback
    exchange: AllReduce
    brought: Tensor
    outcome: ExchangeResult | None = None

    async def run(self) -> None:
        self.outcome = await self.exchange.run()

    async def commit(self) -> Tensor:
        mean = RoundMean(self.store).whole()
        await self.exchange.close()
        settle(self.exchange, keep=True)
        return mean


def make_sides(
    network: MemoryNetwork,
    plan: RoundPlan,
    codec: str = "float32",
    feedbacks: Sequence[ErrorFeedback] | None = None,
    was_away: Callable[[float], bool] = lambda since_s: False,
    scale: float = 1.0,
    brought_by: Mapping[int, Tensor] | None = None,
    identities: Sequence[Identity] = IDENTITIES,
    run_hash: bytes = RUN_HASH,
) -> list[Side]:
    """``plan``: members that claim nothing in it claim what they bring, which is about ``scale`` large, or as
    ``brought_by`` says. ``identities``: theirs, for what they sign."""
    elements, sides = plan.parts[-1].stop, []
    draws = [torch.Generator().manual_seed(100 * plan.round + index) for index in range(len(plan.members))]
    contributions = [torch.randn(elements, generator=draw) * scale for draw in draws]
    for number, brought in (brought_by or {}).items():
        contributions[number] = brought
    feedbacks = feedbacks or [ErrorFeedback(elements) for _ in contributions]
    for feedback, brought in zip(feedbacks, contributions, strict=True):
        feedback.begin(TensorReader(brought.clone()))
    claims = [
        member.norms or honest(brought + feedback.residual)
        for member, feedback, brought in zip(plan.members, feedbacks, contributions, strict=True)
    ]
    plan = claiming(plan, claims, [member.factor for member in plan.members])
    grid = LeafGrid(elements, get_codec_map(codec))
    encoded = [
        EncodedContribution(grid, encode_leaves(one, grid, range(grid.leaves), BufferPool())) for one in feedbacks
    ]
    members = [member.model_copy(update={"root": one.root}) for member, one in zip(plan.members, encoded, strict=True)]
    plan = plan.model_copy(update={"members": tuple(members)})
    about = PlanStatement(RoundName(run_hash, None, plan.round), plan_digest(plan))
    for number, (member, feedback, contribution) in enumerate(zip(members, feedbacks, encoded, strict=True)):
        store = ResultStore(plan, get_codec_map(codec))
        endpoint = network.endpoints.get(member.peer) or network.endpoint(member.peer)
        endpoint.publish(store.blob, store)
        endpoint.publish(store.held, HeldResults(store))

        def sign(statement: Statement, by: Identity = identities[number]) -> bytes:
            return by.sign(statement.bytes_to_sign())

        signer = PlanSigner(member.peer, about, sign)
        exchange = AllReduce(endpoint, store, signer, feedback, contribution, Deadlines(PATIENCE_S), was_away)
        sides.append(Side(store, feedback, exchange, contributions[number]))
    return sides


async def run_all(sides: Sequence[Side]) -> None:
    async with asyncio.TaskGroup() as tasks:
        for side in sides:
            tasks.create_task(side.run())


def digests(side: Side) -> list[bytes | None]:
    return [side.store.digest(part) if side.store.has(part) else None for part in side.store.plan.parts]


def weighted_mean(sides: Sequence[Side], who: Sequence[int]) -> Tensor:
    weights = [sides[0].store.plan.members[index].weight_tokens for index in who]
    return weighted([sides[index].brought for index in who], weights)
