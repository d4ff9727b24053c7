import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from shoal.peer.recipes import corpus
from shoal.peer.recipes.corpus import Corpus, WindowDataset, load_corpus
from shoal.swarm.errors import CorpusError
from shoal.swarm.protocol.run_file import DataSection


def load(source: str, *folders: Path, vocab: int = 256, context: int = 8, held_out: float = 0.1) -> Corpus:
    return load_corpus(DataSection(source=source, held_out=held_out), vocab, context, folders)


def write_files(folder: Path, count: int = 60) -> None:
    for number in range(count):
        path = folder / f"{number % 3}" / f"{number}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"<file {number}>" + "x" * number)


def test_windows_overlap_by_the_one_token_that_is_predicted_next() -> None:
    data = WindowDataset(np.arange(10, dtype=np.uint8), 3)
    assert len(data) == 3
    assert [data[i].tolist() for i in range(3)] == [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9]]
    batch = data.batch(np.array([2, 0]))
    assert batch.dtype == torch.int64
    assert batch.tolist() == [[6, 7, 8, 9], [0, 1, 2, 3]]
    assert data.batch([]).shape == (0, 4)


@pytest.mark.parametrize("index", [-1, 3, 10**12])
def test_windows_outside_the_data_are_refused(index: int) -> None:
    with pytest.raises(IndexError, match="expected 0 to 2"):
        WindowDataset(np.arange(10, dtype=np.uint8), 3)[index]


def test_exactly_one_window_fits() -> None:
    assert len(WindowDataset(np.zeros(4, np.uint8), 3)) == 1


def test_stdlib_loads_quickly_and_the_same_twice() -> None:
    start = time.perf_counter()
    first = load("stdlib", held_out=0.02)
    assert time.perf_counter() - start < 2
    assert first.digest == load("stdlib", held_out=0.02).digest
    assert len(first.digest) == 32
    assert len(first.train) > 1_000_000
    assert 0.002 < len(first.held_out) / len(first.train) < 0.1
    assert b"class OrderedDict" in first.train.tobytes() + first.held_out.tobytes()
    assert "Python 3." in first.about
    assert f"{len(first.train):,} bytes" in first.about


def test_files_go_to_one_side_each(tmp_path: Path) -> None:
    write_files(tmp_path)
    loaded = load("text:**/*.txt", tmp_path, held_out=0.2)
    train, held_out = (side.tobytes().split(b"\0") for side in (loaded.train, loaded.held_out))
    assert train.pop() == held_out.pop() == b""
    assert not set(train) & set(held_out)
    assert set(train) | set(held_out) == {f"<file {n}>".encode() + b"x" * n for n in range(60)}
    assert 3 <= len(held_out) <= 25


def test_the_folder_that_holds_the_files_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("here", "there/deeper"):
        write_files(tmp_path / name / "books")
    digests = {load("text:books/*/*.txt", tmp_path / name).digest for name in ("here", "there/deeper")}
    monkeypatch.chdir(tmp_path / "here")
    digests.add(load("text:books/*/*.txt", Path()).digest)
    monkeypatch.setenv("HOME", str(tmp_path))
    digests.add(load("text:books/*/*.txt", Path("~/here"), tmp_path / "here").digest)
    assert len(digests) == 1


def test_the_digest_sees_one_byte_and_the_split(tmp_path: Path) -> None:
    write_files(tmp_path)
    source = "text:**/*.txt"
    before = load(source, tmp_path).digest
    assert load(source, tmp_path, held_out=0.3).digest != before
    for path in tmp_path.glob("*/*.txt"):  # of both sides
        content = path.read_bytes()
        path.write_bytes(content[:-1] + b"y")
        assert load(source, tmp_path).digest != before
        path.write_bytes(content)
    assert load(source, tmp_path).digest == before


def test_the_digest_sees_where_the_split_lies(tmp_path: Path) -> None:
    """Text of one letter is the same on either side of any split, but the samples differ."""
    path = tmp_path / "a.txt"
    path.write_bytes(b"\0" * 100_000)
    few, many = (load("text:a.txt", tmp_path, held_out=fraction) for fraction in (0.01, 0.4))
    assert few.digest != many.digest


def test_files_are_ordered_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(60):
        (tmp_path / f"{number}.py").write_text(f"<file {number}>")
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    names = [line.decode()[6:-1] for line in load("stdlib").train.tobytes().split(b"\0")[:-1]]
    assert len(names) > 30
    assert names == sorted(names, key=lambda name: name + ".py")


def test_one_sample_on_either_side_is_enough(tmp_path: Path) -> None:
    path = tmp_path / "a.u16"
    path.write_bytes(b"\0" * 36)
    assert len(WindowDataset(load(f"tokens:{path.name}", tmp_path, held_out=0.499).train, 8)) == 1
    path.write_bytes(b"\0" * 32)
    refused(f"tokens:{path.name}", "8 training tokens, but a sample has 9", tmp_path, held_out=0.499)


@pytest.mark.parametrize("size", [20_000, 300_000, 5_000_000])
def test_one_file_is_split_by_blocks(tmp_path: Path, size: int) -> None:
    path = tmp_path / "book.txt"
    numbers = np.arange(size // 4, dtype="<u4")
    path.write_bytes(numbers.tobytes())
    loaded = load(f"text:{path.name}", tmp_path, held_out=0.05)
    assert len(loaded.train) + len(loaded.held_out) == size + 1
    assert 0 < len(loaded.held_out) < 0.3 * size
    sides = [
        set(np.frombuffer(s.tobytes()[: len(s) // 4 * 4], "<u4").tolist()) for s in (loaded.train, loaded.held_out)
    ]
    assert not sides[0] & sides[1]


@pytest.mark.parametrize("large", range(8))
def test_a_few_files_of_unlike_size_are_split_by_blocks(tmp_path: Path, large: int) -> None:
    for number in (large, 8, 9):
        (tmp_path / f"{number}.txt").write_bytes(b"a" * (100_000 if number == large else 30))
    for held_out in (0.01, 0.1, 0.4):
        loaded = load("text:*.txt", tmp_path, held_out=held_out)
        assert 1000 < len(loaded.held_out) < len(loaded.train)


@pytest.mark.parametrize(("suffix", "dtype"), [(".u16", "<u2"), (".u32", "<u4"), (".npy", "<u2"), (".npy", "<u4")])
def test_token_files_are_mapped(tmp_path: Path, suffix: str, dtype: str) -> None:
    path = tmp_path / f"tokens{suffix}"
    tokens = (np.arange(1000) % 500).astype(dtype)
    np.save(path, tokens) if suffix == ".npy" else path.write_bytes(tokens.tobytes())
    loaded = load(f"tokens:{path.name}", tmp_path, vocab=500, held_out=0.1)
    assert isinstance(loaded.train, np.memmap)
    assert np.array_equal(np.concatenate((loaded.train, loaded.held_out)), tokens)
    assert len(loaded.held_out) == 100
    assert WindowDataset(loaded.train, 8)[3].tolist() == list(range(24, 33))
    before = loaded.digest
    tokens[-1] += 0 if tokens[-1] else 1
    tokens[-1] -= 1
    np.save(path, tokens) if suffix == ".npy" else path.write_bytes(tokens.tobytes())
    assert load(f"tokens:{path.name}", tmp_path, vocab=500).digest != before


def test_a_token_outside_the_vocabulary_is_named(tmp_path: Path) -> None:
    path = tmp_path / "tokens.u16"
    tokens = np.zeros(1000, "<u2")
    tokens[777] = 300
    path.write_bytes(tokens.tobytes())
    with pytest.raises(CorpusError, match=r"tokens\.u16: token 777 is 300.*vocab is 300"):
        load(f"tokens:{path.name}", tmp_path, vocab=300)
    load(f"tokens:{path.name}", tmp_path, vocab=301)


def refused(source: str, match: str, *folders: Path, vocab: int = 256, context: int = 8, held_out: float = 0.1) -> None:
    with pytest.raises(CorpusError, match=match):
        load(source, *folders, vocab=vocab, context=context, held_out=held_out)


@pytest.mark.parametrize("source", ["own", "https://example.org/a.u16", "s3://bucket/a.u16"])
def test_sources_that_this_cannot_open_are_refused(source: str) -> None:
    refused(source, r"data\.source: expected stdlib, text:GLOB, tokens:FILE or shards:URL")


def test_bytes_need_a_vocabulary_of_bytes() -> None:
    refused("stdlib", r"recipe\.settings\.vocab to 256, not 200", vocab=200)


def test_missing_text(tmp_path: Path) -> None:
    refused("text:*.txt", "no file matches", tmp_path)


@pytest.mark.parametrize("content", [b"", b"a", b"a" * 8, b"a" * 1500])
def test_too_little_text(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    refused("text:a.txt", "a sample has 601; add data", tmp_path, context=600)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_files(tmp_path)

    really = os.open

    def deny(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if str(path).endswith(".txt"):
            raise PermissionError(13, "Permission denied", str(path))
        return really(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", deny)
    refused("text:**/*.txt", r"\.txt: cannot be read \(Permission denied\)", tmp_path)


def test_a_file_that_shrinks_meanwhile_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"a" * 6000)
    find = corpus.find_files

    def then_shrunk(*arguments: Any) -> Any:
        found = find(*arguments)
        path.write_bytes(b"a" * 5000)
        return found

    monkeypatch.setattr(corpus, "find_files", then_shrunk)
    refused(f"text:{path.name}", r"a\.txt: 5000 bytes, just now 6000", tmp_path)


def test_missing_stdlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    refused("stdlib", r"no \.py files")


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("a.u16", b"", "a.u16: empty"),
        ("a.u16", b"abc", "3 bytes do not divide into tokens of 2"),
        ("a.u32", b"a" * 402, "402 bytes do not divide into tokens of 4"),
        ("a.u16", b"\0" * 16, "7 training tokens, but a sample has 9"),
        ("a.bin", b"\0" * 1000, r"a\.bin: expected \.u16, \.u32"),
        ("a", b"\0" * 1000, "not a file without suffix"),
        ("a.npy", b"\0" * 1000, r"a\.npy: cannot be opened"),
        ("a.npy", b"\x93NUMPY", r"a\.npy: cannot be opened"),
    ],
)
def test_bad_token_files(tmp_path: Path, name: str, content: bytes, match: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    refused(f"tokens:{path.name}", match, tmp_path)
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((50, 10), "<u2"),
        np.zeros(500, "<i4"),
        np.zeros(500, ">u2"),
        np.zeros(0, "<u2"),
        np.zeros(500),
    ],
)
def test_bad_arrays(tmp_path: Path, array: npt.NDArray[Any]) -> None:
    np.save(tmp_path / "a.npy", array)
    refused("tokens:a.npy", r"a\.npy: expected .*1-D uint16 or uint32.*, not ", tmp_path)


def test_arrays_of_objects_are_not_unpickled(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([print, 1] * 300, dtype=object), allow_pickle=True)
    refused("tokens:a.npy", r"1-D uint16 or uint32\), not \|O of shape", tmp_path)


def test_missing_token_file(tmp_path: Path) -> None:
    refused("tokens:a.u16", "no file matches", tmp_path)


def test_text_that_does_not_fit_is_refused_before_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "ab":
        with (tmp_path / f"{name}.txt").open("wb") as file:
            file.truncate(2**40)  # nothing of it is on the disk
    refused("text:*.txt", r"2,199\.0 GB of text here, and .* GB of memory are free", tmp_path)
