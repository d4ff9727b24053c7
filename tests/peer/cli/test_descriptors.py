import resource

import pytest

from shoal.peer.cli.host import HOST_DESCRIPTORS, warn_descriptors
from shoal.peer.cli.main import allow_descriptors
from shoal.swarm.protocol.types import RUN_MEMBERS

UNLIMITED = resource.RLIM_INFINITY


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The last one is in force; what a test appends, or the code sets."""
    kept = [(256, UNLIMITED)]
    monkeypatch.setattr(resource, "getrlimit", lambda kind: kept[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limit: kept.append(limit))
    return kept


@pytest.mark.parametrize(
    ("soft", "hard", "allowed"),
    [(256, UNLIMITED, 8192), (1024, 4096, 4096), (1024, 2**20, 8192), (300, 300, 300)],
)
def test_the_soft_limit_goes_up(limits: list[tuple[int, int]], soft: int, hard: int, allowed: int) -> None:
    limits.append((soft, hard))
    assert allow_descriptors() == allowed
    assert limits[-1] == (allowed, hard), "the hard limit stays: without it the host could not raise it again"


def test_what_is_enough_is_left_alone(limits: list[tuple[int, int]]) -> None:
    for enough in [(10_000, 20_000), (UNLIMITED, UNLIMITED)]:
        limits.append(enough)
        assert allow_descriptors() >= 8192
        assert limits[-1] == enough


def test_a_system_that_refuses(limits: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(kind: int, limit: tuple[int, int]) -> None:
        raise ValueError("current limit exceeds maximum limit")

    monkeypatch.setattr(resource, "setrlimit", refuse)
    assert allow_descriptors() == 256


def test_here_it_works() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, before[1]))
    try:
        assert allow_descriptors() == resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 200
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_host_that_cannot_have_enough_says_so(caplog: pytest.LogCaptureFixture) -> None:
    warn_descriptors(HOST_DESCRIPTORS)
    assert not caplog.records
    warn_descriptors(1024)
    assert "1024 open files" in caplog.text
    assert str(RUN_MEMBERS) in caplog.text
