"""Hugging Face's and TRL's trainers, Lightning and Fabric in real runs: churn, parity, and the loss of one process."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.integration.forked import import_once
from tests.integration.harness import ROUNDS_S, START_S, Member, Swarm, check_journal, check_parity, finish

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(900)]

COMES_UP_S = START_S + ROUNDS_S  # importing these frameworks takes long

SCRIPT = str(Path(__file__).parent / "framework_loop.py")
TOML = """
algorithm = "diloco"
averaging.codec = "int8"
[run]
name = "frameworks"
seed = 3
{ends}
[recipe]
name = "own"
[data]
source = "own"
[inner]
batch_samples = 4
[schedule]
warmup_tokens = 64
[outer]
optimizer = "sgd"
lr = 1.0
[round]
tokens = {tokens}
max_s = {max_s}
patience_s = 15
"""


@pytest.fixture(scope="module", autouse=True)
def frameworks_are_imported() -> None:
    """Their imports take some ten seconds of CPU, which are spent once."""
    import_once("transformers.trainer", "trl.trainer.sft_trainer", "peft", "datasets", "lightning.pytorch")


def loop(swarm: Swarm, invite: str, kind: str, label: str = "") -> Member:
    folder = swarm.folder / (label or kind)
    folder.mkdir()
    return swarm._add(Member(folder.name, [sys.executable, SCRIPT, kind, invite, str(folder)], folder, folder))


def alone(folder: Path, kind: str, steps: int) -> dict[str, Any]:
    """Run the script without Shoal, for so many steps."""
    folder.mkdir()
    environment = {**os.environ, "STEPS": str(steps)}
    subprocess.run([sys.executable, SCRIPT, kind, "alone", str(folder)], env=environment, check=True, timeout=ROUNDS_S)
    process = Member.__new__(Member)
    process._events, process._events_before, process._events_read_bytes = folder / "events.jsonl", 0, 0
    process._all_events = []
    return process.events("trained")[0]


def test_supervised_fine_tuning_goes_on_through_a_late_joiner_and_a_kill(swarm: Swarm) -> None:
    """TRL's trainer: evaluated in rounds, joined late, and killed and resumed from its own checkpoint."""
    hosting = swarm.host(TOML.format(ends="", tokens=10**9, max_s=4))
    first = loop(swarm, hosting.invite, "resumed")
    first.committed(after=first.committed(within_s=COMES_UP_S)["round"])
    late = loop(swarm, hosting.invite, "full")
    late.committed(within_s=COMES_UP_S)
    first.kill()
    first.start()
    first.committed(within_s=COMES_UP_S)
    verdicts = finish(hosting, [first, late])
    ends = [one.events("trained")[0] for one in (first, late)]
    assert ends[1]["rates"] == pytest.approx([5e-3] * len(ends[1]["rates"])), "a late joiner does not warm up again"
    losses = [one.verdict.loss for one in verdicts if one.verdict.loss is not None]
    assert losses[-1] < 0.7 * losses[0]
    assert all(one["loss"] < 0.7 * losses[0] for one in ends), "each has the model that they have trained together"


def test_adapters_are_averaged_and_the_base_stays_as_it_is(swarm: Swarm) -> None:
    """PEFT; the script checks the base. That another base is refused is shown with own loops."""
    hosting = swarm.host(TOML.format(ends="", tokens=10**9, max_s=4))
    loops = [loop(swarm, hosting.invite, "lora", label) for label in ("one", "two")]
    newest = max(one.committed(within_s=COMES_UP_S)["round"] for one in loops)
    for one in loops:
        one.committed(after=newest)
    verdicts = finish(hosting, loops)
    losses = [one.verdict.loss for one in verdicts if one.verdict.loss is not None]
    assert losses[-1] < losses[0]


@pytest.mark.matrix
def test_lightning_and_fabric_train_in_one_run(swarm: Swarm) -> None:
    hosting = swarm.host(TOML.format(ends="rounds = 5", tokens=600, max_s=20))
    loops = [loop(swarm, hosting.invite, kind) for kind in ("lightning", "fabric")]
    for one in loops:
        assert one.exit_code(COMES_UP_S) == 0, one.tail()
    hosting.stop()
    check_parity(hosting, loops)
    check_journal(hosting)
    ends = [one.events("trained")[0] for one in loops]
    single = alone(swarm.folder / "alone", "lightning", steps=int(ends[0]["steps"]))
    assert ends[0]["loss"] < 1.2 * single["loss"]
    assert ends[1]["loss"] < 0.5
