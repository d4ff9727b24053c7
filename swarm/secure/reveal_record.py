"""Record, on the disk, of the rounds in which this member has signed sets, and of the work that has left it masked.

It never signs other sets for one of these rounds, not even as a second process with the same identity. One that starts
again, or is set back to an earlier moment, has no keys of before (``round_keys.py``) and could reveal nothing. And it
never offers work on the same samples again, from the same anchor or another: done anew, it is nearly the same work, so
two sums that differ by it alone would show it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgpack

from shoal.swarm import durable
from shoal.swarm.errors import SecureRefused, StorageError
from shoal.swarm.protocol.statements import RoundName
from shoal.swarm.sample_ranges import Ranges, count, merge, subtract
from shoal.swarm.system import flags

_DIGEST_BYTES = 32
_LINE_BYTES = 2 * _DIGEST_BYTES
_KEPT = 4096
"""Rounds that the file keeps when it is opened: far more than a coordinator's journal may be behind."""


_LOCK_S = 5.0
"""Time to wait for another process that signs."""

_ANCHORS = 64
"""Anchors whose spent samples are remembered: from one as far back, work on the same samples is quite another."""


class RevealRecord:
    """Digests of the sets that this member has signed, by round, and spent samples, by anchor. ``path``: of a file, and
    of another one with the ending ``.spent``; None keeps them in memory alone."""

    def __init__(self, path: Path | None) -> None:
        """Raises ``StorageError`` when a file cannot be read or written."""
        self._path = path
        self._signed: dict[bytes, bytes] = {}
        self._spent: dict[bytes, Ranges] = {}
        if path is None:
            return
        try:
            self._read_spent()
            data = path.read_bytes() if path.exists() else b""
            self._read(data)
            if len(data) > 2 * _KEPT * _LINE_BYTES or len(data) % _LINE_BYTES:
                durable.put(path, b"".join(name + sets for name, sets in self._signed.items()), 0o600)
        except OSError as error:
            raise StorageError(f"{path}: the record of secure rounds cannot be used: {error}") from error

    @property
    def _spent_path(self) -> Path:
        assert self._path is not None
        return self._path.with_name(self._path.name + ".spent")

    def has_spent(self, anchor: bytes) -> bool:
        """Whether any work from the state with this digest has left masked."""
        return anchor in self._spent

    def is_spent(self, ranges: Ranges) -> bool:
        """Whether any work on these samples has left masked, whatever the anchor: from another one it may be nearly the
        same."""
        mine = merge(ranges)
        before = merge(one for spent in self._spent.values() for one in spent)
        return count(subtract(mine, before)) < count(mine)

    def spend(self, anchor: bytes, ranges: Ranges) -> None:
        """Record that work on these samples is about to leave; on the disk when this returns.

        Raises ``SecureRefused`` if such work has left before, also that of another process, and ``StorageError``."""
        if self._path is None:
            self._spend(anchor, ranges)
            return
        with self._locked():
            self._read_spent()
            self._spend(anchor, ranges)
            durable.put(self._spent_path, msgpack.packb(list(self._spent.items())), 0o600)

    def _spend(self, anchor: bytes, ranges: Ranges) -> None:
        if self.is_spent(ranges):
            raise SecureRefused("work on these samples has left masked before, by this process or another one")
        spent = merge([*self._spent.pop(anchor, []), *ranges])
        kept = list(self._spent.items())[-_ANCHORS + 1 :]
        self._spent = {**dict(kept), anchor: spent}

    def _read_spent(self) -> None:
        if self._spent_path.exists():
            self._spent = _unpack(self._spent_path.read_bytes())

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the files against other processes with this identity. Raises ``StorageError`` for what fails inside."""
        from filelock import FileLock, Timeout  # slow to import

        assert self._path is not None
        try:
            with FileLock(self._path.with_name(self._path.name + ".lock"), timeout=_LOCK_S, thread_local=False):
                yield
        except (OSError, Timeout) as error:
            raise StorageError(f"{self._path}: the record of secure rounds cannot be written: {error}") from error

    def has(self, name: RoundName) -> bool:
        """Whether sets of this round were signed before."""
        return _digest(repr(name.fields).encode()) in self._signed

    def write(self, name: RoundName, sets: bytes) -> None:
        """Record that these sets, as bytes to sign, are about to be signed; on the disk when this returns.

        Raises ``SecureRefused`` if other sets of the round were signed, and ``StorageError``."""
        key, digest = _digest(repr(name.fields).encode()), _digest(sets)
        if self._path is None:
            self._note(name, key, digest)
            return
        with self._locked():
            is_new = not self._path.exists()
            self._read(b"" if is_new else self._path.read_bytes())  # another process may have signed
            if self._note(name, key, digest):
                descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | flags(), 0o600)
                try:
                    durable.append(descriptor, key + digest)
                finally:
                    os.close(descriptor)
                if is_new:
                    durable.sync_folder(self._path.parent)

    def _note(self, name: RoundName, key: bytes, digest: bytes) -> bool:
        """Note signed sets in memory; returns whether they are new."""
        if self._signed.get(key, digest) != digest:
            raise SecureRefused(f"other sets of round {name.round} have been signed here before")
        is_new = key not in self._signed
        self._signed[key] = digest
        return is_new

    def _read(self, data: bytes) -> None:
        """Take over what a file holds."""
        whole = len(data) // _LINE_BYTES * _LINE_BYTES  # what a crash has cut off was not acted upon
        for at in range(max(0, whole - _KEPT * _LINE_BYTES), whole, _LINE_BYTES):
            self._signed[data[at : at + _DIGEST_BYTES]] = data[at + _DIGEST_BYTES : at + _LINE_BYTES]


def _unpack(data: bytes) -> dict[bytes, Ranges]:
    """Return spent samples by anchor. Raises ``StorageError`` for other bytes."""
    try:
        anchors = msgpack.unpackb(data, use_list=False)
        spent = {bytes(anchor): [(int(start), int(stop)) for start, stop in ranges] for anchor, ranges in anchors}
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise StorageError("the record of spent samples is damaged: move it away to go on") from error
    return spent


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()
