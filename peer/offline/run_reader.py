"""Reader of a live run, as a guest: fetches its members' state, whole or stage by stage of a pipeline."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from operator import is_not
from typing import TypeVar

from torch import Tensor

from shoal.peer.checkpoints.local_state import model_buffers
from shoal.peer.recipes import Recipe, layered_recipe, load_recipe
from shoal.peer.recipes.model_memory import check_start_fits
from shoal.peer.state_transfer.bfloat16_anchor import fetch_rounded_anchor
from shoal.peer.state_transfer.chunk_format import format_of
from shoal.peer.state_transfer.download import StateDownload
from shoal.peer.state_transfer.partial_state import PartialState, WantedState
from shoal.peer.state_transfer.start import RunStart
from shoal.peer.training.anchor import AnchorState
from shoal.peer.training.parameters import ParameterVector
from shoal.swarm.aio import in_thread
from shoal.swarm.client.coordinator_client import CoordinatorClient
from shoal.swarm.client.observer import observe, observe_stages
from shoal.swarm.errors import LinkError, RecipeError, StateFileError
from shoal.swarm.protocol.invite import Invite
from shoal.swarm.protocol.rounds import RunView
from shoal.swarm.protocol.run_file import RunFile
from shoal.swarm.protocol.types import TensorSpec
from shoal.swarm.transport.node import Endpoint, ScopedEndpoint

log = logging.getLogger(__name__)

_FETCH_S = 10.0
_TRIES = 8
_OR_EXPORT = "before its first round is committed, this run has the state of the checkpoint of {}: export that"

T = TypeVar("T")


@dataclass(frozen=True)
class StateShare:
    """A state that some members hold alike: the run's, or that of one stage.

    ``vectors``: of anchor and outer optimizer; ``start``: what the run starts from, where that is a checkpoint."""

    client: CoordinatorClient
    layout: tuple[TensorSpec, ...]
    vectors: int
    start: RunStart | None = None

    @property
    def elements(self) -> int:
        return sum(spec.elements for spec in self.layout)

    async def anchor(self, view: RunView, *, rounded: bool = False) -> Tensor:
        """Fetch the anchor of the view, (n,) float32; ``rounded``: transferred in bfloat16. Raises ``LinkError``."""
        if self._is_start(view):
            anchor = (await self.state(view)).anchor
            return anchor.bfloat16() if rounded else anchor
        if rounded:
            donors, version = self._donors(), view.anchor_version
            return (await fetch_rounded_anchor(self._endpoint, donors, version, self.elements, _FETCH_S)).bfloat16()
        return (await self._fetch(view, only_anchor=True)).values[0]

    async def state(self, view: RunView) -> AnchorState:
        """Fetch the state of the view. Raises ``LinkError``."""
        if self._is_start(view):
            assert self.start is not None
            return await self.start.state_of(self.layout).fetch()
        return (await self._fetch(view, only_anchor=False)).whole()

    def _is_start(self, view: RunView) -> bool:
        """Whether it is the state that the run starts from, whose tensors are checked one by one."""
        return self.start is not None and view.anchor_version == 0

    async def _fetch(self, view: RunView, *, only_anchor: bool) -> PartialState:
        assert view.state_digest is not None
        wanted = WantedState(view.anchor_version, view.state_digest, (self.vectors, self.elements))
        partial = PartialState(wanted, only_anchor=only_anchor)
        chunk_format = format_of(self.client.run_file.checkpoints.transfer)
        return await StateDownload(self._endpoint, partial, self._donors, _FETCH_S, chunk_format=chunk_format).run()

    def _donors(self) -> list[str]:
        return self.client.node.trainers(self.client.scope)

    @property
    def _endpoint(self) -> Endpoint:
        node = self.client.node
        return ScopedEndpoint(node, self.client.scope) if self.client.scope else node


@dataclass(frozen=True)
class LiveRun:
    """A live run; ``shares``: the run's one state, or those of all stages in their order; ``buffers``: of the model
    with which the run began, as its state has none."""

    client: CoordinatorClient
    recipe: Recipe
    shares: tuple[StateShare, ...]
    buffers: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def run_file(self) -> RunFile:
        return self.client.run_file

    @property
    def layout(self) -> tuple[TensorSpec, ...]:
        return tuple(spec for share in self.shares for spec in share.layout)

    async def at_one_version(self, fetch: Callable[[Sequence[RunView]], Awaitable[T]]) -> T:
        """Call ``fetch`` with views of one version of all shares; once more if that version was replaced before it had
        all.

        Raises ``StateFileError`` while members hold no such state, and what ``fetch`` raises."""
        for tries in range(1, _TRIES + 1):
            views = await self._agreed_views()
            try:
                return await fetch(views)
            except LinkError as error:
                if tries == _TRIES or not await self._has_gone_on(views):
                    if (start := self.shares[0].start) is not None and views[0].anchor_version == 0:
                        raise StateFileError(f"{error}; {_OR_EXPORT.format(start.start.source)}") from error
                    raise
                log.warning(
                    "version %d was replaced before it was fetched, so the next one is: %s",
                    views[0].anchor_version,
                    error,
                )
        raise AssertionError("the last try returns or raises")

    async def _agreed_views(self) -> list[RunView]:
        clients = [share.client for share in self.shares]
        try:
            async with asyncio.timeout(clients[0].deadlines.patience_s):
                while not _agree(views := [client.view for client in clients]):
                    for client, view in zip(clients, views, strict=True):
                        await client.wait_for(partial(is_not, view), client.deadlines.heartbeat_s)
        except TimeoutError as error:
            lacking = [number for number, view in enumerate(views) if view.state_digest is None]
            which = f" of {', '.join(f'stage {number}' for number in lacking)}" if len(clients) > 1 and lacking else ""
            start = self.shares[0].start
            is_start = start is not None and views[0].anchor_version == 0
            what = _OR_EXPORT.format(start.start.source) if start is not None and is_start else "try again later"
            raise StateFileError(f"no member of the run holds its state{which} at the moment; {what}") from error
        return views

    async def _has_gone_on(self, views: Sequence[RunView]) -> bool:
        for share, view in zip(self.shares, views, strict=True):
            is_other = partial(_is_of_another_version, view)
            if is_other(await share.client.wait_for(is_other, share.client.deadlines.heartbeat_s)):
                return True
        return False


def _is_of_another_version(then: RunView, now: RunView) -> bool:
    return now.anchor_version != then.anchor_version


def _agree(views: Sequence[RunView]) -> bool:
    """Whether all views are of the end of one round, with the state that it left."""
    ends = {(view.anchor_version, view.verdict.round if view.verdict else None) for view in views}
    return len(ends) == 1 and all(view.state_digest is not None for view in views)


@asynccontextmanager
async def observe_run(invite: Invite) -> AsyncIterator[LiveRun]:
    """Observe a run as a guest, until the context ends. It needs an installed recipe, which gives names and shapes.

    Raises the errors of a join, and ``RecipeError``."""
    async with observe(invite) as client:
        run = client.run_file
        if run.recipe.name == "own":
            raise RecipeError("this run has no recipe to name its parameters: export a member's checkpoint instead")
        # In threads, as importing and building take seconds, and a guest that is silent meanwhile is removed.
        recipe, slots = await in_thread(load_recipe, run), run.outer.slots
        vectors, node = 1 + slots, client.node
        start = RunStart(run.start, slots, None, node, node.trainers, _FETCH_S) if run.start is not None else None
        if run.pipeline is None:
            check_start_fits(run, recipe)
            model = await in_thread(recipe.build_model, run.run.seed)
            layout = ParameterVector(model).layout
            yield LiveRun(client, recipe, (StateShare(client, layout, vectors, start),), model_buffers(model))
            return
        pipeline = client.view.pipeline
        if pipeline is None:
            raise StateFileError("the run has not been cut into stages yet; try again later")
        layers = await in_thread(layered_recipe(recipe, run).layers, run.run.seed)
        layers.check_boundaries(pipeline.boundaries)
        layouts = [
            tuple(spec for layout in layers.layouts[first:stop] for spec in layout)
            for first, stop in pairwise(pipeline.boundaries)
        ]
        async with observe_stages(client, len(layouts)) as clients:
            shares = (StateShare(one, layout, vectors, start) for one, layout in zip(clients, layouts, strict=True))
            yield LiveRun(client, recipe, tuple(shares))
