"""The sets that a verdict names: who can be shown to have signed for them, and what a host cannot make up."""

from typing import Any

import pytest
from tests.fakes.secure_rounds import Scene

from shoal.swarm.protocol.secure import SecureStage, SignedSets
from shoal.swarm.secure.round_keys import fresh_nonce
from shoal.swarm.secure.signed_sets import fault_of, groups_of


@pytest.fixture(scope="module")
def scene() -> Scene:
    scene = Scene(n=8, group=4, silent={5: SecureStage.MASKS})
    scene.until(SecureStage.OPEN)
    return scene


@pytest.fixture
def signed(scene: Scene) -> SignedSets:
    signed = scene.board.signed()
    assert signed is not None
    return signed


def test_the_sets_of_an_honest_round_are_signed_by_all_that_are_here(scene: Scene, signed: SignedSets) -> None:
    assert not fault_of(scene.about, scene.plan, signed)
    assert [one.member for one in signed.consents] == [0, 1, 2, 3, 4, 6, 7]
    assert [one.members for one in groups_of(scene.about, scene.plan, signed)] == [
        one.members for one in scene.members[0].groups
    ]


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda one: {"sets": (one.sets[0][1:], *one.sets[1:])}, "too few members of a group|have not signed"),
        (lambda one: {"sets": ((), one.sets[1])}, "2 of 2 groups have not signed"),
        (lambda one: {"sets": ((*one.sets[0], 5), one.sets[1])}, "others than the senders"),
        (lambda one: {"senders": (0, 1, 2, 3, 4, 6, 7)}, "groups have not signed"),
        (lambda one: {"consents": one.consents[:2]}, "groups have not signed"),
        (lambda one: {"consents": (one.consents[0],) * 8}, "groups have not signed"),
        (lambda one: {"nonces": (fresh_nonce(), *one.nonces[1:])}, "had committed to another random number"),
        (lambda one: {"sets": one.sets[:1]}, "not a set for each part"),
        (lambda one: {"names": one.names[:1]}, "not a set for each part"),
        (lambda one: {"names": one.names[::-1]}, "groups have not signed"),
    ],
)
def test_a_host_cannot_make_sets_up(scene: Scene, signed: SignedSets, change: Any, fault: str) -> None:
    made_up = signed.model_copy(update=change(signed))
    found = fault_of(scene.about, scene.plan, made_up)
    assert any(one in found for one in fault.split("|")), found


def test_a_mean_is_of_whole_sums(scene: Scene, signed: SignedSets) -> None:
    groups = [one.among(signed.sets[0]) for one in scene.members[0].groups]
    assert not fault_of(scene.about, scene.plan, signed, [groups[0], ()]), "another group could not be opened"
    assert "of others" in fault_of(scene.about, scene.plan, signed, [groups[0][1:], ()])
    unsigned = signed.model_copy(update={"consents": tuple(one for one in signed.consents if one.member in groups[0])})
    assert not fault_of(scene.about, scene.plan, unsigned, [groups[0], ()])
    assert "have not signed" in fault_of(scene.about, scene.plan, unsigned, [groups[1], ()])
