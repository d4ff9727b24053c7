"""Files at a URL, through fsspec and whatever driver the URL needs; every failure becomes a ``RemoteStorageError``."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from shoal.swarm.errors import RemoteStorageError

T = TypeVar("T")


_ANONYMOUS: dict[str, dict[str, Any]] = {"s3": {"anon": True}, "gs": {"token": "anon"}, "hf": {"token": False}}
"""Options of the drivers, for each scheme that a run file may name, that keep them from using credentials."""


class RemoteStore:
    """The folder at a URL; paths are relative to it, with ``/``. Methods block: call them in worker threads."""

    def __init__(self, file_system: Any, root: str, url: str) -> None:
        """``file_system``: an fsspec file system; ``url``: for messages only."""
        self._files = file_system
        self._root = root.rstrip("/")
        self.url = re.sub(r"(?<![:/])/+$", "", without_password(url))

    @classmethod
    def open(cls, url: str, *, anonymous: bool = False) -> RemoteStore:
        """Open a URL, without connecting yet. Credentials and addresses are where its driver looks for them.

        ``anonymous``: show no credentials of this machine, and look for none, as some drivers do in the network: for
        URLs that a stranger has written.

        Raises ``RemoteStorageError`` where the URL is of an unknown kind or its driver is missing."""
        try:
            from fsspec.core import url_to_fs
        except ImportError as error:
            raise RemoteStorageError(f"remote copies need a package: pip install 'shoal[remote]' ({error})") from error
        shown = without_password(url)
        if not re.match(r"^[A-Za-z][A-Za-z0-9+.-]*://", url):
            raise RemoteStorageError(f"{shown}: expected a URL, such as s3://BUCKET/FOLDER or file:///FOLDER")
        options = _ANONYMOUS.get(url.partition("://")[0], {}) if anonymous else {}
        try:
            file_system, root = url_to_fs(url, use_listings_cache=False, skip_instance_cache=True, **options)
        except ImportError as error:
            raise RemoteStorageError(f"{shown}: its driver is not installed: {_advice(url, str(error))}") from error
        except Exception as error:  # drivers raise any kind of error
            raise RemoteStorageError(f"{shown}: cannot be used: {error}") from error
        return cls(file_system, root, url)

    def folders(self, path: str = "") -> list[str]:
        """Names of the folders in a folder, sorted; none where there is no such folder."""
        return sorted(_name(one) for one in self._entries(path) if one["type"] == "directory")

    def sizes(self, path: str) -> dict[str, int]:
        """Bytes of the files in a folder, by name; none where there is no such folder."""
        return {_name(one): int(one["size"] or 0) for one in self._entries(path) if one["type"] == "file"}

    def put(self, local: Path, path: str) -> None:
        """Upload a file in place of any other; the driver sends a large one in several parts."""
        with self._failing(path, "cannot be written"):
            self._files.makedirs(self._at(path).rpartition("/")[0], exist_ok=True)
            self._files.put_file(str(local), self._at(path))

    def read(self, path: str, start: int, stop: int) -> bytes:
        """The bytes from ``start`` to ``stop``, as far as the file has them. Raises ``FileNotFoundError``, too."""
        with self._failing(path, "cannot be read", FileNotFoundError):
            return bytes(self._files.cat_file(self._at(path), start=start, end=stop))

    def size(self, path: str) -> int:
        """Bytes of a file. Raises ``FileNotFoundError``, too."""
        with self._failing(path, "cannot be read", FileNotFoundError):
            return int(self._files.size(self._at(path)) or 0)

    def remove(self, path: str) -> None:
        """Remove a file, or a folder with everything in it."""
        with self._failing(path, "cannot be removed"):
            self._files.rm(self._at(path), recursive=True)

    def shown(self, path: str) -> str:
        """Name of a file or folder in messages."""
        between = "" if self.url.endswith("/") or not path else "/"
        return f"{self.url}{between}{path}"

    def _at(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root

    def _entries(self, path: str) -> list[dict[str, Any]]:
        with self._failing(path, "cannot be listed", FileNotFoundError):
            try:
                self._files.invalidate_cache()
                return [dict(one) for one in self._files.ls(self._at(path), detail=True)]
            except (FileNotFoundError, NotADirectoryError):
                return []

    @contextmanager
    def _failing(self, path: str, what: str, *passed_on: type[Exception]) -> Iterator[None]:
        try:
            yield
        except passed_on:
            raise
        except Exception as error:  # drivers raise any kind of error
            raise RemoteStorageError(f"{self.shown(path)}: {what}: {type(error).__name__}: {error}") from error


class DaemonThreads(Executor):
    """Executor with a daemon thread for each call: a storage that hangs must not keep a process alive."""

    def submit(self, work: Callable[..., T], /, *args: Any, **options: Any) -> Future[T]:
        future: Future[T] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work(*args, **options))
                except BaseException as error:  # noqa: BLE001 - handed to the future
                    future.set_exception(error)

        threading.Thread(target=run, name="shoal-remote", daemon=True).start()
        return future


def without_password(url: str) -> str:
    """The URL without credentials, for messages."""
    return re.sub(r"//[^/@]*@", "//…@", url)


def _advice(url: str, said: str) -> str:
    packages = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "hf": "huggingface_hub", "az": "adlfs"}
    package = packages.get(url.partition("://")[0])
    return f"pip install {package}" if package else said


def _name(entry: dict[str, Any]) -> str:
    return str(entry["name"]).rstrip("/").rpartition("/")[2]
