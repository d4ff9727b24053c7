"""Building of shards: the same from any number of processes, after a kill, and of every kind of input."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3

from shoal.peer.data import build
from shoal.peer.data.build import about_tokenizer, build_shards, index_shards
from shoal.peer.data.documents import Piece, dataset_files, input_files, plan_pieces, runs_of
from shoal.peer.data.manifest import MANIFEST, Manifest, parse_manifest
from shoal.swarm.errors import CorpusError

WORDS = ["reef", "tide", "shoal", "kelp", "<|endoftext|>"]


@pytest.fixture(autouse=True)
def in_this_process(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes cost seconds each; one test has them."""
    if "processes" in request.node.name:
        return

    def run(tasks: Any, notes: Path, processes: int, progress: Any) -> None:
        for task in tasks:
            if build._read_note(notes, task.number) is None:
                build._build_piece(task)
            progress(task.number + 1, len(tasks))

    monkeypatch.setattr(build, "_run", run)


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(6):
        (folder / f"{number}.txt").write_text(f"<{number}>\n" + "sea and sky\n" * 100 * number)
    (folder / "binary.pyc").write_bytes(bytes(100))
    return folder


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="reef"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    path = tmp_path / "tiny" / "tokenizer.json"
    path.parent.mkdir()
    made.save(str(path))
    return str(path)


def built(
    out: Path, kind: str, files: list[Path], tokenizer: str = "bytes", piece_bytes: int = 2000, **more: Any
) -> Manifest:
    pieces = plan_pieces(kind, files, piece_bytes)
    return build_shards(out, pieces, tokenizer, about_tokenizer(tokenizer), block_bytes=4096, **more)


def tokens_of(out: Path, manifest: Manifest) -> list[int]:
    dtype = {"u8": "u1", "u16": "<u2"}[manifest.dtype]
    return np.concatenate([np.fromfile(out / one.name, dtype) for one in manifest.files]).tolist()


def check_digests(out: Path, manifest: Manifest) -> None:
    for block in range(manifest.blocks):
        file, start, stop = manifest.place(block)
        assert blake3((out / file.name).read_bytes()[start:stop]).digest() == manifest.block_digest(block)


def test_text_is_in_the_shards_whole_and_in_order(tmp_path: Path, texts: Path) -> None:
    manifest = built(tmp_path / "out", "text", input_files(texts, "text"))
    expected = b"".join((texts / f"{number}.txt").read_bytes() + b"\0" for number in range(6))
    assert bytes(tokens_of(tmp_path / "out", manifest)) == expected
    assert len(manifest.files) > 3  # longer files are cut into pieces
    check_digests(tmp_path / "out", manifest)
    assert parse_manifest((tmp_path / "out" / MANIFEST).read_bytes(), "there").digest == manifest.digest
    assert not (tmp_path / "out" / ".build").exists()
    with pytest.raises(CorpusError, match="has shards already"):
        built(tmp_path / "out", "text", input_files(texts, "text"))


@pytest.mark.parametrize("kind", ["text", "jsonl"])
def test_every_line_is_in_one_piece(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"a.{kind}"
    lines = [json.dumps({"text": "x" * (number % 37)}) + "\n" for number in range(200)]
    path.write_text("".join(lines))
    whole = list(runs_of(Piece(kind, (str(path),), -1, -1, 0), "text"))
    for piece_bytes in (1, 7, 100, 1999):
        pieces = plan_pieces(kind, [path], piece_bytes)
        found = [run for piece in pieces for run in runs_of(piece, "text")]
        assert "".join(text for text, _ in found) == "".join(text for text, _ in whole)
        assert sum(ends for _, ends in found) == sum(ends for _, ends in whole)


def test_a_build_that_was_killed_goes_on(tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = input_files(texts, "text")
    whole = built(tmp_path / "whole", "text", files)
    really, calls = build._build_piece, []

    def killed(task: Any) -> None:
        calls.append(task.number)
        if len(calls) == 3:
            (Path(task.out) / f"shard-{task.number:05}.part").write_bytes(b"half")
            raise KeyboardInterrupt
        really(task)

    monkeypatch.setattr(build, "_build_piece", killed)
    with pytest.raises(KeyboardInterrupt):
        built(tmp_path / "out", "text", files)
    assert not (tmp_path / "out" / MANIFEST).exists()
    assert built(tmp_path / "out", "text", files).digest == whole.digest
    assert calls[3:] == list(range(2, len(plan_pieces("text", files, 2000))))
    check_digests(tmp_path / "out", whole)


def test_another_input_does_not_go_on(tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(task: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(build, "_build_piece", killed)
    with pytest.raises(KeyboardInterrupt):
        built(tmp_path / "out", "text", input_files(texts, "text"))
    (texts / "6.txt").write_text("more")
    with pytest.raises(CorpusError, match="of other input or options: empty the folder"):
        built(tmp_path / "out", "text", input_files(texts, "text"))


def test_the_number_of_processes_changes_nothing(tmp_path: Path, texts: Path) -> None:
    files, told = input_files(texts, "text"), []
    one = built(tmp_path / "one", "text", files, processes=2, progress=lambda done, total: told.append((done, total)))
    for task_number in range(len(one.files)):
        assert (tmp_path / "one" / f"shard-{task_number:05}.u8").exists()
    assert told[0][0] == 0
    assert told[-1][0] == told[-1][1]
    assert one.digest == _in_one(tmp_path, files).digest


def _in_one(tmp_path: Path, files: list[Path]) -> Manifest:
    out = tmp_path / "alone"
    (out / ".build").mkdir(parents=True)
    about, notes = about_tokenizer("bytes"), []
    for number, piece in enumerate(plan_pieces("text", files, 2000)):
        build._build_piece(build._Task(piece, number, str(out), "bytes", "u8", 0, "text", 4096))
        notes.append(build._read_note(out / ".build", number))
    return build._manifest("u8", 4096, about, [note for note in notes if note is not None and note.size_bytes])


def test_tokenizers_and_ends_of_documents(tmp_path: Path, tokenizer: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"body": "shoal kelp"}\n\n{"body": "tide"}\n')
    manifest = built(tmp_path / "out", "jsonl", [path], tokenizer, field="body")
    assert tokens_of(tmp_path / "out", manifest) == [2, 3, 4, 1, 4]
    about = manifest.tokenizer
    assert (manifest.dtype, about.name, about.vocab, about.end) == ("u8", "tiny", 5, 4)
    assert about.digest == blake3(Path(tokenizer).read_bytes()).digest()
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == Path(tokenizer).read_bytes()
    with pytest.raises(CorpusError, match=r"--end <x>: .* has no such token"):
        about_tokenizer(tokenizer, "<x>")
    with pytest.raises(CorpusError, match="byte 0: expected a record with a text 'text'"):
        built(tmp_path / "other", "jsonl", [path], tokenizer)


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_columns(tmp_path: Path, kind: str) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")
    folder = tmp_path / "set" / "train"
    folder.mkdir(parents=True)
    table = pyarrow.table({"text": [f"line {number}" for number in range(50)] + [None], "other": list(range(51))})
    if kind == "parquet":
        pyarrow.parquet.write_table(table, folder / "a.parquet", row_group_size=7)
    else:
        path = str(folder / "data-00000-of-00001.arrow")
        with pyarrow.OSFile(path, "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    found, files = dataset_files(tmp_path / "set")
    assert found == kind
    manifest = built(tmp_path / "out", kind, files, piece_bytes=500)
    expected = b"".join(f"line {number}\0".encode() for number in range(50))
    assert bytes(tokens_of(tmp_path / "out", manifest)) == expected
    with pytest.raises(CorpusError, match="expected a column 'body', not text, other"):
        built(tmp_path / "other", kind, files, field="body")
    cut = tmp_path / f"cut.{kind}"
    cut.write_bytes(files[0].read_bytes()[:300])
    with pytest.raises(CorpusError, match=r"cut off|no Arrow stream"):
        built(tmp_path / "cut", kind, [cut])


def test_files_of_tokens_are_taken_as_they_are(tmp_path: Path, tokenizer: str) -> None:
    (tmp_path / "sub").mkdir()
    np.array([1, 2, 3, 4] * 3000, "<u2").tofile(tmp_path / "sub" / "000_shuffled.ds")
    np.array([0, 1], "<u2").tofile(tmp_path / "001_shuffled.ds")
    (tmp_path / "001_shuffled.ds.index").write_bytes(b"index")
    manifest = index_shards(tmp_path, about_tokenizer(tokenizer), 4096, lambda done, total: None)
    assert [one.name for one in manifest.files] == ["001_shuffled.ds", "sub/000_shuffled.ds"]
    assert (manifest.dtype, manifest.tokens) == ("u16", 12_002)
    check_digests(tmp_path, manifest)
    np.array([5], "<u2").tofile(tmp_path / "001_shuffled.ds")
    with pytest.raises(CorpusError, match="tokens beyond the tokenizer's 5"):
        index_shards(tmp_path, about_tokenizer(tokenizer), 4096, lambda done, total: None)
    (tmp_path / "001_shuffled.ds").write_bytes(b"odd")
    with pytest.raises(CorpusError, match="do not divide into tokens of 2"):
        index_shards(tmp_path, about_tokenizer(tokenizer), 4096, lambda done, total: None)


def test_what_cannot_be_built_is_said(tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CorpusError, match="has no files of parquet"):
        input_files(texts, "parquet")
    with pytest.raises(CorpusError, match=r"expected a tokenizer\.json of the library tokenizers"):
        about_tokenizer(str(texts / "1.txt"))
    (texts / "empty").mkdir()
    (texts / "empty" / "a.txt").write_text("")
    with pytest.raises(CorpusError, match="the input has no text"):
        built(tmp_path / "none", "text", input_files(texts / "empty", "text"))

    def full(task: Any) -> None:
        raise OSError(28, "No space left on device", task.out)

    monkeypatch.setattr(build, "_build_piece", full)
    with pytest.raises(CorpusError, match=r"No space left on device: free some space .* the same command again"):
        built(tmp_path / "full", "text", input_files(texts, "text"))
