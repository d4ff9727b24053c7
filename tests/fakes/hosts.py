"""A coordinator of one run on a port of its own, as a host of one run has it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from shoal.swarm.coordinator.front import CoordinatorFront
from shoal.swarm.coordinator.journal import Journal
from shoal.swarm.coordinator.service import CoordinatorService
from shoal.swarm.protocol.identity import Identity
from shoal.swarm.protocol.run_file import RunFile


@asynccontextmanager
async def serve(
    run_toml: str, run: RunFile, identity: Identity, address: tuple[str, int], journal: Journal, epoch: int
) -> AsyncIterator[CoordinatorService]:
    """Serve a run on ``address`` until the context ends."""
    async with (
        CoordinatorFront.open(identity.coordinator_keys(), address, (run.run.name,)) as front,
        front.serving(run_toml, run, identity, journal, epoch) as service,
    ):
        yield service
