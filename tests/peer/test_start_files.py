"""Start of a run from another one's checkpoint: whole, in three stages, in two; always the same bits."""

import asyncio
import shutil
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from tests.fakes.journals import leased
from tests.fakes.outer_steps import TensorMean
from tests.peer.checkpoints.making import verdict_chain
from tests.peer.layered_models import Key, Line, gpt, mean_gradient
from tests.peer.starts import (
    put_together,
    random_state,
    read,
    run_start,
    run_toml,
    same_bits,
    stage_layouts,
    start_toml,
    started,
    write_checkpoint,
)

from shoal.compression.range_reader import whole_vector
from shoal.peer.checkpoints.checkpoint import CheckpointContents
from shoal.peer.checkpoints.manifest import CheckpointAbout, StageAbout
from shoal.peer.checkpoints.retention import Retention
from shoal.peer.checkpoints.source import _OpenFile
from shoal.peer.checkpoints.store import CheckpointStore
from shoal.peer.cli.files import start_of
from shoal.peer.cli.host import started_run_file
from shoal.peer.cli.start_section import start_section, with_section
from shoal.peer.history.catch_up import next_state
from shoal.peer.options import StartFrom
from shoal.peer.state_transfer.start import StartFiles
from shoal.peer.training.anchor import AnchorState
from shoal.peer.training.data import run_order
from shoal.peer.training.lr_schedule import lr_factor, run_lr_factor
from shoal.peer.training.parameters import ParameterVector
from shoal.swarm.errors import ModelMismatch, RunFileError, SealedForOthers, StateFileError, UserError
from shoal.swarm.protocol.identity import Identity
from shoal.swarm.protocol.run_file import RunFile, parse_run_file

LAYERED = gpt().layers(1)
LAYOUT = LAYERED.layout
ELEMENTS = sum(spec.elements for spec in LAYOUT)
THREE, TWO = (0, 2, 4, 6), (0, 3, 6)
WHOLE = random_state(ELEMENTS)
BATCH = 40


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run without stages."""
    folder = tmp_path_factory.mktemp("finished")
    toml = run_toml("finished")
    write_checkpoint(folder / "peer", parse_run_file(toml), toml, LAYOUT, random_state(ELEMENTS, 2))
    write_checkpoint(folder / "peer", parse_run_file(toml), toml, LAYOUT, WHOLE)
    return folder


def stages_of(run: RunFile, folder: Path, boundaries: tuple[int, ...]) -> list[AnchorState]:
    """The states that the holders of the stages read."""
    start = run_start(run, folder)
    return [start.state_of(layout).read() for layout in stage_layouts(LAYERED, boundaries)]


def test_from_the_whole_to_three_stages_to_two_and_back(place: Path, tmp_path: Path) -> None:
    assert len(LAYERED) == 6
    state, folder = WHOLE, place
    for name, boundaries in (("three", THREE), ("two", TWO), ("whole", (0, 6)), ("again", THREE)):
        toml = start_toml(run_toml(name, len(boundaries) - 1 if len(boundaries) > 2 else 0), folder)
        run = parse_run_file(toml)
        found = stages_of(run, folder, boundaries)
        assert [one.version for one in found] == [0] * len(found)
        together = put_together(found, 1)
        assert same_bits(together.values, state.values), "anchor and outer vectors, bit for bit"
        state, folder = together, tmp_path / name
        write_checkpoint(folder, run, toml, LAYOUT, state)
    assert run.start is not None
    assert run.start.run.startswith("whole-")
    assert (run.start.outer_steps, run.start.tokens) == (3 + 3, 640 * 6), "all that was done before"


def test_the_digest_of_a_start_follows_from_the_run_file(place: Path) -> None:
    run = started(run_toml("next", 3), place)
    assert run.start is not None
    layouts = stage_layouts(LAYERED, THREE)
    digests = [run.start.state_digest(layout) for layout in layouts]
    assert [state.digest for state in stages_of(run, place, THREE)] == digests
    assert len({*digests, run.start.state_digest(LAYOUT)}) == 4
    other = run.start.model_copy(update={"tensors": dict(reversed(run.start.tensors.items()))})
    assert other.state_digest(LAYOUT) == run.start.state_digest(LAYOUT), "as the model has them, not as the file"


def test_only_the_parameters(place: Path) -> None:
    run = started(run_toml("next", 3), place, only_parameters=True)
    assert run.start is not None
    assert (run.start.tokens, run.start.outer_steps) == (0, 0)
    together = put_together(stages_of(run, place, THREE), 1)
    assert same_bits(together.anchor, WHOLE.anchor)
    assert not together.outer.any()


def test_another_outer_optimizer_begins_at_zero(place: Path) -> None:
    run = started(run_toml("next", outer="nesterov"), place)
    assert run.start is not None
    assert (run.start.tokens, run.start.outer_steps) == (640 * 3, 0)
    state = run_start(run, place, slots=1).state_of(LAYOUT).read()
    assert state.values.shape == (2, ELEMENTS)
    assert same_bits(state.anchor, WHOLE.anchor)
    assert not state.outer.any()


# Training goes on ---------------------------------------------------------------------------------------------


def trained(
    run: RunFile, state: AnchorState, rounds: int, boundaries: tuple[int, ...] = (0, 6)
) -> tuple[AnchorState, list[float]]:
    """The state after so many rounds from the run's start, computed by a line of peers, and their losses."""
    recipe = gpt()
    data = recipe.training_data()
    order = run_order(run, data, recipe.tokens_per_sample)
    line = Line(recipe, boundaries, [(stage, stage) for stage in range(len(boundaries) - 1)])
    cuts = [0]
    for layout in stage_layouts(LAYERED, boundaries):
        cuts.append(cuts[-1] + sum(spec.elements for spec in layout))
    parts = state.values.split([b - a for a, b in pairwise(cuts)], dim=1)
    states = [AnchorState.make(part[0], part[1:], 0) for part in parts]
    losses = []
    for number in range(rounds):
        line.restart([one.anchor for one in states])
        for one, (stage,) in zip(states, line.peers, strict=True):
            ParameterVector(stage.model).write(one.anchor)
        batch = data.batch(order.indices(number * BATCH, (number + 1) * BATCH))
        losses.append(line.drive(Key(number, 0, BATCH), batch, range(len(states))))
        verdict = verdict_chain(number + 1)[-1].model_copy(update={"tokens": 640, "tokens_total": 640 * (number + 1)})
        means = zip(states, line.means(), stage_layouts(LAYERED, boundaries), strict=True)
        states = [next_state(one, TensorMean(mean, 4096), verdict, run, layout) for one, mean, layout in means]
    return put_together(states, rounds), losses


SCHEDULE = "tokens = {}\n[schedule]\nkind = 'cosine'\nwarmup_tokens = 1280\n"


def test_training_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    """Two rounds of a whole model, two in three stages and two in two equal six rounds of one process."""
    alone = parse_run_file(run_toml("alone", more=SCHEDULE.format(640 * 6)))
    vector = ParameterVector(gpt().build_model(1))
    initial = AnchorState.make(whole_vector(vector), torch.zeros(2, ELEMENTS), 0)
    expected, losses = trained(alone, initial, 6)
    assert losses[-1] < losses[0] - 0.1

    state, found = initial, []
    for name, boundaries in (("whole", (0, 6)), ("three", THREE), ("two", TWO)):
        left = 640 * (6 - len(found))
        toml = run_toml(name, len(boundaries) - 1 if name != "whole" else 0, more=SCHEDULE.format(left))
        run = parse_run_file(toml)
        if found:
            toml = start_toml(toml, tmp_path / "last")
            run = parse_run_file(toml)
            state = put_together(stages_of(run, tmp_path / "last", boundaries), 0)
            (tmp_path / "last").rename(tmp_path / f"before-{name}")
        state, here = trained(run, state, 2, boundaries)
        found += here
        write_checkpoint(tmp_path / "last", run, toml, LAYOUT, state)
    assert found == pytest.approx(losses, rel=1e-5)
    assert torch.linalg.vector_norm(state.values - expected.values) < 1e-5 * torch.linalg.vector_norm(expected.values)


def test_where_the_learning_rate_and_the_samples_go_on(place: Path) -> None:
    run = started(run_toml("next", more=SCHEDULE.format(640 * 7)), place)
    assert run_lr_factor(run, 640) == lr_factor(run.schedule, 640 * 10, 640 * 4)
    alone = parse_run_file(run_toml("next", more=SCHEDULE.format(640 * 7)))
    assert run_lr_factor(alone, 640) == lr_factor(run.schedule, 640 * 7, 640)
    tokens = gpt().tokens_per_sample
    before, after = run_order(alone, range(1000), tokens), run_order(run, range(1000), tokens)
    first = 640 * 3 // tokens
    assert after.indices(0, 2000).tolist() == before.indices(first, first + 2000).tolist()


# Refusals -----------------------------------------------------------------------------------------------------


def copied(place: Path, tmp_path: Path) -> Path:
    """Folder of a copy of the newest checkpoint, to be damaged."""
    (found,) = place.glob("**/round-00000002")
    copy = tmp_path / "copy" / found.name
    copy.mkdir(parents=True)
    for file in found.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    return copy


def damaged(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def test_a_truncated_file_is_named_with_its_tensor(place: Path, tmp_path: Path) -> None:
    run, copy = started(run_toml("next"), place), copied(place, tmp_path)
    file = copy / "anchor-00001-of-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(StateFileError, match=rf"tensor '{LAYOUT[0].name}'.*{file.name}: size: expected"):
        run_start(run, copy).state_of(LAYOUT).read()


def test_damage_is_named_with_its_tensor(place: Path, tmp_path: Path) -> None:
    run, copy = started(run_toml("next"), place), copied(place, tmp_path)
    damaged(copy / "outer-00001-of-00001.safetensors", -1)
    with pytest.raises(StateFileError, match=rf"tensor '0.{LAYOUT[0].name}'.*outer-00001-of-00001.*SHA-256"):
        run_start(run, copy).state_of(LAYOUT).read()


def test_a_forged_checkpoint_is_not_what_the_run_starts_from(place: Path, tmp_path: Path) -> None:
    """It is signed, of the right round, and claims the right state, but some values differ."""
    run = started(run_toml("next"), place)
    values = WHOLE.values.clone()
    values[0, -1] += 1e-3
    toml = run_toml("finished")
    forged = write_checkpoint(
        tmp_path, parse_run_file(toml), toml, LAYOUT, AnchorState.of(values, WHOLE.version), claimed_digest=WHOLE.digest
    )
    first, last = stage_layouts(LAYERED, TWO)
    start = run_start(run, forged)
    assert same_bits(start.state_of(first).read().anchor, WHOLE.anchor[: sum(spec.elements for spec in first)])
    with pytest.raises(StateFileError, match=rf"{forged}.*SHA-256 of the tensor '{LAYOUT[-1].name}'.*run file says"):
        start.state_of(last).read()


def test_another_checkpoint_of_the_run_is_not_it_either(place: Path) -> None:
    run = started(run_toml("next"), place)
    (older,) = place.glob("**/round-00000001")
    with pytest.raises(StateFileError, match=r"round 2 of finished-.*is not here.*is round 1 of finished-"):
        run_start(run, older)
    with pytest.raises(StateFileError, match="is not here"):
        run_start(run, older / "nothing")


def test_a_model_of_other_settings_is_refused_naming_the_first_difference(place: Path) -> None:
    start = run_start(started(run_toml("next"), place), place)
    wider, shorter, longer = (gpt(**one).layers(1).layout for one in ({"width": 64}, {"layers": 3}, {"layers": 5}))
    with pytest.raises(ModelMismatch, match=rf"{LAYOUT[0].name} is \[\d+, 64\] here, and \[\d+, 32\]"):
        start.check(wider, whole=True)
    with pytest.raises(ModelMismatch, match=r"it lacks \S*3\S* \[\d+\], which the checkpoint has"):
        start.check(shorter, whole=True)
    with pytest.raises(ModelMismatch, match=r"it has \S*4\S* \[\d+\], which the checkpoint lacks"):
        start.state_of(longer)


def test_a_host_refuses_a_checkpoint_of_another_model(place: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(run_toml("next", 3).replace("width = 32", "width = 64"))
    with pytest.raises(ModelMismatch, match="in the checkpoint"):
        asyncio.run(started_run_file(path, tmp_path / "state", StartFrom(place)))


def test_a_stages_checkpoint_is_no_start(tmp_path: Path) -> None:
    toml = run_toml("staged", 3)
    layout = stage_layouts(LAYERED, THREE)[1]
    state = random_state(sum(spec.elements for spec in layout))
    about = StageAbout(number=1, stages=3)
    write_checkpoint(tmp_path, parse_run_file(toml), toml, layout, state, stage=about)
    with pytest.raises(StateFileError, match=r"no checkpoint of a whole model here.*is of one stage: join all stages"):
        start_section(StartFrom(tmp_path), parse_run_file(run_toml("next")))


@pytest.mark.parametrize("name", ["anchor-00001-of-00001.safetensors", "manifest.json"])
def test_where_the_newest_one_is_damaged_an_older_one_is_the_start(
    place: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """As in a restore; where the damaged one is named, its damage is reported."""
    folder, run = tmp_path / "finished", parse_run_file(run_toml("next"))
    shutil.copytree(place, folder)
    older, newest = sorted(folder.glob("**/round-*"))
    damaged(newest / name, -1)
    assert start_section(StartFrom(folder), run) == start_section(StartFrom(older), run)
    assert "a checkpoint cannot be used" in caplog.text
    assert str(newest / name) in caplog.text
    with pytest.raises(StateFileError, match=name):
        start_section(StartFrom(newest), run)
    damaged(older / name, -1)
    with pytest.raises(StateFileError, match=name):
        start_section(StartFrom(folder), run)


def test_a_checkpoint_of_a_run_that_diverged_is_no_start(tmp_path: Path) -> None:
    """An older one is not taken by itself, as nobody knows how far back is good."""
    toml, anchor = run_toml("diverged"), WHOLE.anchor.clone()
    anchor[-1] = torch.nan
    write_checkpoint(tmp_path, parse_run_file(toml), toml, LAYOUT, random_state(ELEMENTS, WHOLE.version - 1))
    write_checkpoint(tmp_path, parse_run_file(toml), toml, LAYOUT, AnchorState.make(anchor, WHOLE.outer, WHOLE.version))
    with pytest.raises(StateFileError, match=f"tensor '{LAYOUT[-1].name}' has values .* not a number: the run had div"):
        start_section(StartFrom(tmp_path), parse_run_file(run_toml("next")))


def test_of_several_runs_the_host_has_to_name_one(place: Path, tmp_path: Path) -> None:
    (tmp_path / "one").symlink_to(place)
    toml = run_toml("other")
    write_checkpoint(tmp_path / "two", parse_run_file(toml), toml, LAYOUT, WHOLE)
    (tmp_path / "one").unlink()
    write_checkpoint(tmp_path / "one", parse_run_file(run_toml("more")), run_toml("more"), LAYOUT, WHOLE)
    with pytest.raises(StateFileError, match="several runs"):
        start_section(StartFrom(tmp_path), parse_run_file(run_toml("next")))


def test_a_sealed_checkpoint_needs_its_reader(tmp_path: Path) -> None:
    toml = run_toml("closed")
    run = parse_run_file(toml)
    plain = write_checkpoint(tmp_path / "plain", run, toml, LAYOUT, WHOLE)
    keys = tmp_path / "identity"
    reader = Identity.load_or_create(keys)
    store = CheckpointStore(tmp_path / "sealed", run.hash, reader, Retention(), ())
    found = read(plain)
    about = {name: getattr(found.manifest, name) for name in type(found.manifest).model_fields}
    for name in ("format", "files", "identity_key", "signature"):
        del about[name]
    sealed = store.write(CheckpointContents(CheckpointAbout(**about), WHOLE, None, verdict_chain(3, run.hash))).folder
    with pytest.raises(SealedForOthers):
        start_section(StartFrom(sealed), parse_run_file(run_toml("next")))
    text = run_toml("next")
    section = start_section(StartFrom(sealed, keys), parse_run_file(text))
    assert section == start_section(StartFrom(plain), parse_run_file(text))
    files = StartFiles.find(sealed, section, reader)
    assert same_bits(files.rows(LAYOUT[3].name, 3), StartFiles.find(plain, section, None).rows(LAYOUT[3].name, 3))


# The run file -------------------------------------------------------------------------------------------------


def test_a_host_goes_on_with_the_start_that_it_wrote(place: Path, tmp_path: Path) -> None:
    path, kept = tmp_path / "run.toml", tmp_path / "state"
    path.write_text(run_toml("next", 3))
    text, run = asyncio.run(started_run_file(path, kept, StartFrom(place)))
    assert text.startswith(path.read_text().rstrip("\n"))
    assert parse_run_file(text) == run
    leased(kept, run.hash, text).close()
    (kept / "run.toml").write_text(text)
    assert asyncio.run(started_run_file(path, kept, StartFrom(tmp_path / "is gone"))) == (text, run)
    path.write_text(run_toml("next", 2))
    with pytest.raises(StateFileError):
        asyncio.run(started_run_file(path, kept, StartFrom(tmp_path / "is gone")))


def test_what_to_take_needs_something_to_take_it_from(place: Path, tmp_path: Path) -> None:
    assert start_of(None, None, only_parameters=False) is None
    assert start_of(place, tmp_path / "none", only_parameters=True) == StartFrom(place, only_parameters=True)
    with pytest.raises(UserError, match="--from FOLDER"):
        start_of(None, None, only_parameters=True)


def test_a_run_file_has_one_start(place: Path) -> None:
    text = run_toml("next")
    section = start_section(StartFrom(place), parse_run_file(text))
    whole, _ = with_section(text, section, "run.toml")
    with pytest.raises(RunFileError, match=r"run\.toml: has a \[start\] already"):
        with_section(whole, section, "run.toml")


def test_a_stage_reads_no_file_that_it_does_not_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.peer.checkpoints.tensors.SHARD_BYTES", 1)
    monkeypatch.setattr("shoal.peer.checkpoints.tensors.shards.__defaults__", (1,))
    toml = run_toml("cut")
    cut = write_checkpoint(tmp_path, parse_run_file(toml), toml, LAYOUT, WHOLE)
    run = started(run_toml("next", 3), cut)
    read_bytes = Counter[str]()
    real = _OpenFile.read_into

    def counted(self: _OpenFile, at: int, out: memoryview) -> None:
        read_bytes[self.place] += out.nbytes
        real(self, at, out)

    monkeypatch.setattr(_OpenFile, "read_into", counted)
    layout = stage_layouts(LAYERED, THREE)[1]
    run_start(run, cut).state_of(layout).read()
    files = {name for name, size in read_bytes.items() if size > 4096}
    large = [spec for spec in layout if spec.elements >= 1024]
    assert len(files) == 2 * len(large), "one of the anchor and one of the outer optimizer's two vectors"


def test_mean_gradients_are_those_of_one_piece() -> None:
    """``trained`` relies on this."""
    recipe = gpt()
    model, data = recipe.build_model(1), recipe.training_data()
    line = Line(recipe, THREE, [(0, 0), (1, 1), (2, 2)])
    batch = data.batch(range(4))
    line.drive(Key(0, 0, 4), batch, range(3))
    assert torch.allclose(torch.cat(line.means()), mean_gradient(recipe, model, batch), atol=1e-6)
