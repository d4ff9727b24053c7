"""A member that missed rounds: their committed bytes from the others, where those are fewer than a whole state's."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence

from shoal.peer.history.catch_up import Steps, catch_up, path
from shoal.peer.history.record_writer import RecordKeeper
from shoal.peer.training.anchor import State
from shoal.swarm.aio import in_thread
from shoal.swarm.averaging.result_fetch import fetch_committed
from shoal.swarm.averaging.results import ResultStore
from shoal.swarm.errors import LinkError, StateFileError
from shoal.swarm.protocol.messages import RunView, Verdict
from shoal.swarm.transport.node import Endpoint

log = logging.getLogger(__name__)

VerdictsFrom = Callable[[int], Awaitable[Sequence[Verdict]]]
"""The run's verdicts from that round on, as far as they can be had."""


class MissedRounds:
    """Called with a state, it gives the newest one that the run's verdicts lead to from there.

    ``donors``: who may have results, at the moment; ``view``: the run now; ``rounds``: how many it has applied in
    all."""

    def __init__(
        self,
        steps: Steps,
        endpoint: Endpoint,
        keeper: RecordKeeper,
        verdicts_from: VerdictsFrom,
        donors: Callable[[], Sequence[str]],
        view: Callable[[], RunView],
        progress_s: float,
    ) -> None:
        self.rounds = 0
        self._steps = steps
        self._endpoint = endpoint
        self._keeper = keeper
        self._verdicts_from = verdicts_from
        self._donors = donors
        self._view = view
        self._progress_s = progress_s

    async def __call__(self, state: State) -> State:
        """Raises ``LinkError`` when there is no way from this state, or not a shorter one than to fetch another."""
        view = self._view()
        if view.verdict is not None and view.verdict.committed:  # all rounds are about as large
            await self._require_fewer([view.verdict] * (view.anchor_version - state.version), state)
        # No round before that one can have gone from this state: a round makes one version at most.
        verdicts = await self._verdicts_from(state.version)
        missed = path(verdicts, state.version, state.digest)
        if not missed:
            raise LinkError(f"no committed round is known that went on from version {state.version}")
        size_bytes = await self._require_fewer(missed, state)
        found = await catch_up(state, missed, self._results, self._steps)
        self.rounds += len(missed)
        log.info("caught up %d rounds to version %d by %d bytes", len(missed), found.version, size_bytes)
        return found

    async def _require_fewer(self, verdicts: Sequence[Verdict], state: State) -> int:
        """The bytes of these rounds' results. Raises ``LinkError`` where a state has no more."""
        each = {verdict.chain: verdict for verdict in verdicts}
        sizes = {chain: await in_thread(self._steps.results_bytes, verdict) for chain, verdict in each.items()}
        size_bytes = sum(sizes[verdict.chain] for verdict in verdicts)
        if size_bytes >= state.values.nbytes:
            raise LinkError(f"the {len(verdicts)} rounds since then are no fewer bytes than a state")
        return size_bytes

    async def _results(self, verdict: Verdict) -> ResultStore:
        """From our own record, else from others."""
        try:
            return await in_thread(self._steps.recorded, self._keeper.records, verdict)
        except StateFileError as error:
            log.debug("round %d is fetched: %s", verdict.round, error)
        assert verdict.plan is not None
        planned = {member.peer for member in verdict.plan.members}
        store = ResultStore.of(verdict, self._steps.coding)
        donors = sorted(self._donors(), key=lambda peer: peer not in planned)
        await fetch_committed(self._endpoint, store, verdict, donors, self._progress_s)
        self._keeper.add(store, verdict)
        return store
