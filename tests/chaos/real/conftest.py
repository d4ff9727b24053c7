"""One swarm a test; its processes never outlive it, and a failure shows what they said last."""

from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from tests.integration.harness import Swarm


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[Swarm]:
    processes = Swarm(tmp_path)
    try:
        yield processes
    finally:
        processes.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    processes = getattr(item, "funcargs", {}).get("swarm")
    if report.when == "call" and report.failed and isinstance(processes, Swarm):
        report.sections.append(("processes", processes.tails()))
    return report
