"""Store in a Postgres database: a table of keys, and a row for each run that commits lock, with the lease's epoch.

Needs the extra ``postgres``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import psycopg
from psycopg.conninfo import conninfo_to_dict

from shoal.swarm.coordinator.stores.fenced_store import EPOCH_STEP, HEAD, Entry, StoreLimits
from shoal.swarm.errors import JournalUnavailable, LeaseLost, UserError

T = TypeVar("T")

_ANSWER_S = 3.0
_AT_ONCE_S = 0.5
_LIMITS = StoreLimits(commit_bytes=2**24, commit_keys=2**12)

_TABLES = """
create table if not exists shoal_lease (
    run text primary key,
    epoch bigint not null default 0,
    holder text not null default '',
    until timestamptz not null default '-infinity',
    head bigint not null default 0
);
create table if not exists shoal_journal (
    run text not null,
    key text collate "C" not null,
    value bytea not null,
    primary key (run, key)
);
"""


class _TimedConnection(psycopg.Connection[tuple[Any, ...]]):
    """Connection on which nothing takes longer than ``_ANSWER_S``, also when the server stands still."""

    def wait(self, gen: Any, interval: float = 0.1, timeout: float | None = None) -> Any:
        return super().wait(gen, interval, _ANSWER_S if timeout is None else timeout)


class PostgresStore:
    """One run's rows in a database (``fenced_store.FencedStore``). Leases end by the server's clock."""

    limits = _LIMITS

    def __init__(self, url: str, run: str) -> None:
        """``url``: as libpq takes it; ``run``: the rows' name, as several runs may share the tables."""
        self._url, self._run = url, run
        try:
            about = conninfo_to_dict(url)
        except psycopg.Error:
            about = {}
        hosts = str(about.get("host") or "").split(",")
        # What libpq says of a URL repeats it, and a password with such a character is taken for a host or a database.
        if not about or "@" in f"{about.get('host')}{about.get('dbname')}":
            raise UserError(
                "--journal postgres://…: not a URL of Postgres, postgres://USER:PASSWORD@HOST:PORT/DATABASE; in a "
                "password, write @ / : # ? % and spaces as %40 %2F %3A %23 %3F %25 %20"
            )
        ports = str(about.get("port") or "5432").split(",")
        named = ",".join(f"{host}:{ports[min(at, len(ports) - 1)]}" for at, host in enumerate(hosts))
        self.location = f"postgres://{named}/{about.get('dbname') or ''}#{run}"
        self._epoch = 0
        self._ttl_s = 0.0
        # Renewals have a connection of their own: a commit on a slow disk must not hold them up.
        self._main, self._renewing = _Connector(self, url), _Connector(self, url)

    def open(self) -> None:
        def make(connection: _TimedConnection) -> None:
            # Two hosts that begin together must not both make the tables.
            connection.execute("select pg_advisory_xact_lock(7391)")
            if connection.execute("select to_regclass('shoal_journal')").fetchone() == (None,):
                connection.execute(_TABLES)
            connection.execute("insert into shoal_lease (run) values (%s) on conflict do nothing", (self._run,))

        self._main.run(make)

    # Reading ----------------------------------------------------------------------------------------------

    def read(self, key: str) -> Entry | None:
        def look(connection: _TimedConnection) -> Entry | None:
            found = connection.execute(
                "select value, head from shoal_journal natural join shoal_lease where run = %s and key = %s",
                (self._run, key),
            ).fetchone()
            return None if found is None else Entry(bytes(found[0]), int(found[1]))

        return self._main.run(look)

    def scan(self, first: str, stop: str, limit: int) -> list[tuple[str, bytes]]:
        def look(connection: _TimedConnection) -> list[tuple[str, bytes]]:
            found = connection.execute(
                "select key, value from shoal_journal where run = %s and key >= %s and key < %s order by key limit %s",
                (self._run, first, stop, limit),
            )
            return [(str(key), bytes(value)) for key, value in found]

        return self._main.run(look)

    # The lease --------------------------------------------------------------------------------------------

    def acquire(self, holder: str, ttl_s: float, epoch: int) -> int | None:
        def take(connection: _TimedConnection) -> int | None:
            found = connection.execute(
                "update shoal_lease set epoch = greatest(%s, epoch + %s), holder = %s, "
                "until = clock_timestamp() + make_interval(secs => %s) "
                "where run = %s and until < clock_timestamp() returning epoch",
                (epoch, EPOCH_STEP, holder, ttl_s, self._run),
            ).fetchone()
            return None if found is None else int(found[0])

        taken = self._main.run(take)
        if taken is not None:
            self._epoch, self._ttl_s = taken, ttl_s
        return taken

    def renew(self) -> None:
        def extend(connection: _TimedConnection) -> int:
            return connection.execute(
                "update shoal_lease set until = clock_timestamp() + make_interval(secs => %s) "
                "where run = %s and epoch = %s and until >= clock_timestamp()",
                (self._ttl_s, self._run, self._epoch),
            ).rowcount

        if not self._renewing.run(extend):
            raise LeaseLost(f"{self.location}: the lease has ended")

    def holder(self) -> str:
        def look(connection: _TimedConnection) -> str:
            found = connection.execute(
                "select holder from shoal_lease where run = %s and until >= clock_timestamp()", (self._run,)
            ).fetchone()
            return "" if found is None else str(found[0])

        return self._main.run(look)

    def release(self) -> None:
        def end(connection: _TimedConnection) -> None:
            connection.execute(
                "update shoal_lease set until = '-infinity' where run = %s and epoch = %s", (self._run, self._epoch)
            )

        if self._epoch:
            with suppress(JournalUnavailable):
                self._main.run(end)
            self._epoch = 0

    # Writing ----------------------------------------------------------------------------------------------

    def commit(self, head_revision: int, puts: Mapping[str, bytes], deletes: Sequence[tuple[str, str]]) -> int:
        def write(connection: _TimedConnection) -> int:
            found = connection.execute(
                "select head from shoal_lease where run = %s and epoch = %s and until >= clock_timestamp() for update",
                (self._run, self._epoch),
            ).fetchone()
            if found is None or int(found[0]) != head_revision:
                raise LeaseLost(f"{self.location}: another host has the lease, or has written")
            for first, stop in deletes:
                connection.execute(
                    "delete from shoal_journal where run = %s and key >= %s and key < %s", (self._run, first, stop)
                )
            self._put(connection, puts)
            if HEAD not in puts:
                return head_revision
            connection.execute("update shoal_lease set head = head + 1 where run = %s", (self._run,))
            return head_revision + 1

        return self._main.run(write)

    def put(self, key: str, value: bytes) -> None:
        self._main.run(lambda connection: self._put(connection, {key: value}))

    def _put(self, connection: _TimedConnection, puts: Mapping[str, bytes]) -> None:
        with connection.cursor() as cursor:
            cursor.executemany(
                "insert into shoal_journal (run, key, value) values (%s, %s, %s) "
                "on conflict (run, key) do update set value = excluded.value",
                [(self._run, key, value) for key, value in puts.items()],
            )

    def compact(self) -> None:
        """Nothing to do: the server's autovacuum does it."""

    def close(self) -> None:
        self._main.close()
        self._renewing.close()


class _Connector:
    """One connection, made when it is needed, for one thread at a time."""

    def __init__(self, store: PostgresStore, url: str) -> None:
        self._store, self._url = store, url
        self._lock = threading.Lock()
        self._connection: _TimedConnection | None = None

    def run(self, work: Callable[[_TimedConnection], T]) -> T:
        """Do work in a transaction. Raises ``JournalUnavailable``, also when it is not known whether it was done."""
        with self._lock, self._troubles():
            reused, began_s = self._connection is not None, time.monotonic()
            try:
                return self._try(work)
            except psycopg.OperationalError:
                # The server may have closed an idle connection, as when it was restarted.
                if not reused or time.monotonic() - began_s > _AT_ONCE_S:
                    raise
                return self._try(work)

    def _try(self, work: Callable[[_TimedConnection], T]) -> T:
        if self._connection is None:
            self._connection = _connect(self._url)
        connection = self._connection
        try:
            with connection.transaction():
                return work(connection)
        except psycopg.Error:
            self._connection = None
            with suppress(psycopg.Error):
                connection.close()
            raise

    @contextmanager
    def _troubles(self) -> Iterator[None]:
        location = self._store.location
        try:
            yield
        except psycopg.errors.DiskFull as error:
            raise JournalUnavailable(f"{location}: the server's disk is full: free some space ({error})") from None
        except psycopg.errors.ReadOnlySqlTransaction:
            raise JournalUnavailable(
                f"{location}: the server is read-only: name the primary, or all servers (host1,host2)"
            ) from None
        except (psycopg.errors.InvalidPassword, psycopg.errors.InsufficientPrivilege) as error:
            raise UserError(f"{location}: refused: {_words(error)}. Look at user, password and rights") from None
        except psycopg.Error as error:
            words = _words(error)
            if "authentication failed" in words or "no password supplied" in words:
                raise UserError(f"{location}: refused: {words}. Look at user and password") from None
            raise JournalUnavailable(f"{location}: Postgres does not answer ({words})") from None

    def close(self) -> None:
        with self._lock, suppress(psycopg.Error):
            if self._connection is not None:
                self._connection.close()


def _connect(url: str) -> _TimedConnection:
    made = _TimedConnection.connect(url, connect_timeout=3, target_session_attrs="read-write", autocommit=True)
    # What is answered is on the disk, whatever the server's own setting.
    made.execute("set synchronous_commit = on")
    made.execute(f"set statement_timeout = {int(_ANSWER_S * 1000)}")
    made.execute(f"set lock_timeout = {int(_ANSWER_S * 1000)}")
    # A host that stops or loses its power in a commit must not keep the run's row locked: nobody could take over.
    made.execute(f"set idle_in_transaction_session_timeout = {int(_ANSWER_S * 1000)}")
    made.execute(f"set tcp_user_timeout = {int(_ANSWER_S * 1000)}")
    made.execute("set tcp_keepalives_idle = 3")
    made.execute("set tcp_keepalives_interval = 1")
    made.execute("set tcp_keepalives_count = 3")
    return made


def _words(error: psycopg.Error) -> str:
    """The error in one line. libpq's messages name hosts and users, never passwords."""
    return " ".join(str(error).split())[:300] or type(error).__name__
