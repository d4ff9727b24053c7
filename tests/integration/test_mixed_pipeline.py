"""One peer holds the whole model and others one stage each, as real processes."""

import pytest
from tests.integration.harness import KILLED, ROUNDS_S, START_S, Swarm
from tests.integration.test_pipeline import ROUNDS as FEW
from tests.integration.test_pipeline import STAGES, TOML, check, join, launcher, span

pytestmark = pytest.mark.integration

ROUNDS = 24
EVEN = TOML.replace(f"rounds = {FEW}", f"rounds = {ROUNDS}").replace("layers = 4", f"layers = {STAGES}")
"""A block a stage: whoever holds all of them is of most use in all."""


def test_a_peer_with_the_whole_model_and_three_with_a_stage_each(swarm: Swarm) -> None:
    """The whole peer averages with another replica in each stage; when it dies, these keep what it had contributed."""
    host = swarm.host(EVEN)
    others = [join(swarm, host, f"peer{number}") for number in range(STAGES)]
    assert sorted(span(member) for member in others) == [(stage, stage) for stage in range(STAGES)]
    armed = swarm.folder / "armed"
    whole = swarm.member(host.invite, "whole", launcher("backward", 2, armed))
    assert span(whole) == (0, STAGES - 1)
    whole.committed(after=whole.committed()["round"] + 2)
    armed.touch()
    assert whole.exit_code(START_S + ROUNDS_S) == KILLED, whole.tail()
    check(host, others, ROUNDS, EVEN)
    together = whole.events("committed", included=True)
    assert {one["stage"] for one in together} == set(range(STAGES))
    for mine in together:
        about = {name: mine[name] for name in ("stage", "round", "anchor_version", "digest")}
        assert sum(len(other.events("committed", **about)) for other in others) == 1, "parity with the other replica"
