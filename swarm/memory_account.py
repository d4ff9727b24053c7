"""Account of a member's memory: what each parameter takes on the device and in the machine's memory, item by item; also
on its disk, and on its link in a round.

``shoal join``, ``shoal doctor`` and the pipeline's planner count with it, and ``benchmarks/memory.py`` compares it with
what processes take. Amounts are in float32 values for each parameter, so that of n parameters an item takes
4 * n * ``values`` bytes. What does not grow with the model (Python, torch, links, buffers of chunks) and what grows
with the batch (activations) is not counted here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from shoal.swarm.protocol.run_file import RunFile

Place: TypeAlias = Literal["device", "host"]
Moment: TypeAlias = Literal["work", "exchange", "join"]
"""Local work; a round, from the contribution to the next anchor, with all that is there at some time in it; the arrival
of the state that a joiner fetches."""

ALWAYS: tuple[Moment, ...] = ("work", "exchange", "join")
FEWEST_PEERS = 2
"""Fewest members of a round that exchange anything."""

_SAMPLE = ("layers.0.weight", (1024, 1024))
"""Tensor by which the bytes of packed values are counted."""


@dataclass(frozen=True)
class MemoryItem:
    """Memory for ``values`` float32 values of each parameter in one place, at these moments."""

    name: str
    place: Place
    values: float
    moments: tuple[Moment, ...] = ALWAYS


@dataclass(frozen=True)
class MemoryDemand:
    """Float32 values of each parameter at the moment that takes most of them.

    ``device``, ``host``: of a GPU with a memory of its own, and of the machine beside it; ``shared``: of a machine
    whose device computes in its memory (CPU, MPS). That is no more than the other two together, as they need not be
    largest at the same moment."""

    device: float
    host: float
    shared: float


class MemoryAccount:
    """Items of a member's memory. ``ranks``: processes of an island, over whose devices the model is spread."""

    def __init__(self, items: Iterable[MemoryItem], ranks: int = 1) -> None:
        self.items = tuple(items)
        self._ranks = ranks

    def values(self, moment: Moment, *places: Place) -> float:
        """Return the float32 values of each parameter that are in these places at a moment."""
        return sum(one.values for one in self.items if moment in one.moments and one.place in places)

    def demand(self) -> MemoryDemand:
        """Return the most that there is at any moment; ``device``: on each of an island's."""

        def most(*places: Place) -> float:
            return max(self.values(moment, *places) for moment in ALWAYS)

        return MemoryDemand(most("device") / self._ranks, most("host"), most("device", "host"))


def account_of(run: RunFile, *, value_bytes: float = 4.0, peers: int = FEWEST_PEERS, ranks: int = 1) -> MemoryAccount:
    """Return the account of a member that trains the whole model or, in a pipeline, stages.

    ``value_bytes``: size of a parameter in the model, on average; where it is less than 4, the inner optimizer has
    float32 masters; ``peers``: members of a round, by whose number some codecs pack means; ``ranks``: processes of an
    island."""
    between_ranks = _between_ranks(run) if ranks > 1 else ()
    return MemoryAccount([*_training(run, value_bytes), *_state(run), *_round(run, peers), *between_ranks], ranks)


def _training(run: RunFile, value_bytes: float) -> Iterable[MemoryItem]:
    yield MemoryItem("parameters", "device", value_bytes / 4)
    during: tuple[Moment, ...] = ("work", "exchange") if run.averaging.overlap else ("work",)
    has_masters = value_bytes < 4 and run.algorithm != "virtual_batch"  # whose gradients are float32 as well
    yield MemoryItem("gradients", "device", 1.0 if has_masters else value_bytes / 4, during)
    if run.algorithm == "virtual_batch":
        yield MemoryItem("sum of gradients", "device", 1.0, ("work", "exchange"))
        return
    if has_masters:
        yield MemoryItem("float32 masters", "device", 1.0)
    yield MemoryItem("inner optimizer", "device", run.inner.state_values)
    if run.averaging.overlap:
        yield MemoryItem("parameters that were contributed", "device", 1.0, ("exchange",))


def _state(run: RunFile) -> Iterable[MemoryItem]:
    has_optimizer = run.algorithm != "virtual_batch"
    yield MemoryItem("anchor", "host", 1.0)
    yield MemoryItem("outer optimizer", "host", float(run.outer.slots))
    yield MemoryItem("residual", "host", {"float32": 1.0, "bfloat16": 0.5}[run.averaging.residual_precision])
    if has_optimizer and run.averaging.overlap:
        copied = run.inner.state_values
        yield MemoryItem("copy of the inner optimizer for checkpoints", "host", copied, ("work", "exchange"))


def _round(run: RunFile, peers: int) -> Iterable[MemoryItem]:
    contribution, result = _packed(run, peers)
    yield MemoryItem("results of the last round", "host", result, ("work", "exchange"))
    yield MemoryItem("encoded contribution", "host", contribution, ("exchange",))
    yield MemoryItem("loss of encoding the means of our part", "host", 1.0 / peers, ("exchange",))
    yield MemoryItem("results of this round", "host", result, ("exchange",))


def _between_ranks(run: RunFile) -> Iterable[MemoryItem]:
    yield MemoryItem("parameters shared among the ranks", "host", 1.0)
    if run.algorithm != "virtual_batch" and not run.averaging.overlap:
        yield MemoryItem("whole inner optimizer for checkpoints", "host", run.inner.state_values, ("exchange",))


def _packed(run: RunFile, peers: int) -> tuple[float, float]:
    """Return the float32 values that a packed parameter of a contribution, and of a result, takes."""
    formats, values = run.format_map((_SAMPLE,)), _SAMPLE[1][0] * _SAMPLE[1][1]
    contribution, result = formats.contribution(0, values), formats.result(0, values, peers)
    return contribution.packed_bytes(values) / (4 * values), result.packed_bytes(values) / (4 * values)


def checkpoint_values(run: RunFile) -> float:
    """Return the float32 values of each parameter in a checkpoint: anchor, outer and inner optimizer, residual."""
    inner = 0 if run.algorithm == "virtual_batch" else run.inner.state_values
    return 1.0 + run.outer.slots + inner + {"float32": 1.0, "bfloat16": 0.5}[run.averaging.residual_precision]


def round_values(run: RunFile, *, peers: int = FEWEST_PEERS) -> float:
    """Return the most float32 values of each parameter that a member of many sends in a round, and receives: its
    contribution in pieces to their owners, and its part of the mean to everybody."""
    return sum(_packed(run, peers))
