"""A real Prometheus scrapes a host and a member, with the rules that are shipped, through a kill."""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.integration.harness import Process, Swarm, end_with_parent, eventually, run_toml
from tests.integration.test_page import status_of

PROMETHEUS, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")
ALERTS = Path(__file__).resolve().parents[2] / "deploy" / "monitoring" / "alerts.yml"

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(PROMETHEUS is None or PROMTOOL is None, reason="needs Debian's prometheus"),
]


class Prometheus:
    """A server on loopback that scrapes these addresses every second."""

    def __init__(self, folder: Path, targets: list[str]) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        self._url = f"http://127.0.0.1:{port}/api/v1"
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(ALERTS)],
            "scrape_configs": [{"job_name": "shoal", "static_configs": [{"targets": targets}]}],
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        assert PROMETHEUS is not None
        options = ["--config.file=prometheus.yml", "--storage.tsdb.path=data", f"--web.listen-address=127.0.0.1:{port}"]
        self.log = folder / "log.txt"
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [PROMETHEUS, *options],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=end_with_parent,
            )

    def ask(self, path: str, **query: str) -> Any:
        try:
            with urllib.request.urlopen(f"{self._url}/{path}?{urllib.parse.urlencode(query)}", timeout=10) as answer:
                return json.load(answer)["data"]
        except (urllib.error.URLError, ConnectionError):
            return None

    def value(self, query: str) -> float | None:
        """The only value of a query; None without one."""
        found = (self.ask("query", query=query) or {}).get("result", [])
        return float(found[0]["value"][1]) if len(found) == 1 else None

    def until(self, query: str, expected: float, within_s: float = 60.0) -> None:
        eventually(f"{query} is {expected}", lambda: self.value(query) == expected, within_s, self.log.read_text)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "prometheus"
    made.mkdir()
    return made


def metrics_of(process: Process) -> str:
    """Address of a process that was started with ``--metrics``."""
    process.says("Metrics http://")
    found = re.search(r"^Metrics http://(\S+)/metrics", process.text(), re.MULTILINE)
    assert found is not None, process.tail()
    return found[1]


def scrape(address: str) -> bytes:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        return bytes(answer.read())


def test_a_prometheus_follows_a_host_and_a_member(swarm: Swarm, folder: Path) -> None:
    free, backup = ["--metrics", "127.0.0.1:0"], str(folder / "backup")
    host = swarm.host(run_toml(rounds=None), extra=[*free, "--backup", backup])
    ada = swarm.member(host.invite, "ada", extra=free)
    bob = swarm.member(host.invite, "bob")
    prometheus = Prometheus(folder, [metrics_of(host), metrics_of(ada)])
    try:
        ada.committed()
        bob.committed()
        prometheus.until('count(up{job="shoal"} == 1)', 2)
        prometheus.until('sum(shoal_members{run="reef",state!="gone"})', 2)
        prometheus.until("count(shoal_member_share_ratio > 0)", 2)

        # What promtool says of what was really served.
        assert PROMTOOL is not None
        for address in (metrics_of(host), metrics_of(ada)):
            served = scrape(address)
            done = subprocess.run([PROMTOOL, "check", "metrics"], input=served, capture_output=True, timeout=30)
            assert (done.returncode, done.stdout + done.stderr) == (0, b"")
            assert host.invite.encode() not in served
            assert b"127.0.0.1" not in served

        # What Prometheus knows is what the command says.
        told = status_of(swarm, host)
        counted = eventually("rounds", lambda: prometheus.value('shoal_rounds_total{result="committed"}'), 30)
        assert abs(counted - told["rounds_committed"]) <= 5
        names = prometheus.ask("query", query="shoal_member_info")["result"]
        assert {one["metric"]["name"] for one in names} == {"ada", "bob"}
        assert prometheus.value('shoal_disk_free_bytes{files="backup"}')
        assert prometheus.value("shoal_backup_behind_seconds") == 0
        assert prometheus.value("time() - shoal_last_commit_timestamp_seconds < bool 60") == 1
        assert prometheus.value("shoal_journal_write_seconds_total > bool 0") == 1
        assert prometheus.value("count(process_resident_memory_bytes > 1e6)") == 2

        # The member's own process.
        mine = f'shoal_peer_info{{peer="{ada.peer}"}}'
        assert prometheus.value(mine) == 1
        assert prometheus.value("shoal_peer_sent_bytes_total > bool 0") == 1
        share = prometheus.value("shoal_peer_round_share_ratio")
        assert share is not None
        assert 0 <= share <= 1
        prometheus.until("shoal_peer_checkpoints > bool 0", 1)
        assert prometheus.value("abs(time() - shoal_peer_checkpoint_timestamp_seconds) < bool 300") == 1

        bob.send(signal.SIGKILL)
        prometheus.until('shoal_members{state="gone"}', 1)
        prometheus.until(f'shoal_member_up{{peer="{bob.peer}"}}', 0)
        host.kill()
        prometheus.until("shoal_peer_coordinator_away", 1)
        prometheus.until('count(up{job="shoal"} == 0)', 1)
        prometheus.until('count(ALERTS{alertname="ShoalDown",alertstate="pending"})', 1)
        rules = prometheus.ask("rules")["groups"][0]["rules"]
        assert {rule["health"] for rule in rules} == {"ok"}
    finally:
        prometheus.close()
