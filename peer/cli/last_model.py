"""Last model of a run on its host: when the run ends, it is fetched from the members, who stay for it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from shoal.peer.cli.command import INVITE_VARIABLE
from shoal.peer.event_schema import Event, make_event
from shoal.swarm.aio import Changes
from shoal.swarm.coordinator.service import CoordinatorService
from shoal.swarm.errors import LinkError, ShoalError
from shoal.swarm.protocol.invite import Invite
from shoal.swarm.protocol.run_file import RunFile
from shoal.swarm.protocol.types import Address

log = logging.getLogger(__name__)

MODEL_FILE = "model.safetensors"
_SMALL_ELEMENTS = 100_000_000
"""Most values of a model that is kept without being asked for: 400 MB, and seconds for the members."""

_FETCH_S = 110.0
"""Time for the fetch; members stay a little longer (``LAST_STATE_S``)."""

_TRIES = 3

RunCommand = Callable[[Sequence[str], Mapping[str, str]], Awaitable[None]]
"""Runs a ``shoal`` command in a process of its own, without its output, with these variables in its environment."""


def keeps_model(wanted: bool | None, run: RunFile) -> bool:
    """Whether the host keeps the last model: as its options say, else if it is small and not of an own loop."""
    if wanted is not None:
        return wanted
    return run.recipe.name != "own" and run.pins is not None and run.pins.elements <= _SMALL_ELEMENTS


class LastModel:
    """Says when a run ends, and keeps its last model at ``place`` then, if there is one."""

    def __init__(
        self,
        service: CoordinatorService,
        place: Path | None,
        run_command: RunCommand,
        say: Callable[[Event], None],
    ) -> None:
        """``say``: reports an event."""
        self._service = service
        self._place = place
        self._run_command = run_command
        self._say = say
        service.scope.wants_last_state = place is not None

    async def run(self, make_invite: Callable[[], Awaitable[Invite]], here: Address) -> None:
        """Wait for the run's end. ``make_invite``: one by which this host lets an observer in then, whatever has become
        of admission since the start; ``here``: where this machine itself reaches the coordinator."""
        scope, changes = self._service.scope, Changes()
        was_over = scope.has_ended
        self._service.observe(lambda _: changes.announce())
        await changes.until(lambda: scope.has_ended)
        now = scope.status(time.monotonic())
        self._say(make_event("run_ended", rounds=now.rounds_committed, tokens=now.tokens_committed, loss=now.loss))
        try:
            if self._place is not None and not (was_over and self._place.exists()):
                await self._keep(make_invite, here, self._place)
        finally:
            scope.wants_last_state = False

    async def _export(self, arguments: Sequence[str], variables: Mapping[str, str]) -> None:
        for tries_left in reversed(range(_TRIES)):
            try:
                await self._run_command(arguments, variables)
            except LinkError as error:  # on a busy machine, its membership may have lapsed
                if not tries_left:
                    raise
                log.info("the last model is fetched once more: %s", error)
            else:
                return

    async def _keep(self, make_invite: Callable[[], Awaitable[Invite]], here: Address, place: Path) -> None:
        try:
            async with asyncio.timeout(_FETCH_S):
                invite = replace(await make_invite(), addresses=(here,))
                # In the environment, as arguments are seen by all users of a machine.
                await self._export(["export", "--out", str(place), "--replace"], {INVITE_VARIABLE: str(invite)})
        except (ShoalError, TimeoutError) as error:
            trouble = str(error) or f"the members did not send it within {_FETCH_S:.0f} s"
            self._say(make_event("model_kept", path=None, trouble=trouble))
        else:
            self._say(make_event("model_kept", path=str(place), trouble=""))
