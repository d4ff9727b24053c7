"""``shoal``, but it never serves its contribution, though it says it is ready: ``withholding_member.py join …``."""

import asyncio

from shoal.peer.cli.main import main
from shoal.swarm.averaging.contribution import ContributionSource


def withhold() -> None:
    async def chunk(self: ContributionSource, index: int) -> memoryview:
        return await asyncio.get_running_loop().create_future()

    ContributionSource.chunk = chunk  # type: ignore[method-assign]


if __name__ == "__main__":
    withhold()
    main()
