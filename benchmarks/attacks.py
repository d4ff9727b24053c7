"""Held-out loss of runs under attack, at as many honest tokens, beside that of the honest members alone.

Real plans, exchanges, codecs and verdicts in one process, on the in-memory network and virtual clock of the tests.
Honest members train a small gpt on the standard library's text. All join before the first round, so attackers are no
newcomers among members with credit: the worst case for rules that count past work.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import torch
from common import comma, console, parser, publish
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parents[1]))

from tests.fakes.exchanges import make_sides
from tests.fakes.memory_network import MemoryNetwork, Step, stalled
from tests.fakes.outer_steps import stepped
from tests.fakes.swarm import SimMember, Swarm, run_toml, swarm
from tests.fakes.virtual_clock import Stuck, run_virtual

from shoal.compression.codec_map import CodecMap
from shoal.compression.error_feedback import ErrorFeedback
from shoal.compression.range_reader import TensorReader, whole_vector
from shoal.peer.recipes import Recipe, load_recipe
from shoal.peer.training.algorithms import local_work
from shoal.peer.training.inner_loop import make_inner
from shoal.peer.training.outer_optimizer import outer_of
from shoal.peer.training.parameters import ParameterVector
from shoal.swarm.averaging.allreduce import AllReduce
from shoal.swarm.averaging.auditor import Auditor
from shoal.swarm.averaging.averager import Averager
from shoal.swarm.averaging.buffer_pool import BufferPool
from shoal.swarm.averaging.chunk_judge import RunFacts, checked_contribution, judge, reduce_again
from shoal.swarm.averaging.contribution import encode_leaves
from shoal.swarm.averaging.inclusions import audits_a_round
from shoal.swarm.averaging.outcome import Aborted, Committed, RoundOffer
from shoal.swarm.averaging.reduction import ChunkCollector, ReducedChunk, Reduction
from shoal.swarm.averaging.results import ResultStore
from shoal.swarm.coordinator.round_plan import chunk_elements, split
from shoal.swarm.errors import ShoalError
from shoal.swarm.protocol.evidence import evidence_id
from shoal.swarm.protocol.messages import PeerToCoordinatorRoundReport
from shoal.swarm.protocol.rounds import Part, PlanMember, RoundPlan, RunView
from shoal.swarm.protocol.run_file import RunFile, parse_run_file
from shoal.swarm.protocol.types import TensorSpec
from shoal.swarm.sample_ranges import count

PEERS = 8
SYBILS = 20
BATCH, STEPS = 8, 2
SAMPLES = BATCH * STEPS
"""Of a member's round; to the run each is a token."""
WARMUP_ROUNDS = 5
MAX_S = 30.0
"""Of a round, virtual: what attackers do not lease is not waited for longer."""
WORST_RATIO = 1000.0
"""Stands for every larger ratio and for losses that are no number."""
OUT_ROUNDS = 5
"""An attacker that is in none of so many last rounds is out."""

RECIPE = """
[run]
name = "attacks"
seed = {seed}
tokens = 1000000
[recipe]
name = "gpt"
settings = {{ layers = 1, width = 32, heads = 2, context = 32 }}
[inner]
lr = 2e-3
batch_samples = 8
[round]
tokens = 1000
"""

Bring = Callable[[Tensor, "Trainer"], Tensor]
"""What is brought instead of the real contribution."""


def huge(real: Tensor, member: Trainer) -> Tensor:
    return torch.full_like(real, 1e30)


def random(real: Tensor, member: Trainer) -> Tensor:
    drawn = torch.randn(real.shape, generator=member.draws)
    return torch.mul(drawn, 10 * real.norm() / drawn.norm())


def flipped(real: Tensor, member: Trainer) -> Tensor:
    return -10 * real


def biased(real: Tensor, member: Trainer) -> Tensor:
    """All attackers push the same way, half as far as the real work goes."""
    direction = torch.randn(real.shape, generator=torch.Generator().manual_seed(7))
    return torch.add(real, direction * (0.5 * real.norm() / direction.norm()))


def zero(real: Tensor, member: Trainer) -> Tensor:
    return torch.zeros_like(real)


def copied(real: Tensor, member: Trainer) -> Tensor:
    """The first honest member's newest contribution."""
    victim = member.swarm.members[0]
    assert isinstance(victim, Trainer)
    return real if victim.brought is None else victim.brought


CONTRIBUTIONS: dict[str, Bring] = {
    "huge": huge,
    "random": random,
    "flip": flipped,
    "bias": biased,
    "zero": zero,
    "copy": copied,
    "sybils": flipped,
}
OWNERS = ("owner", "equivocation")
"""Kinds that are out when they own no part, though their work may still count."""
_TIMES = 20
KINDS = (*CONTRIBUTIONS, *OWNERS, "withhold", "accuse")


class LyingReduction(Reduction):
    """The owner's means point the other way, for everybody alike."""

    async def _make(self, collector: ChunkCollector, index: int) -> ReducedChunk:
        made, store, group = await super()._make(collector, index), self.context.store, self.group
        start, stop = store.bounds(index)
        if made.included:
            codec, packed = store.codec_map.result(start, stop, len(group.members)), made.result[group.header_bytes :]
            packed[:] = codec.encode(-codec.decode(packed, stop - start)).numpy().tobytes()
        return made


class LyingOwner(Averager):
    def _all_reduce(self, store: ResultStore) -> AllReduce:
        exchange = super()._all_reduce(store)
        kept = exchange.as_owner.inclusions
        exchange.as_owner = LyingReduction(exchange._context, store.group, store.put, inclusions=kept)
        return exchange


class FalseAccuser(Averager):
    """It says of all others that they delivered nothing."""

    async def _take_part(
        self, view: RunView, plan: RoundPlan, offer: RoundOffer, tasks: asyncio.TaskGroup
    ) -> PeerToCoordinatorRoundReport | None:
        report = await super()._take_part(view, plan, offer, tasks)
        lies = tuple(index for index, one in enumerate(plan.members) if one.peer != self._client.peer)
        return report and report.model_copy(update={"failed": lies, "undelivered": lies, "dropped": lies})


class Trainer(SimMember):
    """Trains really; ``kind`` is its attack, "" of an honest member."""

    run: RunFile
    recipe: Recipe
    kind = ""
    brought: Tensor | None = None
    auditor: Auditor | None = None

    def begin_training(self, run: RunFile, recipe: Recipe, number: int, kind: str) -> None:
        self.run, self.recipe, self.kind = run, recipe, kind
        self.model = recipe.build_model(run.run.seed)
        self.vector = ParameterVector(self.model)
        self.local = local_work(run, self.vector, make_inner(self.model, run.inner))
        self.outer = outer_of(run.outer)
        self.anchor, self.outer_state = whole_vector(self.vector), torch.zeros(self.outer.slots, self.elements)
        self.draws = torch.Generator().manual_seed(100 * run.run.seed + number)

    async def _make_averager(self, tasks: asyncio.TaskGroup) -> Averager:
        codec_map = CodecMap(self.client.run_file.format_map([("w", (self.elements,))]))
        made = {"owner": LyingOwner, "accuse": FalseAccuser}.get(self.kind, Averager)
        averager = made(self.client, self.endpoint, codec_map, self.elements)
        if share := self.client.run_file.audit.share:
            client, rng = self.client, Random(f"{self.run.run.seed} {self.peer}")
            self.auditor = Auditor(self.endpoint, client.peer, share, client.deadlines, self._accuse, rng)
            averager.auditor = self.auditor
        return averager

    async def _live(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(super()._live())
            if self.auditor is not None:
                tasks.create_task(self.auditor.run())

    async def _accuse(self, evidence: bytes) -> None:
        """Show evidence to the coordinator, which judges it as its service does."""
        coordinator = self.swarm.coordinator
        layout = (TensorSpec(name="w", shape=(self.elements,)),)
        facts = RunFacts.of(self.client.run_file, coordinator.identity.public_key, layout)
        found = judge(evidence, facts)
        if found.word == "guilty":
            admission = coordinator.machine.scope.admission
            admission.expel(found.maker, evidence_id(evidence), self.peer, found.round)

    def train(self) -> Tensor:
        """A round's contribution, (n,) float32."""
        self.local.restart_from(self.anchor)
        data = self.recipe.training_data()
        for _ in range(STEPS):
            chosen = torch.randint(len(data), (BATCH,), generator=self.draws)
            self.recipe.loss(self.model, data.batch(chosen.tolist())).backward()  # type: ignore[no-untyped-call]
            self.local.step(BATCH, min(1.0, (self.version + 1) / WARMUP_ROUNDS))
        self.brought = whole_vector(self.local.contribution(self.anchor)).clone()
        bring = CONTRIBUTIONS.get(self.kind)
        return self.brought if bring is None else bring(self.brought, self)

    def apply(self, mean: Tensor) -> None:
        self.anchor, self.outer_state = stepped(self.outer, self.anchor, self.outer_state, mean, self.version)

    @property
    def digest(self) -> bytes:
        return hashlib.sha256(self.anchor.numpy().tobytes() + self.version.to_bytes(4, "big")).digest()

    def held_out_loss(self) -> float:
        self.vector.write(self.anchor)
        return self.recipe.held_out_loss(self.model, "cpu")

    async def one_round(self, contribution: Tensor) -> bool:
        """Whether it was committed. Raises ``RuntimeError`` if this member has fallen out of step."""
        await self.work(SAMPLES - count(self.done))
        match await self.average(contribution):
            case Committed():
                return True
            case Aborted():
                return False
            case other:
                raise RuntimeError(f"{self.kind or 'honest'}: {other.reason}")

    async def attack(self) -> None:
        """Go on until it is excluded or the run is over."""
        try:
            while True:
                contribution = self.train()
                while not await self.one_round(contribution):
                    pass
        except (ShoalError, RuntimeError) as error:
            console.print(f"  {self.kind} ended: {error}", highlight=False)


@dataclass
class Watch:
    """``losses``: held-out, by honest tokens in the anchor; ``plans``: of committed rounds; ``aborted``: rounds;
    ``audit_bytes``: that honest members fetched for audits, beside the ``round_bytes`` of their rounds."""

    losses: dict[int, float] = field(default_factory=dict)
    plans: list[RoundPlan] = field(default_factory=list)
    aborted: int = 0
    expelled: int = 0
    trouble: str = ""
    audit_bytes: int = 0
    round_bytes: int = 0


@dataclass(frozen=True)
class Case:
    kind: str
    honest: int
    attackers: int
    robust: str
    seed: int
    share: float = 0.0


def equivocating(holder: str) -> Callable[[Step, bytes], Any]:
    """To every other member it sends means that point the other way in the second half of each chunk."""

    async def fault(step: Step, payload: bytes) -> bytes:
        if (step.blob.kind, step.holder) != ("result", holder) or int(step.to[-1], 36) % 2:
            return payload
        half = len(payload) // 2
        return payload[:half] + bytes((256 - one) % 256 for one in payload[half:])

    return fault


async def simulate(case: Case, marks: Sequence[int]) -> tuple[Watch, list[str]]:
    """Run until the honest members have brought as many tokens as in the last of ``marks``, in rounds without loss."""
    run = parse_run_file(RECIPE.format(seed=case.seed))
    recipe, watch, network = load_recipe(run), Watch(), MemoryNetwork(case.seed)
    elements, each = ParameterVector(recipe.build_model(case.seed)).elements, case.honest * SAMPLES
    toml = run_toml((case.honest + case.attackers) * SAMPLES, "int8", max_s=MAX_S, seed=case.seed, robust=case.robust)
    toml += f"[audit]\nshare = {case.share}\n"
    numbers = iter(range(case.honest + case.attackers))

    class Made(Trainer):
        def _begin(self, swarm: Swarm) -> None:
            super()._begin(swarm)
            number = next(numbers)
            self.begin_training(run, recipe, number, case.kind if number >= case.honest else "")

    async with swarm(case.honest + case.attackers, toml, elements, network, make=Made) as made:
        members = [one for one in made.members if isinstance(one, Trainer)]
        honest, attackers = members[: case.honest], members[case.honest :]
        for one in attackers:
            if case.kind == "withhold":
                network.faults.append(stalled("contribution", one.peer, 0))
            if case.kind == "equivocation":
                network.faults.append(equivocating(one.peer))
        attacks = [asyncio.create_task(one.attack()) for one in attackers]
        names = {one.peer for one in honest}
        try:
            tokens, wanted = 0, [mark * each for mark in marks]
            contributions = [one.train() for one in honest]
            while tokens < wanted[-1]:
                async with asyncio.TaskGroup() as tasks:
                    rounds = [tasks.create_task(one.one_round(c)) for one, c in zip(honest, contributions, strict=True)]
                committed = [task.result() for task in rounds]
                if not all(committed):
                    watch.aborted += 1
                    if watch.aborted > 3 * marks[-1]:
                        raise RuntimeError("too many rounds are aborted")
                    continue
                if len({one.digest for one in honest}) > 1:
                    raise RuntimeError("honest members hold different states")
                verdict = honest[0].view.verdict
                assert verdict is not None
                assert verdict.plan is not None
                watch.plans.append(verdict.plan)
                tokens += sum(one.weight_tokens for one in verdict.plan.members if one.peer in names)
                if len(watch.plans) > 3 * marks[-1]:
                    raise RuntimeError("honest work is left out")
                for mark in [mark for mark in wanted if mark <= tokens and mark not in watch.losses]:
                    watch.losses[mark] = honest[0].held_out_loss()
                contributions = [one.train() for one in honest]
        except* (ShoalError, RuntimeError) as errors:
            watch.trouble = str(errors.exceptions[0])
        finally:
            known = made.coordinator.machine.scope.membership.members
            watch.expelled = sum(one.peer not in known or not known[one.peer].alive for one in honest)
            auditors = [one.auditor for one in honest if one.auditor is not None]
            watch.audit_bytes = sum(one.audited_bytes for one in auditors)
            received = sum(size for (_, to), size in network.moved_bytes.items() if to in names)
            watch.round_bytes = received - watch.audit_bytes
            for task in attacks:
                task.cancel()
            await asyncio.gather(*attacks, return_exceptions=True)
        return watch, [one.peer for one in attackers]


def rounds_until_out(watch: Watch, attackers: Sequence[str], kind: str) -> float | None:
    """Committed rounds with any of these attackers, None if they stay."""
    last = 0
    for number, plan in enumerate(watch.plans, start=1):
        owners = {plan.members[part.owner].peer for part in plan.parts}
        present = owners if kind in OWNERS else {one.peer for one in plan.members}
        last = number if present.intersection(attackers) else last
    return last if len(watch.plans) - last >= OUT_ROUNDS else None


def run_case(case: Case, marks: Sequence[int]) -> tuple[Watch, list[str]]:
    try:
        return run_virtual(simulate(case, marks), horizon_s=1e6)
    except (Stuck, ExceptionGroup) as error:
        return Watch(trouble=f"{type(error).__name__}: {error}"), []


def ratio_of(loss: float | None, clean: float | None) -> float:
    """``WORST_RATIO`` for what did not get so far, or is no number."""
    if loss is None or clean is None or not math.isfinite(loss):
        return WORST_RATIO
    return min(WORST_RATIO, loss / clean)


def rows_of(
    like: Case, seeds: int, marks: Sequence[int], clean: dict[tuple[int, str, float, int], Watch]
) -> dict[str, Any]:
    """One row: all seeds of one attack beside the same honest members alone."""
    ratios: dict[int, list[float]] = {mark: [] for mark in marks}
    outs: list[float | None] = []
    expelled, troubles, audited, carried = 0, set[str](), 0, 0
    for seed in range(1, seeds + 1):
        known = like.honest, like.robust, like.share, seed
        if known not in clean:
            clean[known], _ = run_case(replace(like, kind="", attackers=0, seed=seed), marks)
        beside = clean[known]
        watch, who = run_case(replace(like, seed=seed), marks)
        for mark in marks:
            tokens = mark * like.honest * SAMPLES
            ratios[mark].append(ratio_of(watch.losses.get(tokens), beside.losses.get(tokens)))
        outs.append(rounds_until_out(watch, who, like.kind))
        expelled += watch.expelled
        audited, carried = audited + watch.audit_bytes, carried + watch.round_bytes
        troubles |= {watch.trouble, beside.trouble} - {""}
    stays = any(one is None for one in outs)
    row: dict[str, Any] = {"attack": like.kind, "attackers": like.attackers, "robust": like.robust, "share": like.share}
    for mark in marks:
        row |= {f"loss at {mark}": median(ratios[mark]), f"worst at {mark}": max(ratios[mark])}
    gone = [one for one in outs if one is not None]
    row |= {"out after": "stays" if stays else f"{max(gone):.0f}", "median": median(gone) if gone else None}
    row |= {"audit_bytes_share": audited / carried if carried else 0.0}
    return row | {"honest expelled": expelled, "trouble": "; ".join(sorted(troubles)) or "-"}


# What audits cost and find ----------------------------------------------------------------------------------


def chance(share: float, members: int, lies: int) -> float:
    """Probability that a round in which ``lies`` chunks are wrong is found out: each of the others audits each of them
    with probability ``2 * share / members``."""
    return 1.0 - (1.0 - 2.0 * share / members) ** (lies * (members - 1))


def drawn_chance(share: float, members: int, chunks: int, lies: int, rounds: int = 20_000) -> float:
    """The same, drawn as auditors draw: so many of the chunks that others made."""
    rng, found, own = Random(1), 0, chunks // members
    wanted = audits_a_round(share, members, chunks)
    for _ in range(rounds):
        for _ in range(members - 1):
            count = math.floor(wanted) + (rng.random() < wanted % 1.0)
            if any(one < lies for one in rng.sample(range(chunks - own), count)):
                found += 1
                break
    return found / rounds


def audit_cost(share: float, members: int, elements: int) -> float:
    """CPU time of a member's audits over that of its round: encoding its contribution, reducing its part with all
    checks, decoding the mean. One thread, int8."""
    audit_s, round_s, chunks = run_virtual(_costs(members, elements))
    return audits_a_round(share, members, chunks) * audit_s / round_s


async def _costs(members: int, elements: int) -> tuple[float, float, int]:
    """Return the CPU time of an audit of one chunk and of a member's round, and the number of chunks."""
    chunk = chunk_elements(elements, members)
    peers = [letter * 16 for letter in "abcdefgh"[:members]]
    plan = RoundPlan(
        round=0,
        anchor_version=0,
        state_digest=bytes(32),
        chunk_elements=chunk,
        members=tuple(PlanMember(peer=peer, weight_tokens=1) for peer in peers),
        parts=tuple(
            Part(owner=owner, start=start, stop=stop)
            for owner, start, stop in split(elements, [1 / members] * members, chunk)
        ),
    )
    sides = make_sides(MemoryNetwork(), plan, "int8")
    store = sides[0].store
    grid, contributions = store.leaf_grid, [side.exchange._source._contribution for side in sides]
    feedback = ErrorFeedback(elements)
    feedback.begin(TensorReader(torch.randn(elements)))

    def shown(index: int) -> dict[int, memoryview]:
        bounds = store.bounds(index)
        return {at: one.chunk(*bounds, BufferPool()) for at, one in enumerate(contributions) if one is not None}

    def made(index: int, data: dict[int, memoryview]) -> memoryview:
        packed = {at: checked_contribution(store, index, at, one) for at, one in data.items()}
        return reduce_again(store, index, sorted(packed), packed)

    own, data = store.chunks_of(store.plan.parts[0]), shown(0)
    made(0, data)  # compiles
    began_s = time.process_time()
    for _ in range(_TIMES):
        result = made(0, data)
    audit_s = (time.process_time() - began_s) / _TIMES
    began_s = time.process_time()
    encode_leaves(feedback, grid, range(grid.leaves), BufferPool())
    for index in range(store.chunks):
        store.codec(index).decode(result[store.group.header_bytes :], store.bounds(0)[1])
    return audit_s, time.process_time() - began_s + len(own) * audit_s, store.chunks


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--rounds", type=int, default=100, help="measured at 0.3 of them and at their end")
    arguments.add_argument("--seeds", type=int, default=5)
    arguments.add_argument("--attackers", type=comma(int), default=[1, 2, 3], help="of 8; sybils are 20 beside 8")
    arguments.add_argument("--kinds", type=comma(str), default=list(KINDS), help=", ".join(KINDS))
    arguments.add_argument("--robust", type=comma(str), default=["norm"])
    arguments.add_argument("--shares", type=comma(float), default=[0.02], help="[audit] share")
    arguments.add_argument("--clean-rounds", type=int, default=0, help="rounds without attackers, to count exclusions")
    arguments.add_argument("--audits", action="store_true", help="what audits cost and find, for 8 members")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    marks = sorted({max(1, round(0.3 * options.rounds)), options.rounds})
    clean: dict[tuple[int, str, float, int], Watch] = {}
    rows: list[dict[str, Any]] = []
    for robust, share in product(options.robust, options.shares):
        for kind in options.kinds:
            for attackers in [SYBILS] if kind == "sybils" else options.attackers:
                honest = PEERS if kind == "sybils" else PEERS - attackers
                rows.append(rows_of(Case(kind, honest, attackers, robust, 0, share), options.seeds, marks, clean))
                console.print("  ".join(f"{name}: {value}" for name, value in rows[-1].items()), highlight=False)
    worst = [max(row[f"worst at {mark}"] for mark in marks) for row in rows if row["attackers"] == 2]
    ratios: dict[str, float | None] = {"worst_loss_2_of_8_vs_clean": max(worst, default=None), "honest_expelled": None}
    if options.clean_rounds:
        watch, _ = run_case(Case("", PEERS, 0, options.robust[0], 1, options.shares[0]), [options.clean_rounds])
        ratios["honest_expelled"] = None if watch.trouble and not watch.expelled else watch.expelled
        console.print(f"{len(watch.plans)} clean rounds {watch.trouble}", highlight=False)
    if options.audits:
        ratios["audit_cpu_share"] = audit_cost(options.shares[0], PEERS, 10**7)
        for lies in (1, 8, 32):
            formula, drawn = chance(options.shares[0], PEERS, lies), drawn_chance(options.shares[0], PEERS, 256, lies)
            console.print(f"{lies} of 256 chunks wrong: found in a round with {formula:.3f}, drawn {drawn:.3f}")
            ratios[f"found_{lies}_of_256"] = drawn
    publish(f"held-out loss / that of the honest alone, {options.seeds} seeds", rows, ratios, options.json)


if __name__ == "__main__":
    main()
