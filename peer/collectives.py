"""Collectives over a run's members: all-reduce, all-gather, reduce-scatter and broadcast of arrays of any framework.

::

    with Collectives.join(invite) as run:
        while (total := run.all_reduce({"hits": hits}, "sum")) is not None:
            print(total.value["hits"], "of", len(total.members), "members, of whom this is number", total.rank)

The run file has ``recipe.name = "own"``, ``data.source = "own"`` and a ``[collective]`` section, which bounds what a
call may take. A call is a round: its verdict is its only end, and every member of the call gets the bit-identical
result. Who takes part is known when it ends: a member that dies in it is left out, and one that joins is in the next.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
from torch import Tensor

from shoal.compression.range_reader import TensorReader
from shoal.peer.array_member import ArrayMember
from shoal.peer.array_packing import CallPart, PackedCall, call_digest, label_of, pack, unpack
from shoal.peer.array_trees import ArrayKind, NumpyArray, as_numpy, named_arrays, replaced
from shoal.peer.options import SessionOptions
from shoal.peer.session import Session
from shoal.swarm.averaging.outcome import Committed
from shoal.swarm.errors import UserError

log = logging.getLogger(__name__)

Operation = Literal["sum", "mean", "max", "min"]

_MOST_OTHER_CALLS = 64
"""Rounds in which most members call something else, until a call is given up: a loop has fewer calls in a turn."""


@dataclass(frozen=True)
class Collected:
    """Result of a collective. ``members``: peer ids of those that are in it, by rank; ``rank``: of this member among
    them; ``round``: the run's round that it was; ``source``: of a broadcast, the rank of whose arrays these are."""

    value: Any
    members: tuple[str, ...]
    rank: int
    round: int
    source: int | None = None


class Collectives:
    """Member of a run whose rounds are collectives, made with ``join``; a context manager that leaves the run.

    All members make the same calls, with arrays of the same names, shapes and types. A call waits until all members of
    the run have made it, but no longer than ``round.max_s``. While most members make another call, as when this one has
    joined in the middle of their loop, a call waits for its turn. Trees of arrays may be nested; results are of the
    same kind and on the same device. A call returns None at the run's end, and blocks over aborted rounds, restarts of
    the coordinator and deaths of members.

    Calls raise ``UserError`` for arrays that do not fit into ``collective.values``, or if the others keep making other
    calls; and the error that ended the connection. For use by one thread.
    """

    def __init__(self, session: Session) -> None:
        """``session``: connected and not started. Raises ``UserError`` for a run without ``[collective]``."""
        section = session.run_file.collective
        if section is None:
            raise UserError(
                "the run has no [collective] section, so its rounds average: join it by shoal.peer.array_averager, or "
                "host it with collective.values and collective.members"
            )
        self._room = section.values
        self._member = ArrayMember(session, {"collective": (section.elements,)})

    @classmethod
    def join(cls, invite: str, options: SessionOptions | None = None) -> Collectives:
        """Join the run. Raises ``UserError`` if it is not one of collectives, and the errors of ``Session.join``."""
        session = Session.connect(invite, options)
        try:
            return cls(session)
        except BaseException:
            session.close()
            raise

    @property
    def peer(self) -> str:
        """This member's peer id."""
        return self._member.peer

    def all_gather(self, arrays: Any) -> Collected | None:
        """Return the arrays of all members, bit for bit: ``value`` is a list of trees, by rank.

        Of floating types with up to four bytes, -0.0 comes back as 0.0."""

        def made(call: _Complete) -> list[Any]:
            return [_made(arrays, call.kinds, one) for one in call.brought]

        return self._call("all_gather", arrays, made)

    def all_reduce(self, arrays: Any, operation: Operation = "sum") -> Collected | None:
        """Return the sum, mean, maximum or minimum over the members, element by element.

        Computed in the arrays' type, in the order of ranks; float16 and bfloat16 in float32. Means of integers are
        float64, and sums of truth values int64."""
        reduce = _reducer(operation)

        def made(call: _Complete) -> Any:
            return _made(arrays, call.kinds, [reduce(one) for one in call.by_array()])

        return self._call(f"all_reduce {operation}", arrays, made)

    def reduce_scatter(self, arrays: Any, operation: Operation = "sum") -> Collected | None:
        """Return this member's share of what ``all_reduce`` returns: of each array the rank-th piece of the first axis.

        Pieces are as of ``numpy.array_split``: the first ones are longer by one where the axis does not divide."""
        if any(not kind.shape for kind in _kinds_of(arrays).values()):
            raise UserError("reduce_scatter: expected arrays of one dimension or more, which can be cut to pieces")
        reduce = _reducer(operation)

        def made(call: _Complete) -> Any:
            pieces = [np.array_split(reduce(one), len(call.members))[call.rank] for one in call.by_array()]
            return _made(arrays, call.kinds, pieces)

        return self._call(f"reduce_scatter {operation}", arrays, made)

    def broadcast(self, arrays: Any, *, source: bool) -> Collected | None:
        """Return the arrays of the member that says it is the ``source``; of several, of the one with the lowest rank.

        ``arrays``: those of other members give names, shapes and types only. Waits while no member is a source."""

        def made(call: _Complete) -> Any:
            assert call.source is not None, "a call without one is not complete"
            return _made(arrays, call.kinds, call.brought[call.source])

        return self._call("broadcast", arrays, made, CallPart.SOURCE if source else CallPart.RECEIVES)

    def barrier(self) -> Collected | None:
        """Return when all members have called it; ``value`` is None."""
        return self._call("barrier", (), lambda call: None)

    def close(self) -> None:
        """Leave the run."""
        self._member.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call(
        self, name: str, arrays: Any, made: Callable[[_Complete], Any], part: CallPart = CallPart.EQUAL
    ) -> Collected | None:
        """Make a call until a committed round has it."""
        kinds = _kinds_of(arrays)
        call = PackedCall(call_digest(name, kinds), list(kinds.values()), part)
        values = pack(call, [as_numpy(one) for _, one in named_arrays(arrays)], self._room)
        others = 0
        while others < _MOST_OTHER_CALLS:
            outcome = self._member.bring(lambda anchor: TensorReader(values), 1)
            if outcome is None:
                return None
            rows = _rows(outcome)
            chosen = chosen_call([label for label, _ in rows.values()])
            complete = _complete(rows, call, self.peer) if chosen == call.digest else None
            if complete is not None:
                number = outcome.verdict.round
                return Collected(made(complete), complete.members, complete.rank, number, complete.source)
            if chosen is not None and chosen != call.digest:
                level = logging.DEBUG if others else logging.WARNING
                log.log(level, "the other members make another call than %s, which waits for its turn", name)
                others += 1
        raise UserError(
            f"{name}: in {_MOST_OTHER_CALLS} rounds the other members have made another call, or this one with arrays "
            "of other names, shapes or types: run the same program on all of them"
        )


@dataclass(frozen=True)
class _Complete:
    """A call that a round has completed. ``brought``: arrays by rank; ``source``: rank of the first source, if any."""

    kinds: list[ArrayKind]
    members: tuple[str, ...]
    brought: list[list[NumpyArray]]
    rank: int
    source: int | None

    def by_array(self) -> list[list[NumpyArray]]:
        return [list(one) for one in zip(*self.brought, strict=True)]


_Rows = dict[str, tuple[tuple[bytes, CallPart], Tensor]]
"""Labels and vectors of members whose contributions came whole and are to some call, in the order of peer ids."""


def _rows(outcome: Committed) -> _Rows:
    plan, rows = outcome.verdict.plan, {}
    assert plan is not None
    for index, member in enumerate(plan.members):
        row = outcome.mean.brought(index)
        if row is not None and (label := label_of(row)) is not None:
            rows[member.peer] = label, row
    return rows


def _complete(rows: _Rows, call: PackedCall, me: str) -> _Complete | None:
    """Return the call as the round that chose it has completed it; None if ``me`` is not in it, or no source.

    Members whose arrays are not what ``pack`` makes are not in it. The same bytes give the same on every member."""
    members, brought, parts = [], [], []
    for peer, ((digest, part), row) in rows.items():
        if digest == call.digest and (arrays := unpack(call, row)) is not None:
            members.append(peer)
            brought.append(arrays)
            parts.append(part)
    source = parts.index(CallPart.SOURCE) if CallPart.SOURCE in parts else None
    if me not in members or (source is None and CallPart.RECEIVES in parts):
        return None
    return _Complete(call.kinds, tuple(members), brought, members.index(me), source)


def chosen_call(labels: Sequence[tuple[bytes, CallPart]]) -> bytes | None:
    """Return the digest of the call that a round completes: the one that most of its members make, of equals that of
    the lowest peer id. None of none. ``labels``: in the order of peer ids.

    A call in which all receive is not complete: it would keep its members from whoever is to be the source."""
    count = Counter(digest for digest, _ in labels)
    able = {digest for digest, part in labels if part is not CallPart.RECEIVES}
    most = max((count[digest] for digest in able), default=0)
    return next((digest for digest, _ in labels if digest in able and count[digest] == most), None)


def _kinds_of(arrays: Any) -> dict[str, ArrayKind]:
    kinds = [(name, ArrayKind.of(array)) for name, array in named_arrays(arrays)]
    if len(dict(kinds)) != len(kinds):
        raise UserError("two arrays have the same name: keys may not contain slashes")
    return dict(kinds)


def _made(tree: Any, kinds: list[ArrayKind], arrays: list[NumpyArray]) -> Any:
    made = [
        kind.make(array, keep_dtype=kind.dtype == array.dtype.name or kind.is_floating)
        for kind, array in zip(kinds, arrays, strict=True)
    ]
    return replaced(tree, iter(made))


def _reducer(operation: Operation) -> Callable[[list[NumpyArray]], NumpyArray]:
    """Return what reduces arrays of the same shape: one after the other, each operation rounded once."""
    if operation not in _REDUCERS:
        raise UserError(f"operation: expected one of {', '.join(_REDUCERS)}, not {operation!r}")
    reduce = _REDUCERS[operation]

    def reduced(arrays: list[NumpyArray]) -> NumpyArray:
        found = np.asarray(reduce(arrays))
        # The bits of a NaN, and the sign of a zero among equals, are the processor's choice.
        return np.where(np.isnan(found), found.dtype.type(np.nan), found + 0) if found.dtype.kind == "f" else found

    return reduced


def _sum(arrays: list[NumpyArray]) -> NumpyArray:
    total = arrays[0].astype(np.int64) if arrays[0].dtype == np.bool_ else arrays[0]
    for one in arrays[1:]:
        total = np.asarray(np.add(total, one, dtype=total.dtype))
    return total


def _mean(arrays: list[NumpyArray]) -> NumpyArray:
    if not np.issubdtype(arrays[0].dtype, np.inexact):
        arrays = [one.astype(np.float64) for one in arrays]
    total = _sum(arrays)
    return np.asarray(np.divide(total, total.dtype.type(len(arrays))))


def _largest(arrays: list[NumpyArray]) -> NumpyArray:
    return np.asarray(np.maximum.reduce(arrays))


def _smallest(arrays: list[NumpyArray]) -> NumpyArray:
    return np.asarray(np.minimum.reduce(arrays))


_REDUCERS: Mapping[str, Callable[[list[NumpyArray]], NumpyArray]] = {
    "sum": _sum,
    "mean": _mean,
    "max": _largest,
    "min": _smallest,
}
