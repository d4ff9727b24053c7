"""Memberships of this process: in the run and in each stage that it holds, on one node and connection.

A stage is averaged like a run of its own, so this process is a separate ``LocalMember`` of each, with its own
heartbeats, state, records and history. Stages are entered and left at any time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from types import MappingProxyType

from shoal.peer.member.member import LocalMember, StageMembership
from shoal.peer.relay.offer import RelayOffer
from shoal.swarm.aio import task_scope
from shoal.swarm.client.coordinator_client import MemberInfo
from shoal.swarm.errors import ShoalError
from shoal.swarm.protocol.identity import Identity
from shoal.swarm.protocol.invite import Invite
from shoal.swarm.protocol.rounds import RunView
from shoal.swarm.transport.limits.traffic_limits import TrafficLimits

log = logging.getLogger(__name__)


def scope_of(stage: int) -> int:
    """Return the scope of a stage; scope 0 is the run's."""
    return stage + 1


class Memberships:
    """Memberships in the run (``run``) and in its stages; made with ``open``, on the network thread."""

    def __init__(self, run: LocalMember, tasks: asyncio.TaskGroup) -> None:
        self.run = run
        self._tasks = tasks
        self._stays: dict[int, _Stay] = {}

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        invite: Invite,
        identity: Identity,
        bind: tuple[str, int],
        describe: Callable[[], MemberInfo],
        limits: TrafficLimits | None = None,
        *,
        maps_ports: bool = False,
        offer: RelayOffer | None = None,
    ) -> AsyncIterator[Memberships]:
        """Bind and join the run as ``LocalMember.open`` does; at the end leave all stages, then the run."""
        opened = LocalMember.open(invite, identity, bind, describe, limits, maps_ports=maps_ports, offer=offer)
        async with opened as run, task_scope() as tasks:
            members = cls(run, tasks)
            try:
                yield members
            finally:
                await members.leave_all()

    @property
    def stages(self) -> Mapping[int, LocalMember]:
        """Memberships in the stages that were entered and not left, by stage number."""
        entered = {stage: stay.member for stage, stay in self._stays.items() if stay.member is not None}
        return MappingProxyType(dict(sorted(entered.items())))

    async def enter(self, stage: int, is_ours: Callable[[RunView], bool] = lambda view: True) -> LocalMember:
        """Join a stage, until ``leave``. Raises as ``CoordinatorClient.join``.

        ``is_ours``: returns whether a view's plan assigns the stage to this peer; once it does not, the member's waits
        raise ``NotAdmitted``. Any other error ends all memberships.
        """
        assert stage not in self._stays, f"stage {stage} was entered before and not left"
        stay = _Stay()
        life = self._stay(stage, stay, is_ours)
        try:
            stay.task = self._tasks.create_task(life)
        except RuntimeError:  # the task group is ending; its error reaches the caller when it has
            life.close()
            await asyncio.Event().wait()
            raise
        self._stays[stage] = stay
        try:
            return await asyncio.shield(stay.entered)
        except asyncio.CancelledError:
            stay.over.set()
            raise

    async def leave(self, stage: int) -> None:
        """Leave a stage of which no round is under way here; its claims go to other peers. Other stages go on."""
        stay = self._stays[stage]
        stay.over.set()
        assert stay.task is not None
        await asyncio.wait([stay.task])

    async def leave_all(self) -> None:
        """Leave all stages at once, also those that are being joined."""
        tasks = []
        for stay in self._stays.values():
            assert stay.task is not None
            tasks.append(stay.task)
            stay.over.set()
            if not stay.entered.done():
                stay.task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _stay(self, stage: int, stay: _Stay, is_ours: Callable[[RunView], bool]) -> None:
        client = self.run.client.in_scope(scope_of(stage))
        membership = StageMembership(self.run.client, is_ours, f"stage {stage}")
        try:
            async with LocalMember.joined(client, membership) as member:
                stay.member, member.start = member, self.run.start
                stay.entered.set_result(member)
                log.debug("in stage %d", stage)
                await stay.over.wait()
        except ShoalError as error:
            if stay.entered.done():
                raise
            stay.entered.set_exception(error)
        finally:
            stay.entered.cancel()
            client.withdraw()
            del self._stays[stage]


class _Stay:
    """Membership in one stage: ``entered`` resolves when it is joined, ``over`` is set to leave it."""

    def __init__(self) -> None:
        self.member: LocalMember | None = None
        self.task: asyncio.Task[None] | None = None
        self.entered: asyncio.Future[LocalMember] = asyncio.get_running_loop().create_future()
        self.over = asyncio.Event()
