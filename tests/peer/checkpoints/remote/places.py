"""A store of checkpoints, a URL for its copies, and a file system that fails where it is told to."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsspec.implementations.memory import MemoryFileSystem
from tests.fakes.virtual_clock import run_virtual, until
from tests.peer.checkpoints.making import IDENTITY, RUN, contents

from shoal.peer.checkpoints.remote.store import RemoteStore
from shoal.peer.checkpoints.remote.upload import CheckpointUploader, CopyDestination
from shoal.peer.checkpoints.retention import Retention
from shoal.peer.checkpoints.store import CheckpointStore
from shoal.swarm.protocol.identity import Identity

RUN_FOLDER = f"reef-{RUN.hash.hex()[:8]}"
OWN = {"steps": 3}


class Killed(BaseException):
    """Stands for SIGKILL: nothing of ours may catch it."""


def fresh_memory() -> MemoryFileSystem:
    """An empty file system of fsspec's, which shares nothing with others."""
    memory = MemoryFileSystem(skip_instance_cache=True)
    memory.store, memory.pseudo_dirs = {}, [""]
    return memory


@dataclass
class Faulty:
    """File system that passes calls on; ``fails`` is asked before each change or read, with its name and path, and may
    raise.

    A failing ``put_file`` has written half of the file before."""

    inner: Any
    fails: Callable[[str, str], None] = lambda what, path: None
    calls: list[tuple[str, str]] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def _meet(self, what: str, path: str) -> None:
        self.calls.append((what, path.rpartition("/")[2]))
        self.fails(what, path)

    def put_file(self, local: str, path: str) -> None:
        try:
            self._meet("put", path)
        except BaseException:
            data = Path(local).read_bytes()
            self.inner.pipe_file(path, data[: len(data) // 2])
            raise
        self.inner.put_file(local, path)
        self._meet("sent", path)

    def cat_file(self, path: str, start: int, end: int) -> bytes:
        self._meet("read", path)
        assert 0 <= start < end <= self.inner.size(path), "S3 answers anything else with an error"
        return bytes(self.inner.cat_file(path, start=start, end=end))

    def rm(self, path: str, recursive: bool) -> None:
        self._meet("remove", path)
        self.inner.rm(path, recursive=recursive)

    def names(self) -> list[str]:
        """All files, below the root."""
        return sorted(path.removeprefix("/copies/") for path in self.inner.find("/copies"))


@dataclass
class Place:
    """One peer with its checkpoints, and the copies at the URL."""

    folder: Path
    files: Faulty = field(default_factory=lambda: Faulty(fresh_memory()))
    identity: Identity = IDENTITY
    readers: list[bytes] | None = None

    @property
    def base(self) -> str:
        return f"{RUN_FOLDER}/{self.identity.peer_id}"

    @property
    def remote(self) -> RemoteStore:
        return RemoteStore(self.files, "/copies", "memory://copies")

    def store(self, retention: Retention | None = None) -> CheckpointStore:
        """The store, opened as after a start."""
        place = self.folder / "checkpoints"
        return CheckpointStore(place, RUN.hash, self.identity, retention or Retention(9), sealed_for=self.readers)

    def write(self, *rounds: int) -> CheckpointStore:
        store = self.store()
        for number in rounds:
            store.write(contents(number, OWN))
        return store

    def copies(self, store: CheckpointStore | None = None, every: int = 1, keep: int = 9) -> CheckpointUploader:
        """The uploader, made as after a start."""
        return CheckpointUploader(
            store or self.store(), CopyDestination(self.remote, every, Retention(keep)), self.base
        )

    def copy_all(self, store: CheckpointStore | None = None, every: int = 1, keep: int = 9) -> None:
        """Copy until nothing is due, then end."""

        async def main() -> None:
            copies = self.copies(store, every, keep)
            copies.finish()
            copies._every = every
            await copies.run()

        run_virtual(main())

    def whole(self) -> list[int]:
        """Rounds whose copies have the file that is uploaded last."""
        return sorted({int(name.split("/")[2][6:]) for name in self.files.names() if name.endswith("/manifest.json")})


def run_for(copies: CheckpointUploader, done: Callable[[], object]) -> float:
    """Run it in virtual time until ``done``; return the seconds."""

    async def main() -> float:
        running = asyncio.get_running_loop().create_task(copies.run())
        await until(done, 0.5)
        running.cancel()
        return asyncio.get_running_loop().time()

    return run_virtual(main(), horizon_s=1e6)
