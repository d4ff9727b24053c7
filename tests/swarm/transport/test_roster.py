"""Who is known, by scope; no sockets."""

from tests.fakes.memory_coordinator import curve_keys, identity

from shoal.swarm.protocol.types import Address, Role, RosterEntry
from shoal.swarm.transport.roster import Rosters


def entry(number: int, process: int = 0, port: int = 1, role: Role = "trainer") -> RosterEntry:
    """``process``: of the same identity, with a transport key of its own."""
    me, keys = identity(number), curve_keys(number + 50 * process)
    return RosterEntry(
        peer=me.peer_id,
        certificate=me.certify(keys),
        name="x",
        role=role,
        addresses=(Address(host="127.0.0.1", control_port=port, data_port=port),),
        reachable=True,
    )


ONE, TWO, THREE = entry(1), entry(2), entry(3)


def key(one: RosterEntry) -> bytes:
    return one.certificate.curve_key


def test_whoever_is_on_one_roster_is_known() -> None:
    rosters = Rosters()
    assert rosters.update((ONE,), 0) == set()
    assert rosters.update((TWO,), 3) == set()
    assert [rosters.peer_with(key(one)) for one in (ONE, TWO, THREE)] == [ONE.peer, TWO.peer, None]
    assert ONE.peer in rosters
    assert TWO.peer in rosters
    assert THREE.peer not in rosters
    assert rosters.trainers(0) == [ONE.peer]
    assert rosters.trainers(3) == [TWO.peer]
    assert rosters.trainers(1) == []


def test_keys_are_parted_from_when_the_last_scope_has_dropped_them() -> None:
    rosters = Rosters()
    rosters.update((ONE, TWO), 0)
    rosters.update((ONE, THREE), 1)
    assert rosters.update((TWO,), 0) == set(), "stage 0 knows it still"
    assert rosters.update((THREE,), 1) == {key(ONE)}
    assert rosters.leave(1) == {key(THREE)}
    assert rosters.leave(1) == set()
    assert rosters.peer_with(key(TWO)) == TWO.peer


def test_another_process_of_a_peer_is_known_beside_the_one_that_some_scope_still_has() -> None:
    rosters, later = Rosters(), entry(1, process=1)
    rosters.update((ONE,), 0)
    rosters.update((ONE,), 2)
    assert rosters.update((later,), 2) == set()
    assert rosters.entry(ONE.peer, 2) == later
    assert rosters.entry(ONE.peer, 0) == ONE
    assert rosters.peer_with(key(ONE)) == rosters.peer_with(key(later)) == ONE.peer
    assert rosters.update((later,), 0) == {key(ONE)}


def test_who_moves_is_parted_from() -> None:
    rosters, moved = Rosters(), entry(1, port=2)
    rosters.update((ONE,), 0)
    assert rosters.update((moved,), 0) == {key(ONE)}
    assert rosters.entry(ONE.peer, 0) == moved


def test_a_scope_that_lacks_a_peer_takes_it_from_the_run_then_from_other_stages() -> None:
    rosters, elsewhere = Rosters(), entry(2, process=1)
    rosters.update((ONE,), 0)
    rosters.update((TWO,), 2)
    rosters.update((elsewhere,), 1)
    assert rosters.entry(ONE.peer, 2) == ONE
    assert rosters.entry(TWO.peer, 2) == TWO
    assert rosters.entry(TWO.peer, 5) == elsewhere
    assert rosters.entry(THREE.peer, 2) is None


def test_a_certificate_of_another_key_is_left_out_in_every_scope() -> None:
    rosters = Rosters()
    rosters.update((ONE,), 0)
    forged = TWO.model_copy(update={"peer": ONE.peer})
    rosters.update((forged, THREE), 1)
    assert rosters.trainers(1) == [THREE.peer]
    assert rosters.entry(ONE.peer, 1) == ONE
    unsigned = ONE.certificate.model_copy(update={"signature": bytes(64)})
    rosters.update((ONE.model_copy(update={"certificate": unsigned}),), 2)
    assert rosters.trainers(2) == []


def test_observers_train_in_no_scope() -> None:
    rosters = Rosters()
    rosters.update((entry(1, role="observer"), entry(2, role="contributor")), 1)
    assert rosters.trainers(1) == [TWO.peer]
