"""A peer's offer of its relay to members that nobody can dial: ``shoal join --relay-for-others``."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from shoal.peer.relay.process import RelayProcess
from shoal.swarm.aio import task_scope
from shoal.swarm.client.coordinator_client import CoordinatorClient
from shoal.swarm.errors import FINAL_ERRORS, LinkError
from shoal.swarm.protocol.paths import RELAY_OFFER_S
from shoal.swarm.transport.limits.traffic_limits import TrafficLimits

log = logging.getLogger(__name__)

_RETRY_S = 5.0
_SHARE = 0.5
"""Part of the peer's own limits that its relay uses at most: the rest is for its part in the run."""


class RelayOffer:
    """The relay that a peer runs for others as long as it is a member that can be dialed. ``run`` is for a task.

    What it carries counts in the peer's own limits: each byte comes in and goes out once."""

    def __init__(self, identity: Path, bind: tuple[str, int], bps: float, limits: TrafficLimits) -> None:
        """``identity``: file of the relay's key pair; ``bind``: where it listens; ``bps``: the most that it passes on,
        in bits a second; ``limits``: of the peer's traffic."""
        self._identity, self._bind, self._bps, self._limits = identity, bind, bps, limits
        self._told: str | None = None

    @property
    def bytes_s(self) -> float:
        """The most that the relay passes on now."""
        limits = (self._limits.upload.bps, self._limits.download.bps)
        return min(self._bps, *(_SHARE * bps for bps in limits if bps), self._bps) / 8

    async def run(self, client: CoordinatorClient, port: int | None) -> None:
        """Offer the relay again and again until cancelled. The offer ends with the membership.

        ``port``: where others reach it, None for the port on which it listens."""
        relay = RelayProcess(self._identity, self._bind, client.coordinator_key, self.bytes_s)
        relay.on_carried = self._count
        async with task_scope() as tasks:
            tasks.create_task(relay.run())
            while True:
                if relay.bytes_s != self.bytes_s:
                    relay.set_rate(self.bytes_s)
                url, trouble = relay.url(), "it is being started"
                if url is not None:
                    trouble = await self._offer(client, url.key, port or url.port)
                    self._tell(trouble, f"{self.bytes_s * 8 / 1e6:g} Mbit/s at port {port or url.port}")
                await asyncio.sleep(_RETRY_S if trouble else RELAY_OFFER_S / 3)

    async def _offer(self, client: CoordinatorClient, key: bytes, port: int) -> str:
        try:
            return await client.offer_relay(key, port)
        except FINAL_ERRORS:
            raise
        except LinkError as error:
            return str(error)

    def _tell(self, trouble: str, what: str) -> None:
        if trouble == self._told:
            return
        self._told = trouble
        if trouble:
            log.warning("the relay for others (%s) is not used: %s", what, trouble)
        else:
            log.info("this machine's relay for others is offered to the run: %s", what)

    def _count(self, size_bytes: int) -> None:
        self._limits.upload.count_control(size_bytes)
        self._limits.download.count_control(size_bytes)
