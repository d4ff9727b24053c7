"""What members may ask of a node over its control channel: pings, and links for everything else."""

from __future__ import annotations

from collections.abc import Callable

from shoal.swarm.errors import NotAdmitted
from shoal.swarm.protocol.messages import (
    Acknowledged,
    Message,
    PeerToPeerCheckLink,
    PeerToPeerOpenLink,
    PeerToPeerPing,
    PeerToPeerPong,
)
from shoal.swarm.transport.channel import Channel
from shoal.swarm.transport.control import ControlPlane
from shoal.swarm.transport.data_plane import DataPlane


def answer_members(control: ControlPlane, data: DataPlane, is_member: Callable[[bytes], bool]) -> None:
    """Register the handlers. Links only with members."""

    async def ping(channel: Channel, message: Message) -> Message:
        return PeerToPeerPong()

    async def open_link(channel: Channel, message: Message) -> Message:
        assert isinstance(message, PeerToPeerOpenLink)
        if not is_member(channel.remote_key):
            raise NotAdmitted("only members of the run may open links")
        return data.accept_link(channel.remote_key, message)

    async def check_link(channel: Channel, message: Message) -> Message:
        assert isinstance(message, PeerToPeerCheckLink)
        data.find_link(channel.remote_key, message.link)
        return Acknowledged()

    control.handle(PeerToPeerPing, ping)
    control.handle(PeerToPeerOpenLink, open_link)
    control.handle(PeerToPeerCheckLink, check_link)
