"""Why this machine cannot join a run, by the run's card."""

from dataclasses import replace

import pytest
from tests.peer.directory.cards import make_card, run_file

from shoal.peer.directory.card import SignedCard
from shoal.peer.directory.local_fit import Machine, fit_of
from shoal.swarm.protocol.messages import PROTOCOL_VERSION

CARD = make_card()
assert CARD.needs is not None
MACHINE = Machine("cpu", CARD.needs.shared_bytes, None, CARD.needs.disk_bytes, frozenset({"gpt"}), "3.12.1", 1)
GPU = replace(MACHINE, device="cuda", host_bytes=CARD.needs.host_bytes, device_bytes=CARD.needs.device_bytes)


def with_fields(**fields: object) -> SignedCard:
    return CARD.model_copy(update=fields)


@pytest.mark.parametrize("machine", [MACHINE, GPU])
def test_a_machine_with_just_enough_can_join(machine: Machine) -> None:
    assert fit_of(CARD, machine).can_join
    assert fit_of(CARD, machine).doubts == ()


@pytest.mark.parametrize(
    ("card", "machine", "words"),
    [
        (CARD, replace(MACHINE, host_bytes=MACHINE.host_bytes - 1), "memory: needs"),
        (CARD, replace(GPU, host_bytes=GPU.host_bytes - 1), "memory: needs"),
        (CARD, replace(GPU, device_bytes=1000), "memory of cuda: needs"),
        (CARD, replace(MACHINE, disk_bytes=MACHINE.disk_bytes - 1), "disk: needs"),
        (CARD, replace(MACHINE, recipes=frozenset()), "'gpt' is not installed"),
        (with_fields(recipe="own"), MACHINE, "loop of their own"),
        (with_fields(protocol=PROTOCOL_VERSION + 1), MACHINE, "needs Shoal 0.1.0"),
        (with_fields(state="ended"), MACHINE, "ended"),
        (make_card(run_file(admission="token")), MACHINE, "ask kim@example.org"),
    ],
)
def test_each_obstacle_is_named(card: SignedCard, machine: Machine, words: str) -> None:
    (obstacle,) = fit_of(card, machine).obstacles
    assert words in obstacle


@pytest.mark.parametrize(
    ("card", "words"),
    [
        (with_fields(python="3.13.0"), "Python 3.13.0"),
        (with_fields(data="text:books/*.txt"), "--data"),
        (with_fields(needs=None), "not known yet"),
        (with_fields(state="stopped"), "may come back"),
    ],
)
def test_each_doubt_is_named(card: SignedCard, words: str) -> None:
    fit = fit_of(card, MACHINE)
    assert fit.can_join
    assert words in "; ".join(fit.doubts)
