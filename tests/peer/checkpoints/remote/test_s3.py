"""Copies in a real S3 server's bucket, on loopback. Needs ``pip install s3fs 'moto[s3,server]'``; skips without."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.peer.checkpoints.making import RUN
from tests.peer.checkpoints.remote.places import Place

from shoal.peer.checkpoints.remote.copies import find_copies
from shoal.peer.checkpoints.remote.restore import CheckpointRestorer
from shoal.peer.checkpoints.remote.store import RemoteStore
from shoal.peer.checkpoints.retention import Retention
from shoal.peer.checkpoints.store import CheckpointStore
from shoal.swarm.errors import RemoteStorageError

pytest.importorskip("s3fs", reason="s3fs is not installed")
server = pytest.importorskip("moto.server", reason="moto[server] is not installed")

LARGE_BYTES = 101 * 2**20
"""s3fs sends what has two of its parts of 50 MiB, or more, in parts."""


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    running = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "reef")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "reef")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    try:
        yield "s3://reef"
    finally:
        running.stop()


class Bucket(Place):
    url = ""

    @property
    def remote(self) -> RemoteStore:
        return RemoteStore.open(f"{self.url}/copies")


def test_copied_to_a_bucket_and_restored_from_it(bucket: str, tmp_path: Path) -> None:
    place = Bucket(tmp_path / "there", readers=[])
    place.url = bucket
    store = place.write(1, 2)
    place.copy_all(store, keep=1)
    place.copy_all(place.write(3), keep=1)
    found = find_copies(place.remote)
    assert [(copy.round, copy.peer, copy.is_sealed) for copy in found] == [(3, place.identity.peer_id, True)]
    runs = tmp_path / "here"
    (folder,) = CheckpointRestorer(place.remote, runs, place.identity, print).restore(found)
    restored = CheckpointStore(folder.parent, RUN.hash, place.identity, Retention())
    checkpoint = restored.load_newest()
    assert checkpoint is not None
    assert checkpoint.manifest.round == 3
    assert checkpoint.own is not None


def test_a_large_file_goes_in_parts(bucket: str, tmp_path: Path) -> None:
    large = tmp_path / "large"
    with large.open("wb") as file:
        file.truncate(LARGE_BYTES - 3)
        file.seek(0, os.SEEK_END)
        file.write(b"end")
    remote = RemoteStore.open(f"{bucket}/copies")
    remote.put(large, "run/large")
    assert remote.sizes("run") == {"large": LARGE_BYTES}
    assert remote.read("run/large", LARGE_BYTES - 5, LARGE_BYTES) == b"\0\0end"
    assert remote._files.info("reef/copies/run/large")["ETag"].strip('"').endswith("-3"), "three parts"
    with pytest.raises(FileNotFoundError):
        remote.read("run/none", 0, 1)
    remote.remove("run")
    assert remote.sizes("run") == {}


def test_who_may_not_is_told(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(RemoteStorageError, match="cannot be listed"):
        RemoteStore.open(f"{bucket}/copies").folders()
