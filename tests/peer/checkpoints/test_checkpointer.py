import pytest

from shoal.peer.checkpoints.checkpointer import CheckpointPace

ROUND_S = 10.0


def written(write_s: float, rounds: int, *, in_step: bool, first: int = 0) -> list[int]:
    """The rounds after which a peer writes, whose checkpoints take so long and which joined in round ``first``."""
    pace, found, busy_s = CheckpointPace(in_step=in_step), [], -1.0
    for number in range(first, rounds):
        now_s = number * ROUND_S
        if pace.is_due(number, now_s) and now_s >= busy_s:
            found.append(number)
            busy_s = now_s + write_s
            pace.wrote(write_s, busy_s)
    return found


def test_what_is_written_fast_is_written_after_every_round() -> None:
    for in_step in (True, False):
        assert written(0.4, 20, in_step=in_step) == list(range(20))


@pytest.mark.parametrize("write_s", [0.6, 2.0, 9.0, 25.0])
def test_writing_takes_a_twentieth_of_the_time(write_s: float) -> None:
    for in_step in (True, False):
        found = written(write_s, 1000, in_step=in_step)
        assert len(found) * write_s <= 1000 * ROUND_S / 20 + 2 * write_s
    assert len(written(write_s, 1000, in_step=True)) >= len(written(write_s, 1000, in_step=False)) / 2 - 1


def test_in_step_the_slowest_ones_rounds_are_those_of_all() -> None:
    peers = [
        written(write_s, 400, in_step=True, first=first)
        for write_s, first in ((0.7, 0), (3.0, 5), (9.0, 11), (0.1, 17), (6.0, 23))
    ]
    common = set.intersection(*map(set, peers))
    assert [number for number in peers[2] if number >= 32] == sorted(one for one in common if one >= 32)
    assert len(common) >= 10
