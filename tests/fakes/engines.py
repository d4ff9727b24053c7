"""Real engines of shared journals as child processes: an etcd cluster of three, and a Postgres server."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

ETCD = shutil.which("etcd")


def free_ports(number: int) -> list[int]:
    """Ports of loopback that were free a moment ago."""
    sockets = [socket.socket() for _ in range(number)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(0.2)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _until(ports: Sequence[int], processes: Sequence[subprocess.Popen[bytes]], log: Path, within_s: float = 20) -> None:
    give_up_s = time.monotonic() + within_s
    while not all(map(_answers, ports)):
        dead = [one for one in processes if one.poll() is not None]
        assert not dead, log.read_text(errors="replace")[-2000:]
        assert time.monotonic() < give_up_s, log.read_text(errors="replace")[-2000:]
        time.sleep(0.05)


class EtcdCluster:
    """Members of a cluster; ``signal`` and ``restart`` one of them by its number."""

    def __init__(
        self,
        folder: Path,
        members: int = 3,
        extra: Sequence[str] = (),
        apart: Sequence[tuple[str, Sequence[str]]] = (),
        client_scheme: str = "http",
    ) -> None:
        """``apart``: of each member that has a machine of its own the address, and the words before its command.
        ``client_scheme``: ``https`` for clients by TLS, with the files named in ``extra``."""
        assert ETCD is not None
        ports = free_ports(2 * members)
        self.ports, peers = ports[:members], ports[members:]
        hosts = [address for address, _ in apart] or ["127.0.0.1"] * members
        before = [words for _, words in apart] or [()] * members
        cluster = ",".join(f"m{at}=http://{hosts[at]}:{port}" for at, port in enumerate(peers))
        self._places = [f"{host}:{port}" for host, port in zip(hosts, self.ports, strict=True)]
        self._log = folder / "etcd.log"
        self._commands = [
            [
                *(*before[at], ETCD, "--name", f"m{at}", "--data-dir", str(folder / f"m{at}")),
                *("--listen-client-urls", f"{client_scheme}://{hosts[at]}:{self.ports[at]}"),
                *("--advertise-client-urls", f"{client_scheme}://{hosts[at]}:{self.ports[at]}"),
                *("--listen-peer-urls", f"http://{hosts[at]}:{peers[at]}"),
                *("--initial-advertise-peer-urls", f"http://{hosts[at]}:{peers[at]}"),
                *("--initial-cluster", cluster, "--log-level", "error"),
                *("--heartbeat-interval", "50", "--election-timeout", "500"),
                "--pre-vote",
                *extra,
            ]
            for at in range(members)
        ]
        self.processes: list[subprocess.Popen[bytes]] = []
        for at in range(members):
            self.processes.append(self._start(at))
        if not apart:  # from elsewhere nobody sees those
            _until(self.ports, self.processes, self._log)

    def _start(self, at: int) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            return subprocess.Popen(self._commands[at], stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    def url(self, prefix: str = "shoal") -> str:
        return f"etcd://{','.join(self._places)}/{prefix}"

    def signal(self, at: int, number: signal.Signals) -> None:
        self.processes[at].send_signal(number)
        if number == signal.SIGKILL:
            self.processes[at].wait()

    def restart(self, at: int) -> None:
        self.processes[at] = self._start(at)
        _until([self.ports[at]], [self.processes[at]], self._log)

    def close(self) -> None:
        for one in self.processes:
            with suppress(ProcessLookupError):
                one.kill()
            one.wait()


_READY = b"database system is ready to accept connections"


class PostgresServer:
    """A server of its own, which only this machine reaches."""

    def __init__(self, folder: Path, programs: Path) -> None:
        self._programs, self._data = programs, folder / "data"
        self._as = _ordinary_user()
        folder.mkdir(parents=True, exist_ok=True)
        if self._as:
            for parent in [folder, *folder.parents][:4]:  # pytest keeps its folders to their owner
                with suppress(OSError):
                    parent.chmod(parent.stat().st_mode | 0o055)
            os.chown(folder, *self._as)
        (self.port,) = free_ports(1)
        self._run("initdb", "-D", str(self._data), "-U", "shoal", "--auth=trust", "--no-sync", "--no-instructions")
        self._log = folder / "log.txt"
        self._folder = folder
        self.process = self._start()

    def _user(self) -> dict[str, int]:
        return {"user": self._as[0], "group": self._as[1]} if self._as else {}

    def _run(self, program: str, *arguments: str) -> None:
        command = [str(self._programs / program), *arguments]
        done = subprocess.run(command, capture_output=True, check=False, cwd="/", **self._user())  # type: ignore[call-overload]
        assert not done.returncode, done.stderr.decode()

    def _start(self) -> subprocess.Popen[bytes]:
        options = ["-c", "listen_addresses=127.0.0.1", "-p", str(self.port), "-k", str(self._folder)]
        command = [str(self._programs / "postgres"), "-D", str(self._data), *options]
        with self._log.open("ab") as log:
            before = log.tell()
            process = subprocess.Popen(command, stdout=log, stderr=log, cwd="/", **self._user())  # type: ignore[call-overload]
        _until([self.port], [process], self._log)
        while _READY not in self._log.read_bytes()[before:]:  # until then it answers that it is starting up
            assert process.poll() is None, self._log.read_text(errors="replace")
            time.sleep(0.05)
        return process  # type: ignore[no-any-return]

    def url(self) -> str:
        return f"postgres://shoal@127.0.0.1:{self.port}/postgres"

    def kill(self) -> None:
        """End it at once, with all its processes, as a loss of power does."""
        self.process.send_signal(signal.SIGQUIT)
        self.process.wait()

    def restart(self) -> None:
        self.process = self._start()

    def stand_still(self, still: bool) -> None:
        """Stop all its processes, or let them go on."""
        number = signal.SIGSTOP if still else signal.SIGCONT
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        for pid in [self.process.pid, *map(int, children)]:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def close(self) -> None:
        if self.process.poll() is None:
            self.stand_still(False)
            self.kill()


def _ordinary_user() -> tuple[int, int] | None:
    """User and group to be where this process is root, as which Postgres does not run."""
    if os.getuid():
        return None
    import pwd

    for name in ("postgres", "nobody"):
        with suppress(KeyError):
            found = pwd.getpwnam(name)
            return found.pw_uid, found.pw_gid
    pytest.skip("Postgres does not run as root, and there is no user to be instead")


def postgres_programs() -> Path | None:
    """The folder of the newest server that Debian's package or the path has."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[4]))
    named = shutil.which("initdb")
    return found[-1].parent if found else Path(named).parent if named else None


@contextmanager
def etcd_cluster(folder: Path, members: int = 3, extra: Sequence[str] = ()) -> Iterator[EtcdCluster]:
    """A running cluster; skips where there is no etcd."""
    if ETCD is None:
        pytest.skip("no etcd here: apt-get install etcd-server")
    folder.mkdir(parents=True, exist_ok=True)
    cluster = EtcdCluster(folder, members, extra)
    try:
        yield cluster
    finally:
        cluster.close()


@contextmanager
def postgres_server(folder: Path) -> Iterator[PostgresServer]:
    """A running server; skips where there is none to run."""
    programs = postgres_programs()
    if programs is None:
        pytest.skip("no Postgres server here: apt-get install postgresql")
    server = PostgresServer(folder, programs)
    try:
        yield server
    finally:
        server.close()
