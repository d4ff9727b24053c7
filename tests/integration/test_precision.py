"""Peers whose parameters are bfloat16 and float32 in one run, which has one float32 anchor."""

import pytest
import torch
from tests.integration.harness import Swarm
from tests.integration.own_loop_runs import host, loop, train

pytestmark = pytest.mark.integration


def test_bfloat16_and_float32_peers_train_in_one_run(swarm: Swarm) -> None:
    hosting = host(swarm)
    loops = [loop(swarm, hosting.invite, kind) for kind in ("watched", "bfloat16")]
    verdicts = train(hosting, loops, rounds=3)
    assert any(one.verdict.plan is not None and len(one.verdict.plan.members) == 2 for one in verdicts)
    warning = "the model's trainable parameters are bfloat16 and the inner optimizer steps them directly"
    assert loops[1].text().count(warning) == 1
    assert warning not in loops[0].text()


def test_an_idle_bfloat16_peer_holds_the_anchor_back_by_nothing(swarm: Swarm) -> None:
    """Its work is exactly zero, so the anchor moves by the float32 peer's share of the weights."""
    hosting = host(swarm, codec="float32")
    loops = [loop(swarm, hosting.invite, kind) for kind in ("watched", "idle-bfloat16")]
    verdicts = train(hosting, loops, rounds=4)
    roundings = []
    for one in loops[0].events("watched"):
        verdict = verdicts[one["round"]].verdict
        assert verdict.plan is not None
        weights = {member.peer: member.weight for member in verdict.plan.members}
        if weights.keys() != {member.peer for member in loops}:
            continue
        share = weights[loops[0].peer] / sum(weights.values())
        anchor, local, following = (torch.tensor(one[name]) for name in ("anchor", "local", "next"))
        torch.testing.assert_close(following, anchor + share * (local - anchor), rtol=0, atol=1e-6)
        roundings.append(float((anchor - anchor.bfloat16().float()).abs().max()))
    assert sum(rounding > 1e-4 for rounding in roundings) >= 2, (
        "the anchor is no bfloat16 one, so the test would see it"
    )
