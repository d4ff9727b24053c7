"""Runs of own loops for tests: a host, loops of ``own_loop.py``, and what must hold at their end."""

import sys
from pathlib import Path

from tests.integration.harness import ROUNDS_S, START_S, Host, Member, Swarm, finish

from shoal.swarm.coordinator.events import VerdictGiven

SCRIPT = Path(__file__).parent / "own_loop.py"
TOML = """
algorithm = "{algorithm}"
averaging.codec = "{codec}"
[run]
name = "loops"
seed = 3
[recipe]
name = "own"
[data]
source = "own"
[inner]
batch_samples = 16
{inner}
[outer]
optimizer = "sgd"
lr = {outer_lr}
[round]
tokens = {tokens}
max_s = {max_s}
patience_s = 4
"""


def host(swarm: Swarm, inner: str = "", codec: str = "int8") -> Host:
    settings = {"algorithm": "diloco", "outer_lr": 1.0, "tokens": 10**9}
    return swarm.host(TOML.format(max_s=1.5, inner=inner, codec=codec, **settings))


def virtual_batch_host(swarm: Swarm) -> Host:
    settings = {"algorithm": "virtual_batch", "outer_lr": 0.02, "tokens": 256}
    return swarm.host(TOML.format(max_s=60.0, inner="", codec="int8", **settings))


def loop(swarm: Swarm, invite: str, kind: str) -> Member:
    folder = swarm.folder / kind
    folder.mkdir()
    alone = ["env"] if kind.endswith("loaded") else []  # its workers need a script of their own
    command = [*alone, sys.executable, str(SCRIPT), kind, invite, str(folder)]
    return swarm._add(Member(kind, command, folder, folder))


def train(hosting: Host, loops: list[Member], rounds: int = 2) -> list[VerdictGiven]:
    """Train for some rounds with all of them, stop, and check parity, the journal's accounts of samples, and that no
    sample was trained twice. Returns the verdicts."""
    newest = -1
    for _ in range(rounds):
        newest = max(one.committed(after=newest, within_s=START_S + ROUNDS_S)["round"] for one in loops)
    verdicts = finish(hosting, loops)
    trained = [index for one in loops for index in one.events("trained")[0]["indices"]]
    for one in loops:  # while its workers start, a loop has no samples and may miss a round
        first_s = one.events("committed", included=True)[0]["time"]
        resyncs = [event for event in one.events("resync") if event["time"] > first_s]
        assert resyncs == [], f"{one.label}, included first at {first_s}: {resyncs}"
    assert len(set(trained)) == len(trained), "no sample is trained twice"
    assert sum(one.verdict.tokens for one in verdicts) <= len(trained)
    for one in loops:
        assert one.events("left")[0]["tokens_trained"] == len(one.events("trained")[0]["indices"])
    losses = [one.verdict.loss for one in verdicts if one.verdict.loss is not None]
    assert losses[-1] < losses[0]
    return verdicts
