"""Catching up: from one state of the run to a later one, by applying what the rounds between them committed.

``next_state`` is the only place where a round's mean becomes the next state, in the memory of the one before."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from itertools import islice
from typing import Any

from shoal.compression.codec_map import CodecMap
from shoal.peer.history.record_archive import RecordArchive
from shoal.peer.history.round_records import RoundRecords
from shoal.peer.training.anchor import AnchorState
from shoal.peer.training.lr_schedule import round_lr_factor
from shoal.peer.training.outer_optimizer import OuterStep, make_outer
from shoal.swarm.aio import in_thread, task_scope
from shoal.swarm.averaging.result_fetch import fetch_committed
from shoal.swarm.averaging.results import ResultStore, RoundMean
from shoal.swarm.errors import LinkError, StateFileError, WireError
from shoal.swarm.protocol.amendments import amended
from shoal.swarm.protocol.rounds import RoundPlan, RunView, Verdict
from shoal.swarm.protocol.run_file import RunFile
from shoal.swarm.protocol.types import TensorSpec
from shoal.swarm.transport.node import Endpoint

log = logging.getLogger(__name__)

_ROUNDS_AT_ONCE = 2
"""Fetched at the same time: the next one while the one before is decoded and applied."""

GetResults = Callable[[Verdict], Coroutine[Any, Any, ResultStore]]
"""Gets the results that a verdict has committed, from wherever they are; raises ``LinkError`` when it cannot."""

VerdictsFrom = Callable[[int], Awaitable[Sequence[Verdict]]]
"""The run's verdicts from a round on, as far as they can be had."""


def next_state(
    state: AnchorState, mean: RoundMean, verdict: Verdict, original: RunFile, layout: Sequence[TensorSpec]
) -> AnchorState:
    """Overwrite a state by that after a committed round, piece by piece; ``mean``: decoded from its committed bytes.

    With the settings that the verdict names, so that whoever holds it takes the same step."""
    run = amended(original, verdict.amended)
    is_batch = run.algorithm == "virtual_batch"
    factor = round_lr_factor(run, verdict.tokens_total - verdict.tokens, verdict.tokens) if is_batch else 1.0
    steps = state.version + (run.start.outer_steps if run.start else 0)
    step = OuterStep(make_outer(run.outer), layout, steps, factor)
    step.measure(state.values, mean.pieces)
    return state.step(verdict.anchor_version, mean.pieces(), step.change)


def standing_rounds(verdicts: Iterable[Verdict]) -> list[tuple[RoundPlan, Verdict]]:
    """Return the committed rounds that are in the anchor, as far as these verdicts tell, with their plans.

    Verdicts may be missing, and come in any order. A round counts only if the run has not gone back behind it since: a
    later verdict with its anchor version or a lower one undoes it."""
    standing: list[tuple[RoundPlan, Verdict]] = []
    for verdict in sorted(verdicts, key=lambda one: one.round):
        plan = verdict.plan if verdict.committed else None
        before = plan.anchor_version if plan is not None else verdict.anchor_version
        while standing and standing[-1][1].anchor_version > before:
            standing.pop()
        if plan is not None:
            standing.append((plan, verdict))
    return standing


def rounds_after(verdicts: Iterable[Verdict], version: int, digest: bytes) -> list[Verdict]:
    """Return the ``standing_rounds`` that lead on from a state; none for a state of another run."""
    found: list[Verdict] = []
    for plan, verdict in standing_rounds(verdicts):
        if plan.anchor_version == version and (found or plan.state_digest == digest):
            found.append(verdict)
            version = verdict.anchor_version
    return found


def is_start_of(state: AnchorState, verdict: Verdict) -> bool:
    """Whether the round was averaged on this state."""
    plan = verdict.plan
    assert plan is not None
    is_its = (plan.anchor_version, plan.state_digest) == (state.version, state.digest)
    return is_its and plan.parts[-1].stop == state.elements


class RoundApplier:
    """Applies committed rounds of one run to states: decodes their bytes to means, and steps the outer optimizer.

    For worker threads."""

    def __init__(self, run: RunFile, layout: Sequence[TensorSpec]) -> None:
        """``layout``: the model's tensors, or those of the stage."""
        self._layout = layout
        self.codec_map = CodecMap(run.format_map([(spec.name, spec.shape) for spec in layout]))
        self._run = run

    def apply(self, state: AnchorState, verdict: Verdict, mean: RoundMean) -> AnchorState:
        """Overwrite the state by the one after that round, and return it; see ``AnchorState.step``."""
        return next_state(state, mean, verdict, self._run, self._layout)

    def results_bytes(self, verdict: Verdict) -> int:
        """Upper bound on the bytes to fetch for a round's results."""
        store = ResultStore.of(verdict, self.codec_map)
        return sum(store.result_bytes(chunk) for chunk in range(store.chunks))

    def recorded(self, records: RoundRecords, verdict: Verdict) -> ResultStore:
        """Read the results of a round from its record.

        Raises ``StateFileError`` naming the file, also for a round of another history of the run."""
        record = records.open(verdict.round)
        if record.verdict.chain != verdict.chain:
            raise StateFileError(
                f"{record.path}: field verdict: expected the one of the run's chain; the record is of another history"
            )
        store = ResultStore.of(record.verdict, self.codec_map)
        try:
            store.adopt(record.read())
        except WireError as error:
            raise StateFileError(f"{record.path}: field lengths: {error}; it is damaged") from error
        return store


def roll_forward(state: AnchorState, records: RoundRecords, applier: RoundApplier, newest: int) -> AnchorState:
    """Apply the local records to a state, up to anchor version ``newest`` or as far as they are there and undamaged.

    The state is overwritten. An error while a round is being applied leaves no state at all, and is raised."""
    verdicts = [record.verdict for record in records.open_all()]
    for verdict in rounds_after(verdicts, state.version, state.digest):
        if state.version == newest:
            break
        if not is_start_of(state, verdict):
            log.warning("round %d was averaged on another state than the records before it lead to", verdict.round)
            break
        try:
            store = applier.recorded(records, verdict)
        except StateFileError as error:
            log.warning("a round record is left out: %s", error)
            break
        state = applier.apply(state, verdict, RoundMean(store))
    return state


async def catch_up(
    state: AnchorState, verdicts: Sequence[Verdict], get_results: GetResults, applier: RoundApplier
) -> AnchorState:
    """The state after these committed rounds, of which the first was averaged on ``state``, which is overwritten.

    Raises ``LinkError`` when results cannot be fetched, or where a round was averaged on another state. Then
    ``state.current`` is the state after the rounds that were applied."""
    todo = iter(verdicts)
    async with task_scope() as tasks:
        under_way = deque(
            (verdict, tasks.create_task(get_results(verdict))) for verdict in islice(todo, _ROUNDS_AT_ONCE)
        )
        while under_way:
            verdict, fetching = under_way.popleft()
            store = await fetching
            if not is_start_of(state, verdict):
                raise LinkError(
                    f"round {verdict.round} was averaged on another state than the rounds before it lead to"
                )
            state = await in_thread(_apply_results, applier, state, verdict, store)
            del store
            under_way.extend((later, tasks.create_task(get_results(later))) for later in islice(todo, 1))
    return state


def _apply_results(applier: RoundApplier, state: AnchorState, verdict: Verdict, store: ResultStore) -> AnchorState:
    return applier.apply(state, verdict, RoundMean(store))


class RoundCatchUp:
    """Brings a state up to the newest one by the rounds that were committed since; called with the state.

    ``donors``: the peers that may have results now; ``view``: the run now; ``rounds``: how many rounds have been
    applied in all."""

    def __init__(
        self,
        applier: RoundApplier,
        endpoint: Endpoint,
        archive: RecordArchive,
        verdicts_from: VerdictsFrom,
        donors: Callable[[], Sequence[str]],
        view: Callable[[], RunView],
        progress_s: float,
    ) -> None:
        self.rounds = 0
        self._applier = applier
        self._endpoint = endpoint
        self._archive = archive
        self._verdicts_from = verdicts_from
        self._donors = donors
        self._view = view
        self._progress_s = progress_s

    async def __call__(self, state: AnchorState) -> AnchorState:
        """Raises ``LinkError`` where no rounds lead on from this state, or where they have no fewer bytes than a
        state; see ``catch_up``."""
        view = self._view()
        if view.verdict is not None and view.verdict.committed:  # all rounds are about as large
            await self._require_fewer([view.verdict] * (view.anchor_version - state.version), state)
        # No earlier round can have been averaged on this state: a round makes one version at most.
        verdicts = await self._verdicts_from(state.version)
        missed = rounds_after(verdicts, state.version, state.digest)
        if not missed:
            raise LinkError(f"no committed round is known that was averaged on version {state.version}")
        size_bytes = await self._require_fewer(missed, state)
        found = await catch_up(state, missed, self._results, self._applier)
        self.rounds += len(missed)
        log.info("caught up %d rounds to version %d with at most %d bytes", len(missed), found.version, size_bytes)
        return found

    async def _require_fewer(self, verdicts: Sequence[Verdict], state: AnchorState) -> int:
        """The bytes of these rounds' results. Raises ``LinkError`` unless a state has more."""
        each = {verdict.chain: verdict for verdict in verdicts}
        sizes = {chain: await in_thread(self._applier.results_bytes, verdict) for chain, verdict in each.items()}
        size_bytes = sum(sizes[verdict.chain] for verdict in verdicts)
        if size_bytes >= state.size_bytes:
            raise LinkError(f"the {len(verdicts)} rounds since then have no fewer bytes than a state")
        return size_bytes

    async def _results(self, verdict: Verdict) -> ResultStore:
        """Get a round's results from our own record, or else from other members."""
        try:
            return await in_thread(self._applier.recorded, self._archive.records, verdict)
        except StateFileError as error:
            log.debug("round %d is fetched, as there is no record of it: %s", verdict.round, error)
        assert verdict.plan is not None
        planned = {member.peer for member in verdict.plan.members}
        store = ResultStore.of(verdict, self._applier.codec_map)
        donors = sorted(self._donors(), key=lambda peer: peer not in planned)
        await fetch_committed(self._endpoint, store, verdict, donors, self._progress_s)
        self._archive.add(store, verdict)
        return store
