"""What a run file pins, and what of it a member's description has to be."""

from typing import Any

import pytest
from pydantic import ValidationError

from shoal.swarm.errors import CorpusError, ModelMismatch, RunFileError
from shoal.swarm.protocol.messages import PeerToCoordinatorDescribeModel
from shoal.swarm.protocol.pins import PinnedLayer, PinsSection, layout_digest
from shoal.swarm.protocol.run_file import parse_run_file
from shoal.swarm.protocol.types import FrozenParameters, TensorSpec

LAYOUT = tuple(TensorSpec(name=name, shape=(3, 4)) for name in "abcd")
CORPUS = b"\1" * 32
PINS = PinsSection(
    layout=layout_digest(LAYOUT), elements=48, tokens_per_sample=8, samples=100, corpus=CORPUS.hex(), state="5" * 64
)


def described(**changes: Any) -> PeerToCoordinatorDescribeModel:
    model = PeerToCoordinatorDescribeModel(layout=LAYOUT, corpus_digest=CORPUS, tokens_per_sample=8, samples=100)
    return model.model_copy(update=changes)


def test_what_is_pinned_is_accepted() -> None:
    PINS.check_model(described())
    PINS.check_model(described(corpus_digest=None, samples=None))  # the data comes later
    PINS.model_copy(update={"corpus": None, "samples": None}).check_model(described(samples=7))


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"layout": LAYOUT[:3]}, ModelMismatch),
        ({"layout": LAYOUT[::-1]}, ModelMismatch),
        ({"layout": (*LAYOUT[:3], LAYOUT[3].model_copy(update={"shape": (4, 3)}))}, ModelMismatch),
        ({"tokens_per_sample": 9}, ModelMismatch),
        ({"frozen": FrozenParameters(elements=7, digest=b"f" * 32)}, ModelMismatch),
        ({"corpus_digest": b"\2" * 32}, CorpusError),
        ({"samples": 101}, CorpusError),
        ({"samples": 101, "corpus_digest": None}, CorpusError),
    ],
)
def test_anything_else_is_refused(changes: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        PINS.check_model(described(**changes))


def pinned_layers() -> tuple[PinnedLayer, ...]:
    cuts = (LAYOUT[:1], LAYOUT[1:3], LAYOUT[3:])
    return tuple(PinnedLayer(tensors=len(one), elements=12 * len(one), layout=layout_digest(one)) for one in cuts)


@pytest.mark.parametrize(("first", "stop"), [(0, 1), (0, 2), (1, 3), (0, 3)])
def test_a_stage_has_its_layers_and_no_others(first: int, stop: int) -> None:
    layers = pinned_layers()
    edges = [0, 1, 3, 4]
    its = LAYOUT[edges[first] : edges[stop]]
    PINS.check_stage(described(layout=its), layers[first:stop])
    for other in (its[1:], its[:-1], (*its, LAYOUT[0]), its[::-1] if len(its) > 1 else (LAYOUT[2],)):
        with pytest.raises(ModelMismatch):
            PINS.check_stage(described(layout=other), layers[first:stop])
    with pytest.raises(CorpusError):
        PINS.check_stage(described(layout=its, corpus_digest=b"\2" * 32), layers[first:stop])


def test_layers_add_up() -> None:
    fields = PINS.model_dump() | {"state": None, "layers": pinned_layers()}
    assert PinsSection.model_validate(fields).layers == pinned_layers()
    with pytest.raises(ValidationError, match="expected 49 elements"):
        PinsSection.model_validate(fields | {"elements": 49})
    with pytest.raises(ValidationError, match="whole model"):
        PinsSection.model_validate(fields | {"state": "5" * 64})


RUN = '[run]\nname = "x"\n[recipe]\nname = "own"\n[round]\ntokens = 8\n'
TENSORS = f'tensors = {{ a = {{ shape = [1], sha256 = "{"b" * 64}" }} }}\n'
START = f'[start]\nrun = "y"\nround = 1\nstate = "{"a" * 64}"\n' + TENSORS
SECTION = f'[pins]\nlayout = "{"1" * 64}"\nelements = 5\ntokens_per_sample = 1\n'


def test_they_count_in_the_runs_hash() -> None:
    plain, pinned = parse_run_file(RUN), parse_run_file(RUN + SECTION)
    assert plain.hash != pinned.hash
    assert pinned.model_copy(update={"pins": None}).hash == plain.hash
    assert pinned.hash != parse_run_file(RUN + SECTION + f'state = "{"2" * 64}"\n').hash


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (RUN + START + SECTION + f'state = "{"2" * 64}"\n', "pins.state: expected only without"),
        (RUN + SECTION + f'layers = [{{ tensors = 1, elements = 5, layout = "{"1" * 64}" }}]\n', "pins.layers"),
        (RUN + SECTION.replace("= 5", "= 0"), "pins.elements"),
        (RUN + SECTION.replace("1" * 64, "no digest"), "pins.layout"),
        (RUN + SECTION + "colour = 1\n", "pins.colour"),
    ],
)
def test_what_says_nothing_or_two_things_is_refused(text: str, words: str) -> None:
    with pytest.raises(RunFileError, match=words):
        parse_run_file(text)
    assert parse_run_file(RUN + START + SECTION).pins is not None


def test_another_base_is_refused_with_both_digests() -> None:
    base = FrozenParameters(elements=1_000, digest=b"\xab" * 32)
    pins = PINS.model_copy(update={"frozen_elements": 1_000, "frozen": (b"\xab" * 32).hex()})
    pins.check_model(described(frozen=base))
    other = FrozenParameters(elements=1_000, digest=b"\xcd" * 32)
    with pytest.raises(ModelMismatch, match=rf"1,000 \({'cd' * 8}\) here, 1,000 \({'ab' * 8}\) in the run; load"):
        pins.check_model(described(frozen=other))
    with pytest.raises(ModelMismatch, match="none here, 1,000"):
        pins.check_model(described())
