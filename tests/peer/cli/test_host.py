"""Whose keys a host uses, and what it leaves in its folder and in the backup."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.fakes.journals import leased
from tests.swarm.coordinator.stories import RUN, story
from tests.swarm.coordinator.world import SIGNER

from shoal.peer.cli.host import Hosting, HostOptions, _follow_admission, check_keys, host, host_identity, say_reach
from shoal.peer.cli.supervisor import Restarts
from shoal.swarm.aio import Changes
from shoal.swarm.coordinator.local_journal import JOURNAL, Backup, LocalJournal
from shoal.swarm.coordinator.service import CoordinatorService
from shoal.swarm.errors import DamagedRecords, FolderInUse, HostCrashed, IdentityError, StorageError, UserError
from shoal.swarm.protocol.identity import Identity
from shoal.swarm.protocol.run_file import load_run_file, parse_run_file
from shoal.swarm.protocol.types import Address

RUN_HASH = b"r" * 32


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state" / "reef"


def test_a_new_run_gets_keys_of_its_own(state: Path) -> None:
    identity, pem = host_identity(None, state)
    assert (state / "identity").read_bytes() == pem
    assert (state / "identity").stat().st_mode & 0o777 == 0o600
    assert host_identity(None, state)[0].peer_id == identity.peer_id
    assert host_identity(None, state.with_name("other"))[0].peer_id != identity.peer_id


def test_nobody_else_can_go_on_with_a_journal(state: Path) -> None:
    leased(state, RUN_HASH, "toml").close()
    with pytest.raises(IdentityError, match="restore it from the backup"):
        host_identity(None, state)
    assert not (state / "identity").exists()


def test_a_file_that_is_named_is_used(state: Path, tmp_path: Path) -> None:
    given = Identity.load_or_create(tmp_path / "keys")
    host_identity(None, state)
    identity, pem = host_identity(tmp_path / "keys", state)
    assert identity.peer_id == given.peer_id
    assert pem == (tmp_path / "keys").read_bytes()


@pytest.mark.parametrize("rounds", [0, 1, 4])
def test_only_the_keys_that_signed_the_verdicts_go_on_with_them(state: Path, rounds: int) -> None:
    journal = leased(state, RUN.hash, "toml")
    for events, _ in story():
        if journal.rounds < rounds:
            journal.append(journal.next_index, events)
    assert journal.rounds == rounds
    check_keys(SIGNER, journal, state / "identity")
    if rounds:
        with pytest.raises(IdentityError, match="restore it from the backup"):
            check_keys(Identity.generate(), journal, state / "identity")
    journal.close()


def test_wrong_keys_change_nothing_in_the_backup(state: Path, tmp_path: Path) -> None:
    toml = tmp_path / "tiny.toml"
    toml.write_text('[run]\nname = "reef"\n[recipe]\nname = "own"\n[round]\ntokens = 9\n')
    text, run = load_run_file(toml)
    backup = Backup(tmp_path / "backup" / "reef")
    backup.keep("identity", b"the right keys", 0o600)
    journal = leased(state, run.hash, text, backup)
    for events, _ in story():
        journal.append(journal.next_index, events)
    journal.close()
    options = HostOptions(tmp_path / "other", tmp_path / "state", ("127.0.0.1", 0), backup=tmp_path / "backup")

    def started(_: Hosting) -> None:
        raise AssertionError("it has begun")

    with pytest.raises(IdentityError, match="other has not the keys"):
        asyncio.run(host([toml], options, started, lambda _: None))
    assert (tmp_path / "backup" / "reef" / "identity").read_bytes() == b"the right keys"
    leased(state, run.hash, text).close()


def test_a_backup_in_the_same_place_is_none(state: Path, tmp_path: Path) -> None:
    run = tmp_path / "run.toml"
    run.write_text('[run]\nname = "reef"\n[recipe]\nname = "own"\n[round]\ntokens = 1\n')
    options = HostOptions(None, state.parent, backup=tmp_path / "." / "state")
    with pytest.raises(UserError, match="another disk"):
        asyncio.run(host([run], options, lambda _: None, lambda _: None))
    assert not state.exists()


def test_several_runs_do_not_share_the_file_of_a_card(state: Path, tmp_path: Path) -> None:
    runs = [tmp_path / "reef.toml", tmp_path / "kelp.toml"]
    for one in runs:
        one.write_text(f'[run]\nname = "{one.stem}"\n[recipe]\nname = "own"\n[round]\ntokens = 1\n')
    options = HostOptions(None, state.parent, publish=str(tmp_path / "card.json"))

    def started(hosting: Hosting) -> None:
        raise AssertionError("it has begun")

    with pytest.raises(UserError, match="name a folder"):
        asyncio.run(host(runs, options, started, lambda _: None))


class SeveralRuns:
    """A host of several runs in this process, with what it logs; the journals' leases are counted."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
        self.folder, self._caplog = folder, caplog
        self.files: list[Path] = []
        self.keep_model = False
        self.leases: Counter[str] = Counter()
        self.faults: dict[str, list[Exception]] = {}
        lease = LocalJournal.lease

        def counted(journal: LocalJournal) -> int:
            name = Path(journal.location).name
            self.leases[name] += 1
            if self.faults.get(name):
                raise self.faults[name].pop()
            return lease(journal)

        monkeypatch.setattr(LocalJournal, "lease", counted)
        monkeypatch.setattr("shoal.peer.cli.host.Restarts", lambda: Restarts(most=3, first_pause_s=0.001))

    def add(self, name: str, text: str = "") -> Path:
        path = self.folder / f"{name}.toml"
        path.write_text(text or f'[run]\nname = "{name}"\n[recipe]\nname = "own"\n[round]\ntokens = 1\n')
        self.files.append(path)
        return path

    def said(self, *words: str) -> list[str]:
        lines = [one.getMessage() for one in self._caplog.records]
        return [line for line in lines if all(word in line for word in words)]

    async def serve(self, started: int, until: Callable[[], bool] = lambda: True) -> None:
        """Host until so many runs were announced, and ``until`` holds. Raises what ends the host before."""
        names: list[str] = []
        changes, loop = Changes(), asyncio.get_running_loop()

        class Listener(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                loop.call_soon_threadsafe(changes.announce)

        def announced(one: Hosting) -> None:
            names.append(one.invite.run)
            changes.announce()

        listener = Listener()
        logging.getLogger().addHandler(listener)
        try:
            place = self.folder / "state"
            options = HostOptions(None, place, ("127.0.0.1", 0), relay=False, keep_model=self.keep_model)
            hosting = asyncio.create_task(host(self.files, options, announced, lambda _: None))
            hosting.add_done_callback(lambda _: changes.announce())
            async with asyncio.timeout(30):
                await changes.until(lambda: hosting.done() or (len(names) >= started and until()))
            if hosting.done():
                await hosting
            hosting.cancel()
            await asyncio.gather(hosting, return_exceptions=True)
        finally:
            logging.getLogger().removeHandler(listener)


@pytest.fixture
def several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> SeveralRuns:
    return SeveralRuns(tmp_path, monkeypatch, caplog)


def damage_journal(runs: SeveralRuns) -> str:
    asyncio.run(runs.serve(2))
    path = runs.folder / "state" / "reef" / JOURNAL
    data = bytearray(path.read_bytes())
    data[100] ^= 0xFF  # in the head; a damaged end would be repaired
    path.write_bytes(bytes(data))
    return f"the run reef cannot go on: {path}"


def change_settings(runs: SeveralRuns) -> str:
    asyncio.run(runs.serve(2))
    runs.files[0].write_text(runs.files[0].read_text().replace("tokens = 1", "tokens = 2"))
    return "other settings"


def lose_the_keys(runs: SeveralRuns) -> str:
    asyncio.run(runs.serve(2))
    (runs.folder / "state" / "reef" / "identity").unlink()
    return "identity is missing"


def spoil_the_file(runs: SeveralRuns) -> str:
    runs.files[0].write_text("[run\n")
    return "reef.toml"


@pytest.mark.parametrize("fault", [damage_journal, change_settings, lose_the_keys, spoil_the_file])
def test_a_fault_that_does_not_pass_is_said_once_and_others_are_served(
    several: SeveralRuns, fault: Callable[[SeveralRuns], str]
) -> None:
    for name in ("reef", "kelp"):
        several.add(name)
    words = fault(several)
    several.leases.clear()
    asyncio.run(several.serve(1, lambda: bool(several.said(words))))
    assert len(several.said(words)) == 1
    assert several.leases["reef"] <= 1
    assert several.leases["kelp"] == 1
    assert not several.said("begins again")


def test_a_fault_that_passes_is_tried_again(several: SeveralRuns) -> None:
    for name in ("reef", "kelp"):
        several.add(name)
    several.faults["reef"] = [StorageError("the disk is full"), FolderInUse("another one holds it")]
    asyncio.run(several.serve(2))
    assert several.leases == {"reef": 3, "kelp": 1}
    assert len(several.said("the run reef", "begins again")) == 2


def test_a_host_whose_runs_are_all_at_fault_ends(several: SeveralRuns) -> None:
    for name in ("reef", "kelp"):
        several.add(name)
    several.faults = {name: [DamagedRecords("damaged")] for name in ("reef", "kelp")}
    with pytest.raises(HostCrashed):
        asyncio.run(several.serve(1))
    for path in several.files:
        path.write_text("")
    with pytest.raises(HostCrashed, match="none of the run files"):
        asyncio.run(several.serve(1))


def test_members_of_a_run_that_has_ended_stay_from_the_first_answer_on(
    several: SeveralRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    stay: list[bool] = []
    printed_token = CoordinatorService.printed_token

    async def looked_at(service: CoordinatorService) -> bytes:  # what a host waits for first; members are answered
        stay.append(service.scope.wants_last_state)
        return await printed_token(service)

    monkeypatch.setattr(CoordinatorService, "printed_token", looked_at)
    several.add("reef")
    several.keep_model = True
    asyncio.run(several.serve(1))
    assert stay[0]


def test_another_invite_is_printed_when_admission_is_amended() -> None:
    observers: list[Any] = []
    announced: list[Any] = []
    text = '[run]\nname = "reef"\n[recipe]\nname = "own"\n[access]\nadmission = "{}"\n[round]\ntokens = 1\n'
    scope = SimpleNamespace(run=parse_run_file(text.format("open")))
    service = SimpleNamespace(scope=scope, observe=observers.append)

    async def make() -> Any:
        return scope.run.access.admission

    async def main() -> None:
        following = asyncio.create_task(_follow_admission(service, make, announced.append))  # type: ignore[arg-type]
        for admission in ("open", "token", "token", "open"):
            await asyncio.sleep(0)
            scope.run = parse_run_file(text.format(admission))
            observers[0](None)
            for _ in range(5):
                await asyncio.sleep(0)
        following.cancel()

    asyncio.run(main())
    assert announced == ["token", "open"]


@pytest.mark.parametrize(
    ("hosts", "told"),
    [
        (["127.0.0.1"], "127.0.0.1 is known to this machine only"),
        (["192.168.1.5", "127.0.0.1"], "192.168.1.5, 127.0.0.1 is known to machines of this network only"),
        (["192.168.1.5", "host.example.org"], ""),
        (["8.8.8.8"], ""),
    ],
)
def test_an_invite_that_few_can_use_is_warned_of(hosts: list[str], told: str) -> None:
    words = say_reach([Address(host=one, control_port=7707) for one in hosts])
    assert words.startswith(told)
    assert bool(words) == bool(told)


def test_a_relay_lets_everybody_join() -> None:
    relayed = Address(host="192.168.1.9", control_port=443, kind="relayed")
    assert not say_reach([Address(host="192.168.1.5", control_port=7707), relayed])
