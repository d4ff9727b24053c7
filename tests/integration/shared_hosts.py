"""Hosts as real processes that share a run's journal, and what must hold of it at the end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.integration.audit import Audit, Parity
from tests.integration.harness import LOOPBACK, ROUNDS_S, SHOAL, START_S, Member, Process, Swarm, eventually

from shoal.swarm.coordinator.events import JournalEvent, VerdictGiven
from shoal.swarm.coordinator.shared_journal import SharedJournal
from shoal.swarm.coordinator.stores.place import open_store
from shoal.swarm.errors import LeaseLost
from shoal.swarm.protocol.identity import Identity, key_text
from shoal.swarm.protocol.run_file import load_run_file

LEASE_S = 2.0


class SharedHost(Process):
    """A ``shoal host --journal``; ``home``: its machine's folder, with keys of its own."""

    def __init__(
        self,
        swarm: Swarm,
        label: str,
        toml: str,
        url: str,
        keys: Sequence[str],
        extra: Sequence[str],
        launcher: Sequence[str] = SHOAL,
    ) -> None:
        folder = swarm._folder(label)
        self.home = folder / "home"
        self.state = folder / "state"
        self.run_file = folder / "run.toml"
        self.run_file.write_text(toml)
        self.url = url
        self.run_name = load_run_file(self.run_file)[1].run.name
        options = ["--bind", LOOPBACK, "--state", str(self.state), "--no-supervisor", "--no-pins", "--no-relay"]
        named = [word for key in keys for word in ("--standby-key", key)]
        events = folder / "events.jsonl"
        shared = ["--journal", url, "--lease", str(LEASE_S), "--log-json", str(events)]
        command = [
            "env",
            f"SHOAL_HOME={self.home}",
            *launcher,
            "host",
            str(self.run_file),
            *options,
            *shared,
            *named,
            *extra,
        ]
        super().__init__(label, command, folder / "log.txt", events, folder)

    @property
    def machine_key(self) -> str:
        return machine_key(self.home)

    def leads(self, within_s: float = START_S) -> int:
        """Wait until it leads; return its epoch."""
        return int(self.event("leading", within_s)["epoch"])

    def stands_by(self, within_s: float = START_S) -> str:
        """Wait until it follows another host; return that one."""
        return str(self.event("standing_by", within_s)["leader"])

    def invite(self, addresses: int = 1) -> str:
        """Wait for an invite that names so many addresses."""
        path = self.state / self.run_name / "invite.txt"

        def look() -> str | None:
            text = path.read_text().strip() if path.exists() else ""
            return text if text and text.partition("/reef")[0].count(",") >= addresses - 1 else None

        return eventually(f"an invite with {addresses} addresses", look, START_S, self.tail)


def machine_key(home: Path) -> str:
    """The public key of the machine with this folder, as ``shoal identity`` prints it."""
    return key_text(Identity.load_or_create(home / "identity").public_key)


def shared_hosts(
    swarm: Swarm,
    toml: str,
    url: str,
    labels: Sequence[str],
    extra: Sequence[str] = (),
    launcher: Sequence[str] = SHOAL,
    each: Sequence[Sequence[str]] = (),
) -> list[SharedHost]:
    """Start hosts of one run; the first one leads, the others stand by. ``each``: options of each alone."""
    first, *others = labels
    own, *others_own = each or [()] * len(labels)
    keys = [machine_key(swarm._folder(one) / "home") for one in others]
    leading = swarm._add(SharedHost(swarm, first, toml, url, keys, [*extra, *own], launcher))
    leading.leads()
    hosts = [leading]
    for label, options in zip(others, others_own, strict=True):
        hosts.append(swarm._add(SharedHost(swarm, label, toml, url, (), [*extra, *options], launcher)))
    for one in hosts[1:]:
        one.stands_by()
    return hosts


def journal_events(url: str, run: str, folder: Path) -> list[JournalEvent]:
    """Read a journal that was not compacted yet."""
    journal = SharedJournal(open_store(url, run), "test", LEASE_S, folder)
    assert journal.open() is not None
    try:
        journal.follow()
    except LeaseLost as error:
        raise AssertionError from error
    try:
        return journal.read(0)
    finally:
        journal.close()


def check(swarm: Swarm, host: SharedHost, members: Iterable[Member]) -> list[VerdictGiven]:
    """One verdict a round, chains equal everywhere, no sample twice and none lost. Returns the verdicts."""
    events = journal_events(host.url, host.run_name, swarm.folder)
    audit = Audit(load_run_file(host.run_file)[1])
    audit.take(events)
    parity = Parity()
    for member in members:
        parity.take_events(member.all_events())
    parity.take_journal_events(events)
    parity.check()
    return audit.verdicts


def leave(hosts: Sequence[SharedHost], members: Sequence[Member]) -> None:
    """Stop members, then hosts."""
    for member in members:
        member.interrupt()
    for member in members:
        member.has_left()
    for one in hosts:
        if one.running:
            one.interrupt()
            assert one.exit_code(ROUNDS_S) == 0, one.tail()
