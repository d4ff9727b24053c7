"""``virtual_batch`` over several peers equals synchronous training on the global batch by a plain PyTorch loop."""

import pytest
import torch
from safetensors.torch import load_file
from tests.integration.harness import (
    ROUNDS_S,
    SHOAL,
    START_S,
    Swarm,
    check_journal,
    check_parity,
    held,
    run_toml,
)
from tests.integration.plain_loop import plain_loop

pytestmark = pytest.mark.integration

ROUNDS = 6
BATCH = 96
CONTEXT = 32


def test_three_unequal_peers_equal_one_process(swarm: Swarm) -> None:
    outer = 'optimizer = "adamw"\nlr = 2e-3\nweight_decay = 0.01'
    toml = run_toml(
        algorithm="virtual_batch", codec="float32", tokens=BATCH * CONTEXT, max_s=120, rounds=ROUNDS, outer=outer
    )
    host = swarm.host(toml)
    # They begin together: else the first might do everything alone.
    gate = swarm.folder / "gate"
    gate.touch()
    speeds = {"slowest": 0.3, "slow": 0.1, "fast": 0.02}
    members = [swarm.member(host.invite, label, held(gate, rest_s)) for label, rest_s in speeds.items()]
    for member in members:
        member.says("waits at the gate", START_S)
    gate.unlink()
    for member in members:
        assert member.exit_code(START_S + ROUNDS_S) == 0, member.tail()
    host.stop()
    check_parity(host, members)
    verdicts = [one.verdict for one in check_journal(host)]
    assert [one.tokens for one in verdicts] == [BATCH * CONTEXT] * ROUNDS
    weights = {
        tuple(member.weight_tokens for member in one.plan.members)
        for one in verdicts
        if one.plan and len(one.plan.members) == 3
    }
    assert weights, "all three have averaged together"

    out = swarm.folder / "model.safetensors"
    export = swarm.command("export", *SHOAL, "export", "--run", str(members[0].folder), "--out", str(out))
    assert export.exit_code(START_S) == 0, export.tail()
    trained, plain = load_file(out), plain_loop(toml, ROUNDS, BATCH)
    assert trained.keys() == plain.keys()
    for name in plain:
        difference = torch.linalg.vector_norm(trained[name] - plain[name]) / torch.linalg.vector_norm(plain[name])
        assert difference < 1e-5, name
