"""The array job of ``deploy/slurm`` on a real Slurm of this machine, with two nodes and two peers."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.harness import ROUNDS_S, START_S, Swarm, end_with_parent, eventually, run_toml

from shoal.peer.options import TERMINATED

pytestmark = [pytest.mark.integration, pytest.mark.matrix]

SCRIPT = Path(__file__).resolve().parents[2] / "deploy" / "slurm" / "peers.sbatch"
DAEMONS = ("munged", "slurmctld", "slurmd", "sbatch")

CONFIGURATION = """
ClusterName=reef
SlurmctldHost={host}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldPort={ports[0]}
SlurmdParameters=config_overrides
MpiDefault=none
KillWait=30
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


class Cluster:
    """A Slurm of one machine, whose daemons are processes of this test; ``environment``: for its commands."""

    def __init__(self, folder: Path) -> None:
        folder.chmod(0o755)
        for name in ("state", "spool.n1", "spool.n2", "bin", "home"):
            (folder / name).mkdir()
        (folder / "munge.key").write_bytes(os.urandom(1024))
        (folder / "munge.key").chmod(0o600)
        shoal = folder / "bin" / "shoal"
        shoal.write_text(f'#!/bin/sh\nexec {sys.executable} -m shoal.peer "$@"\n')
        shoal.chmod(0o755)
        configuration = folder / "slurm.conf"
        host = socket.gethostname().partition(".")[0]
        configuration.write_text(CONFIGURATION.format(host=host, folder=folder, ports=free_ports(3)))
        self._folder = folder
        self.environment = os.environ | {
            "SLURM_CONF": str(configuration),
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "HOME": str(folder / "home"),
        }
        self.environment.pop("SHOAL_HOME", None)
        places = [f"--{what}-file={folder}/munge.{what.split('-')[0]}" for what in ("key", "pid", "log", "seed")]
        munge = ["munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *places]
        self._daemons = [self._start("munged", munge)]
        eventually("munge listens", (folder / "munge.socket").exists, START_S)
        self._daemons.append(self._start("slurmctld", ["slurmctld", "-D"]))
        self._daemons += [self._start(node, ["slurmd", "-D", "-N", node]) for node in ("n1", "n2")]
        eventually("both nodes are idle", lambda: self.ask("sinfo", "-h", "-o", "%D %t") == "2 idle", START_S)

    def _start(self, name: str, command: list[str]) -> subprocess.Popen[bytes]:
        with (self._folder / f"{name}.log").open("wb") as log:
            return subprocess.Popen(
                command, env=self.environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                preexec_fn=end_with_parent,
            )  # fmt: skip

    def ask(self, *command: str) -> str:
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, cwd=self._folder)
        return done.stdout.strip()

    def state(self, task: str) -> str:
        return self.ask("squeue", "-h", "-j", task, "-o", "%T")

    def log(self, job: str, task: int) -> str:
        path = self._folder / f"shoal-{job}_{task}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def close(self) -> None:
        self.ask("scancel", "--user", "root")
        for daemon in reversed(self._daemons):
            daemon.send_signal(signal.SIGTERM)
        for daemon in self._daemons:
            daemon.wait(START_S)


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    missing = [name for name in DAEMONS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]
    if missing or not hasattr(os, "geteuid") or os.geteuid() != 0:
        pytest.skip(f"needs root, and Debian's munge and slurm-wlm: without {', '.join(missing) or 'root'}")
    made = Cluster(tmp_path_factory.mktemp("slurm"))
    try:
        yield made
    finally:
        made.close()


def test_a_job_of_two_peers_leaves_before_its_time_is_up_and_comes_back_unless_it_is_cancelled(
    cluster: Cluster, swarm: Swarm
) -> None:
    host = swarm.host(run_toml())
    invite = swarm.folder / "invite"
    invite.write_text(host.invite)
    options = ("--device", "cpu", "--threads", "1", "--bind", "127.0.0.1")
    # The signal that comes 120 s before the limit is sent by hand, so that nobody waits for it.
    job = cluster.ask("sbatch", "--parsable", "--array=0-1", str(SCRIPT), str(invite), *options)
    logs = lambda: cluster.log(job, 0) + cluster.log(job, 1)  # noqa: E731
    together = lambda task: "· 2 peers ·" in cluster.log(job, task)  # noqa: E731
    eventually("both peers are in a round", lambda: together(0) and together(1), START_S + ROUNDS_S, logs)

    for task in (0, 1):
        cluster.ask("scancel", "--batch", "--signal=TERM", f"{job}_{task}")
        eventually("it is queued again", lambda t=task: cluster.state(f"{job}_{t}") == "PENDING", ROUNDS_S, logs)
        assert f"exit code {TERMINATED}: this task is queued again" in cluster.log(job, task)
        assert cluster.log(job, task).count("left at version") == 1

    cluster.ask("scontrol", "update", f"JobId={job}_1", "StartTime=now")
    joined = lambda: re.findall(r"joined reef as (\w+)", cluster.log(job, 1))  # noqa: E731
    eventually("it is back", lambda: len(joined()) == 2, START_S + ROUNDS_S, logs)
    assert len(set(joined())) == 1, "it is another member"
    second = lambda: cluster.log(job, 1).rpartition("joined reef as ")[2]  # noqa: E731
    eventually("it trains again", lambda: " committed · " in second(), ROUNDS_S, logs)

    cluster.ask("scancel", job)
    eventually("nothing is queued", lambda: cluster.state(job) == "", ROUNDS_S, logs)
    assert "left at version" in second()
    assert "queued again" not in second()
    host.stop()
