"""Prometheus and Grafana files in ``deploy/monitoring``: valid by promtool, and about metrics that there are."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.swarm.web.samples import RUN, crowd, full_status

from shoal.swarm.web.metrics import METRICS, exposition, process_readings
from shoal.swarm.web.run_metrics import HostFacts, run_readings

pytest.importorskip("prometheus_client")
FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "monitoring"
PROMTOOL = shutil.which("promtool")
OF_PROMETHEUS = {"up": {"job", "instance"}}
SELECTOR = re.compile(r"\b((?:shoal|process)_\w+|up)\b(?:\{([^}]*)\})?")

needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="needs promtool, of Debian's prometheus")


def promtool(*arguments: str | Path, text: bytes | None = None) -> str:
    assert PROMTOOL is not None
    done = subprocess.run(
        [PROMTOOL, *map(str, arguments)], input=text, capture_output=True, cwd=FOLDER, timeout=60, check=False
    )
    said = (done.stdout + done.stderr).decode()
    assert done.returncode == 0, said
    return said


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def dashboard_queries() -> Iterator[str]:
    board = json.loads((FOLDER / "grafana.json").read_text())
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"]
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["definition"]


@needs_promtool
def test_promtool_accepts_the_rules_and_the_configuration() -> None:
    promtool("check", "rules", "alerts.yml")
    promtool("check", "config", "prometheus.yml")


@needs_promtool
def test_alerts_fire_for_what_they_are_about_and_not_otherwise() -> None:
    promtool("test", "rules", "alerts_test.yml")


def test_each_alert_is_tested_silent_and_firing_and_says_what_to_do() -> None:
    tested = yaml.safe_load((FOLDER / "alerts_test.yml").read_text())["tests"]
    cases = [case for test in tested for case in test["alert_rule_test"]]
    names = {rule["alert"] for rule in alerts()}
    assert {case["alertname"] for case in cases if case.get("exp_alerts")} == names
    assert {case["alertname"] for case in cases if not case.get("exp_alerts")} == names
    assert all(rule["annotations"].keys() == {"summary", "action"} for rule in alerts())


@pytest.mark.parametrize("query", [*(rule["expr"] for rule in alerts()), *dashboard_queries()])
def test_queries_are_about_metrics_and_labels_that_there_are(query: str) -> None:
    found = list(SELECTOR.finditer(query))
    assert found
    for name, selectors in (match.groups() for match in found):
        assert name in METRICS or name in OF_PROMETHEUS, name
        labels = set(re.findall(r"(\w+)\s*[=!]~?", selectors or ""))
        known = set(METRICS[name].all_labels) | {"job", "instance"} if name in METRICS else OF_PROMETHEUS[name]
        assert labels <= known, (name, labels)


@needs_promtool
def test_queries_of_the_dashboard_are_valid(tmp_path: Path) -> None:
    queries = [one for one in dashboard_queries() if not one.startswith("label_values")]
    rules = [{"record": f"shoal:panel:{number}", "expr": query} for number, query in enumerate(queries)]
    path = tmp_path / "queries.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "board", "rules": rules}]}))
    promtool("check", "rules", path)


@needs_promtool
def test_promtool_finds_no_fault_in_the_names_of_a_whole_scrape() -> None:
    readings = [*run_readings(RUN, full_status(crowd(3)), HostFacts()), *process_readings()]
    assert not promtool("check", "metrics", text=exposition(readings, "")[0]).strip()
