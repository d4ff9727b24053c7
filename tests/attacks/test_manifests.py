"""A stranger's checkpoint costs no memory for what its manifest claims, and blocks no command."""

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.attacks.test_memory import LEAST_BYTES, most_bytes
from tests.integration.harness import FRESH, SHOAL, START_S, Swarm, run_toml
from tests.peer.checkpoints.making import IDENTITY, LAYOUT, contents, open_store

from shoal.peer.checkpoints.manifest import MANIFEST, CheckpointAbout, Manifest, shard_name
from shoal.swarm.errors import StateFileError
from shoal.swarm.protocol.types import TensorSpec

pytestmark = [pytest.mark.integration, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]

ELEMENTS = 2**40
CLAIMED_BYTES = 2 * 4 * ELEMENTS
"""8.8 TB: the anchor and one vector of the outer optimizer."""


def claiming(folder: Path, place: Path, *, sparse: bool) -> Path:
    """A checkpoint that its peer has signed, and of which the manifest alone is as large as it should be; ``sparse``:
    the files are, too, as far as their sizes tell."""
    made = contents(0)
    whole = open_store(folder).write(made).folder
    fields = {name: getattr(made.about, name) for name in CheckpointAbout.model_fields}
    layout = (TensorSpec(name="w", shape=(ELEMENTS,)), *LAYOUT)
    files = {shard_name(kind, 0, 1): (4 * ELEMENTS + 2**20, 64 * "0") for kind in ("anchor", "outer")}
    manifest = Manifest.sign(CheckpointAbout(**{**fields, "layout": layout}), files, IDENTITY)
    shutil.copytree(whole, place)
    (place / MANIFEST).write_bytes(manifest.file_bytes)
    if sparse:
        for name, (size_bytes, _) in files.items():
            with (place / name).open("wb") as file:
                file.truncate(size_bytes)
    return place


def with_fifo(folder: Path, place: Path, name: str) -> Path:
    shutil.copytree(open_store(folder).write(contents(0)).folder, place)
    (place / name).unlink()
    os.mkfifo(place / name)
    return place


COMMANDS: dict[str, Callable[[Path, Path], tuple[str, ...]]] = {
    "verify": lambda place, out: ("verify", str(place)),
    "export": lambda place, out: ("export", "--run", str(place), "--out", str(out)),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_manifest_that_claims_8_8_tb(swarm: Swarm, command: str) -> None:
    for sparse in (False, True):
        place = claiming(swarm.folder / f"made-{sparse}", swarm.folder / f"round-{sparse}", sparse=sparse)
        arguments = COMMANDS[command](place, swarm.folder / "model.safetensors")
        process = swarm.command(f"{command}-{sparse}", *FRESH, *arguments)
        assert most_bytes(process, StateFileError) < LEAST_BYTES
        words = " ".join(process.text().split())
        what = "content: expected 4398047559680 bytes, not" if sparse else "size: expected 4398047559680 bytes, not"
        assert what in words
        assert str(place).rpartition("/")[2] in words


@pytest.mark.parametrize("name", [MANIFEST, "anchor-00001-of-00001.safetensors", "verdicts.msgpack"])
def test_a_fifo_among_the_files(swarm: Swarm, name: str) -> None:
    place = with_fifo(swarm.folder / "made", swarm.folder / "round-fifo", name)
    for command, arguments in COMMANDS.items():
        process = swarm.command(command, *SHOAL, *arguments(place, swarm.folder / "model.safetensors"))
        assert process.exit_code(START_S) == StateFileError.exit_code, process.tail()
        assert "expected a regular file, not a FIFO" in " ".join(process.text().split()), process.tail()


def test_a_run_does_not_start_from_what_is_only_claimed(swarm: Swarm) -> None:
    places = [
        claiming(swarm.folder / "made-large", swarm.folder / "claims", sparse=True),
        with_fifo(swarm.folder / "made-fifo", swarm.folder / "fifo", "anchor-00001-of-00001.safetensors"),
    ]
    run = swarm.run_file(run_toml())
    for place in places:
        where = ("--bind", "127.0.0.1:0", "--state", str(swarm.folder / "state"), "--from", str(place))
        host = swarm.command(f"host-{place.name}", *FRESH, "host", str(run), *where)
        assert most_bytes(host, StateFileError) < LEAST_BYTES
