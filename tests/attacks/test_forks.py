"""A coordinator that tells members different verdicts is found out by its own signatures."""

import subprocess
import sys
from pathlib import Path

import pytest
from tests.integration.harness import ROUNDS_S, SHOAL, Swarm, run_toml

from shoal.swarm.errors import CoordinatorForked

pytestmark = pytest.mark.integration

FORKING = (sys.executable, str(Path(__file__).with_name("forking_host.py")), "3")


def test_two_signed_verdicts_of_one_round_stop_who_sees_them_and_prove_it_to_anybody(swarm: Swarm) -> None:
    host = swarm.host(run_toml(max_s=1.0), launcher=FORKING)
    members = []
    for label in ("a", "b", "victim"):
        members.append(swarm.member(host.invite, label))
        members[-1].event("joined", ROUNDS_S)
    victim = members[-1]
    assert victim.exit_code(ROUNDS_S) == CoordinatorForked.exit_code, victim.tail()
    proofs = list(victim.folder.glob("**/*.fork"))
    assert len(proofs) == 1
    assert int(proofs[0].stem.removeprefix("round-")) >= 3, "before it was told the same as all"
    # Whoever was compared with has the same proof; the others go on until they see one.
    stopped = [one for one in members[:2] if list(one.folder.glob("**/*.fork"))]
    assert stopped
    for one in stopped:
        assert one.exit_code(ROUNDS_S) == CoordinatorForked.exit_code, one.tail()
    shown = subprocess.run([*SHOAL, "verify", proofs[0]], capture_output=True, text=True, timeout=60)
    assert shown.returncode == 0, shown.stderr
    assert "has signed two verdicts of round" in shown.stdout
    damaged = proofs[0].with_name("damaged.fork")
    data = bytearray(proofs[0].read_bytes())
    data[-10] ^= 1
    damaged.write_bytes(data)
    refused = subprocess.run([*SHOAL, "verify", damaged], capture_output=True, text=True, timeout=60)
    assert refused.returncode == 17, refused.stdout
    for one in members[:2]:
        if one not in stopped:
            one.interrupt()
            one.exit_code(ROUNDS_S)
    host.interrupt()
    host.exit_code(ROUNDS_S)
