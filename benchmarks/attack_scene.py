"""A run under attack, in one process: what ``attacks.py`` measures.

Real: the coordinator's state machine and what it journals, clients, averagers, codecs, commitments, audits with
evidence and its judge, validators' draws and scores, credit and leases. In memory: network and clock, which are those
of the tests, so a run is the same each time. Small: the model, which tells a byte of text from the four before it.
All join before the first round, so attackers are no newcomers among members with credit (but ``late``), and each has a
network of its own: the worst case for rules that count past work.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import math
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.append(str(Path(__file__).resolve().parents[1]))

from tests.fakes.memory_coordinator import MemoryCoordinator
from tests.fakes.memory_network import MemoryNetwork, Step, stalled
from tests.fakes.outer_steps import stepped
from tests.fakes.swarm import SimMember, Swarm, swarm
from tests.fakes.virtual_clock import Stuck, run_virtual

from shoal.compression.codec_map import CodecMap
from shoal.compression.range_reader import whole_vector
from shoal.peer.recipes.gpt import GptRecipe
from shoal.peer.training.algorithms import local_work
from shoal.peer.training.data import run_order
from shoal.peer.training.inner_optimizer import make_inner
from shoal.peer.training.outer_optimizer import make_outer
from shoal.peer.training.parameters import ParameterVector
from shoal.peer.validation.scorer import Scorer, bare_score
from shoal.peer.validation.scoring import draw
from shoal.swarm.averaging.allreduce import AllReduce
from shoal.swarm.averaging.auditor import Auditor
from shoal.swarm.averaging.averager import Averager
from shoal.swarm.averaging.chunk_judge import RunFacts, judge
from shoal.swarm.averaging.committed_contribution import PartialContribution, fetch_contribution
from shoal.swarm.averaging.leaf_grid import LeafGrid
from shoal.swarm.averaging.outcome import Aborted, Committed, RoundOffer
from shoal.swarm.averaging.reduction import ChunkCollector, ReducedChunk, Reduction
from shoal.swarm.averaging.results import ResultStore
from shoal.swarm.coordinator.host_commands import HostCommands
from shoal.swarm.coordinator.trust import DOUBTED_AFTER
from shoal.swarm.errors import LinkError, ShoalError
from shoal.swarm.protocol.evidence import evidence_id
from shoal.swarm.protocol.messages import (
    Acknowledged,
    CoordinatorToHostInvite,
    CoordinatorToPeerLease,
    CoordinatorToPeerWork,
    CreateInvite,
    PeerToCoordinatorGetWork,
    PeerToCoordinatorRequestLease,
    PeerToCoordinatorRoundReport,
    PeerToCoordinatorScoreWork,
)
from shoal.swarm.protocol.rounds import RoundPlan, RunView, Verdict
from shoal.swarm.protocol.run_file import DataSection, RunFile, parse_run_file
from shoal.swarm.protocol.statements import PlanSigner
from shoal.swarm.protocol.types import TensorSpec
from shoal.swarm.protocol.work_scores import BAD
from shoal.swarm.sample_ranges import count, merge

CONTEXT, BATCH, STEPS = 16, 8, 2
SAMPLES = BATCH * STEPS
"""Of an even member's round; to the run each is a token."""
WARMUP_ROUNDS = 5
WORK_S, MAX_S, TICK_S = 2.0, 6.0, 0.25
"""Virtual: of local work, of a round, which waits no longer for what attackers do not lease, and of the coordinator."""
OUT_ROUNDS = 5
"""An attacker that is in none of so many last rounds is out."""

RUN = """
algorithm = "diloco"
[averaging]
codec = "{codec}"
robust = "{robust}"
secure = {secure}
[run]
name = "attacks"
seed = {seed}
[recipe]
name = "own"
[inner]
lr = 5e-4
batch_samples = 8
[round]
tokens = {tokens}
max_s = {max_s}
patience_s = 6.0
[audit]
share = {share}
work_share = {work_share}
"""


# The model --------------------------------------------------------------------------------------------------


class NextByte(nn.Module):
    """Tells the next byte from the four before it: 30,032 parameters, which are eight leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 16)
        self.hidden = nn.Linear(4 * 16, 80)
        self.head = nn.Linear(80, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        """``tokens``: (b, context); returns logits, (b, context, 256)."""
        windows = F.pad(tokens, (3, 0)).unfold(1, 4, 1)
        logits: Tensor = self.head(torch.tanh(self.hidden(self.embedding(windows).flatten(2))))
        return logits


UNUSED = {"layers": 1, "width": 16, "heads": 1}


class NextByteRecipe(GptRecipe):
    """The recipe ``gpt`` with its text, its loss and a smaller model."""

    def build_model(self, seed: int) -> Any:
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed)
            return NextByte()


# Attacks ----------------------------------------------------------------------------------------------------

Bring = Callable[[Tensor, "Trainer"], Tensor]
"""What is brought instead of the real contribution."""


def huge(real: Tensor, member: Trainer) -> Tensor:
    return torch.full_like(real, 1e30)


def random(real: Tensor, member: Trainer) -> Tensor:
    drawn = torch.randn(real.shape, generator=member.draws)
    return torch.mul(drawn, 10 * real.norm() / drawn.norm())


def flipped(real: Tensor, member: Trainer) -> Tensor:
    return -10 * real


def bounded_flip(real: Tensor, member: Trainer) -> Tensor:
    """As long as the bound lets through whole, so it earns credit like honest work."""
    return -1.4 * real


def biased(real: Tensor, member: Trainer) -> Tensor:
    """All attackers push the same way, half as far as the real work goes."""
    direction = torch.randn(real.shape, generator=torch.Generator().manual_seed(7))
    return torch.add(real, direction * (0.5 * real.norm() / direction.norm()))


def zero(real: Tensor, member: Trainer) -> Tensor:
    return torch.zeros_like(real)


def copied(real: Tensor, member: Trainer) -> Tensor:
    """The first honest member's contribution to the round before, the newest that travels before the roots of this
    one are known."""
    victim = member.swarm.members[0]
    assert isinstance(victim, Trainer)
    return real if victim.brought_before is None else victim.brought_before


CONTRIBUTIONS: dict[str, Bring] = {
    "huge": huge,
    "random": random,
    "flip": flipped,
    "bounded": bounded_flip,
    "bias": biased,
    "zero": zero,
    "copy": copied,
    "sybils": flipped,
    "late": flipped,
}
MANY = ("sybils", "late")
"""Kinds of many identities beside all honest members, from the start and once others have credit."""
OWNERS = ("owner", "equivocation")
"""Kinds that are out when they own no part, though their work may still count."""
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
    def _all_reduce(self, store: ResultStore, signer: PlanSigner) -> AllReduce:
        exchange = super()._all_reduce(store, signer)
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


def equivocating(holder: str) -> Callable[[Step, bytes], Any]:
    """To every other member it sends means that point the other way in the second half of each chunk."""

    async def fault(step: Step, payload: bytes) -> bytes:
        if (step.blob.kind, step.holder) != ("result", holder) or int(step.to[-1], 36) % 2:
            return payload
        half = len(payload) // 2
        return payload[:half] + bytes((256 - one) % 256 for one in payload[half:])

    return fault


# Members ----------------------------------------------------------------------------------------------------


class Member(SimMember):
    """Follows the anchor of a real run."""

    run: RunFile
    recipe: NextByteRecipe
    _digest: tuple[int, bytes] = (-1, b"")

    def begin_training(self, run: RunFile, recipe: NextByteRecipe) -> None:
        self.run, self.recipe = run, recipe
        self.model = recipe.build_model(run.run.seed)
        self.vector = ParameterVector(self.model)
        self.outer = make_outer(run.outer)
        self.anchor, self.outer_state = whole_vector(self.vector), torch.zeros(self.outer.slots, self.elements)
        self.codec_map = CodecMap(run.format_map([("w", (self.elements,))]))

    def apply(self, mean: Tensor) -> None:
        self.anchor, self.outer_state = stepped(self.outer, self.anchor, self.outer_state, mean, self.version)

    @property
    def digest(self) -> bytes:
        if self._digest[0] != self.version:
            self._digest = self.version, hashlib.sha256(self.anchor.numpy().tobytes()).digest()
        return self._digest[1]

    def held_out_loss(self) -> float:
        self.vector.write(self.anchor)
        return self.recipe.held_out_loss(self.model, "cpu")


class Trainer(Member):
    """Trains really; ``kind`` is its attack, "" of an honest member; ``steps``: of its round."""

    kind = ""
    steps = STEPS
    brought: Tensor | None = None
    brought_before: Tensor | None = None
    auditor: Auditor | None = None
    _trained: tuple[int, int] = (-1, 0)

    def begin_training(self, run: RunFile, recipe: NextByteRecipe) -> None:
        super().begin_training(run, recipe)
        self.local = local_work(run, self.vector, make_inner(self.model, run.inner))
        self.data = recipe.training_data()
        self.order = run_order(run, self.data, 1)
        self.draws = torch.Generator().manual_seed(100 * run.run.seed + len(self.swarm.members))

    async def _make_averager(self, tasks: asyncio.TaskGroup) -> Averager:
        made = {"owner": LyingOwner, "accuse": FalseAccuser}.get(self.kind, Averager)
        averager = made(self.client, self.endpoint, self.codec_map, self.elements)
        if share := self.run.audit.share:
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

    async def lease(self) -> None:
        """Work for a while, then take its samples; an attacker that gets none soon goes without."""
        await asyncio.sleep(WORK_S)
        refused, wanted = 0, BATCH * self.steps
        while self.view.round == self.round and self.view.phase in ("waiting", "training"):
            missing = wanted - count(self.done)
            if missing <= 0 or (self.kind and refused > 1):
                break
            ask = PeerToCoordinatorRequestLease(round=self.round, samples=missing, tokens_done=count(self.done))
            answer = await self.client.ask(ask, CoordinatorToPeerLease)
            self.done = merge([*self.done, *((one.start, one.stop) for one in answer.ranges)])
            if not answer.ranges:
                refused += 1
                await asyncio.sleep(0.5)
        await self.beat()

    def train(self) -> None:
        """Make the contribution of the samples that it holds."""
        if self._trained == (self.version, count(self.done)):
            return
        self._trained = self.version, count(self.done)
        self.local.restart_from(self.anchor)
        for start, stop in self.done:
            for at in range(start, stop, BATCH):
                batch = self.data.batch(self.order.indices(at, min(at + BATCH, stop)))
                self.recipe.loss(self.model, batch).backward()  # type: ignore[no-untyped-call]
                self.local.step(len(batch), min(1.0, (self.version + 1) / WARMUP_ROUNDS))
        self.brought_before = self.brought
        self.brought = whole_vector(self.local.contribution(self.anchor)).clone()

    async def one_round(self) -> bool:
        """Whether it was committed. Raises ``RuntimeError`` if this member has fallen out of step."""
        await self.lease()
        self.train()
        bring = CONTRIBUTIONS.get(self.kind)
        assert self.brought is not None
        match await self.average(self.brought if bring is None else bring(self.brought, self)):
            case Committed():
                return True
            case Aborted():
                return False
            case other:
                raise RuntimeError(f"{self.kind or 'honest'}: {other.reason}")

    async def attack(self) -> str:
        """Go on until it is excluded or the run is over; return why it ended."""
        membership = self.swarm.coordinator.machine.scope.membership
        try:
            while True:
                if self.kind == "late" and not membership.with_credit():
                    await self.average(torch.zeros(self.elements))  # of no samples: it only follows
                else:
                    await self.one_round()
        except (ShoalError, RuntimeError) as error:
            return str(error)


class Validator(Member):
    """Draws and scores as ``shoal join --role validator`` does, between rounds."""

    role = "validator"

    def __init__(self, swarm: Swarm, number: int, latency_s: float) -> None:
        coordinator: MemoryCoordinator = swarm.coordinator
        made = HostCommands(coordinator.machine.scope, coordinator.identity).answer(CreateInvite(role="validator"))
        assert isinstance(made, CoordinatorToHostInvite)
        self.token = made.token
        self.scored = self.bad = 0
        self._doubted: set[str] = set()
        self._looks = Counter[str]()
        super().__init__(swarm, number, latency_s)

    def begin_training(self, run: RunFile, recipe: NextByteRecipe) -> None:
        super().begin_training(run, recipe)
        self.rng = Random(f"{run.run.seed} validator {self.peer}")
        self.scorer = Scorer(run, recipe, torch.device("cpu"), self.rng)
        self.grid = LeafGrid(self.elements, self.codec_map)

    async def follow(self) -> None:
        """Take part without work, and score after each committed round."""
        nothing = torch.zeros(self.elements)
        while True:
            before = self.anchor
            match await self.average(nothing):
                case Committed(verdict=verdict):
                    await self._review(verdict, before)
                case Aborted():
                    pass
                case other:
                    raise RuntimeError(f"validator: {other.reason}")

    async def _review(self, verdict: Verdict, anchor: Tensor) -> None:
        assert verdict.plan is not None
        planned = {one.peer: one for one in verdict.plan.members}
        for peer in draw(list(planned), self._doubted, self._looks, self.run.audit.work_share, self.rng):
            ask = PeerToCoordinatorGetWork(round=verdict.round, peer=peer)
            work = await self.client.ask(ask, CoordinatorToPeerWork)
            self._doubted.update(work.doubted)
            if not work.ranges:
                continue
            deadlines, root = self.client.deadlines, planned[peer].root
            partial = PartialContribution(self.grid)
            about = peer, verdict.round, root, partial, deadlines.request_s, deadlines.patience_s
            try:
                contribution = await fetch_contribution(self.endpoint, *about)
            except LinkError:
                score = bare_score(verdict, peer).model_copy(update={"finding": "withheld"})
            else:
                score = self.scorer.score(verdict, planned[peer], work, anchor, contribution)
            self.scored, self.bad = self.scored + 1, self.bad + (score.finding in BAD)
            self._looks[peer] += 1
            (self._doubted.add if score.finding in BAD else self._doubted.discard)(peer)
            await self.client.ask(PeerToCoordinatorScoreWork(signed=self.client.sign_score(score)), Acknowledged)


# A run ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """``validators``: beside honest members and attackers; ``steps``: of each honest member, even ones if empty;
    ``secure``: contributions are masked, so ``robust`` is none and nothing is audited."""

    kind: str
    honest: int
    attackers: int
    seed: int
    robust: str = "norm"
    share: float = 0.02
    validators: int = 0
    work_share: float = 0.02
    steps: tuple[int, ...] = ()
    codec: str = "int8"
    secure: bool = False

    def run_toml(self, tokens: int) -> str:
        """Return the run file of rounds of so many tokens."""
        return RUN.format(
            codec=self.codec,
            robust=self.robust,
            secure=str(self.secure).lower(),
            seed=self.seed,
            tokens=tokens,
            max_s=MAX_S,
            share=self.share,
            work_share=self.work_share,
        )


@dataclass
class Watch:
    """``losses``: held-out, by honest tokens in the anchor; ``plans``: of committed rounds; ``aborted``: rounds;
    ``expelled``: honest members that were banned, ``barred``: that are not here for any reason, ``doubted``: that lost
    their credit by scores; ``banned``: by attacker, the committed rounds before that; ``audit_bytes``: that honest
    members fetched for audits, beside the ``round_bytes`` of their rounds."""

    losses: dict[int, float] = field(default_factory=dict)
    plans: list[RoundPlan] = field(default_factory=list)
    attackers: list[str] = field(default_factory=list)
    aborted: int = 0
    expelled: int = 0
    barred: int = 0
    doubted: int = 0
    banned: dict[str, int] = field(default_factory=dict)
    trouble: str = ""
    audit_bytes: int = 0
    round_bytes: int = 0
    scored: int = 0
    bad_scores: int = 0


async def simulate(case: Case, marks: Sequence[int]) -> Watch:
    """Run until the honest members have brought as many tokens as in the last of ``marks``, in rounds without loss."""
    watch, network = Watch(), MemoryNetwork(case.seed)
    steps = case.steps or (STEPS,) * case.honest
    each = sum(steps) * BATCH
    toml = case.run_toml(each + case.attackers * SAMPLES)
    run, recipe = (
        parse_run_file(toml),
        NextByteRecipe({"layers": 1, "width": 16, "heads": 1, "context": CONTEXT}, DataSection()),
    )
    elements = ParameterVector(recipe.build_model(case.seed)).elements

    def make(swarm: Swarm, number: int, latency_s: float) -> SimMember:
        member: Trainer | Validator
        if number > case.honest + case.attackers:
            member = Validator(swarm, number, latency_s)
        else:
            member = Trainer(swarm, number, latency_s)
            member.kind = case.kind if number > case.honest else ""
            member.steps = STEPS if member.kind else steps[number - 1]
        member.begin_training(run, recipe)
        return member

    members = case.honest + case.attackers + case.validators
    async with swarm(members, toml, elements, network, latency_s=0.001, make=make) as made:
        made.coordinator.tick_s = TICK_S
        trainers = [one for one in made.members if isinstance(one, Trainer)]
        honest, attackers = trainers[: case.honest], trainers[case.honest :]
        watch.attackers = [one.peer for one in attackers]
        for one in attackers:
            if case.kind == "withhold":
                network.faults.append(stalled("contribution", one.peer, 0))
            if case.kind == "equivocation":
                network.faults.append(equivocating(one.peer))
        validators = [one for one in made.members if isinstance(one, Validator)]
        others: list[asyncio.Task[Any]] = [asyncio.create_task(one.attack()) for one in attackers]
        others += [asyncio.create_task(one.follow()) for one in validators]
        try:
            await _rounds(case, made, honest, watch, [mark * each for mark in marks])
        except* (ShoalError, RuntimeError) as errors:
            watch.trouble = str(errors.exceptions[0])
        finally:
            scope = made.coordinator.machine.scope
            known = [scope.membership.members.get(one.peer) for one in honest]
            watch.barred = sum(one is None or not one.alive for one in known)
            watch.doubted = sum(one is not None and one.work.bad >= DOUBTED_AFTER for one in known)
            watch.expelled = sum(one.peer in scope.admission.access_list.bans for one in honest)
            auditors = [one.auditor for one in honest if one.auditor is not None]
            watch.audit_bytes = sum(one.audited_bytes for one in auditors)
            names = {one.peer for one in honest}
            received = sum(size for (_, to), size in network.moved_bytes.items() if to in names)
            watch.round_bytes = received - watch.audit_bytes
            watch.scored, watch.bad_scores = sum(one.scored for one in validators), sum(one.bad for one in validators)
            for task in others:
                task.cancel()
            ends = await asyncio.gather(*others, return_exceptions=True)
            broken = [one for one in ends if isinstance(one, Exception)]
            watch.trouble = watch.trouble or (str(broken[0]) if broken else "")
        return watch


async def _rounds(case: Case, made: Swarm, honest: list[Trainer], watch: Watch, wanted: list[int]) -> None:
    tokens, names = 0, {one.peer for one in honest}
    bans = made.coordinator.machine.scope.admission.access_list.bans
    while tokens < wanted[-1]:
        async with asyncio.TaskGroup() as tasks:
            rounds = [tasks.create_task(one.one_round()) for one in honest]
        if not all(task.result() for task in rounds):
            watch.aborted += 1
            if watch.aborted > 100:
                raise RuntimeError("too many rounds are aborted")
            continue
        if len({one.digest for one in honest}) > 1:
            raise RuntimeError("honest members hold different states")
        verdict = honest[0].view.verdict
        assert verdict is not None
        assert verdict.plan is not None
        watch.plans.append(verdict.plan)
        for peer in bans:
            watch.banned.setdefault(peer, len(watch.plans))
        tokens += sum(one.weight_tokens for one in verdict.plan.members if one.peer in names)
        if not case.steps and len(watch.plans) * len(honest) * SAMPLES > 2 * wanted[-1] + 100 * SAMPLES:
            raise RuntimeError("honest work is left out")
        for mark in [mark for mark in wanted if mark <= tokens and mark not in watch.losses]:
            watch.losses[mark] = honest[0].held_out_loss()


def rounds_until_out(watch: Watch, kind: str) -> list[int | None]:
    """For each attacker the last committed round with it, None if it stays."""
    found: list[int | None] = []
    for peer in watch.attackers:
        last = 0
        for number, plan in enumerate(watch.plans, start=1):
            owners = {plan.members[part.owner].peer for part in plan.parts}
            present = owners if kind in OWNERS else {one.peer for one in plan.members}
            last = number if peer in present else last
        found.append(last if len(watch.plans) - last >= OUT_ROUNDS else None)
    return found


def run_case(case: Case, marks: Sequence[int]) -> Watch:
    """Run a case on a virtual clock; the same each time."""
    torch.manual_seed(case.seed)
    np.random.seed(case.seed)
    try:
        return run_virtual(simulate(case, marks), horizon_s=1e6)
    except (Stuck, ExceptionGroup) as error:
        first: Exception = error
        while isinstance(first, ExceptionGroup):
            first = first.exceptions[0]
        return Watch(trouble=f"{type(first).__name__}: {first}")


def calm_collector() -> None:
    """Collect garbage seldom: of a process of many imports and few cycles."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 1000)


def ratio_of(loss: float | None, clean: float | None, worst: float) -> float:
    """``worst`` for what did not get so far, or is no number."""
    if loss is None or clean is None or not math.isfinite(loss):
        return worst
    return min(worst, loss / clean)
