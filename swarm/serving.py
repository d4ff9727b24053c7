"""What members may ask of a node: pings, links, and streams over them."""

from __future__ import annotations

from collections.abc import Callable

from shoal.swarm.bulk import DataPlane
from shoal.swarm.channel import Channel
from shoal.swarm.control import ControlPlane
from shoal.swarm.errors import NotAdmitted
from shoal.swarm.messages import (
    Acknowledged,
    Message,
    PeerToPeerCloseStream,
    PeerToPeerOpenLink,
    PeerToPeerOpenStream,
    PeerToPeerPing,
    PeerToPeerPong,
    PeerToPeerStreamOpened,
)


def answer_members(control: ControlPlane, data: DataPlane, is_member: Callable[[bytes], bool]) -> None:
    """Register the handlers. Links only with members, streams only over one's own links."""

    def require_member(channel: Channel) -> None:
        if not is_member(channel.remote_key):
            raise NotAdmitted("only members of the run may open links")

    async def ping(channel: Channel, message: Message) -> Message:
        return PeerToPeerPong()

    async def open_link(channel: Channel, message: Message) -> Message:
        assert isinstance(message, PeerToPeerOpenLink)
        require_member(channel)
        return data.accept_link(channel.remote_key, message)

    async def open_stream(channel: Channel, message: Message) -> Message:
        assert isinstance(message, PeerToPeerOpenStream)
        require_member(channel)
        await data.serve(data.find_link(channel.remote_key, message.link), message)
        return PeerToPeerStreamOpened()

    async def close_stream(channel: Channel, message: Message) -> Message:
        assert isinstance(message, PeerToPeerCloseStream)
        data.close_stream(data.find_link(channel.remote_key, message.link), message.stream)
        return Acknowledged()

    control.handle(PeerToPeerPing, ping)
    control.handle(PeerToPeerOpenLink, open_link)
    control.handle(PeerToPeerOpenStream, open_stream)
    control.handle(PeerToPeerCloseStream, close_stream)
