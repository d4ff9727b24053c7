"""Contract of journals, over all engines: the folder, memory, an etcd cluster of three, and Postgres."""

import itertools
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, Protocol

import pytest
from tests.fakes.engines import EtcdCluster, PostgresServer, etcd_cluster, postgres_server
from tests.fakes.memory_store import MemoryEngine, MemoryStore
from tests.fakes.shared_journals import DyingStore, HostDied, SharedEngine
from tests.swarm.coordinator.stories import RUN, events_in, state, state_after, story
from tests.swarm.coordinator.world import entry

from shoal.swarm.coordinator.access_trail import AccessTrail
from shoal.swarm.coordinator.events import JournalEvent, MemberLost, PeerAllowed, VerdictGiven
from shoal.swarm.coordinator.journal import Journal
from shoal.swarm.coordinator.local_journal import LocalJournal
from shoal.swarm.coordinator.shared_journal import SharedRun
from shoal.swarm.coordinator.stores import postgres as postgres_store
from shoal.swarm.coordinator.stores.etcd import EtcdStore, _encode
from shoal.swarm.coordinator.stores.fenced_store import EPOCH_STEP, FencedStore, StoreLimits, boot_time_s
from shoal.swarm.coordinator.stores.place import open_store
from shoal.swarm.coordinator.stores.postgres import PostgresStore
from shoal.swarm.errors import (
    DamagedRecords,
    IdentityError,
    JournalUnavailable,
    LeaseLost,
    RunFileError,
    StorageError,
    UserError,
)

KEY = bytes(range(32))
THE_RUN = SharedRun(RUN.hash, "toml", KEY)
integration = pytest.mark.integration


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    with etcd_cluster(tmp_path_factory.mktemp("etcd")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PostgresServer]:
    with postgres_server(tmp_path_factory.mktemp("postgres")) as server:
        yield server


_numbers = itertools.count()


def memory_engine(folder: Path, limits: StoreLimits | None = None) -> SharedEngine:
    clock = [0.0]
    engine = MemoryEngine(lambda: clock[0])

    def pass_lease() -> None:
        clock[0] += 5.1

    return SharedEngine(lambda: MemoryStore(engine, limits), pass_lease, folder, lambda: clock[0], 5.0, THE_RUN)


def real_engine(folder: Path, store: Callable[[str], FencedStore]) -> SharedEngine:
    name = f"run-{next(_numbers)}"

    def pass_lease() -> None:
        watching = store(name)
        watching.open()
        while watching.holder():
            time.sleep(0.05)
        watching.close()

    return SharedEngine(lambda: store(name), pass_lease, folder, boot_time_s, 2.0, THE_RUN)


matrix = [integration, pytest.mark.matrix]
ENGINES = ["memory", pytest.param("etcd", marks=integration), pytest.param("postgres", marks=integration)]
SOME = ["memory", pytest.param("etcd", marks=matrix), pytest.param("postgres", marks=matrix)]
"""Engines of tests that show of a real engine what others show, too: those are in `make chaos`."""


@pytest.fixture
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SharedEngine]:
    kind = request.param
    if kind == "memory":
        made = memory_engine(tmp_path)
    else:
        url = request.getfixturevalue(kind).url()
        made = real_engine(tmp_path, lambda name: open_store(url, name))
    yield made
    made.close()


shared = pytest.mark.parametrize("engine", ENGINES, indirect=True)
partly = pytest.mark.parametrize("engine", SOME, indirect=True)


class Opened(Protocol):
    """Opens a journal as the only writer, as a process does that starts."""

    def __call__(self) -> Journal: ...


@pytest.fixture
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Opened]:
    if request.param == "local":

        def open_local() -> Journal:
            journal = LocalJournal(tmp_path / "state", RUN.hash, "toml")
            journal.lease()
            return journal

        yield open_local
        return
    if request.param == "memory":
        made = memory_engine(tmp_path)
    else:
        url = request.getfixturevalue(request.param).url()
        made = real_engine(tmp_path, lambda name: open_store(url, name))
    yield made.leader
    made.close()


every = pytest.mark.parametrize("opened", ["local", *ENGINES], indirect=True)
partly_every = pytest.mark.parametrize("opened", ["local", *SOME], indirect=True)


def tell(journal: Journal, first: int = 0, stop: int | None = None, compact: bool = False) -> None:
    """Write these transactions of the story."""
    for events, snapshot in story()[first:stop]:
        journal.append(journal.next_index, events)
        if compact and snapshot is not None:
            journal.compact(snapshot)


def given_in(events: Sequence[JournalEvent]) -> list[VerdictGiven]:
    return [event for event in events if isinstance(event, VerdictGiven)]


# Every journal ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("opened", "compact"),
    [
        *itertools.product(("local", "memory"), (False, True)),
        pytest.param("etcd", True, marks=integration),
        pytest.param("postgres", True, marks=integration),
    ],
    indirect=["opened"],
)
def test_what_one_process_writes_the_next_one_reads(opened: Opened, compact: bool) -> None:
    told = story()
    half = len(told) // 2
    journal = opened()
    tell(journal, 0, half, compact)
    journal.close()
    journal = opened()
    assert journal.next_index == half
    assert state(journal.read(0)) == state_after(half)
    tell(journal, half, compact=compact)
    journal.close()
    journal = opened()
    assert journal.next_index == len(told)
    assert state(journal.read(0)) == state_after(len(told))
    verdicts = given_in(events_in(len(told)))
    assert len(verdicts) == 4
    assert journal.verdicts(0, 100, None) == verdicts
    assert journal.verdicts(1, 2, None) == verdicts[1:3]
    assert journal.verdicts(9, 2, None) == []
    journal.close()


@partly_every
def test_a_transaction_at_another_index_is_refused_and_nothing_comes_after_it(opened: Opened) -> None:
    journal = opened()
    tell(journal, 0, 2)
    with pytest.raises(StorageError, match="2 transactions"):
        journal.append(1, story()[2][0])
    with pytest.raises(StorageError):
        journal.append(2, story()[2][0])
    journal.close()
    journal = opened()
    assert state(journal.read(0)) == state_after(2)
    journal.close()


@partly_every
def test_a_second_writer_waits_and_has_a_later_epoch(opened: Opened, tmp_path: Path) -> None:
    journal = opened()
    with pytest.raises((StorageError, AssertionError)):
        opened()
    first = journal.next_index
    journal.close()
    journal = opened()
    assert journal.next_index == first
    journal.close()


@every
def test_access_records_outlive_compactions(opened: Opened) -> None:
    journal = opened()
    trail = AccessTrail(RUN.hash, lambda data: bytes(64), None)
    made = []
    for events, snapshot in story():
        asked = [PeerAllowed(peer=entry(1).peer, round=0, at_s=1.0)] * 3
        records = trail.records(asked, {}, 1.0)  # type: ignore[arg-type]
        made += [one.record for one in records]
        journal.append(journal.next_index, [*events, *asked, *records])
        if snapshot is not None:
            journal.compact(snapshot)
    journal.close()
    journal = opened()
    assert journal.access_count == len(made) > 20
    assert journal.access_records(0, 1000) == made
    assert journal.access_records(3, 2) == made[3:5]
    journal.close()


# Shared ones ------------------------------------------------------------------------------------------------


@partly
def test_a_host_follows_and_takes_over_where_the_other_ended(engine: SharedEngine) -> None:
    leading, standby = engine.leader("one"), engine.host("two")
    assert standby.holder() == "one"
    assert standby.begin(engine.run) is None
    told = story()
    for at in range(len(told)):
        tell(leading, at, at + 1)
        if at % 3 == 0:
            assert standby.follow()
    assert not standby.follow() or standby.next_index == len(told)
    assert state(standby.read(0)) == state_after(len(told))
    leading.close()
    assert standby.begin(engine.run) is not None
    assert state(standby.read(0)) == state_after(len(told))
    assert standby.verdicts(0, 100) == given_in(events_in(len(told)))


@partly
def test_epochs_of_leases_are_far_apart(engine: SharedEngine) -> None:
    epochs = []
    for _ in range(3):
        journal = engine.host()
        epochs.append(journal.begin(engine.run))
        journal.close()
    assert all(epochs)
    assert all(later - earlier >= EPOCH_STEP for earlier, later in itertools.pairwise(epochs) if earlier and later)


@partly
def test_a_silent_host_is_fenced_off(engine: SharedEngine) -> None:
    leading = engine.leader("one")
    tell(leading, 0, 3)
    leading.check_lease()
    engine.pass_lease()
    with pytest.raises(LeaseLost):
        leading.check_lease()
    standby = engine.leader("two")
    tell(standby, 3, 4)
    with pytest.raises(LeaseLost):
        leading.append(3, story()[3][0])
    with pytest.raises(LeaseLost):
        leading.renew()
    later = engine.host("three")
    later.follow()
    assert state(later.read(0)) == state_after(4)


@shared
def test_the_engine_fences_a_host_whose_clock_stood_still(engine: SharedEngine) -> None:
    """As a virtual machine's does while it is moved: by its own clock it has the lease."""
    now_s = [engine.now_s()]
    engine.now_s, running = lambda: now_s[0], engine.now_s
    leading = engine.leader("one")
    engine.now_s = running
    tell(leading, 0, 3)
    engine.pass_lease()
    standby = engine.leader("two")
    leading.check_lease()
    with pytest.raises(LeaseLost, match="leads the run no more"):
        leading.append(3, story()[3][0])
    tell(standby, 3, 5)
    with pytest.raises(LeaseLost):
        leading.append(3, story()[3][0])
    assert state(standby.read(0)) == state_after(5)


@partly
def test_a_host_that_renews_leads_on(engine: SharedEngine) -> None:
    leading, standby = engine.leader("one"), engine.host("two")
    tell(leading, 0, 2)
    until_s = time.monotonic() + (2.5 if engine.ttl_s < 5 else 0.0)
    while time.monotonic() < until_s:
        leading.renew()
        assert standby.begin(engine.run) is None
        time.sleep(0.25)
    tell(leading, 2, 3)
    assert leading.lease_left_s > 0


@shared
def test_what_is_larger_than_a_request_is_one_transaction(engine: SharedEngine) -> None:
    leading = engine.leader()
    reasons = [MemberLost(peer=entry(1).peer, reason=f"{at} " + "x" * 900) for at in range(6000)]
    leading.append(0, reasons)
    leading.append(1, reasons[:2])
    leading.close()
    assert engine.leader().read(0) == [*reasons, *reasons[:2]]


def die(engine: SharedEngine, point: int, after: bool, transactions: Sequence[Sequence[JournalEvent]]) -> None:
    """Begin the run and write, as a host that dies at that commit."""
    journal = engine.host("one", DyingStore(engine.store(), point, after=after))
    journal.begin(engine.run)
    for at, events in enumerate(transactions):
        journal.append(at, events)
        if (snapshot := story()[at][1]) is not None and transactions[at] is story()[at][0]:
            journal.compact(snapshot)


def check_the_next(engine: SharedEngine) -> None:
    """Nothing that was written is lost, nothing is there twice; the next host goes on, and one after it reads all."""
    engine.pass_lease()
    journal = engine.leader("two")
    done = journal.next_index
    assert state(journal.read(0)) == state_after(done)
    tell(journal, done, compact=True)
    journal.close()
    last = engine.leader("three")
    assert last.next_index == len(story())
    assert state(last.read(0)) == state_after(len(story()))
    assert last.verdicts(0) == given_in(events_in(len(story())))
    last.close()


@pytest.mark.parametrize("after", [False, True])
def test_a_host_may_die_at_every_commit(tmp_path: Path, after: bool) -> None:
    engine = memory_engine(tmp_path / "whole")
    counting = DyingStore(engine.store())
    tell(engine.leader("whole", counting), compact=True)
    for point in range(counting.commits):
        engine = memory_engine(tmp_path / str(point))
        with pytest.raises(HostDied):
            die(engine, point, after, [events for events, _ in story()])
        check_the_next(engine)


@integration
@pytest.mark.parametrize("kind", ["etcd", "postgres"])
def test_a_host_may_die_at_a_commit_to_a_real_engine(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    url = request.getfixturevalue(kind).url()
    for point, after in ((0, True), (12, False)):
        engine = real_engine(tmp_path / str(point), lambda name: open_store(url, name))
        engine.ttl_s = 1.0
        with pytest.raises(HostDied):
            die(engine, point, after, [events for events, _ in story()])
        check_the_next(engine)


def test_a_large_commit_may_end_anywhere(tmp_path: Path) -> None:
    """Of a transaction in many pieces: it is there whole, or the next host's is."""
    reasons = [MemberLost(peer=entry(1).peer, reason=f"{at} " + "x" * 900) for at in range(3000)]
    for point, after in itertools.product(range(1, 5), (False, True)):
        engine = memory_engine(tmp_path / f"{point}{after}", StoreLimits(2**20, 64))
        with pytest.raises(HostDied):
            die(engine, point, after, [reasons, reasons])
        engine.pass_lease()
        journal = engine.leader("two")
        assert journal.next_index in (0, 1, 2)
        assert journal.read(0) == reasons * journal.next_index
        journal.append(journal.next_index, reasons[:5])
        assert journal.read(0)[-5:] == reasons[:5]


def test_a_commit_whose_answer_is_lost_counts_once(tmp_path: Path) -> None:
    engine = memory_engine(tmp_path)
    store = engine.store()
    assert isinstance(store, MemoryStore)
    journal = engine.leader("one", store)
    tell(journal, 0, 2)
    lost = [0]

    def lose() -> None:
        lost[0] += 1
        if lost[0] == 1:
            raise JournalUnavailable("no answer")

    store.after_commit = lose
    tell(journal, 2, 3)
    assert lost[0] == 1
    assert not journal.trouble
    follower = engine.host("three")
    follower.follow()
    assert state(follower.read(0)) == state_after(3)


def test_an_engine_that_takes_no_writes_is_waited_for_as_long_as_the_lease_is_held(tmp_path: Path) -> None:
    engine = memory_engine(tmp_path)
    store = engine.store()
    assert isinstance(store, MemoryStore)
    journal = engine.leader("one", store)
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        assert "full" in journal.trouble
        if len(pauses) == 3:
            store.trouble = ""

    journal._pause = pause
    store.trouble = "the disk is full"
    tell(journal, 0, 2)
    assert len(pauses) == 3
    assert not journal.trouble

    def wait(seconds: float) -> None:
        engine.pass_lease()

    journal._pause = wait
    store.trouble = "the disk is full"
    with pytest.raises(LeaseLost, match="disk is full"):
        tell(journal, 2, 3)
    store.trouble = ""
    with pytest.raises(LeaseLost):
        tell(journal, 2, 3)


def test_of_another_run_or_host(tmp_path: Path) -> None:
    engine = memory_engine(tmp_path)
    engine.leader().close()
    with pytest.raises(RunFileError, match="other settings"):
        engine.host().begin(SharedRun(bytes(32), "toml", KEY))
    with pytest.raises(IdentityError, match="its keys"):
        engine.host().begin(SharedRun(RUN.hash, "toml", bytes(32)))
    assert engine.leader().open() == THE_RUN  # neither has kept the lease


def test_evidence_is_kept_in_both_places(tmp_path: Path) -> None:
    engine = memory_engine(tmp_path)
    journal = engine.leader()
    journal.keep_evidence("ab" * 32, b"x" * 2**21)
    assert (journal._folder / f"{'ab' * 32}.evidence").read_bytes() == b"x" * 2**21
    tell(journal)
    assert journal._value(f"evidence/{'ab' * 32}") == b"x" * 2**21


@pytest.mark.parametrize("claimed", [2**10 + 1, 2**32 - 1])
def test_a_value_that_claims_more_pieces_than_any_has_is_refused_at_once(tmp_path: Path, claimed: int) -> None:
    engine = memory_engine(tmp_path)
    journal = engine.leader()
    asked: list[str] = []
    journal._store.scan = lambda first, stop, limit: asked.append(first) or []  # type: ignore
    journal._store.put("about/x", b"")
    with pytest.raises(DamagedRecords, match=f"{claimed} pieces"):
        journal._joined("log/0", claimed.to_bytes(4, "big"))
    assert not asked


def test_pieces_that_are_none_of_ours_are_refused(tmp_path: Path) -> None:
    engine = memory_engine(tmp_path)
    leading, store = engine.leader("one"), engine.store()
    leading.append(0, [MemberLost(peer=entry(1).peer, reason=f"{at} " + "x" * 900) for at in range(600)])
    pieces = sorted(key for key in store.engine.values if key.startswith("more/log"))  # type: ignore[attr-defined]
    assert len(pieces) >= 2
    store.put(pieces[1], b"x" * (2**18 + 1))
    with pytest.raises(DamagedRecords, match="piece"):
        engine.host("two").follow()


@pytest.mark.parametrize("engine", [pytest.param("etcd", marks=matrix)], indirect=True)
def test_revisions_of_others_in_the_cluster_are_kept(engine: SharedEngine, etcd: EtcdCluster) -> None:
    """A compaction of etcd is one of the whole cluster."""
    stranger = open_store(etcd.url("stranger"), "theirs")
    stranger.open()
    leading = engine.leader("one")
    store = leading._store
    assert isinstance(store, EtcdStore)

    def oldest_is_kept(revision: int) -> bool:
        key = _encode(b"shoal/any")
        with suppress(UserError, JournalUnavailable):
            return bool(store._call("kv/range", {"key": key, "revision": str(revision)}))
        return False

    stranger.put("about/x", b"x")
    tell(leading, 0, 4)
    revision = store._revision - 1
    store.compact()
    assert oldest_is_kept(revision)
    stranger._call("kv/deleterange", {"key": _encode(b"stranger/theirs/about/x")})  # type: ignore[attr-defined]
    store.compact()
    assert not oldest_is_kept(revision)
    tell(leading, 4)
    leading.close()
    assert engine.leader("two").next_index == len(story())
    stranger.close()


@pytest.mark.parametrize("engine", [pytest.param("etcd", marks=matrix)], indirect=True)
@pytest.mark.parametrize("at", range(3))
def test_a_member_of_etcd_that_hangs_costs_nobody_the_lease(engine: SharedEngine, etcd: EtcdCluster, at: int) -> None:
    engine.ttl_s = 4.0
    leading = engine.leader("one")
    store = leading._store
    assert isinstance(store, EtcdStore)
    store._at = at
    etcd.signal(at, signal.SIGSTOP)
    try:
        for _ in range(12):
            leading.renew()
            time.sleep(0.5)
        tell(leading, 0, 2)
    finally:
        etcd.signal(at, signal.SIGCONT)
    assert store._at != at


@pytest.mark.integration
@pytest.mark.matrix
def test_a_host_that_stops_in_a_commit_to_postgres_keeps_no_row_locked(
    tmp_path: Path, postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connection lives on, as the system holds it, or a router: the server ends it, and another host leads."""
    monkeypatch.setattr(postgres_store, "_ANSWER_S", 1.0)
    engine = real_engine(tmp_path, lambda name: open_store(postgres.url(), name))
    engine.ttl_s = 1.0
    leading = engine.leader("one")
    store = leading._store
    assert isinstance(store, PostgresStore)
    goes_on, has_locked = threading.Event(), threading.Event()

    def stop(connection: Any) -> None:
        connection.execute("select head from shoal_lease where run = %s for update", (store._run,))
        has_locked.set()
        goes_on.wait(60)

    with ThreadPoolExecutor(1) as thread:
        stopped = thread.submit(store._main.run, stop)
        try:
            assert has_locked.wait(10)
            began_s = time.monotonic()
            follower = engine.host("two")
            while time.monotonic() < began_s + 15:
                with suppress(JournalUnavailable):
                    if follower.begin(engine.run) is not None:
                        break
            assert time.monotonic() - began_s < 10
            tell(follower, 0, 2)
        finally:
            goes_on.set()
        with pytest.raises(JournalUnavailable):
            stopped.result()
    with pytest.raises(LeaseLost):
        tell(leading, 0, 1)


# URLs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        *("etcd://", "etcd://host:0/x", "etcd://a,b/x?ca=/y", "etcd://a/../?x=1", "redis://a", "x", "etcd://a/x y"),
        "etcds://a/x?ca=/nowhere",
        "postgres://a:b:c@[/x",
    ],
)
def test_urls_that_are_none(url: str) -> None:
    with pytest.raises(UserError):
        open_store(url, "run")


@pytest.mark.parametrize("url", ["etcd://root:geheim@a:1,b/some/prefix", "postgres://me:geheim@a:1,b:2/base"])
def test_a_place_is_shown_without_its_password(url: str) -> None:
    store = open_store(url, "run")
    assert "geheim" not in store.location + repr(store) + repr(vars(store).get("_place", ""))
    assert "a:1" in store.location


@pytest.mark.parametrize("password", ["geheim%zz", "a@geheim", "a/geheim", "a w=geheim"])
def test_a_password_in_a_wrong_url_is_not_repeated(password: str) -> None:
    with pytest.raises(UserError) as found:
        open_store(f"postgres://me:{password}@a/base", "run")
    assert "geheim" not in str(found.value)


def test_a_journal_may_be_compacted_while_a_follower_reads_a_long_value(tmp_path: Path) -> None:
    engine = memory_engine(tmp_path)
    leading, store = engine.leader("one"), engine.store()
    follower = engine.host("two", store)
    read_value, told = store.scan, story()
    long = [MemberLost(peer=entry(1).peer, reason=f"{at} " + "x" * 900) for at in range(600)]
    at, snapshot = next((at, found) for at, (_, found) in enumerate(told) if found is not None)
    tell(leading, 0, at + 1)
    leading.append(at + 1, long)

    def scan(first: str, stop: str, limit: int) -> list[tuple[str, bytes]]:
        if first.startswith("more/log"):
            leading.compact(snapshot)
        return read_value(first, stop, limit)

    store.scan = scan  # type: ignore[method-assign]
    assert follower.follow()
    assert follower.next_index == at + 2
    assert follower.read(0) == [snapshot]


class _AnswersAnything(BaseHTTPRequestHandler):
    """What is at an address instead of etcd, as a proxy is: all is well."""

    def do_POST(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"OK")

    def log_message(self, *_: Any) -> None:
        pass


def test_what_is_no_etcd_is_no_empty_journal() -> None:
    with HTTPServer(("127.0.0.1", 0), _AnswersAnything) as server:
        serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        serving.start()
        try:
            store = open_store(f"etcd://127.0.0.1:{server.server_port}/shoal", "run")
            with pytest.raises(JournalUnavailable, match="etcd does not answer"):
                store.open()
            store.close()
        finally:
            server.shutdown()
            serving.join()


def test_an_engine_that_is_not_there(tmp_path: Path) -> None:
    for url in ("etcd://user:geheim@127.0.0.1:9,127.0.0.1:10/x", "postgres://user:geheim@127.0.0.1:9/x"):
        with pytest.raises(JournalUnavailable) as found:
            open_store(url, "run").open()
        assert "geheim" not in str(found.value)
