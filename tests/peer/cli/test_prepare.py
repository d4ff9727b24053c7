"""What `shoal prepare` pins is what members bring, and a host publishes it once."""

import asyncio
from pathlib import Path

import pytest
import torch
from tests.fakes.journals import leased

from shoal.compression.range_reader import whole_vector
from shoal.peer.cli import host as hosting
from shoal.peer.cli.host import pinned_run_file, say_pins
from shoal.peer.cli.prepare import pins_of, prepare, with_pins
from shoal.peer.data_places import DataPlaces
from shoal.peer.recipes import load_recipe
from shoal.peer.training.anchor import AnchorState
from shoal.peer.training.parameters import ParameterVector
from shoal.swarm.errors import CorpusError, DeviceError, RecipeError, RunFileError, ShoalError
from shoal.swarm.protocol.pins import layout_digest
from shoal.swarm.protocol.run_file import RunFile, load_run_file, parse_run_file

TEXT = """
[run]
name = "reef"
seed = 3
[recipe]
name = "gpt"
settings = { layers = 2, heads = 2, width = 32, context = 16, tie_embedding = false }
[data]
source = "text:corpus.txt"
[round]
tokens = 320
"""


@pytest.fixture
def text(tmp_path: Path) -> str:
    (tmp_path / "corpus.txt").write_text("water " * 3000)
    return TEXT


def piped(text: str) -> str:
    return 'algorithm = "virtual_batch"\n' + text + "[pipeline]\nmicro_batch = 5\n"


@pytest.mark.parametrize("outer", ["sgd", "nesterov", "adamw"])
@pytest.mark.parametrize("piece", [7, 2**22])
def test_pins_are_what_a_member_brings(
    text: str, tmp_path: Path, outer: str, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.peer.cli.prepare._PIECE_ELEMENTS", piece)
    run = parse_run_file(f'{text}[outer]\noptimizer = "{outer}"\n')
    recipe = load_recipe(run, DataPlaces((tmp_path,)))
    vector = ParameterVector(recipe.build_model(3))
    told: list[object] = []
    pins = pins_of(run, told.append, DataPlaces((tmp_path,)))
    state = AnchorState.make(whole_vector(vector), torch.zeros(run.outer.slots, vector.elements), 0)
    assert pins.state == state.digest.hex()
    assert (pins.layout, pins.elements) == (layout_digest(vector.layout), vector.elements)
    assert (pins.tokens_per_sample, pins.samples) == (16, len(recipe.training_data()))
    assert pins.corpus == recipe.corpus_digest.hex()
    assert "Preparing: building the model …" in told


def test_a_pipelines_layers_are_pinned(text: str, tmp_path: Path) -> None:
    pins = pins_of(parse_run_file(piped(text)), lambda words: None, DataPlaces((tmp_path,)))
    assert pins.layers is not None
    assert pins.state is None
    assert [layer.tensors for layer in pins.layers] == [1, 6, 6, 2]
    prepared, run = with_pins(piped(text), pins, "run.toml")
    assert run.pins == pins
    assert parse_run_file(prepared) == run
    assert "first state not pinned" in say_pins(pins)


def test_prepare_writes_a_run_file(text: str, tmp_path: Path) -> None:
    path, out = tmp_path / "run.toml", tmp_path / "prepared.toml"
    path.write_text(text)
    run = prepare(path, out, lambda words: None, DataPlaces((tmp_path,)))
    written, found = load_run_file(out)
    assert found == run
    assert written.startswith(text.rstrip("\n"))
    assert found.model_copy(update={"pins": None}) == parse_run_file(text)
    with pytest.raises(RunFileError, match=r"has \[pins\] already"):
        prepare(out, tmp_path / "again.toml", lambda words: None)


def test_what_cannot_be_prepared_is_refused(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for changed, error in (
        (text.replace('"gpt"', '"own"'), RecipeError),
        (text.replace('"gpt"', '"elsewhere"'), RecipeError),
        (text.replace("corpus.txt", "none.txt"), CorpusError),
    ):
        with pytest.raises(error):
            pins_of(parse_run_file(changed), lambda words: None, DataPlaces((tmp_path,)))
    monkeypatch.setattr("shoal.peer.recipes.model_memory.usable_bytes", lambda device, limit: 1000)
    with pytest.raises(CorpusError, match="--data"):
        pins_of(parse_run_file(text), lambda words: None)
    with pytest.raises(DeviceError):
        pins_of(parse_run_file(text), lambda words: None, DataPlaces((tmp_path,)))


class TestHost:
    """``prepared``: stands for the process that builds the model."""

    @pytest.fixture(autouse=True)
    def prepared(self, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
        calls: list[Path] = []

        async def here(given: Path, out: Path, places: DataPlaces) -> None:
            calls.append(given)
            prepare(given, out, lambda words: None, places)

        monkeypatch.setattr(hosting, "_prepare_apart", here)
        return calls

    def publish(self, text: str, folder: Path, *, pin: bool = True) -> tuple[str, RunFile]:
        data = DataPlaces((folder.parent,))
        return asyncio.run(pinned_run_file(text, parse_run_file(text), folder, pin=pin, places=data))

    def test_it_prepares_once(self, text: str, tmp_path: Path, prepared: list[Path]) -> None:
        folder = tmp_path / "state"
        published, run = self.publish(text, folder)
        assert run.pins is not None
        leased(folder, run.hash, published).close()
        (folder / "run.toml").write_text(published)
        for pin in (True, False):
            assert self.publish(text, folder, pin=pin) == (published, run)
        assert self.publish(published, folder) == (published, run)
        assert len(prepared) == 1
        assert not prepared[0].exists()
        assert self.publish(text.replace("seed = 3", "seed = 4"), folder)[1].pins != run.pins, "another run"

    def test_a_run_that_was_begun_without_stays_without(self, text: str, tmp_path: Path, prepared: list[Path]) -> None:
        folder = tmp_path / "state"
        assert self.publish(text, folder, pin=False) == (text, parse_run_file(text))
        leased(folder, parse_run_file(text).hash, text).close()
        (folder / "run.toml").write_text(text)
        assert self.publish(text, folder) == (text, parse_run_file(text))
        assert not prepared

    def test_own_loops_have_none(self, text: str, tmp_path: Path, prepared: list[Path]) -> None:
        own = text.replace('"gpt"', '"own"')
        assert self.publish(own, tmp_path / "state")[1].pins is None
        assert not prepared


@pytest.mark.parametrize(
    ("given", "wrong", "kind", "said"),
    [
        ('"gpt"', '"gtp"', RecipeError, "recipe.name: 'gtp' is not installed here .*; did you mean 'gpt'?"),
        ("layers", "layer", RecipeError, r"recipe\.settings\.layer: no such field; did you mean 'layers'\?"),
        ("heads = 2", "heads = 3", RecipeError, r"width: expected an even multiple of heads \(3"),
        ("corpus.txt", "*.md", CorpusError, r"text:\*\.md: no file matches below .*: check --data, and data\.source"),
        ("text:corpus.txt", "stdlb", RunFileError, r"data\.source: expected .*not 'stdlb'; did you mean 'stdlib'\?"),
        ("text:", "txt:", RunFileError, r"data\.source: expected .*; did you mean 'text'\?"),
    ],
)
def test_what_a_run_file_misspells_is_told_with_what_was_meant(
    text: str, tmp_path: Path, given: str, wrong: str, kind: type[ShoalError], said: str
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text.replace(given, wrong, 1))
    with pytest.raises(kind, match=said):
        prepare(path, tmp_path / "out.toml", lambda words: None, DataPlaces((tmp_path,)))
