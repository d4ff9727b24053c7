"""Every role, every fault, every step of a round: afterwards nothing shows."""

import pytest
from tests.chaos.scene import MOMENTS, ROLES, Attack, staged
from tests.fakes.processes import run_processes

FAULTS = (
    "SIGKILL",
    "SIGSTOP",
    "SIGSTOP, long",
    "cut",
    "cut, long",
    "half-open",
    "half-open to all",
    "corrupted bytes",
    "corrupted bytes to one",
)


def impossible(attack: Attack) -> str:
    """Why there is no such case; empty where there is."""
    corrupted = attack.fault.startswith("corrupted")
    if attack.role == "coordinator" and corrupted:
        return "what is changed on its way fails authentication, which is a cut; verdicts are signed besides"
    if attack.role == "coordinator" and attack.fault == "half-open to all":
        return "all members hear nothing of a coordinator that is stopped, too"
    if attack.role == "contributor" and corrupted and attack.moment not in ("before contributing", "while contributing"):
        return "all its bytes are sent"
    return ""


ALL = [Attack(role, fault, moment) for role in ROLES for fault in FAULTS for moment in MOMENTS]
POSSIBLE = [attack for attack in ALL if not impossible(attack)]


@pytest.mark.parametrize("topology", ["group"])
@pytest.mark.parametrize("attack", POSSIBLE, ids=str)
def test_one_fault(attack: Attack, topology: str) -> None:
    async def main() -> None:
        async with staged([attack], topology) as scene:
            await scene.settle()
            assert scene.fired == [attack]

    run_processes(main())
