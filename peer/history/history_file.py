"""History file: a run's verdicts in their order, behind a head that says whose they are; it only grows."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgpack
from pydantic import Field

from shoal.peer.history.chain import ChainCheck, ChainSummary
from shoal.peer.regular_file import open_regular, read_regular
from shoal.swarm.errors import LinkError, RunFileError, StateFileError, StorageError, WireError
from shoal.swarm.protocol.identity import verify_certificate
from shoal.swarm.protocol.rounds import Verdict
from shoal.swarm.protocol.run_file import parse_run_file
from shoal.swarm.protocol.run_toml import MAX_RUN_FILE_BYTES
from shoal.swarm.protocol.types import Certificate, Record, Scope
from shoal.swarm.protocol.verdict_chain import pack_verdict, unpack_maps
from shoal.swarm.protocol.verdict_chain import unpack_verdicts as unpack_each_verdict

log = logging.getLogger(__name__)

HISTORY_FILE = "history.msgpack"


class HistoryOrigin(Record):
    """The head of a history file: the run and the coordinator that its verdicts are of.

    The run file's text gives the run's name and hash; the certificate the identity that signs the verdicts, and the key
    that invites name. ``scope``: whose rounds, the run's or a stage's."""

    format: Literal[1] = 1
    run_toml: str = Field(max_length=MAX_RUN_FILE_BYTES)
    coordinator: Certificate
    scope: Scope = 0

    @property
    def run(self) -> str:
        return parse_run_file(self.run_toml).run.name

    @property
    def run_hash(self) -> bytes:
        return parse_run_file(self.run_toml).hash


@dataclass(frozen=True)
class HistoryDamage:
    """Offset from which a file cannot be read, and why.

    ``is_end``: only the last record is incomplete, as when a writer is at work or was killed."""

    offset: int
    is_end: bool
    reason: str


@dataclass(frozen=True)
class UnpackedVerdicts:
    """Verdicts as unpacked, not checked; ``ends``: the offset after each; ``damage``: what ends them early."""

    verdicts: tuple[Verdict, ...]
    ends: tuple[int, ...]
    damage: HistoryDamage | None


@dataclass(frozen=True)
class UnpackedHistory(UnpackedVerdicts):
    """Contents of a history file, of which only the head has been checked."""

    origin: HistoryOrigin
    head_bytes: int


def pack_origin(origin: HistoryOrigin) -> bytes:
    """Encode the head of a history; the verdicts follow, one msgpack map after the other."""
    data: bytes = msgpack.packb(origin.model_dump())
    return data


def unpack_history(data: bytes, place: str) -> UnpackedHistory:
    """Decode a history file as far as possible. Raises ``StateFileError`` for a file without the head of a history."""
    try:
        body, head_bytes = next(unpack_maps(data))
        origin = HistoryOrigin.model_validate(body)
        verify_certificate(origin.coordinator)
        parse_run_file(origin.run_toml, place)
    except RunFileError as error:
        raise StateFileError(f"{place}: field run_toml: {error}") from error
    except (ValueError, TypeError, StopIteration, LinkError) as error:
        raise StateFileError(f"{place}: its head is not that of a run's history: {type(error).__name__}") from error
    rest = unpack_verdicts(data, head_bytes)
    return UnpackedHistory(rest.verdicts, rest.ends, rest.damage, origin, head_bytes)


def unpack_verdicts(data: bytes, start: int = 0) -> UnpackedVerdicts:
    """Decode the verdicts from offset ``start`` on, as far as possible."""
    verdicts: list[Verdict] = []
    ends = [start]
    damage = None
    try:
        for verdict, end in unpack_each_verdict(data, start):
            verdicts.append(verdict)
            ends.append(end)
        if ends[-1] < len(data):
            damage = HistoryDamage(ends[-1], is_end=True, reason="its last record is not whole")
    except WireError as error:
        damage = HistoryDamage(ends[-1], is_end=False, reason=str(error))
    return UnpackedVerdicts(tuple(verdicts), tuple(ends[1:]), damage)


class HistoryFile:
    """A member's history on disk, whose verdicts have been checked. Methods block: call them in worker threads, one at
    a time."""

    def __init__(self, path: Path, origin: HistoryOrigin) -> None:
        """Open the file, or create it. What does not fit the origin is kept under another name. Raises
        ``StorageError``."""
        self.path = path
        self._origin = origin
        self._ends: list[int] = []
        self._head_bytes = 0
        self._check = self._new_check()
        kept = self._read()
        if kept is None:
            self._create(())
        else:
            self._load(kept)

    @property
    def chain(self) -> ChainSummary:
        """Summary of the verdicts in the file; ``chain.rounds`` is the next round."""
        return self._check.chain

    @property
    def epoch(self) -> int:
        """Epoch of the coordinator that gave the newest verdict; 0 without one."""
        return self._check.epoch

    def append(self, verdicts: Sequence[Verdict]) -> None:
        """Check verdicts and append them.

        Raises ``StateFileError`` for the first that does not continue the chain, and ``StorageError``; those before it
        are kept."""
        fresh: list[bytes] = []
        try:
            for verdict in verdicts:
                self._check.add(verdict)
                fresh.append(pack_verdict(verdict))
        finally:
            if fresh:
                self._write(fresh)

    def verdicts(self, first: int = 0, stop: int | None = None) -> tuple[Verdict, ...]:
        """Read the verdicts of rounds ``first`` to ``stop`` - 1, as far as the file has them.

        Raises ``StorageError`` for a file that somebody has changed or removed meanwhile."""
        bounds = [self._head_bytes, *self._ends]
        newest = len(self._ends)
        start, end = bounds[min(first, newest)], bounds[newest if stop is None else min(stop, newest)]
        try:
            with open_regular(self.path) as file:
                file.seek(start)
                found = unpack_verdicts(file.read(max(0, end - start)))
        except OSError as error:
            raise StorageError(f"{self.path}: the history cannot be read: {error}") from error
        if found.damage is not None:
            raise StorageError(f"{self.path}: was changed while it is in use")
        return found.verdicts

    def set_aside(self, why: str) -> None:
        """Keep the file under another name and start a new history. Raises ``StorageError``."""
        aside = self.path.with_name(f"{self.path.stem}-{self.chain.chain.hex()[:16]}.old")
        log.warning("%s; the file is kept as %s, and a new history starts", why, aside.name)
        try:
            self.path.replace(aside)
        except OSError as error:
            raise self._refused(error) from error
        self._create(())

    # On disk ------------------------------------------------------------------------------------------------

    def _new_check(self) -> ChainCheck:
        origin = self._origin
        return ChainCheck(origin.run_hash, origin.coordinator.identity_key, scope=origin.scope)

    def _read(self) -> UnpackedHistory | None:
        """Contents of the file; None where there is no history of this origin. Any other file is kept under another
        name."""
        try:
            data = read_regular(self.path)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StorageError(f"{self.path}: the history cannot be read: {error}") from error
        try:
            kept = unpack_history(data, str(self.path))
        except StateFileError as error:
            self.set_aside(str(error))
            return None
        if _owner(kept.origin) != _owner(self._origin):
            self.set_aside(f"{self.path}: is the history of another run, or of another coordinator")
            return None
        return kept

    def _load(self, kept: UnpackedHistory) -> None:
        self._head_bytes = kept.head_bytes
        good = kept.verdicts
        why = ""
        for verdict in kept.verdicts:
            try:
                self._check.add(verdict)
            except StateFileError as error:
                good, why = kept.verdicts[: self.chain.rounds], str(error)
                break
        self._ends = list(kept.ends[: len(good)])
        if why or (kept.damage is not None and not kept.damage.is_end):
            where = self._ends[-1] if self._ends else self._head_bytes
            self.set_aside(f"{self.path}: {why or f'at offset {where} is no verdict'}")
            self._create(good)
        elif kept.damage is not None:
            log.warning("%s: %s; that record is removed and fetched again", self.path, kept.damage.reason)
            self._write(())

    def _create(self, verdicts: Sequence[Verdict]) -> None:
        """Create a new file with these verdicts. Raises ``StorageError``."""
        self._check, self._ends = self._new_check(), []
        head = pack_origin(self._origin)
        self._head_bytes = len(head)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_bytes(head)
        except OSError as error:
            raise self._refused(error) from error
        self.append(verdicts)

    def _write(self, records: Sequence[bytes]) -> None:
        """Write records behind the last good one, in place of whatever is there. Raises ``StorageError``."""
        end = self._ends[-1] if self._ends else self._head_bytes
        try:
            with self.path.open("r+b") as file:
                file.seek(end)
                file.truncate()  # removes what an earlier write left on a full disk
                file.write(b"".join(records))
        except OSError as error:
            self._forget_unwritten()
            raise self._refused(error) from error
        for record in records:
            end += len(record)
            self._ends.append(end)

    def _forget_unwritten(self) -> None:
        known = self.verdicts() if self._ends else ()
        self._check = self._new_check()
        for verdict in known:
            self._check.add(verdict)

    def _refused(self, error: OSError) -> StorageError:
        return StorageError(f"{self.path}: the history cannot be kept: {error}; free some space on the disk")


def _owner(origin: HistoryOrigin) -> tuple[bytes, bytes, int]:
    return origin.run_hash, origin.coordinator.identity_key, origin.scope
