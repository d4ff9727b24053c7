"""Cost of the bound on influence for honest members of very different speeds: held-out loss with it and without it.

Rounds of a small gpt, really trained, on a simulated clock: members whose speeds are 1 : 4 and 1 : 20 and that see
different parts of the corpus bring what they have managed when a round closes, and make some steps more or less each
time. Plans, their bounds and factors are those of the coordinator's own code; the exchange itself is exact, as what a
codec loses is the same either way. One row more has an attacker with 2 % of the weight, who brings 1e30.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from common import console, parser, publish
from torch import Tensor

from shoal.compression.range_reader import whole_vector
from shoal.peer.recipes import Recipe, load_recipe
from shoal.peer.training.algorithms import LocalWork, local_work
from shoal.peer.training.inner_optimizer import make_inner
from shoal.peer.training.lr_schedule import lr_factor
from shoal.peer.training.outer_optimizer import make_outer
from shoal.peer.training.parameters import ParameterVector
from shoal.swarm.averaging.norm_claims import pack, ranges, total_norm
from shoal.swarm.coordinator.influence import (
    bounded,
    is_unusual,
    level_of,
    norm_bound,
    power_of,
    suspects_of,
)
from shoal.swarm.coordinator.membership import Member
from shoal.swarm.coordinator.rollback import CommittedRound
from shoal.swarm.coordinator.trust import earn_credit
from shoal.swarm.protocol.rounds import Part, PlanMember, RoundPlan
from shoal.swarm.protocol.run_file import RunFile, parse_run_file
from shoal.swarm.protocol.types import Address, Certificate, DeviceInfo, RosterEntry

BATCH, CONTEXT = 8, 64
SLOWEST_STEPS = 3
"""Of the slowest member in a round."""

RUN = """
[run]
name = "uneven"
seed = {seed}
tokens = {tokens}
[recipe]
name = "gpt"
settings = {{ layers = 2, width = 64, heads = 2, context = 64 }}
[averaging]
robust = "{robust}"
[inner]
lr = 2e-3
batch_samples = 8
[schedule]
kind = "cosine"
warmup_tokens = {warmup}
[round]
tokens = {round_tokens}
"""

SWARMS = {"1 : 4": (1, 1, 4, 4), "1 : 20": (1, 1, 4, 20)}
"""Speeds of the members."""


@dataclass
class Trainer:
    """One member: what the coordinator knows of it, its model, its part of the corpus, its pace."""

    about: Member
    recipe: Recipe
    model: Any
    work: LocalWork
    samples: range
    speed: int
    draws: torch.Generator

    @property
    def peer(self) -> str:
        return self.about.entry.peer

    def train(self, anchor: Tensor, run: RunFile, tokens: int, round_tokens: int) -> tuple[Tensor, int]:
        """A round's work from the anchor: the contribution, (n,) float32, and its tokens."""
        self.work.restart_from(anchor)
        assert run.run.tokens is not None
        data, jitter = self.recipe.training_data(), 0.7 + 0.6 * float(torch.rand((), generator=self.draws))
        steps = max(1, round(self.speed * SLOWEST_STEPS * jitter))
        for step in range(steps):
            chosen = torch.randint(self.samples.start, self.samples.stop, (BATCH,), generator=self.draws)
            loss = self.recipe.loss(self.model, data.batch(chosen.tolist()))
            loss.backward()  # type: ignore[no-untyped-call]
            now = min(tokens + round_tokens * step // steps, run.run.tokens)
            self.work.step(BATCH, lr_factor(run.schedule, run.run.tokens, now))
        return whole_vector(self.work.contribution(anchor)), steps * BATCH * CONTEXT


@dataclass(frozen=True)
class Result:
    """``clipped``: the largest share of rounds in which one honest member was above its bound; ``longest``: the longest
    honest contribution, of its bound; ``barred``: honest members that would have been left out if the run had diverged
    in its second half."""

    loss: float
    clipped: float
    longest: float
    barred: int


def make_member(number: int) -> Member:
    """Ordered by number, so that sums are the same in every run."""
    peer = "peer" + "abcdefgh"[number] * 12
    certificate = Certificate(identity_key=bytes(32), curve_key=bytes(32), signature=bytes(64))
    entry = RosterEntry(
        peer=peer,
        certificate=certificate,
        name=peer,
        role="trainer",
        addresses=(Address(host="127.0.0.1", control_port=1, data_port=2),),
        reachable=True,
    )
    return Member(entry, DeviceInfo(kind="cpu", name="simulated", memory_bytes=0), 0.0)


def make_trainer(run: RunFile, recipe: Recipe, number: int, members: int, speed: int) -> Trainer:
    """Its part of the corpus is its own."""
    model, samples = recipe.build_model(run.run.seed), len(recipe.training_data())
    return Trainer(
        about=make_member(number),
        recipe=recipe,
        model=model,
        work=local_work(run, ParameterVector(model), make_inner(model, run.inner)),
        samples=range(samples * number // members, samples * (number + 1) // members),
        speed=speed,
        draws=torch.Generator().manual_seed(100 * run.run.seed + number),
    )


def plan_of(number: int, brought: dict[str, tuple[Tensor, int]]) -> RoundPlan:
    """As the coordinator makes it of what members claim, before it is bounded."""
    elements = next(iter(brought.values()))[0].numel()
    members = [
        PlanMember(peer=peer, weight_tokens=weight, norms=claim_of(one)) for peer, (one, weight) in brought.items()
    ]
    return RoundPlan(
        round=number,
        anchor_version=number,
        state_digest=bytes(32),
        chunk_elements=2**18,
        members=tuple(members),
        parts=(Part(owner=0, start=0, stop=elements),),
    )


def claim_of(contribution: Tensor) -> bytes:
    """``(n,) float32``"""
    exact = contribution.double()
    return pack([float(exact[start:stop].norm()) for start, stop in ranges(contribution.numel())])


def simulate(speeds: tuple[int, ...], robust: str, rounds: int, seed: int, *, attacked: bool = False) -> Result:
    """The same seed is the same run, but for the bound and the attacker."""
    round_tokens = sum(speeds) * SLOWEST_STEPS * BATCH * CONTEXT
    tokens = rounds * round_tokens
    settings = {"warmup": tokens // 10, "round_tokens": round_tokens, "robust": robust}
    run = parse_run_file(RUN.format(seed=seed, tokens=tokens, **settings))
    recipe, outer, power = load_recipe(run), make_outer(run.outer), power_of(run)
    trainers = [make_trainer(run, recipe, number, len(speeds), speed) for number, speed in enumerate(speeds)]
    honest, attacker = [one.peer for one in trainers], make_member(len(trainers))
    members = {one.peer: one.about for one in trainers} | {attacker.entry.peer: attacker}
    vector = ParameterVector(trainers[0].model)
    trained, values = 0, torch.zeros(1 + outer.slots, vector.elements)
    anchor = values[0]
    vector.read(0, vector.elements, anchor)
    past: list[CommittedRound] = []
    above, barred, longest = Counter[str](), set[str](), 0.0
    for number in range(rounds):
        brought = {one.peer: one.train(anchor, run, trained, round_tokens) for one in trainers}
        if attacked:
            brought[attacker.entry.peer] = torch.full_like(anchor, 1e30), sum(w for _, w in brought.values()) // 49
        plan = bounded(plan_of(number, brought), run, past, members)
        weight = sum(one.weight_tokens for one in plan.members)
        counted = sum(one.weight for one in plan.members)
        mean = torch.zeros_like(anchor)
        for one in plan.members:
            mean += brought[one.peer][0] * (one.factor * one.weight / counted)
            if one.peer in honest:
                above[one.peer] += is_unusual(one, plan.rho, power)
                longest = max(longest, total_norm(one.norms) / norm_bound(one, plan.rho, power))
        suspects = suspects_of(plan, members, power)
        barred |= set(suspects).intersection(honest) if number >= rounds // 2 else set()
        level = level_of(plan.members, members, power)
        past.append(CommittedRound(number, bytes(32), weight, 1.0, (), level, plan.rho, None, suspects))
        outer.step_(values, mean, number)
        trained += weight
        for one in plan.members:
            members[one.peer].rounds_committed += 1
        earn_credit(members, {one.peer: one.weight_tokens for one in plan.members}, weight)
    vector.write(anchor)
    loss = recipe.held_out_loss(trainers[0].model, "cpu")
    return Result(loss, max(above[peer] / rounds for peer in honest), longest, len(barred))


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--rounds", type=int, default=40)
    arguments.add_argument("--seeds", type=int, default=1, help="runs of each kind, with and without bounds in turns")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    ratios: dict[str, float | None] = {}
    clipped, barred, worst = 0.0, 0, 0.0
    for name, speeds in SWARMS.items():
        for seed in range(1, options.seeds + 1):
            results = {robust: simulate(speeds, robust, options.rounds, seed) for robust in ("none", "norm")}
            kinds = {f"bound {robust}": result for robust, result in results.items()}
            if seed == 1:
                kinds["bound norm, attacked"] = simulate(speeds, "norm", options.rounds, seed, attacked=True)
                attack = kinds["bound norm, attacked"].loss / results["none"].loss
                ratios[f"held_out_loss_attacked_vs_not_{speeds[-1]}"] = attack
            for kind, result in kinds.items():
                rows.append({"speeds": name, "seed": seed, "run": kind, **row(result)})
                console.print(f"{name}, seed {seed}, {kind}: held-out loss {result.loss:.4f}")
            ratio = results["norm"].loss / results["none"].loss
            worst, barred = max(worst, ratio), max(barred, results["norm"].barred)
            clipped = max(clipped, results["norm"].clipped)
    ratios |= {"held_out_loss_bounded_vs_not": worst, "clipped_share_worst": clipped, "barred": barred}
    publish(f"{options.rounds} rounds, members of their own data", rows, ratios, options.json)


def row(result: Result) -> dict[str, Any]:
    return {
        "held-out loss": result.loss,
        "clipped, share of rounds": result.clipped,
        "longest, of its bound": result.longest,
        "barred": result.barred,
    }


if __name__ == "__main__":
    main()
