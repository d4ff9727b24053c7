"""Mapped ports of a member that nobody can dial otherwise, from its join to its end."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

from shoal.swarm.client.coordinator_client import CoordinatorClient
from shoal.swarm.errors import LinkError
from shoal.swarm.protocol.types import Address
from shoal.swarm.transport.paths.port_mapping import Mapping, NoMapping, PortMapper

log = logging.getLogger(__name__)

_CLOSE_S = 3.0
_RETRY_S = 60.0


async def keep_mapped(client: CoordinatorClient, mapper: PortMapper) -> None:
    """Map this member's ports if the coordinator could not dial it, tell the coordinator, renew the leases, and delete
    them when this is cancelled."""
    if client.reachable:
        return
    try:
        mapping = await mapper.open()
        if mapping is None:
            tried = "; ".join(f"{way}: {what}" for way, what in mapper.attempts.items())
            log.info("the router maps no ports for this machine (%s)", tried or "there is no router")
            return
        await _show(client, mapping)
        while client.mapped is not None:
            await asyncio.sleep(mapper.renew_after_s)
            await _renew(client, mapper)
    finally:
        client.mapped = None
        with suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_S):
                await mapper.close()


async def _show(client: CoordinatorClient, mapping: Mapping) -> None:
    control, data = mapping.control.port, mapping.data.port
    client.mapped = Address(kind="mapped", host=mapping.host, control_port=control, data_port=data)
    try:
        await client.show_addresses()
    except LinkError as error:
        log.warning("the coordinator was not told of the mapped ports: %s", error)
        return
    if client.reachable:
        log.info("other peers reach this machine at %s", mapping)
    else:
        log.warning("the router has mapped %s, and nobody reaches this machine there: withdrawn", mapping)
        client.mapped = None


async def _renew(client: CoordinatorClient, mapper: PortMapper) -> None:
    """Renew the leases, again and again while the router does not answer."""
    while True:
        try:
            is_moved = await mapper.renew()
        except NoMapping as error:
            log.warning("the router has not renewed the mapped ports, trying again: %s", error)
            await asyncio.sleep(_RETRY_S)
        else:
            if is_moved and mapper.mapping is not None:
                await _show(client, mapper.mapping)
            return
