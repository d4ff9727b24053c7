"""Pauses after punched paths that broke: longer each time, by peer."""

from shoal.swarm.transport.paths.punch_pauses import PunchPauses


def test_each_pause_is_twice_as_long_as_the_one_before() -> None:
    pauses, now_s = PunchPauses(), 0.0
    assert pauses.may_punch("a", now_s)
    for length_s in (60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 3600.0, 3600.0):
        for _ in range(3):  # several streams on the same path
            pauses.note_broken("a", now_s)
        assert not pauses.may_punch("a", now_s + length_s - 1.0)
        now_s += length_s
        assert pauses.may_punch("a", now_s)
    assert pauses.may_punch("b", 0.0)
    pauses.note_broken("a", now_s)
    pauses.forget(["a"])
    assert pauses.peers == ()
    assert pauses.may_punch("a", now_s)
