"""Pipelines under fire. What is here takes a minute on one core; all of it is in ``pipeline_matrix.py``."""

from pathlib import Path

import pytest
from tests.chaos.pipeline_attacks import SPANS, Attack
from tests.chaos.pipeline_checks import aborted, check
from tests.chaos.pipeline_matrix import FIVE, MIXED, REPLICATED, STAGES, attacked
from tests.chaos.pipeline_scene import Scene, play, until_over


def test_without_faults_no_round_is_aborted(tmp_path: Path) -> None:
    async def act(scene: Scene) -> None:
        for number, layers in enumerate(REPLICATED):
            scene.start(number, layers)
        await until_over(scene)
        check(scene)
        assert aborted(scene.events) == []

    play(tmp_path, act)


@pytest.mark.parametrize("moment", ["holding an output", "holding a gradient", "contributing"])
@pytest.mark.parametrize("fault", ["SIGKILL", "SIGSTOP, long"])
@pytest.mark.parametrize("stage", STAGES)
def test_one_of_two_replicas(tmp_path: Path, stage: str, fault: str, moment: str) -> None:
    attacked(tmp_path, REPLICATED, Attack(stage, fault, moment))


@pytest.mark.parametrize("stage", STAGES)
def test_all_replicas_of_a_stage(tmp_path: Path, stage: str) -> None:
    """Somebody else moves there."""
    attacked(tmp_path, FIVE, Attack(stage, "SIGKILL", "holding an output", everybody=True))


@pytest.mark.parametrize("role", SPANS)
def test_mixed_swarms(tmp_path: Path, role: str) -> None:
    attacked(tmp_path, MIXED, Attack(role, "SIGKILL", "holding a gradient"))


def test_a_killed_peer_comes_back_in_the_same_round(tmp_path: Path) -> None:
    attacked(tmp_path, REPLICATED, Attack("middle", "SIGKILL, back at once", "having counted a gradient"))
