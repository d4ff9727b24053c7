"""Every role, every fault, every step of a round: afterwards nothing shows."""

import pytest
from tests.chaos.attack import FAULTS, MOMENTS, ROLES, Attack
from tests.chaos.scene import play


def impossible(attack: Attack) -> str:
    """Why there is no such case; empty where there is."""
    corrupted = attack.fault.startswith("corrupted")
    if attack.role == "coordinator" and corrupted:
        return "what is changed on its way fails authentication, which is a cut; verdicts are signed besides"
    if attack.role == "coordinator" and attack.fault == "half-open to all":
        return "all members hear nothing of a coordinator that is stopped, too"
    if (
        attack.role == "contributor"
        and corrupted
        and attack.moment not in ("before contributing", "while contributing")
    ):
        return "all its bytes are sent"
    return ""


POSSIBLE = {
    topology: [
        attack
        for attack in (Attack(role, fault, moment) for role in roles for fault in FAULTS for moment in MOMENTS)
        if not impossible(attack)
    ]
    for topology, roles in ROLES.items()
}


@pytest.mark.parametrize(
    ("topology", "attack"),
    [pytest.param(topology, one, id=f"{topology}: {one}") for topology, those in POSSIBLE.items() for one in those],
)
def test_one_fault(topology: str, attack: Attack) -> None:
    assert play([attack], topology) == [attack]
