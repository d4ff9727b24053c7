"""The way to the coordinator, which may be at any of the invite's addresses: which one to call, and when the next."""

from __future__ import annotations

import asyncio
import logging
from typing import TypeVar

from shoal.swarm.errors import DeadlineExceeded, LinkError, Unreachable
from shoal.swarm.protocol.invite import Address, Invite, address_text
from shoal.swarm.protocol.messages import Message
from shoal.swarm.tasks import task_scope
from shoal.swarm.transport.control import Channel, ControlPlane

log = logging.getLogger(__name__)

M = TypeVar("M", bound=Message)

HEAD_START_S = 1.0
"""Between the first calls to two addresses. All go on trying, so none has to be given up for the next one."""

_FIRST_ANSWER_S = 3.0
"""For an answer from whoever is connected and silent, while there is another address; doubled with each failure of all
of them, as a slow coordinator must be heard in the end."""


class Line:
    """``channel``: the one that was asked last, None before the first request. The clients of all scopes share one."""

    def __init__(self, control: ControlPlane, invite: Invite) -> None:
        self.channel: Channel | None = None
        self._control = control
        self._key = invite.key
        self._addresses = list(invite.addresses)  # the one that answered last first
        self._at = invite.addresses[0]
        self._is_silent = False
        self._failures = 0

    async def request(self, message: Message, reply: type[M], limit_s: float, scope: int = 0) -> M:
        """One try: connect to whoever is there, and ask. ``limit_s``: for either of the two.

        Raises ``Unreachable``, ``DeadlineExceeded``, or what the coordinator answers."""
        try:
            channel = await self._connect(limit_s)
        except LinkError as error:
            # Another key, a refusal: somebody else is there now, and the coordinator may come back.
            raise Unreachable(str(error)) from error
        return await self._ask(channel, message, reply, self._answer_s(limit_s), scope)

    async def request_anywhere(
        self, message: Message, reply: type[M], connect_s: float, answer_s: float, scope: int = 0
    ) -> M:
        """Ask at one address after the other until somebody answers; for the first request of all.

        Raises as ``request``, and ``WrongKey`` or ``NotAdmitted`` when that is all that was found."""
        for _ in self._addresses[1:]:
            channel = await self._connect(connect_s)
            try:
                return await self._ask(channel, message, reply, min(answer_s, connect_s), scope)
            except (DeadlineExceeded, Unreachable) as error:
                log.info("%s; trying the invite's next address", error)
        loop = asyncio.get_running_loop()
        give_up_s = loop.time() + connect_s
        while True:
            channel = await self._connect(connect_s)
            try:
                return await self._ask(channel, message, reply, answer_s, scope)
            except Unreachable:
                # A port that strangers flood hangs up on whoever it does not know yet, too.
                if not channel.was_connected or loop.time() > give_up_s:
                    raise

    async def _ask(self, channel: Channel, message: Message, reply: type[M], limit_s: float, scope: int) -> M:
        try:
            answer = await channel.request(message, reply, limit_s, scope)
        except (DeadlineExceeded, Unreachable):
            if channel is self.channel and len(self._addresses) > 1:
                self._failures += 1
                if channel.is_connected:  # whoever is there stands still: the others are called first
                    self._is_silent = True
                    self._addresses.sort(key=lambda one: one == self._at)
            raise
        if channel is self.channel:
            self._failures = 0
            self._addresses.sort(key=lambda one: one != self._at)
        return answer

    def _answer_s(self, limit_s: float) -> float:
        if len(self._addresses) == 1:
            return limit_s
        return min(limit_s, _FIRST_ANSWER_S * 2.0 ** min(self._failures // len(self._addresses), 16))

    async def _connect(self, limit_s: float) -> Channel:
        """The first to be connected, of those that are called ``HEAD_START_S`` apart."""
        if self.channel is not None and self.channel.is_connected and not self._is_silent:
            return self.channel
        if len(self._addresses) == 1:
            self.channel = self._dial(self._at)
            await self.channel.connected(limit_s)
            return self.channel
        troubles: dict[Address, LinkError] = {}
        async with task_scope() as tasks:
            calls = [
                tasks.create_task(self._call(address, number * HEAD_START_S, limit_s))
                for number, address in enumerate(self._addresses)
            ]
            for call in asyncio.as_completed(calls):
                address, found = await call
                if not isinstance(found, LinkError):
                    self._turn_to(address, found)
                    break
                troubles[address] = found
            for task in calls:
                task.cancel()
        if len(troubles) == len(self._addresses):
            raise _trouble(troubles)
        assert self.channel is not None
        return self.channel

    async def _call(self, address: Address, after_s: float, limit_s: float) -> tuple[Address, Channel | LinkError]:
        await asyncio.sleep(after_s)
        try:
            channel = self._dial(address)
            await channel.connected(limit_s)
        except LinkError as error:
            return address, error
        return address, channel

    def _turn_to(self, address: Address, channel: Channel) -> None:
        if self.channel is not None and address != self._at:
            log.info("the coordinator is called at %s now", address_text(*address))
        self.channel, self._at, self._is_silent = channel, address, False

    def _dial(self, address: Address) -> Channel:
        return self._control.dial(*address, self._key)


def _trouble(troubles: dict[Address, LinkError]) -> LinkError:
    """One error that names all addresses. When one of them may only be away, trying again is worth it."""
    away = [error for error in troubles.values() if isinstance(error, Unreachable)]
    if len(away) == len(troubles):
        places = " or ".join(address_text(*address) for address in troubles)
        return Unreachable(
            f"nothing answers at {places}: is the coordinator running there, are the ports open, "
            "are the addresses right?"
        )
    text = "; ".join(str(error) for error in troubles.values())
    return Unreachable(text) if away else type(next(iter(troubles.values())))(text)
