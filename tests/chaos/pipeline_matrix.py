"""Pipelines under fire: every stage, every fault, every step of a micro-batch and of a round.

A quarter of an hour on one core: ``make chaos`` runs it, and ``test_pipeline.py`` a part of it with the other tests."""

from pathlib import Path

import pytest
from tests.chaos.pipeline_attacks import FAULTS, MOMENTS, SPANS, Attack, under
from tests.chaos.pipeline_checks import check
from tests.chaos.pipeline_scene import Scene, play

STAGES = [role for role in SPANS if role != "whole"]
OF_MICRO_BATCHES = list(MOMENTS)[:6]
"""Steps that there are with one replica of a stage, too."""

REPLICATED = (2,) * 6
"""Two replicas of each stage."""

FIVE = (2,) * 5
"""One replica of the last stage."""

MIXED = (2, 2, 2, 6)
"""One replica of each stage, and one of the whole model."""


def attacked(folder: Path, layers: tuple[int, ...], *attacks: Attack) -> None:
    async def act(scene: Scene) -> None:
        await under(scene, attacks, layers)
        check(scene)

    play(folder, act)


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("stage", STAGES)
def test_one_of_two_replicas(tmp_path: Path, stage: str, fault: str, moment: str) -> None:
    attacked(tmp_path, REPLICATED, Attack(stage, fault, moment))


@pytest.mark.parametrize("moment", OF_MICRO_BATCHES)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("stage", STAGES)
def test_all_replicas_of_a_stage(tmp_path: Path, stage: str, fault: str, moment: str) -> None:
    """Somebody moves there, or they come back."""
    attacked(tmp_path, FIVE, Attack(stage, fault, moment, everybody=True))


@pytest.mark.parametrize("moment", OF_MICRO_BATCHES)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("role", SPANS)
def test_mixed_swarms(tmp_path: Path, role: str, fault: str, moment: str) -> None:
    attacked(tmp_path, MIXED, Attack(role, fault, moment))


@pytest.mark.parametrize("second", FAULTS)
@pytest.mark.parametrize("first", FAULTS)
@pytest.mark.parametrize("stage", STAGES)
def test_two_stages_at_once(tmp_path: Path, stage: str, first: str, second: str) -> None:
    other = STAGES[(STAGES.index(stage) + 1) % len(STAGES)]
    attacks = Attack(stage, first, "holding an output"), Attack(other, second, "holding a gradient")
    attacked(tmp_path, REPLICATED, *attacks)
