import random

import pytest

from shoal.peer.state_transfer.download import ChunkShares


def test_donors_take_what_is_next() -> None:
    shares = ChunkShares(range(10))
    runs = [shares.assign(donor, 4) for donor in ("a", "b", "a")]
    assert [run and run.chunks for run in runs] == [range(4), range(4, 8), range(8, 10)]


def test_what_is_here_is_not_asked_for() -> None:
    shares = ChunkShares([0, 1, 5, 6, 9])
    runs = [shares.assign("a", 4) for _ in range(3)]
    assert [run and run.chunks for run in runs] == [range(2), range(5, 7), range(9, 10)]


def test_the_last_chunks_are_asked_from_a_second_donor() -> None:
    shares = ChunkShares(range(4))
    first = shares.assign("slow", 4)
    assert first is not None
    assert shares.assign("slow", 4) is None, "not from the same one twice"
    asked = [shares.assign(donor, 4) for donor in ("b", "c", "d")]
    assert [run and run.chunks for run in asked] == [range(3, 4), range(2, 3), range(1, 2)], "from the end, one by one"
    assert shares.assign("b", 4) is None, "who has something to do is not asked for more of that"
    shares.mark_arrived(0)
    assert shares.assign("e", 4) is None, "all that is left has two askers, or is here"
    assert shares.is_missing(1)
    assert not shares.is_missing(0)


def test_the_longest_waited_for_comes_first() -> None:
    shares = ChunkShares(range(4))
    for donor in ("a", "b"):
        shares.assign(donor, 2)
    run = shares.assign("c", 1)
    assert run is not None
    assert run.chunks == range(1, 2)


def test_what_a_donor_did_not_deliver_is_the_next_to_be_asked_for() -> None:
    shares = ChunkShares(range(10))
    run = shares.assign("a", 4)
    assert run is not None
    shares.mark_arrived(0)
    shares.mark_arrived(2)
    assert shares.end_run(run)
    taken = [shares.assign("b", 4) for _ in range(3)]
    assert [one and one.chunks for one in taken] == [range(1, 2), range(3, 4), range(4, 8)]


def test_a_whole_run_leaves_nothing() -> None:
    shares = ChunkShares(range(2))
    run = shares.assign("a", 4)
    assert run is not None
    for chunk in run.chunks:
        shares.mark_arrived(chunk)
    assert not shares.end_run(run)
    assert shares.left == 0
    assert shares.assign("b", 4) is None


@pytest.mark.parametrize("seed", range(20))
def test_every_chunk_comes_whatever_fails(seed: int) -> None:
    chance = random.Random(seed)
    missing = {chunk for chunk in range(60) if chance.random() < 0.8}
    shares, runs = ChunkShares(missing), []
    for _ in range(100_000):
        if not shares.left:
            break
        asked = [chunk for run in runs for chunk in run.chunks if shares.is_missing(chunk)]
        assert max(map(asked.count, asked), default=0) <= 2
        if runs and chance.random() < 0.6:
            run = runs.pop(chance.randrange(len(runs)))
            for chunk in run.chunks:
                if chance.random() < 0.7:
                    shares.mark_arrived(chunk)
            shares.end_run(run)
        elif (run := shares.assign(chance.choice("abcde"), chance.randint(1, 8))) is not None:
            runs.append(run)
            assert any(map(shares.is_missing, run.chunks))
        else:
            assert runs, "there is always somebody who is asked, or can be"
    assert not shares.left
