"""``[start]`` of a run file: what it says, and what follows from it."""

import hashlib
from typing import Any

import pytest

from shoal.swarm.errors import RunFileError
from shoal.swarm.protocol.run_file import parse_run_file
from shoal.swarm.protocol.start_section import StartSection, StartTensor, tensor_hash
from shoal.swarm.protocol.types import TensorSpec

LEAST = "[run]\nname = 't'\n[recipe]\nname = 'own'\n[round]\ntokens = 100\n"
START = (
    f"[start]\nrun = 'reef-01234567'\nround = 8\nstate = '{'a' * 64}'\ntokens = 900\nouter_steps = 9\n"
    f"[start.tensors]\n'a.weight' = {{ shape = [2, 3], sha256 = '{'1' * 64}' }}\n"
    f"bias = {{ shape = [], sha256 = '{'2' * 64}' }}\n"
)
LAYOUT = (
    TensorSpec(name="a.weight", shape=(2, 3)),
    TensorSpec(name="bias", shape=()),
)


def start(text: str = START) -> StartSection:
    found = parse_run_file(LEAST + text).start
    assert found is not None
    return found


def test_what_it_says() -> None:
    found = start()
    assert found.tensors["a.weight"] == StartTensor(shape=(2, 3), sha256="1" * 64)
    assert (found.source, found.rows(2)) == ("round 8 of reef-01234567", 3)
    assert start(START.replace("outer_steps = 9\n", "")).rows(2) == 1
    assert "--from FOLDER" in found.outlook


def test_a_run_without_it_starts_from_its_seed_and_is_another_run() -> None:
    assert parse_run_file(LEAST).start is None
    assert parse_run_file(LEAST).hash != parse_run_file(LEAST + START).hash


@pytest.mark.parametrize(
    ("before", "after"), [("= 900", "= 901"), ("= 9\n", "= 8\n"), ("111", "112"), ("[2, 3]", "[3, 2]")]
)
def test_every_part_of_it_counts_in_the_hash(before: str, after: str) -> None:
    assert parse_run_file(LEAST + START.replace(before, after, 1)).hash != parse_run_file(LEAST + START).hash


@pytest.mark.parametrize(
    ("before", "after", "field"),
    [
        ("1" * 64, "1" * 63, "start.tensors.a.weight.sha256"),
        ("[2, 3]", "[2, -3]", "start.tensors.a.weight.shape.1"),
        ("round = 8", "round = -1", "start.round"),
        ("tokens = 900", "token = 900", "start.token"),
    ],
)
def test_mistakes_are_named(before: str, after: str, field: str) -> None:
    with pytest.raises(RunFileError, match=field.replace(".", r"\.")):
        start(START.replace(before, after))


def test_the_first_difference_is_named() -> None:
    found, other = start(), [LAYOUT[0].model_copy(update={"shape": (3, 2)}), LAYOUT[1]]
    assert found.difference(LAYOUT, whole=True) == ""
    assert found.difference(LAYOUT[:1], whole=False) == ""
    assert found.difference(LAYOUT[:1], whole=True) == "it lacks bias [], which the checkpoint has"
    assert found.difference(other, whole=False) == "a.weight is [3, 2] here, and [2, 3] in the checkpoint"
    more = [TensorSpec(name="new", shape=(1,)), *LAYOUT]
    assert found.difference(more, whole=False) == "it has new [1], which the checkpoint lacks"


def test_a_states_digest_is_of_names_order_and_values() -> None:
    found = start()
    digests = {found.state_digest(one) for one in (LAYOUT, LAYOUT[:1], LAYOUT[1:], LAYOUT[::-1])}
    changed = start(START.replace("2" * 64, "3" * 64))
    assert len(digests | {changed.state_digest(LAYOUT)}) == 5
    assert changed.state_digest(LAYOUT[:1]) == found.state_digest(LAYOUT[:1])


def test_a_tensors_hash_is_of_shape_vectors_and_bytes() -> None:
    data: Any = [memoryview(b"abcd"), memoryview(b"efgh")]
    assert tensor_hash((1, 1), 2, data) == hashlib.sha256(b"shoal start tensor 1 [1, 1] 2\0abcdefgh").hexdigest()
    assert len({tensor_hash((1,), 2, data), tensor_hash((2,), 1, data), tensor_hash((1,), 1, data[:1])}) == 3
