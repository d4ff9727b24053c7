"""File of records that is only ever appended to; each record is checked and chained to the one before it.

::

    file    title line, head record, records …
    record  mark (4 bytes)  payload's length (4)  kind (1)  check of the record before (16)  payload  check (16)

The check is the SHA-256 of everything before it in the record, cut to 16 bytes. A record can be recognised by itself.
So damage in the middle of a file, with good records after it, can be distinguished from the damaged end that a crash
leaves behind: the former is refused, the latter is cut off.
"""

from __future__ import annotations

import hashlib
import logging
import os
import struct
from array import array
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack

from shoal.swarm import durable
from shoal.swarm.errors import DamagedRecords, StorageError
from shoal.swarm.system import flags, read_at

log = logging.getLogger(__name__)


CHECK_BYTES = 16
NO_CHECK = bytes(CHECK_BYTES)
HEAD = 0
_FORMAT = 1
_MARK = b"\xf5rec"  # no UTF-8 text has the first byte, so a text inside a record cannot look like a record
_HEADER = struct.Struct("<4sIB16s")
_BUFFER_BYTES = 2**20
RESTORE = (
    "Nothing was changed. Restore this folder from its backup, or go on from the backup itself: "
    "shoal host RUN.toml --state BACKUP"
)


def pack_record(kind: int, previous: bytes, payload: bytes) -> bytes:
    """Return the bytes of one record. ``previous``: the check of the record before it, which is its last 16 bytes."""
    body = _HEADER.pack(_MARK, len(payload), kind, previous) + payload
    return body + hashlib.sha256(body).digest()[:CHECK_BYTES]


def pack_file(name: str, head: dict[str, Any], records: list[tuple[int, bytes]]) -> bytes:
    """Return the bytes of a whole file of the format ``name``. ``records``: kind and payload of each."""
    parts, check = [_title(name)], NO_CHECK
    for kind, payload in [(HEAD, msgpack.packb(head)), *records]:
        parts.append(pack_record(kind, check, payload))
        check = parts[-1][-CHECK_BYTES:]
    return b"".join(parts)


def _title(name: str) -> bytes:
    return f"shoal {name} {_FORMAT}\n".encode()


@dataclass
class _Damage:
    """First record that is not whole, or not what was written."""

    offset_bytes: int
    number: int
    what: str


class RecordFile:
    """One file, checked from beginning to end when it is opened. All methods raise ``StorageError``.

    ``offsets[i]``: where record i begins, not counting the head; ``kinds[i]``: its kind; ``check``: that of the last
    record; ``size_bytes``: the length of the good records."""

    def __init__(self, path: Path, name: str, *, writable: bool, least: int = 0) -> None:
        """``least``: number of records that the file is known to have had; it is refused if it has fewer.

        A damaged end is left out. Before anything can be appended, ``repair`` has to cut it off."""
        self.path = path
        self.offsets = array("Q")
        self.kinds = bytearray()
        self.check = NO_CHECK
        self.head: dict[str, Any] = {}
        self._descriptor = -1
        self._file_bytes = 0
        self._damage: _Damage | None = None
        try:
            access = os.O_RDWR | os.O_APPEND if writable else os.O_RDONLY
            self._descriptor = os.open(path, access | flags())
            self._check_title(name)
            self._damage = self._scan()
            if self._damage is not None:
                self._judge(self._damage, least)
        except OSError as error:
            self.close()
            raise StorageError(f"{path}: cannot be opened: {error}") from error
        except StorageError:
            self.close()
            raise
        if len(self.offsets) < least:
            self.close()
            raise DamagedRecords(f"{path}: ends after {len(self.offsets)} of at least {least} records. {RESTORE}")

    # Reading ----------------------------------------------------------------------------------------------

    def _check_title(self, name: str) -> None:
        title = _title(name)
        found = read_at(self._descriptor, len(title), 0)
        if found != title:
            raise DamagedRecords(f"{self.path}: {_other_title(name, found)}")
        self.size_bytes = len(title)

    def _scan(self) -> _Damage | None:
        """Read on until the end, or until the first damage.

        The end is where the file ended when the scan began. A record that another process is appending just then is a
        damaged end, although the file may have the whole of it, and more records, when the scan is over."""
        with open(self._descriptor, "rb", buffering=_BUFFER_BYTES, closefd=False) as file:
            file.seek(self.size_bytes)
            total_bytes = self._file_bytes = os.fstat(self._descriptor).st_size
            while self.size_bytes < total_bytes:
                at, number = self.size_bytes, len(self.offsets)
                header = file.read(_HEADER.size)
                if len(header) < _HEADER.size:
                    return _Damage(at, number, "it is cut off")
                mark, length, kind, previous = _HEADER.unpack(header)
                if mark != _MARK or length > total_bytes - at - _HEADER.size - CHECK_BYTES:
                    return _Damage(at, number, "its header is damaged, or it is cut off")
                payload, check = file.read(length), file.read(CHECK_BYTES)
                digest = hashlib.sha256(header)
                digest.update(payload)
                if digest.digest()[:CHECK_BYTES] != check:
                    return _Damage(at, number, "it does not match its check")
                if previous != self.check or (kind == HEAD) != (not self.head):
                    return _Damage(at, number, "it does not follow the record before it")
                self._add(at, kind, payload, check)
                self.size_bytes = at + _HEADER.size + length + CHECK_BYTES
        return None if self.head else _Damage(self.size_bytes, 0, "the head is missing")

    def _add(self, at: int, kind: int, payload: bytes, check: bytes) -> None:
        self.check = check
        if kind == HEAD:
            self.head = unpack_map(payload, self.path)
        else:
            self.offsets.append(at)
            self.kinds.append(kind)

    def _judge(self, damage: _Damage, least: int) -> None:
        rest = self._from(damage)
        if not self.head or damage.number < least or _has_record(rest):
            raise DamagedRecords(f"{self._where(damage)}. {RESTORE}")

    def _where(self, damage: _Damage) -> str:
        return f"{self.path}: record {damage.number} at byte {damage.offset_bytes} is damaged ({damage.what})"

    def _from(self, damage: _Damage) -> bytes:
        return self.bytes_between(damage.offset_bytes, self._file_bytes)

    def read(self, number: int) -> bytes:
        """Return the payload of a record, which is checked again, as the disk may have damaged it meanwhile."""
        start = self.offsets[number]
        stop = self.offsets[number + 1] if number + 1 < len(self.offsets) else self.size_bytes
        try:
            data = read_at(self._descriptor, stop - start, start)
        except OSError as error:
            raise StorageError(f"{self.path}: cannot be read: {error}") from error
        payload = data[_HEADER.size : -CHECK_BYTES]
        if pack_record(self.kinds[number], data[9 : _HEADER.size], payload) != data:
            raise DamagedRecords(f"{self.path}: record {number} at byte {start} is damaged. {RESTORE}")
        return payload

    def check_after(self, records: int) -> bytes:
        """Return the check of the last of the first ``records`` records. Two files in which it is equal have equal
        records up to there."""
        end = self.offsets[records] if records < len(self.offsets) else self.size_bytes
        return self.bytes_between(end - CHECK_BYTES, end)

    def bytes_between(self, start: int, stop: int) -> bytes:
        try:
            return read_at(self._descriptor, stop - start, start)
        except OSError as error:
            raise StorageError(f"{self.path}: cannot be read: {error}") from error

    # Writing ----------------------------------------------------------------------------------------------

    def repair(self) -> None:
        """Move a damaged end into another file beside this one. Raises ``OSError``."""
        damage, self._damage = self._damage, None
        if damage is None:
            return
        rest, aside = self._from(damage), free_name(self.path)
        durable.write_whole(aside, rest)
        durable.sync_folder(aside.parent)
        durable.cut(self._descriptor, damage.offset_bytes)
        log.warning(
            "%s, and no good record comes after it, as when a machine dies while it writes. Its %d bytes were moved to "
            "%s, and the file now ends with the record before it",
            self._where(damage),
            len(rest),
            aside,
        )

    def append(self, records: list[tuple[int, bytes]]) -> None:
        """Append records, given by kind and payload. They are on the disk when this returns.

        Raises ``OSError``; then what was written of them is cut off again, if possible."""
        assert self._damage is None, "repair it first"
        found_bytes = os.fstat(self._descriptor).st_size
        if found_bytes != self.size_bytes:
            raise OSError(
                f"{self.path} has {found_bytes} bytes, and {self.size_bytes} were expected: another process writes to "
                "it, or the rest of a failed write could not be removed"
            )
        data, check, at = bytearray(), self.check, []
        for kind, payload in records:
            at.append(self.size_bytes + len(data))
            record = pack_record(kind, check, payload)
            data += record
            check = record[-CHECK_BYTES:]
        try:
            durable.append(self._descriptor, bytes(data))
        except OSError:
            with suppress(OSError):  # if this fails too, the next start finds a damaged end
                durable.cut(self._descriptor, self.size_bytes)
            raise
        self.offsets.extend(at)
        self.kinds.extend(kind for kind, _ in records)
        self.check = check
        self.size_bytes += len(data)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def unpack_map(payload: bytes, path: Path) -> dict[str, Any]:
    """Unpack the fields of a head. Raises ``StorageError``."""
    try:
        value = msgpack.unpackb(payload)
    except (ValueError, msgpack.UnpackException) as error:
        raise DamagedRecords(f"{path}: its head cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise DamagedRecords(f"{path}: its head cannot be read")
    return value


def _has_record(data: bytes) -> bool:
    """Return whether a good record begins anywhere in the data."""
    at = data.find(_MARK)
    while at >= 0:
        if len(data) - at >= _HEADER.size + CHECK_BYTES:
            _, length, _, _ = _HEADER.unpack_from(data, at)
            end = at + _HEADER.size + length
            if end + CHECK_BYTES <= len(data):
                check = hashlib.sha256(memoryview(data)[at:end]).digest()[:CHECK_BYTES]
                if check == data[end : end + CHECK_BYTES]:
                    return True
        at = data.find(_MARK, at + 1)
    return False


def _other_title(name: str, found: bytes) -> str:
    words = found.split()
    if words[:2] == [b"shoal", name.encode()] and len(words) == 3:
        found_format = words[2].decode(errors="replace")
        return f"{name} format {found_format}, but this release reads format {_FORMAT}: use the release that wrote it"
    return f"this is no {name} of a run. {RESTORE}"


def free_name(path: Path) -> Path:
    """Return an unused name beside ``path`` for a damaged file, which is kept as somebody may still need it."""
    number = 1
    while (aside := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    return aside
