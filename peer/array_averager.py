"""Array averager: weighted means of arrays over all members of a run, for training loops of any framework.

::

    with ArrayAverager.join(invite, {"w": w}) as averager:
        while (means := averager.average({"w": gradient}, weight=samples)) is not None:
            w -= 0.1 * means["w"]

or, for weights that each member trains by itself between two rounds, and that a late joiner begins with::

    with ArrayAverager.join(invite, weights) as averager:
        weights = averager.values or weights
        while (weights := averager.average_values(trained(weights), weight=samples)) is not None: ...

Arrays are NumPy's, torch's, JAX's, TensorFlow's, Keras's, or whatever ``numpy.asarray`` takes, in dicts, lists and
tuples; what comes back is of the same kind, on the same device. The run file has ``recipe.name = "own"`` and
``data.source = "own"``; a round closes when the members' weights add up to ``round.tokens``, or after ``round.max_s``.
"""

from __future__ import annotations

import math
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from shoal.compression.range_reader import RangeReader
from shoal.peer.array_member import ArrayMember, Bring
from shoal.peer.array_trees import ArrayKind, as_tensor, named_arrays, replaced
from shoal.peer.options import SessionOptions
from shoal.peer.session import Session
from shoal.peer.training.tensor_sequence import TensorSequence
from shoal.swarm.averaging.outcome import Committed
from shoal.swarm.errors import UserError


class _FromAnchor:
    """Reader of how far values are from the anchor: ``anchor - values`` (a ``RangeReader``)."""

    def __init__(self, anchor: Tensor, values: RangeReader) -> None:
        self._anchor = anchor
        self._values = values

    @property
    def elements(self) -> int:
        return self._values.elements

    def read(self, start: int, stop: int, out: Tensor) -> None:
        self._values.read(start, stop, out)
        torch.sub(self._anchor[start:stop], out, out=out)


class ArrayAverager:
    """Member of a run that averages arrays, made with ``join``; a context manager that leaves the run at its end.

    For use by one thread.
    """

    def __init__(self, session: Session, like: Any) -> None:
        """``session``: connected and not started; ``like``: arrays of the names and shapes to average.

        Raises ``UserError`` for a run with ``averaging.overlap`` or ``[collective]``.
        """
        if session.run_file.averaging.overlap:
            raise UserError(
                "the run has averaging.overlap = true, which average() cannot use, as it waits for each mean: host the "
                "run without it"
            )
        if session.run_file.collective is not None:
            raise UserError(
                "the run has a [collective] section, so it does not average: join it by shoal.peer.collectives"
            )
        self._kinds = {name: ArrayKind.of(array) for name, array in named_arrays(like)}
        self._tree = replaced(like, iter(range(len(self._kinds))))
        self._has_start = session.run_file.start is not None
        self._member = ArrayMember(session, {name: kind.shape for name, kind in self._kinds.items()})

    @classmethod
    def join(cls, invite: str, like: Any, options: SessionOptions | None = None) -> ArrayAverager:
        """Join the run with arrays of these names and shapes.

        ``like``: a tree of arrays; their values are not used. Raises ``UserError`` for no arrays, ``ModelMismatch`` if
        the run's other members average arrays of other names or shapes, and the errors of ``Session.join``.
        """
        if not list(named_arrays(like)):
            raise UserError("there are no arrays to average: give at least one")
        session = Session.connect(invite, options)
        try:
            return cls(session, like)
        except BaseException:
            session.close()
            raise

    @property
    def values(self) -> Any:
        """The run's current values, like the arrays of ``join``: what ``average_values`` returned last to its members.

        None before the first round, unless the run has a ``[start]``. In a run whose members ``average`` gradients, it
        is what the run's ``[outer]`` optimizer makes of their means from zeros on.
        """
        version, anchor = self._member.anchor
        if version == 0 and not self._has_start:
            return None
        return self._named(anchor, list(self._kinds.values()), self._tree)

    def average(self, arrays: Any, weight: int = 1) -> Any:
        """Return the weighted mean, over all members, of the round that these arrays got into; None at the run's end.

        ``arrays``: names and shapes of ``join``, any numeric type; they are averaged as float32, and of types
        that are not floating the means are float32. ``weight``: 1 or more, such as the number of samples behind them.
        Blocks until a committed round contains the arrays, over aborted rounds, restarts of the coordinator and deaths
        of members.

        Raises ``UserError`` for other names, shapes or values that are not finite, and the error that ended the
        connection.
        """
        given, kinds = self._checked(arrays)
        outcome = self._bring(lambda anchor: given.settled(), weight)
        return None if outcome is None else self._named(outcome.mean.whole(), kinds, arrays)

    def average_values(self, arrays: Any, weight: int = 1) -> Any:
        """Move the run's current values to the weighted mean of the members' values and return them.

        As ``average``, but what a member brings is how far it has come from the run's current values, which the run
        keeps: a late joiner finds them in ``values``. With ``outer.optimizer = "sgd"`` and ``outer.lr = 1.0`` the
        result is the mean itself; other outer optimizers step there (DiLoCo). Arguments, errors and result as
        ``average``.
        """
        given, kinds = self._checked(arrays)
        reader = given.settled()
        outcome = self._bring(lambda anchor: _FromAnchor(anchor, reader), weight)
        return None if outcome is None else self._named(self._member.anchor[1], kinds, arrays)

    def close(self) -> None:
        """Leave the run."""
        self._member.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _bring(self, bring: Bring, weight: int) -> Committed | None:
        if weight < 1:
            raise UserError(f"weight: expected 1 or more, not {weight}")
        return self._member.bring(bring, weight)

    def _checked(self, arrays: Any) -> tuple[TensorSequence, list[ArrayKind]]:
        given = dict(named_arrays(arrays))
        if list(given) != list(self._kinds):
            raise UserError(f"arrays: expected {', '.join(self._kinds)}, not {', '.join(given)}")
        tensors = []
        for name, array in given.items():
            tensor, shape = as_tensor(array), self._kinds[name].shape
            if tuple(tensor.shape) != shape:
                raise UserError(f"{name}: expected the shape {shape}, not {tuple(tensor.shape)}")
            if not bool(torch.isfinite(tensor).all()):
                raise UserError(f"{name}: holds NaN or infinity, which cannot be averaged")
            tensors.append(tensor)
        return TensorSequence(tensors), [ArrayKind.of(array) for array in given.values()]

    def _named(self, vector: Tensor, kinds: list[ArrayKind], tree: Any) -> Any:
        made, at = [], 0
        for kind in kinds:
            size = math.prod(kind.shape)
            values = vector[at : at + size].reshape(kind.shape).clone()
            made.append(kind.make(values, keep_dtype=kind.is_floating))
            at += size
        return replaced(tree, iter(made))
