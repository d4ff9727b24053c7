"""One swarm for all faults of a module; a new one after a case that failed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from tests.chaos.real.stage import Stage
from tests.integration.harness import Swarm


class Theatre:
    """Holds the swarm that the tests of a module share; ``stage`` returns it."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self._factory = factory
        self._open = ExitStack()
        self._stage: Stage | None = None

    def stage(self) -> Stage:
        if self._stage is None:
            self._stage = self._open.enter_context(self._run())
        return self._stage

    @contextmanager
    def _run(self) -> Iterator[Stage]:
        swarm = Swarm(self._factory.mktemp("swarm"))
        try:
            stage = Stage.open(swarm)
            yield stage
            if self._stage is not None:
                stage.finish()
        finally:
            swarm.close()

    def give_up(self) -> None:
        self._stage = None
        self.close()

    def close(self) -> None:
        self._open.close()


@pytest.fixture
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    """A swarm whose processes never outlive the test."""
    processes = Swarm(tmp_path_factory.mktemp("swarm"))
    try:
        yield processes
    finally:
        processes.close()


@pytest.fixture(scope="module")
def theatre(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Theatre]:
    theatre = Theatre(tmp_path_factory)
    yield theatre
    theatre.close()


@pytest.fixture
def stage(theatre: Theatre) -> Iterator[Stage]:
    """In order, with all of its members; what is broken is not played on again."""
    stage = theatre.stage()
    yield stage
    if not stage.in_order:
        theatre.give_up()
