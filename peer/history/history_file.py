"""History file of a peer: it only grows, by verdicts that were checked before."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from shoal.peer.history.chain import Chain, ChainCheck, Kept, Origin, pack_head, unpack_history, unpack_verdicts
from shoal.peer.regular_file import open_regular, read_regular
from shoal.swarm.errors import StateFileError, StorageError
from shoal.swarm.protocol.rounds import Verdict
from shoal.swarm.protocol.verdict_chain import pack_verdict

log = logging.getLogger(__name__)

HISTORY_FILE = "history.msgpack"


class HistoryFile:
    """Methods block: call them in worker threads, one at a time."""

    def __init__(self, path: Path, origin: Origin) -> None:
        """Take up what is there as far as it is right, or begin. Raises ``StorageError``."""
        self.path = path
        self._origin = origin
        self._ends: list[int] = []
        self._head_bytes = 0
        self._check = self._fresh_check()
        kept = self._read()
        if kept is None:
            self._begin(())
        else:
            self._take_up(kept)

    @property
    def chain(self) -> Chain:
        """Summary of what is kept; ``chain.rounds`` is the first round that is not."""
        return self._check.chain

    def append(self, verdicts: Sequence[Verdict]) -> None:
        """Raises ``StateFileError`` for the first that does not go on from what is kept, and ``StorageError``; those
        before it are kept."""
        fresh: list[bytes] = []
        try:
            for verdict in verdicts:
                self._check.take(verdict)
                fresh.append(pack_verdict(verdict))
        finally:
            self._write(fresh)

    def verdicts(self, first: int = 0, stop: int | None = None) -> tuple[Verdict, ...]:
        """Of the rounds ``first`` to ``stop``, as far as they are known. Raises ``StorageError`` for a file that
        somebody has changed or removed meanwhile."""
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
        """Another history is this run's: begin again, and keep the file under another name. Raises ``StorageError``."""
        aside = self.path.with_name(f"{self.path.stem}-{self.chain.chain.hex()[:16]}.old")
        log.warning("%s; it is called %s now, and a new history is begun", why, aside.name)
        try:
            self.path.replace(aside)
        except OSError as error:
            raise self._refused(error) from error
        self._begin(())

    # On disk ------------------------------------------------------------------------------------------------

    def _fresh_check(self) -> ChainCheck:
        origin = self._origin
        return ChainCheck(origin.run_hash, origin.coordinator.identity_key, scope=origin.scope)

    def _read(self) -> Kept | None:
        """None where there is no history of this origin; a file that is something else is left under another name."""
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

    def _take_up(self, kept: Kept) -> None:
        self._head_bytes = kept.head_bytes
        good = kept.verdicts
        why = ""
        for verdict in kept.verdicts:
            try:
                self._check.take(verdict)
            except StateFileError as error:
                good, why = kept.verdicts[: self.chain.rounds], str(error)
                break
        self._ends = list(kept.ends[: len(good)])
        if why or (kept.damage is not None and not kept.damage.is_end):
            where = self._ends[-1] if self._ends else self._head_bytes
            self.set_aside(f"{self.path}: {why or f'at offset {where} is no verdict'}")
            self._begin(good)
        elif kept.damage is not None:
            log.warning("%s: %s and is cut off; it is fetched again", self.path, kept.damage.reason)
            self._cut()

    def _begin(self, verdicts: Sequence[Verdict]) -> None:
        """A new file. Raises ``StorageError``."""
        self._check, self._ends = self._fresh_check(), []
        head = pack_head(self._origin)
        self._head_bytes = len(head)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_bytes(head)
        except OSError as error:
            raise self._refused(error) from error
        self.append(verdicts)

    def _write(self, records: Sequence[bytes]) -> None:
        if not records:
            return
        end = self._ends[-1] if self._ends else self._head_bytes
        try:
            with self.path.open("r+b") as file:
                file.seek(end)
                file.truncate()  # what a full disk left of the time before
                file.write(b"".join(records))
        except OSError as error:
            self._forget_unwritten()
            raise self._refused(error) from error
        for record in records:
            end += len(record)
            self._ends.append(end)

    def _forget_unwritten(self) -> None:
        known = self.verdicts() if self._ends else ()
        self._check = self._fresh_check()
        for verdict in known:
            self._check.take(verdict)

    def _cut(self) -> None:
        try:
            with self.path.open("r+b") as file:
                file.truncate(self._ends[-1] if self._ends else self._head_bytes)
        except OSError as error:
            raise self._refused(error) from error

    def _refused(self, error: OSError) -> StorageError:
        return StorageError(f"{self.path}: the history cannot be kept: {error}; free some space on the disk")


def _owner(origin: Origin) -> tuple[bytes, bytes, int]:
    return origin.run_hash, origin.coordinator.identity_key, origin.scope
