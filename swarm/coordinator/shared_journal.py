"""Journal in a store that several hosts share: one leads by the store's lease, the others follow it as it grows.

Keys, after the run's prefix; numbers have 16 hexadecimal digits, so they are sorted::

    run                the run's hash, its file, and its host's public key; written once
    head               what counts: all other keys of the log are ignored beyond the numbers in it
    log/INDEX          a transaction's events, or the number of the round whose verdict it has
    verdict/ROUND      the transaction with a round's verdicts; kept for ever
    access/NUMBER      an access record; kept for ever
    snapshot/INDEX     the state that the transactions before INDEX lead to
    evidence/NAME      a piece of evidence
    more/KEY/PIECE     further pieces of a long value

A commit of any size is written in steps that each fit into a request: the last one writes the head, and makes it count.
So a host that dies or is fenced off in the middle leaves keys that nobody reads, and the next one overwrites.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import msgpack

from shoal.swarm import durable
from shoal.swarm.coordinator.events import (
    AccessRecorded,
    JournalEvent,
    PipelineSnapshot,
    RunSnapshot,
    VerdictGiven,
    pack_event,
    unpack_event,
    verdicts_in,
)
from shoal.swarm.coordinator.local_journal import evidence_path
from shoal.swarm.coordinator.stores.fenced_store import HEAD, FencedStore, LeaseClock, boot_time_s
from shoal.swarm.errors import (
    DamagedRecords,
    IdentityError,
    JournalUnavailable,
    LeaseLost,
    RunFileError,
    ShoalError,
    StorageError,
)
from shoal.swarm.protocol.access_records import AccessRecord

log = logging.getLogger(__name__)

_FORMAT = 1
_RUN = "run"
_PIECE_BYTES = 2**18
_MOST_PIECES = 2**10
"""Pieces of one value: 256 MiB, which is more than ten thousand members' snapshot has."""
_PAGE = 16
_COMPACT_AT_BYTES = 2**20
_RETRY_S = 0.25
_SAY_AGAIN_S = 30.0


@dataclass(frozen=True)
class _Head:
    """Value of the head. ``first``: number of transactions that a snapshot stands for; ``next``: index of the next one;
    ``rounds``, ``access``: numbers of verdicts and access records; ``log_bytes``: size of the log since the snapshot,
    whose own is ``snapshot_bytes``; ``epoch``, ``write``: who wrote this, and its how-many-eth write, so that no two
    heads are equal."""

    next: int = 0
    first: int = 0
    rounds: int = 0
    access: int = 0
    log_bytes: int = 0
    snapshot_bytes: int = 0
    epoch: int = 0
    write: int = 0

    def pack(self) -> bytes:
        data: bytes = msgpack.packb([getattr(self, one.name) for one in fields(self)])
        return data

    @classmethod
    def unpack(cls, data: bytes, location: str) -> _Head:
        values = _unpacked(data, "head", location)
        if not isinstance(values, list) or len(values) != len(fields(cls)) or not _are_counts(values):
            raise DamagedRecords(f"{location}: its head cannot be read: another release wrote it, or it is damaged")
        return cls(*values)


def _are_counts(values: Iterable[object]) -> bool:
    return all(isinstance(one, int) and one >= 0 for one in values)


@dataclass(frozen=True)
class SharedRun:
    """What a shared journal is of: ``host_key``: the public key of the run's host, whose secret its hosts share."""

    run_hash: bytes
    run_toml: str
    host_key: bytes


class SharedJournal:
    """A run's journal in a shared store (``journal.Journal``). May be used from any thread.

    Before it is leased, ``follow`` keeps what is in it warm, so that ``lease`` and ``read`` take no time."""

    compact_at_bytes = _COMPACT_AT_BYTES
    is_shared = True

    def __init__(
        self,
        store: FencedStore,
        holder: str,
        ttl_s: float,
        folder: Path,
        now_s: Callable[[], float] = boot_time_s,
        pause: Callable[[float], object] | None = None,
    ) -> None:
        """``holder``: this host, for people; ``folder``: of this host, which keeps evidence, too; ``pause``: waits
        between two tries of a write, ended by ``give_up``."""
        self.location = store.location
        self._write_trouble = self._lease_trouble = ""
        self._store, self._holder, self._folder = store, holder, folder
        self._clock = LeaseClock(ttl_s, now_s)
        self._given_up = threading.Event()
        self._pause = pause or self._given_up.wait
        self._lock = threading.RLock()
        self._head, self._revision = _Head(), 0
        self._warm: list[JournalEvent] = []
        self._is_leading = False
        self._failure: StorageError | None = None
        self._said_s = -_SAY_AGAIN_S

    # What it is of ----------------------------------------------------------------------------------------

    def open(self) -> SharedRun | None:
        """Connect; return what the journal is of, None for a new one. Raises ``JournalUnavailable``."""
        self._store.open()
        found = self._value(_RUN)
        if found is None:
            return None
        about = _unpacked(found, _RUN, self.location)
        if not isinstance(about, dict) or about.get("format") != _FORMAT:
            raise DamagedRecords(f"{self.location}: this is no journal of this release")
        return SharedRun(about["run_hash"], about["run_toml"], about["host_key"])

    def check(self, expected: SharedRun) -> None:
        """Check that the journal is of this run and host, or of none yet. Raises ``RunFileError``,
        ``IdentityError``."""
        found = self.open()
        if found is None:
            return
        if found.run_hash != expected.run_hash:
            raise RunFileError(
                f"{self.location} is the journal of the same run with other settings. A run's settings never change: "
                "restore its run file, or give the new one another name"
            )
        if found.host_key != expected.host_key:
            raise IdentityError(f"{self.location}: another host began this run: this machine has not got its keys")

    def read_key(self, name: str) -> bytes | None:
        """Read what hosts tell each other beside the log."""
        found = self._store.read(f"about/{name}")
        return None if found is None else found.value

    def read_keys(self, lead: str) -> dict[str, bytes]:
        """Read all of that whose names begin so, at most a page of them."""
        first = f"about/{lead}"
        return {key[len("about/") :]: value for key, value in self._store.scan(first, first + "~", _PAGE)}

    def put_key(self, name: str, value: bytes) -> None:
        """Tell the other hosts something beside the log. Needs no lease."""
        self._store.put(f"about/{name}", value)

    def holder(self) -> str:
        """Return who leads; empty for nobody."""
        return self._store.holder()

    # Following --------------------------------------------------------------------------------------------

    def follow(self) -> bool:
        """Read what was written since the last call. Return whether there was anything. Raises ``StorageError``."""
        with self._lock:
            while True:
                found = self._store.read(HEAD)
                if found is None or found.revision == self._revision:
                    return False
                head = _Head.unpack(found.value, self.location)
                try:
                    warm = self._up_to(head, self._warm, self._head.next)
                except DamagedRecords:
                    now = self._store.read(HEAD)
                    if now is not None and now.revision != found.revision:  # compacted while a long value was read
                        continue
                    raise
                if warm is not None:
                    self._warm, self._head, self._revision = warm, head, found.revision
                    return True

    def _up_to(self, head: _Head, warm: list[JournalEvent], known: int) -> list[JournalEvent] | None:
        """Read the log up to this head, from transaction ``known`` on, to which the events ``warm`` lead. Return what
        leads to the head; None if the log was compacted meanwhile."""
        if head.first > known:
            snapshot = self._value(f"snapshot/{_number(head.first)}")
            if snapshot is None:
                return None
            warm, known = self._events(snapshot, "snapshot"), head.first
        read: list[JournalEvent] = []
        for index, value in self._records("log", known, head.next):
            if index != known:
                return None
            known += 1
            read += self._transaction(value)
        return [*warm, *read] if known == head.next else None

    def _transaction(self, value: bytes) -> list[JournalEvent]:
        """Unpack a record of the log."""
        found = _unpacked(value, "log", self.location)
        if not isinstance(found, int):
            return self._events(value, "log")
        verdict = self._value(f"verdict/{_number(found)}")
        if verdict is None:
            raise DamagedRecords(f"{self.location}: the verdict of round {found} is missing")
        return self._events(verdict, f"verdict {found}")

    # The lease --------------------------------------------------------------------------------------------

    def begin(self, run: SharedRun) -> int | None:
        """Take the lease if nobody has it, and read what is new; return its epoch, or None.

        A new journal begins with ``run``. Raises ``StorageError``, and as ``check``."""
        sent_s = self._clock.now_s()
        epoch = self._store.acquire(self._holder, self._clock.ttl_s, time.time_ns())
        if epoch is None:
            return None
        self._clock.renewed(sent_s)
        with self._lock:
            try:
                self.check(run)  # another host may have begun it
                self.follow()
                self._is_leading = True
                self._head = replace(self._head, epoch=epoch, write=0)
                if not self._revision:
                    about = {"format": _FORMAT, "run_hash": run.run_hash, "run_toml": run.run_toml}
                    self._write({_RUN: msgpack.packb(about | {"host_key": run.host_key})}, self._head)
            except ShoalError:
                self._is_leading = False
                self._store.release()
                raise
        return epoch

    def lease(self) -> int:
        """As ``Journal.lease``, for a journal that has begun."""
        found = self.open()
        assert found is not None, "begin it first"
        epoch = self.begin(found)
        if epoch is None:
            raise LeaseLost(f"{self.location}: {self.holder() or 'another host'} leads this run now")
        return epoch

    def renew(self) -> None:
        """Keep the lease. Raises ``LeaseLost`` once it has ended; troubles that may pass only count when it has."""
        sent_s = self._clock.now_s()
        try:
            self._store.renew()
        except JournalUnavailable as error:
            self._lease_trouble = str(error)
            self._say_trouble(error)
        else:
            self._lease_trouble = ""
            self._clock.renewed(sent_s)
        self.check_lease()

    def check_lease(self) -> None:
        """Raise ``LeaseLost`` unless this process surely has the lease, by its own clock."""
        if self._clock.left_s <= 0:
            raise LeaseLost(f"its lease has ended, as it was not renewed within {self._clock.ttl_s:g} s")

    def _lost(self, why: str) -> LeaseLost:
        trouble = f" ({self.trouble})" if self.trouble else ""
        return LeaseLost(
            f"{self.location}: this host leads the run no more: {why}{trouble}. Nothing was announced that is not in "
            "the journal; another host goes on, or this one when it is started again"
        )

    @property
    def lease_left_s(self) -> float:
        """Seconds for which the lease is surely held."""
        return self._clock.left_s

    # Reading ----------------------------------------------------------------------------------------------

    @property
    def next_index(self) -> int:
        return self._head.next

    @property
    def rounds(self) -> int:
        """Number of rounds that have their verdicts."""
        return self._head.rounds

    def read(self, from_index: int = 0) -> list[JournalEvent]:
        with self._lock:
            head = self._head
            if from_index <= head.first:
                events: list[JournalEvent] | None = self._warm
                if not events and head.next:
                    events = self._up_to(head, [], 0)
                if events is None:
                    raise LeaseLost(f"{self.location}: another host writes to this journal")
                return list(events)
            return [
                event for _, value in self._records("log", from_index, head.next) for event in self._transaction(value)
            ]

    def verdicts(self, first: int, limit: int | None = None, scope: int | None = None) -> list[VerdictGiven]:
        stop = self.rounds if limit is None else min(self.rounds, first + limit)
        given: list[VerdictGiven] = []
        for number, value in self._records("verdict", first, stop):
            by_scope = verdicts_in(self._events(value, f"verdict {number}"))
            at = min(by_scope, default=0) if scope is None else scope
            if at in by_scope:
                given.append(by_scope[at])
        return given

    @property
    def access_count(self) -> int:
        return self._head.access

    def access_records(self, first: int, limit: int) -> list[AccessRecord]:
        found = self._records("access", first, min(self.access_count, first + limit))
        try:
            return [AccessRecord.model_validate(msgpack.unpackb(value, use_list=False)) for _, value in found]
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise DamagedRecords(f"{self.location}: an access record cannot be read: {error}") from error

    def _records(self, kind: str, first: int, stop: int) -> Iterator[tuple[int, bytes]]:
        """Read the values of this kind with these numbers, in pages."""
        at = first
        while at < stop:
            page = self._store.scan(f"{kind}/{_number(at)}", f"{kind}/{_number(stop)}", _PAGE)
            if not page:
                return
            for key, value in page:
                yield int(key.rpartition("/")[2], 16), self._joined(key, value)
            at = int(page[-1][0].rpartition("/")[2], 16) + 1

    def _value(self, key: str) -> bytes | None:
        found = self._store.read(key)
        return None if found is None else self._joined(key, found.value)

    def _joined(self, key: str, value: bytes) -> bytes:
        """Put a value's pieces together; it begins with their number."""
        pieces = int.from_bytes(value[:4], "big")
        if pieces > _MOST_PIECES:
            raise DamagedRecords(f"{self.location}: {key} claims {pieces} pieces, more than any value has")
        parts: list[bytes] = []
        while len(parts) < pieces:
            found = self._store.scan(f"more/{key}/{_number(len(parts))}", f"more/{key}/{_number(pieces)}", _PAGE)
            if not found:
                raise DamagedRecords(f"{self.location}: a piece of {key} is missing")
            for name, piece in found:
                if name != f"more/{key}/{_number(len(parts))}" or len(piece) > _PIECE_BYTES:
                    raise DamagedRecords(f"{self.location}: a piece of {key} is missing, or is none of ours")
                parts.append(piece)
        return b"".join([*parts, value[4:]])

    def _events(self, data: bytes, what: str) -> list[JournalEvent]:
        packed = _unpacked(data, what, self.location)
        if not isinstance(packed, list) or not all(isinstance(one, bytes) for one in packed):
            raise DamagedRecords(f"{self.location}: {what} holds no list of events")
        return [unpack_event(one) for one in packed]

    # Writing ----------------------------------------------------------------------------------------------

    def append(self, expected_index: int, events: Sequence[JournalEvent]) -> None:
        """As ``Journal.append``. While the engine takes no writes it tries again, for as long as the lease is held."""
        with self._lock:
            head = self._head
            if self._failure is not None:
                raise self._failure
            given = {event.verdict.round for event in verdicts_in(events).values()}
            assert given in (set(), {head.rounds}), "one verdict a round, in their order"
            if expected_index != head.next:
                raise self._fail(
                    StorageError(f"{self.location}: has {head.next} transactions, not {expected_index}: cannot go on")
                )
            data = msgpack.packb([pack_event(event) for event in events])
            index = f"log/{_number(head.next)}"
            puts = {index: data}
            if given:
                puts = {f"verdict/{_number(head.rounds)}": data, index: msgpack.packb(head.rounds)}
            records = [one.record for one in events if isinstance(one, AccessRecorded)]
            assert [one.number for one in records] == list(range(head.access, head.access + len(records)))
            puts |= {f"access/{_number(one.number)}": msgpack.packb(one.model_dump()) for one in records}
            self._write(
                puts,
                replace(
                    head,
                    next=head.next + 1,
                    rounds=head.rounds + len(given),
                    access=head.access + len(records),
                    log_bytes=head.log_bytes + len(data),
                ),
            )

    def keep_evidence(self, name: str, data: bytes) -> None:
        """Keep evidence in the store, and in this host's folder."""
        with self._lock:
            try:
                durable.put(evidence_path(self._folder, name), data)
            except OSError as error:
                raise StorageError(f"{self._folder}: evidence cannot be written: {error}") from error
            self._write({f"evidence/{name}": data}, self._head)

    @property
    def wants_snapshot(self) -> bool:
        return self._head.log_bytes >= max(self.compact_at_bytes, self._head.snapshot_bytes)

    def compact(self, snapshot: RunSnapshot | PipelineSnapshot) -> None:
        """Write the snapshot and drop the log before it. Verdicts are in keys of their own already."""
        with self._lock:
            if self._failure is not None:
                return
            head = self._head
            assert snapshot.round == head.rounds, "a snapshot of what was written"
            data = msgpack.packb([pack_event(snapshot)])
            at = _number(head.next)
            after = replace(head, first=head.next, log_bytes=0, snapshot_bytes=len(data))
            old = [(f"{kind}/", f"{kind}/{at}") for kind in ("log", "snapshot", "more/log", "more/snapshot")]
            try:
                self._write({f"snapshot/{at}": data}, after, old)
            except StorageError:  # the next ``append`` fails with it
                return
            self._store.compact()

    def _write(self, values: Mapping[str, bytes], head: _Head, deletes: Sequence[tuple[str, str]] = ()) -> None:
        """Write values of any size, and then, at once with the last of them, the head. Raises ``LeaseLost``."""
        if self._failure is not None:
            raise self._failure
        if any(len(value) > _MOST_PIECES * _PIECE_BYTES for value in values.values()):
            raise self._fail(StorageError(f"{self.location}: a record is larger than a journal takes"))
        head = replace(head, write=self._head.write + 1)
        packed = head.pack()
        *before, last = _groups(_pieces(values), self._store.limits.commit_bytes - 1024, self._store.limits.commit_keys)
        for puts in before:
            self._commit(puts, ())
        self._revision = self._commit(last | {HEAD: packed}, deletes)
        self._head, self._warm = head, []

    def _commit(self, puts: Mapping[str, bytes], deletes: Sequence[tuple[str, str]]) -> int:
        """Commit, for as long as the lease is held. Return the head's revision."""
        while True:
            try:
                self.check_lease()
                revision = self._store.commit(self._revision, puts, deletes)
            except JournalUnavailable as error:
                self._write_trouble = str(error)
                self._say_trouble(error)
                self._pause(_RETRY_S)
                if self._given_up.is_set():
                    raise self._fail(error) from error
            except LeaseLost as error:
                made = self._made(puts) if self._clock.left_s > 0 else None
                if made is None:
                    raise self._fail(self._lost(str(error))) from error
                self._say_well()
                return made
            except StorageError as error:
                raise self._fail(error) from error
            else:
                self._say_well()
                return revision

    def _made(self, puts: Mapping[str, bytes]) -> int | None:
        """Return the head's revision if an earlier try, which got no answer, has made this commit after all."""
        if HEAD not in puts:
            return None
        try:
            found = self._store.read(HEAD)
        except JournalUnavailable:
            return None
        return found.revision if found is not None and found.value == puts[HEAD] else None

    def _fail(self, error: StorageError) -> StorageError:
        self._failure = error
        return error

    # Troubles ---------------------------------------------------------------------------------------------

    @property
    def trouble(self) -> str:
        """Why the engine takes no writes at the moment; empty while it does."""
        return self._write_trouble or self._lease_trouble

    def _say_trouble(self, error: JournalUnavailable) -> None:
        if self._clock.now_s() - self._said_s >= _SAY_AGAIN_S:
            self._said_s = self._clock.now_s()
            log.warning(
                "THE JOURNAL TAKES NO WRITES: %s. Verdicts wait for it, members train on; this host leads for %.1f s "
                "more without it",
                error,
                max(0.0, self._clock.left_s),
            )

    def _say_well(self) -> None:
        if self._write_trouble:
            log.warning("%s: the journal takes writes again", self.location)
            self._write_trouble, self._said_s = "", -_SAY_AGAIN_S

    @property
    def backup_behind_s(self) -> float | None:
        """None: the engine keeps copies itself."""
        return None

    def give_up(self) -> None:
        """End the tries of a write that waits for the engine; it fails."""
        self._given_up.set()

    def close(self) -> None:
        """Give up the lease, and the connections."""
        self._given_up.set()
        if self._is_leading:
            self._store.release()
        self._store.close()


def _pieces(values: Mapping[str, bytes]) -> Iterator[tuple[str, bytes]]:
    """Yield keys and values of bounded size, each value's further pieces before itself."""
    for key, value in values.items():
        starts = range(0, max(0, len(value) - _PIECE_BYTES), _PIECE_BYTES)
        for number, start in enumerate(starts):
            yield f"more/{key}/{_number(number)}", value[start : start + _PIECE_BYTES]
        rest = value[len(starts) * _PIECE_BYTES :]
        yield key, len(starts).to_bytes(4, "big") + rest


def _groups(puts: Iterable[tuple[str, bytes]], most_bytes: int, most_keys: int) -> list[dict[str, bytes]]:
    """Divide puts among commits that are small enough, in their order; at least one."""
    groups: list[dict[str, bytes]] = [{}]
    size = 0
    for key, value in puts:
        size += len(key) + len(value)
        if groups[-1] and (size > most_bytes or len(groups[-1]) >= most_keys):
            groups.append({})
            size = len(key) + len(value)
        groups[-1][key] = value
    return groups


def _number(value: int) -> str:
    return f"{value:016x}"


def _unpacked(data: bytes, what: str, location: str) -> Any:
    try:
        return msgpack.unpackb(data, strict_map_key=False)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise DamagedRecords(f"{location}: {what} cannot be read: {error}") from error
