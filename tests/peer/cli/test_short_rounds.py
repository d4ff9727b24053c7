"""Advice on round.tokens: said once, where rounds get far more than it."""

import pytest

from shoal.peer.cli.short_rounds import ShortRounds
from shoal.peer.terminal.events import sentence
from shoal.swarm.protocol.run_file import RunFile, parse_run_file


def run(tokens: int = 100, algorithm: str = "diloco") -> RunFile:
    return parse_run_file(
        f'algorithm = "{algorithm}"\n[run]\nname = "whale"\n[recipe]\nname = "own"\n'
        f"[round]\ntokens = {tokens}\npatience_s = 12\n"
    )


def test_rounds_that_get_far_more_than_was_asked_for_are_said_once() -> None:
    short = ShortRounds()
    assert [short.note(run(), tokens) for tokens in (400, 150, 400)] == [None, None, None], "not twice in a row"
    said = short.note(run(), 455)
    assert said is not None
    assert {key: said[key] for key in ("wanted", "tokens", "least_s", "advised")} == {
        "wanted": 100,
        "tokens": 455,
        "least_s": 4.0,
        "advised": 910,
    }
    assert [short.note(run(), 1000) for _ in range(4)] == [None] * 4
    assert short.note(run(200), 1000) is None
    assert short.note(run(200), 1234) is not None, "another value, which is too small, too"
    assert sentence(said | {"run": "whale"}) == (
        "WARNING: round.tokens is 100, but the members train 455 before a round can end, 4.0 s after its end was "
        "announced: set it to 910 or more, as by shoal amend whale round.tokens=910"
    )


@pytest.mark.parametrize(("tokens", "algorithm"), [(140, "diloco"), (10_000, "virtual_batch")])
def test_rounds_that_keep_to_it_are_not(tokens: int, algorithm: str) -> None:
    short = ShortRounds()
    assert [short.note(run(algorithm=algorithm), tokens) for _ in range(5)] == [None] * 5
