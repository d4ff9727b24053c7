"""Members that could not be connected to are named once that has lasted."""

from __future__ import annotations

from tests.swarm.coordinator.world import peer_name

from shoal.swarm.protocol.types import MAX_UNMET
from shoal.swarm.transport.paths.unmet_peers import UnmetPeers

A, B = peer_name(0), peer_name(1)


def test_a_peer_is_named_once_its_failures_have_lasted() -> None:
    unmet = UnmetPeers()
    unmet.note_failure(A, 100.0)
    unmet.note_failure(A, 100.1)
    assert unmet.failed == (A,)
    assert unmet.named == ()
    unmet.note_failure(A, 100.0 + unmet.patience_s)
    assert unmet.named == (A,)
    unmet.note_met(A)
    unmet.note_failure(A, 120.0)
    assert unmet.named == ()


def test_peers_that_left_are_forgotten_and_no_more_are_named_than_a_message_takes() -> None:
    unmet = UnmetPeers()
    names = ["peer" + 11 * "a" + one for one in "abcdefghijklmnopqrstuvwxyz234567"]
    names += [one.replace("aaaa", "bbbb", 1) for one in names]
    for name in names:
        unmet.note_failure(name, 0.0)
        unmet.note_failure(name, unmet.patience_s)
    assert len(unmet.named) == MAX_UNMET < len(names)
    unmet.forget(names[1:])
    assert unmet.named == (names[0],)
