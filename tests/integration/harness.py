"""A host and members as real processes on loopback: started, watched by their JSON events, killed, cleaned up.

Nothing here sleeps for a fixed time: tests wait for an event, a line or an exit, each with a deadline.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar

from tests.integration.audit import Audit, Parity
from tests.integration.followed_journal import FollowedJournal
from tests.integration.forked import Forked, can_fork

from shoal.swarm.coordinator.events import JournalEvent, VerdictGiven
from shoal.swarm.protocol.identity import Identity
from shoal.swarm.protocol.invite import Invite
from shoal.swarm.protocol.run_file import load_run_file
from shoal.swarm.protocol.types import Address

HERE = Path(__file__).parent
SHOAL = (sys.executable, "-m", "shoal.peer")
FRESH = ("env", *SHOAL)
"""``shoal`` as people start it; processes of other commands are forked from one that has imported everything."""

CALM = (sys.executable, str(HERE / "slow_member.py"), "0.02")
"""``shoal`` that rests between steps, to leave the cores to the processes that are starting."""

DOOMED_MEMBER = (sys.executable, str(HERE / "doomed_member.py"))
DOOMED_HOST = (sys.executable, str(HERE / "doomed_host.py"))
LOOPBACK = "127.0.0.1:0"
SLOW_DISK_HOST = (sys.executable, str(HERE / "slow_disk_host.py"))

START_S = 90.0
"""For a process to come up. This and the next two are far longer than it takes: only what is broken comes near them."""

ROUNDS_S = 150.0
"""For a few rounds."""

LEAVE_S = 60.0
"""For a process to end that was asked to."""

KILLED = -signal.SIGKILL
STOPPED_AT_ONCE = 130

_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_PR_SET_PDEATHSIG = 1

Event = dict[str, Any]
T = TypeVar("T")


def run_toml(
    *,
    name: str = "reef",
    rounds: int | None = None,
    tokens: int = 10**12,
    max_s: float = 2.0,
    patience_s: float = 4.0,
    algorithm: str = "diloco",
    codec: str = "int8",
    source: str = "stdlib",
    width: int = 32,
    outer: str = "",
    overlap: bool = False,
) -> str:
    """Run file of a tiny gpt, about 20,000 parameters. A round ends after ``max_s``, however fast the machine."""
    ends = f"rounds = {rounds}" if rounds else ""
    return f"""
algorithm = "{algorithm}"
averaging.codec = "{codec}"
averaging.overlap = {str(overlap).lower()}
[run]
name = "{name}"
seed = 1
{ends}
[recipe]
name = "gpt"
[recipe.settings]
layers = 1
heads = 2
width = {width}
context = 32
[data]
source = "{source}"
[inner]
lr = 2e-3
batch_samples = 4
precision = "float32"
[outer]
{outer}
[round]
tokens = {tokens}
max_s = {max_s}
patience_s = {patience_s}
"""


def held(gate: Path, rest_s: float = 0.02) -> Sequence[str]:
    """``CALM`` members that make no step while there is a file at ``gate``: with it a test lets several begin together,
    however long each of them takes to start."""
    return (sys.executable, str(HERE / "held_member.py"), str(gate), str(rest_s))


def eventually(what: str, look: Callable[[], T | None], within_s: float, about: Callable[[], str] = lambda: "") -> T:
    """Wait for a result that is not None or False, and return it; fail with ``what`` after ``within_s``."""
    deadline_s = time.monotonic() + within_s
    while True:
        found = look()
        if found is not None and found is not False:
            return found
        if time.monotonic() > deadline_s:
            raise AssertionError(f"not within {within_s:.0f} s: {what}\n{about()}")
        time.sleep(0.02)


def end_with_parent() -> None:
    """Have Linux kill this process when pytest is killed. The fixture cleans up in all other cases."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Spawned(Protocol):
    """The part of ``subprocess.Popen`` that tests use."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> Any: ...

    def poll(self) -> int | None: ...

    def wait(self) -> int | None: ...


class Process:
    """One process with its log and, if it writes any, its events. ``start`` starts the same command anew."""

    def __init__(self, label: str, command: Sequence[str], log: Path, events: Path | None, cwd: Path) -> None:
        self.label = label
        self.command = list(command)
        self.log = log
        self._events = events
        self._cwd = cwd
        self._popen: Spawned
        self._events_before = self._log_before = self._events_read_bytes = 0
        self._all_events: list[Event] = []
        self.start()

    def start(self) -> None:
        """Start the command. What was written before is left out from now on, except by ``all_events``."""
        self._events_before = len(self.all_events())
        self._log_before = self.log.stat().st_size if self.log.exists() else 0
        self._popen = self._spawn()

    def _spawn(self) -> Spawned:
        if can_fork(self.command):
            return Forked(self.command, self.log, self._cwd)
        with self.log.open("ab") as log:
            return subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self._cwd,
                process_group=0,  # a Ctrl-C in the terminal is for pytest
                preexec_fn=end_with_parent,
            )

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def running(self) -> bool:
        return self._popen.poll() is None

    def send(self, number: signal.Signals) -> None:
        """Send a signal; nothing happens to a process that has ended."""
        if self.running:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def interrupt(self) -> None:
        self.send(signal.SIGINT)

    def kill(self) -> None:
        """Send SIGKILL, and return when the process is gone."""
        self.send(signal.SIGKILL)
        self._popen.wait()

    def exit_code(self, within_s: float) -> int:
        """Wait for the process to end; return its exit code."""
        eventually(f"{self.label} ends", lambda: not self.running, within_s, self.tail)
        code = self._popen.returncode
        assert isinstance(code, int)
        return code

    # What it said -------------------------------------------------------------------------------------------

    def text(self) -> str:
        """Return the log of this start."""
        return self.log.read_bytes()[self._log_before :].decode(errors="replace")

    def tail(self, lines: int = 25) -> str:
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        state = "runs" if self.running else f"ended with {self._popen.returncode}"
        return f"--- {self.label} (pid {self.pid}, {state})\n" + "\n".join(text.splitlines()[-lines:])

    def all_events(self) -> list[Event]:
        """Return the events of all starts, oldest first. A line that is being written is left for later."""
        if self._events is not None and self._events.exists():
            with self._events.open("rb") as file:
                file.seek(self._events_read_bytes)
                whole, newline, _ = file.read().rpartition(b"\n")
            self._events_read_bytes += len(whole) + len(newline)
            lines = [line for line in whole.splitlines() if line.startswith(b"{") and line.endswith(b"}")]
            self._all_events += [json.loads(line) for line in lines]
        return self._all_events

    def events(self, kind: str, **fields: Any) -> list[Event]:
        """Return the events of this start with these values."""
        mine = self.all_events()[self._events_before :]
        return [one for one in mine if one["event"] == kind and all(one[key] == fields[key] for key in fields)]

    def event(self, kind: str, within_s: float = ROUNDS_S, **fields: Any) -> Event:
        """Wait for the first such event; fail at once when the process has ended without it."""

        def look() -> Event | None:
            ended = not self.running
            found = self.events(kind, **fields)
            if not found and ended:
                raise AssertionError(f"{self.label} ended without {kind} {fields}\n{self.tail()}")
            return found[0] if found else None

        return eventually(f"{self.label}: {kind} {fields}", look, within_s, self.tail)

    def says(self, words: str, within_s: float = ROUNDS_S) -> None:
        """Wait for words in the log of this start; fail at once when the process has ended without them."""

        def look() -> bool:
            ended = not self.running
            said = words in self.text()
            assert said or not ended, f"{self.label} ended without saying {words!r}\n{self.tail()}"
            return said

        eventually(f"{self.label} says {words!r}", look, within_s, self.tail)


class Host(Process):
    """A ``shoal host``; ``invite`` is read from its file."""

    def __init__(self, label: str, command: Sequence[str], folder: Path, run_file: Path) -> None:
        self.run_file = run_file
        self.state = folder / "state" / load_run_file(run_file)[1].run.name
        self._journal_events: list[JournalEvent] = []
        self._journal = FollowedJournal(self.state)
        super().__init__(label, command, folder / "log.txt", folder / "events.jsonl", folder)

    def start(self) -> None:
        super().start()
        self.says("Invite  (", START_S)
        self.invite = (self.state / "invite.txt").read_text().strip()

    def journal_events(self) -> list[JournalEvent]:
        """Return the run's journal events, as far as they were read before the journal was compacted twice."""
        self._journal_events += self._journal.take()
        return self._journal_events

    def stop(self) -> None:
        """Stop the host with Ctrl-C; its exit code must be 0."""
        self.interrupt()
        assert self.exit_code(LEAVE_S) == 0, self.tail()


class Member(Process):
    """A ``shoal join``; its identity and state stay through restarts."""

    def __init__(self, label: str, command: Sequence[str], folder: Path, cwd: Path) -> None:
        super().__init__(label, command, folder / "log.txt", folder / "events.jsonl", cwd)
        self.folder = folder

    @property
    def peer(self) -> str:
        return str(self.event("joined", START_S)["peer"])

    def committed(self, after: int = -1, within_s: float = ROUNDS_S) -> Event:
        """Wait for the first round after ``after`` that was committed with this member's work."""

        def look() -> Event | None:
            found = [one for one in self.events("committed", included=True) if one["round"] > after]
            if not found and not self.running:
                raise AssertionError(f"{self.label} ended before a round after {after}\n{self.tail()}")
            return found[0] if found else None

        return eventually(f"{self.label} commits a round after {after}", look, within_s, self.tail)

    def last_round(self) -> int:
        """Return the newest round whose end the member has logged; -1 before the first."""
        return max((one["round"] for kind in ("committed", "aborted") for one in self.events(kind)), default=-1)

    def leave(self) -> Event:
        """Stop the member with Ctrl-C; its exit code must be 0. Returns its ``left`` event."""
        self.interrupt()
        return self.has_left()

    def has_left(self) -> Event:
        assert self.exit_code(LEAVE_S) == 0, self.tail()
        return self.events("left")[-1]


class Swarm:
    """All processes of one test; ``close`` ends them. ``data``: the folder that members name for the run, and
    agree to; None for runs that read no files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[Process] = []
        self.data: Path | None = None

    def run_file(self, text: str) -> Path:
        path = self.folder / "run.toml"
        path.write_text(text)
        return path

    def host(
        self,
        toml: str,
        label: str = "host",
        launcher: Sequence[str] = SHOAL,
        bind: str = LOOPBACK,
        extra: Sequence[str] = (),
        pins: bool = False,
        supervised: bool = False,
    ) -> Host:
        """Start a host, and return when its invite is there. ``pins``: it builds the model first, which takes seconds
        of processor time. ``supervised``: as people have it; otherwise its process is the coordinator's own, which
        tests stop, kill and start quickly."""
        folder = self._folder(label)
        path = folder / "run.toml"
        path.write_text(toml)
        options = ["--bind", bind, "--state", str(folder / "state")]
        alone = [] if supervised else ["--no-supervisor"]
        alone += [] if pins else ["--no-pins"]
        # Its fetch takes seconds of processor time; tests of it say --keep-model.
        alone += [] if "--keep-model" in extra else ["--no-keep-model"]
        command = [*launcher, "host", str(path), *options, "--log-json", str(folder / "events.jsonl"), *alone, *extra]
        return self._add(Host(label, command, folder, path))

    def member(
        self,
        invite: str,
        label: str,
        launcher: Sequence[str] = CALM,
        identity: Path | None = None,
        cwd: Path | None = None,
        extra: Sequence[str] = (),
        kind: type[Member] = Member,
        data: Path | None = None,
        device: str = "cpu",
    ) -> Member:
        """Start a member, and return at once. ``launcher`` takes ``shoal``'s arguments after its own; ``extra``: more.
        ``data``: for this member only."""
        folder = self._folder(label)
        identity = identity or folder / "identity"
        options = ["--identity", str(identity), "--state", str(folder / "state"), "--name", label]
        more = ["--bind", LOOPBACK, "--threads", "1", "--device", device, "--log-json", str(folder / "events.jsonl")]
        named = data or self.data
        if named is not None:
            more += ["--data", str(named), "--accept", Invite.parse(invite).run_hash.hex()]
        return self._add(kind(label, [*launcher, "join", invite, *options, *more, *extra], folder, cwd or folder))

    def members(self, invite: str, *labels: str, launcher: Sequence[str] = CALM) -> list[Member]:
        return [self.member(invite, label, launcher) for label in labels]

    def command(self, label: str, *command: str, cwd: Path | None = None) -> Process:
        """Start any other command, such as ``shoal status``."""
        folder = self._folder(label)
        return self._add(Process(label, command, folder / "log.txt", None, cwd or folder))

    def identity(self, label: str) -> tuple[Path, str]:
        """Make an identity file; return its path and peer id."""
        path = self._folder(label) / "identity"
        return path, Identity.load_or_create(path).peer_id

    def tails(self) -> str:
        return "\n".join(process.tail() for process in self.processes)

    def close(self) -> None:
        for process in self.processes:
            process.send(signal.SIGKILL)
        for process in self.processes:
            process.kill()

    def _folder(self, label: str) -> Path:
        folder = self.folder / label
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _add(self, process: ProcessT) -> ProcessT:
        self.processes.append(process)
        return process


ProcessT = TypeVar("ProcessT", bound=Process)


# What must hold at the end of every test --------------------------------------------------------------------


def check_parity(host: Host, members: Iterable[Member]) -> dict[int, str]:
    """Check that all have the same digest of each anchor version, and the same verdict on each round.

    Returns the digests by version."""
    parity = Parity()
    for member in members:
        parity.take_events(member.all_events())
    parity.take_journal_events(host.journal_events())
    return parity.check()


def check_journal(host: Host) -> list[VerdictGiven]:
    """Check the journal as ``Audit`` does. Returns the verdicts."""
    _, run = load_run_file(host.run_file)
    audit = Audit(run)
    audit.take(host.journal_events())
    return audit.verdicts


def finish(host: Host, members: Sequence[Member]) -> list[VerdictGiven]:
    """Stop all with Ctrl-C, and check parity and journal. Returns the verdicts."""
    for member in members:
        member.interrupt()
    for member in members:
        member.has_left()
    host.stop()
    check_parity(host, members)
    return check_journal(host)


def invite_with(invite: str, **changes: Any) -> str:
    """Return the invite with other parts: ``host``, ``port``, ``addresses``, ``run``, ``key``, ``run_hash``,
    ``token``."""
    parts = Invite.parse(invite)
    address, *others = parts.addresses
    first = Address(host=changes.pop("host", address.host), control_port=changes.pop("port", address.control_port))
    same = {"addresses": (first, *others), "run": parts.run, "key": parts.key, "run_hash": parts.run_hash}
    same |= {"token": parts.token}
    return str(Invite(**same | changes))
