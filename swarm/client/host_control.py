"""Commands of a run's host to its running coordinator, over a connection that the host's identity vouches for."""

from __future__ import annotations

from typing import TypeVar

from shoal.swarm.client.observer import stranger
from shoal.swarm.protocol.identity import CurveKeys, Identity
from shoal.swarm.protocol.messages import HostCommand, HostToCoordinatorCommand, host_proof
from shoal.swarm.protocol.types import Address, Message

M = TypeVar("M", bound=Message)

_CONNECT_S, _ANSWER_S = 5.0, 20.0


async def command_coordinator(
    address: Address,
    key: bytes,
    identity: Identity,
    run: tuple[str, bytes],
    command: HostCommand,
    reply: type[M],
) -> M:
    """Have the coordinator at ``address``, with this CURVE ``key``, carry out a command of the host on a run.

    ``run``: its name and hash. Raises ``Unreachable`` and the coordinator's errors."""
    keys = CurveKeys.fresh()
    async with stranger(keys) as node:
        if address.is_relayed:
            port = node.relays.forwarder_to(key, (address,), as_guest=True)
            channel = node.control.dial("127.0.0.1", port, key, via=address)
        else:
            channel = node.control.dial(address.host, address.control_port, key)
        channel.run = run[0]
        await channel.connected(_CONNECT_S)
        proof = identity.sign(host_proof(run[1], keys.public))
        return await channel.request(HostToCoordinatorCommand(proof=proof, command=command), reply, _ANSWER_S)
