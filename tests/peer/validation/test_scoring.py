"""Scores of contributions to a real training run of a tiny model: honest ones, and all kinds that are not."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from tests.swarm.averaging.test_allreduce import make_plan
from torch import Tensor

from shoal.peer.recipes.gpt import GptRecipe
from shoal.peer.training.data import SampleOrder
from shoal.peer.training.device import autocast
from shoal.peer.training.inner_loop import InnerLoop
from shoal.peer.training.inner_optimizer import make_inner
from shoal.peer.training.parameters import ParameterVector
from shoal.peer.validation.scorer import Scorer, random_samples
from shoal.peer.validation.scoring import (
    FIRST_LOOKS,
    GROUPS,
    Indices,
    LossMeter,
    Sketches,
    deviation,
    draw,
    effect_of,
    gain_of,
    is_empty,
    is_same_loss,
    same_bytes_as,
    tolerance,
)
from shoal.peer.validation.validator import FollowedAnchors
from shoal.swarm.coordinator.events import WorkStanding
from shoal.swarm.coordinator.trust import is_expelled, work_after
from shoal.swarm.protocol.messages import CoordinatorToPeerWork
from shoal.swarm.protocol.rounds import Verdict
from shoal.swarm.protocol.run_file import DataSection, InnerSection, RunFile
from shoal.swarm.protocol.types import FirstBatch, SampleRange
from shoal.swarm.protocol.work_scores import Gain, WorkScore

TINY = {"layers": 1, "heads": 2, "width": 16, "context": 12}
BATCH = 4
LR, MOMENTUM = 0.7, 0.9
SCORE = {"round": 0, "chain": bytes(32), "peer": "a" * 16, "finding": "wrong gradient"}
INNER = InnerSection(lr=2e-3, batch_samples=BATCH)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def recipe() -> GptRecipe:
    return GptRecipe(dict(TINY), DataSection())


@dataclass
class Training:
    """DiLoCo of members that make ``speeds`` steps a round each."""

    recipe: GptRecipe
    speeds: tuple[int, ...]
    momentum: Tensor = field(init=False)
    anchor: Tensor = field(init=False)
    leased: list[Indices] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.data = self.recipe.training_data()
        model = self.recipe.build_model(1)
        self.models = [copy.deepcopy(model) for _ in self.speeds]
        self.inner = [make_inner(one, INNER) for one in self.models]
        self.vectors = [ParameterVector(one) for one in self.models]
        self.meter = LossMeter(model, self.recipe.loss, self.data)
        self.anchor = torch.empty(self.meter.vector.elements)
        self.meter.vector.read(0, len(self.anchor), self.anchor)
        self.momentum = torch.zeros_like(self.anchor)
        self.order = np.random.default_rng(1).permutation(len(self.data))
        self.at = 0

    def contributions(self) -> list[Tensor]:
        """Train from the anchor; the next samples go to each in turn."""
        made, self.leased = [], []
        for model, inner, vector, steps in zip(self.models, self.inner, self.vectors, self.speeds, strict=True):
            vector.write(self.anchor)
            self.leased.append(self.order[self.at : self.at + steps * BATCH])
            self.at += steps * BATCH
            for start in range(0, steps * BATCH, BATCH):
                self.recipe.loss(model, self.data.batch(self.leased[-1][start : start + BATCH])).backward()
                inner.step()
                inner.zero_grad()
            local = torch.empty_like(self.anchor)
            vector.read(0, len(local), local)
            made.append(self.anchor - local)
        return made

    def share(self, member: int) -> float:
        return self.speeds[member] / sum(self.speeds)

    def apply(self, contributions: list[Tensor]) -> None:
        mean = sum(self.share(number) * one for number, one in enumerate(contributions))
        assert isinstance(mean, Tensor)
        self.momentum = MOMENTUM * self.momentum + mean
        self.anchor = self.anchor - LR * (mean + MOMENTUM * self.momentum)

    def gain(self, member: int, contribution: Tensor, seed: int) -> Gain:
        samples = random_samples(seed, SampleOrder(len(self.data), 1), self.leased[member])
        return self.meter.gain(self.anchor, contribution * (LR * self.share(member)), samples)

    def score(self, member: int, contribution: Tensor, seed: int) -> WorkScore:
        on_random = self.gain(member, contribution, seed)
        on_leased = self.meter.gain(self.anchor, contribution * (LR * self.share(member)), self.leased[member])
        finding = effect_of(on_random, on_leased)
        return WorkScore(round=0, chain=bytes(32), peer="a" * 16, finding=finding, on_random=on_random)

    def finding(self, member: int, contribution: Tensor, seed: int) -> str:
        return self.score(member, contribution, seed).finding


@pytest.mark.parametrize("rounds", [30, pytest.param(150, marks=pytest.mark.matrix)])
def test_honest_members_of_any_speed_are_never_doubted(recipe: GptRecipe, rounds: int) -> None:
    training = Training(recipe, (20, 5, 1))
    standings = [WorkStanding() for _ in training.speeds]
    found: list[list[str]] = [[] for _ in training.speeds]
    sketches = Sketches(seed=5)
    for number in range(rounds):
        contributions = training.contributions()
        for member, one in enumerate(contributions):
            score = training.score(member, one, 100 * number + member)
            found[member].append(score.finding)
            standings[member] = work_after(standings[member], "v", score)
            assert not standings[member].is_doubted, (number, member, found[member])
            assert not is_empty(float(one.norm()), [float(other.norm()) for other in contributions])
            assert not sketches.copied_from(number, str(member), one), (number, member)
        training.apply(contributions)
    assert [one.count("harms") for one in found] == [0, 0, 0]
    assert min(one.count("helps") for one in found) > rounds / 20, found
    assert all(one.sign > 0 for one in standings), standings


def attacked(recipe: GptRecipe, rounds: int = 12) -> tuple[Training, list[Tensor]]:
    """Four equal members, some rounds later."""
    training = Training(recipe, (8, 8, 8, 8))
    for _ in range(rounds):
        training.apply(training.contributions())
    return training, training.contributions()


def test_a_flipped_sign_expels_at_once(recipe: GptRecipe) -> None:
    training, _ = attacked(recipe, 0)
    honest, flipped = WorkStanding(), WorkStanding()
    for number in range(6):
        made = training.contributions()
        honest = work_after(honest, "v", training.score(0, made[0], number))
        flipped = work_after(flipped, "v", training.score(3, -made[3], number))
        training.apply([*made[:3], -made[3]])
    assert (honest.bad, honest.is_doubted) == (0, False)
    assert (flipped.bad, is_expelled(flipped, ["v"])) == (6, True)


def test_random_values_do_next_to_nothing_within_the_bound_and_harm_above(recipe: GptRecipe) -> None:
    training, made = attacked(recipe)
    honest, within, above = training.gain(3, made[3], 0).mean, [], []
    for seed in range(8):
        noise = torch.randn(len(made[3]), generator=torch.Generator().manual_seed(seed))
        noise *= float(made[3].norm()) / float(noise.norm())
        within.append(training.gain(3, 4.0 * noise, seed).mean)
        above.append(training.finding(3, 200.0 * noise, seed))
    assert above == ["harms"] * 8
    assert max(map(abs, within)) < honest / 3, (honest, within)


def test_values_that_are_no_numbers_harm(recipe: GptRecipe) -> None:
    training, made = attacked(recipe, 0)
    broken = made[3].clone()
    broken[0] = float("nan")
    assert training.finding(3, broken, 1) == "harms"
    endless = [float("inf"), float("nan"), 3e38, -3e38]
    assert {gain_of([1.0, 2.0], [1.0, loss]) for loss in endless} == {Gain(mean=-1e29, error=0.0)}
    # On an anchor that has diverged, nobody's contribution harms.
    gains = [gain_of([1.0, loss], [1.0, after]) for loss in endless for after in (1.0, float("nan"), 3e38)]
    assert {effect_of(gain, Gain(mean=-1.0, error=0.0)) for gain in gains} == {"unclear"}


def test_nothing_and_next_to_nothing_are_empty(recipe: GptRecipe) -> None:
    training, made = attacked(recipe, 0)
    norms = [float(one.norm()) for one in made]
    assert is_empty(0.0, norms[:3])
    assert is_empty(1e-4 * norms[3], norms[:3])
    assert not is_empty(norms[3] / 20, norms[:3])
    assert is_empty(0.0, [])
    assert not is_empty(1e-30, [])
    assert training.gain(3, torch.zeros_like(made[3]), 1) == Gain(mean=0.0, error=0.0)
    assert training.finding(3, torch.zeros_like(made[3]), 1) == "unclear"


def test_copies_are_found_and_honest_ones_are_not(recipe: GptRecipe) -> None:
    training, made = attacked(recipe)
    sketches = Sketches(seed=7)
    assert [sketches.copied_from(0, str(member), one) for member, one in enumerate(made)] == [""] * 4
    noise = torch.randn(len(made[0])) * float(made[0].norm()) / len(made[0]) ** 0.5
    assert sketches.copied_from(0, "x", made[1]) == ""  # nobody can have seen it: as alike by chance
    assert sketches.copied_from(1, "x", made[1]) == "1"
    assert sketches.copied_from(1, "y", 3.0 * made[2] + 0.1 * noise) == "2"
    assert sketches.copied_from(1, "0", made[0]) == ""  # its own
    assert sketches.copied_from(1, "z", -made[0]) == ""
    training.apply(made)
    again = training.contributions()
    assert [sketches.copied_from(2, str(member), one) for member, one in enumerate(again)] == [""] * 4


def test_two_members_with_the_same_bytes_in_one_round() -> None:
    plan = make_plan([1, 1, 1])
    one, two, three = plan.members
    alike = plan.model_copy(update={"members": (one, two.model_copy(update={"root": b"r" * 32}), three)})
    assert same_bytes_as(alike.members[0], alike) == three.peer
    assert same_bytes_as(alike.members[1], alike) == ""


def test_a_follower_keeps_the_anchor_before() -> None:
    follower = FollowedAnchors(ParameterVector(torch.nn.Linear(2, 2)))
    state = torch.zeros(6)
    follower.restart_from(state)
    assert follower.before is None
    for version in range(1, 4):
        state += 1  # the state is stepped in place
        follower.continue_from(state)
        assert follower.before is not None
        assert follower.before.equal(torch.full((6,), version - 1.0))
    assert not follower.contribution(state).elements - 6
    follower.restart_from(state)
    assert follower.before is None


def test_a_gradient_is_computed_again(recipe: GptRecipe) -> None:
    training, _ = attacked(recipe, 0)
    indices = np.arange(40, dtype=np.int64)
    model, data = recipe.build_model(1), recipe.training_data()
    vector = ParameterVector(model)
    recipe.loss(model, data.batch(indices)).backward()
    whole = torch.cat([one.grad.reshape(-1) for one in vector.parameters if one.grad is not None])
    again = training.meter.gradient(training.anchor, indices, 16)
    allowed = tolerance("float32", codec_loss=0.01, share=0.25)
    assert deviation(whole, again) < 1e-4
    assert all(one.grad is None for one in training.meter.vector.parameters)
    for wrong in (
        -whole,
        2 * whole,
        torch.zeros_like(whole),
        training.meter.gradient(training.anchor, indices + 50, 16),
    ):
        assert deviation(wrong, again) > allowed
    assert deviation(whole + 0.01 * float(whole.norm()) * torch.eye(1, len(whole))[0], again) < allowed
    for endless in (float("nan"), float("inf"), 3e38):
        apart = deviation(torch.full_like(whole, endless), again)
        assert apart > allowed
        WorkScore.model_validate({**SCORE, "deviation": apart})
    assert deviation(whole, torch.full_like(whole, float("nan"))) == 0.0


def test_gains_beyond_chance() -> None:
    rng = np.random.default_rng(1)
    effects = []
    for _ in range(2000):
        before = rng.normal(3.0, 0.3, GROUPS)
        gain = gain_of(before.tolist(), (before + rng.normal(0.0, 0.01, GROUPS)).tolist())
        effects.append(effect_of(gain, Gain(mean=-1.0, error=0.0)))
    assert 0 < effects.count("harms") <= 15
    good, bad = Gain(mean=1.0, error=0.1), Gain(mean=-1.0, error=0.1)
    assert [effect_of(*pair) for pair in ((good, good), (good, bad))] == ["helps", "helps"]
    assert [effect_of(*pair) for pair in ((bad, bad), (bad, good))] == ["harms", "unclear"]
    assert effect_of(gain_of([3.0], [2.0]), good) == "unclear"


def test_draws() -> None:
    rng, members = random.Random(1), list("abcdefgh")
    known = dict.fromkeys(members, FIRST_LOOKS)
    assert draw(members, {"c", "x"}, known, 0.0, rng) == ["c"]
    everybody = draw(members, {"f"}, known, 1.0, rng)
    assert everybody[0] == "f"
    assert sorted(everybody) == members
    drawn = [peer for _ in range(5000) for peer in draw(members, (), known, 0.02, rng)]
    assert 0.9 < len(drawn) / (5000 * 8 * 0.02) < 1.1
    assert set(drawn) == set(members)


def test_members_that_a_validator_hardly_knows_are_scored_before_the_draw() -> None:
    looks = {"a": FIRST_LOOKS, "b": FIRST_LOOKS - 1, "c": 0}
    for seed in range(20):
        drawn = draw("abcd", {"c"}, looks, 0.0, random.Random(seed))
        assert (drawn[0], sorted(drawn)) == ("c", ["b", "c", "d"])


def test_random_samples_follow_from_the_seed_and_are_not_leased() -> None:
    leased = np.arange(50)
    one = random_samples(3, SampleOrder(100, 1), leased)
    assert (one == random_samples(3, SampleOrder(100, 1), leased)).all()
    assert one.min() >= 50
    assert len(random_samples(3, SampleOrder(10, 1), np.arange(10))) == 128


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_loss_of_a_first_batch_is_measured_again(recipe: GptRecipe, precision: str) -> None:
    training, _ = attacked(recipe, 0)
    indices = np.arange(3, 3 + BATCH, dtype=np.int64)
    model, data = recipe.build_model(1), recipe.training_data()
    loop = InnerLoop(model, recipe.loss, autocast(torch.device("cpu"), precision), 2)
    claimed = float(loop.backward(data.batch(indices)))
    measured, chance = training.meter.loss_at(training.anchor, indices, 3)
    assert chance == 0.0
    assert is_same_loss(claimed, measured, chance, precision)
    assert claimed == pytest.approx(measured, rel=1e-5 if precision == "float32" else 0.01)
    for wrong in (0.9 * claimed, 1.1 * claimed, 0.0, 1e30):
        assert not is_same_loss(wrong, measured, chance, precision)
    other, _ = training.meter.loss_at(training.anchor, indices + 100, 3)
    assert other != measured
    assert is_same_loss(0.0, float("nan"), 0.0, precision), "an anchor that has diverged"


def test_chance_in_the_layers_widens_the_tolerance() -> None:
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5))
    before = {name: one.clone() for name, one in model.named_buffers()}

    class Samples:
        def __len__(self) -> int:
            return 64

        def batch(self, indices: Indices) -> Tensor:
            return torch.randn(len(indices), 4, generator=torch.Generator().manual_seed(1))

    meter = LossMeter(model, lambda net, batch: net(batch).square().mean(), Samples())  # type: ignore[arg-type]
    anchor = torch.ones(meter.vector.elements)
    measured, chance = meter.loss_at(anchor, np.arange(32), 32)
    assert chance > 0.0
    assert is_same_loss(measured + 4 * chance, measured, chance, "float32")
    assert all(one.equal(before[name]) for name, one in model.named_buffers())


def test_chance_in_the_layers_accuses_nobody() -> None:
    """Of losses that it moves by a fifth, measured by many validators."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.LayerNorm(6), torch.nn.Dropout(0.5))

    class Samples:
        def __len__(self) -> int:
            return 8

        def batch(self, indices: Indices) -> Tensor:
            return torch.arange(6.0).repeat(len(indices), 1).sin()

    meter = LossMeter(model, lambda net, batch: net(batch).square().mean(), Samples())  # type: ignore[arg-type]
    anchor, indices, wrong = torch.ones(meter.vector.elements), np.arange(8), 0
    for _ in range(400):
        claimed = meter._training_loss(indices, 8)
        wrong += not is_same_loss(claimed, *meter.loss_at(anchor, indices, 8), "float32")
    assert wrong <= 2


@pytest.mark.parametrize(
    ("first", "finding"),
    [
        (lambda loss: (8, 12, loss), "unclear"),
        (lambda loss: (8, 12, 0.8 * loss), "wrong loss"),
        (lambda loss: (0, 4, loss), "wrong loss"),
        (lambda loss: (8, 40, loss), "wrong loss"),
        (lambda loss: (8, 8, loss), "wrong loss"),
        (None, "unclear"),
    ],
    ids=["true", "lower", "of other samples", "of more samples", "of none", "none"],
)
def test_a_lie_about_the_first_batch_is_a_bad_score(
    recipe: GptRecipe, first: Callable[[float], tuple[int, int, float]] | None, finding: str
) -> None:
    scorer, verdict, anchor, step, samples = scored_member(recipe)
    indices = scorer._order.indices(8, 12)
    claimed, _ = scorer._meter.loss_at(anchor, indices, 4)
    told = None
    if first is not None:
        start, stop, loss = first(claimed)
        told = FirstBatch(samples=SampleRange(start=start, stop=stop), loss=loss)
    work = CoordinatorToPeerWork(ranges=(samples,), first=told)
    score = scorer.score(verdict, verdict.plan.members[0], work, anchor, step)  # type: ignore[union-attr]
    assert score.finding == finding
    assert (score.claimed_loss is None) == (first is None)


def scored_member(recipe: GptRecipe) -> tuple[Scorer, Verdict, Tensor, Tensor, SampleRange]:
    """A scorer, a round of one member that trained on its samples 8 to 40, its anchor, and what it contributes."""
    run = RunFile.model_validate(
        {
            "run": {"name": "reef", "seed": 1},
            "recipe": {"name": "gpt", "settings": TINY},
            "round": {"tokens": 1},
            "inner": {"batch_samples": BATCH, "precision": "float32"},
        }
    )
    scorer = Scorer(run, recipe, torch.device("cpu"), random.Random(1))
    anchor = torch.empty(scorer._meter.vector.elements)
    scorer._meter.vector.read(0, len(anchor), anchor)
    step = 4.0 * scorer._meter.gradient(anchor, scorer._order.indices(8, 40), 16)
    plan = make_plan([1])
    verdict = Verdict.model_construct(round=0, chain=bytes(32), plan=plan)
    return scorer, verdict, anchor, step, SampleRange(start=8, stop=40)
