"""Array averager: weighted means of named arrays over all members of a run, for training loops of any framework.

::

    with ArrayAverager.join(invite, {"w": w}) as averager:
        while (means := averager.average({"w": gradient}, weight=samples)) is not None:
            w -= 0.1 * means["w"]

Arrays are NumPy's, torch's, or whatever ``numpy.asarray`` takes (JAX, TensorFlow); means are NumPy arrays, or torch
tensors on the CPU where torch tensors were given. The run file has ``recipe.name = "own"`` and ``data.source = "own"``;
a round closes when the members' weights add up to ``round.tokens``, or after ``round.max_s``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from shoal.compression.range_reader import RangeReader, TensorReader
from shoal.compression.scratch import zeros
from shoal.peer.member.replica import TrainingSetup
from shoal.peer.network_thread import Interrupted
from shoal.peer.options import SessionOptions
from shoal.peer.session import Readiness, Session
from shoal.peer.training.parameters import ParameterVector
from shoal.peer.training.tensor_sequence import TensorSequence
from shoal.swarm.errors import UserError


class _Arrays(nn.Module):
    """Model with the arrays' names and shapes, of zeros that take no memory; the run's anchor is not kept in it."""

    def __init__(self, like: Mapping[str, Any]) -> None:
        super().__init__()
        for name, array in like.items():
            shape = array.shape if isinstance(array, Tensor) else np.shape(array)
            # A parameter's name may not contain a dot.
            self.register_parameter(name.replace(".", "/"), nn.Parameter(torch.zeros(()).expand(tuple(shape))))


class _GivenArrays:
    """Local work that contributes given arrays instead of training (a ``LocalWork``)."""

    def __init__(self, vector: ParameterVector) -> None:
        self._elements = vector.elements
        self.arrays: TensorSequence | None = None

    def step(self, samples: int, lr_factor: float) -> None:
        """Do nothing, because the arrays are given."""

    def contribution(self, anchor: Tensor) -> RangeReader:
        if self.arrays is None:
            return TensorReader(zeros(self._elements))
        return self.arrays.settled()

    def reset_optimizer(self) -> None:
        """Do nothing, because the caller has its own optimizer."""

    def restart_from(self, anchor: Tensor) -> None:
        """Keep the given arrays, which are offered again until a mean contains them."""

    def continue_from(self, anchor: Tensor) -> None:
        """Keep the given arrays, as ``restart_from``."""


class ArrayAverager:
    """Member of a run that averages arrays, made with ``join``; a context manager that leaves the run at its end.

    For use by one thread.
    """

    def __init__(self, session: Session, like: Mapping[str, Any]) -> None:
        """``session``: connected and not started; ``like``: arrays of the names and shapes to average.

        Raises ``UserError`` for a run with ``averaging.overlap``.
        """
        if session.run_file.averaging.overlap:
            raise UserError(
                "the run has averaging.overlap = true, which average() cannot use, as it waits for each mean: host the "
                "run without it"
            )
        self._session = session
        self._names = list(like)
        self._work: _GivenArrays
        self._mean: Tensor | None = None
        model = _Arrays(like)
        self._shapes = [tuple(one.shape) for one in model.parameters()]
        session.start(TrainingSetup(model, make_work=self._make_work, on_mean=self._on_mean))

    @classmethod
    def join(cls, invite: str, like: Mapping[str, Any], options: SessionOptions | None = None) -> ArrayAverager:
        """Join the run with arrays of these names and shapes.

        ``like``: arrays by name; their values are not used. Raises ``UserError`` for no arrays, ``ModelMismatch`` if
        the run's other members average arrays of other names or shapes, and the errors of ``Session.join``.
        """
        if not like:
            raise UserError("there are no arrays to average: give at least one")
        session = Session.connect(invite, options)
        try:
            return cls(session, like)
        except BaseException:
            session.close()
            raise

    def average(self, arrays: Mapping[str, Any], weight: int = 1) -> dict[str, Any] | None:
        """Return the weighted mean, over all members, of the round that these arrays got into; None at the run's end.

        ``arrays``: names, order and shapes of ``join``, any numeric type; they are averaged as float32. ``weight``: 1
        or more, such as the number of samples behind them. The means are float32, by name. Blocks until a committed
        round contains the arrays, over aborted rounds, restarts of the coordinator and deaths of members.

        Raises ``UserError`` for other names, shapes or values that are not finite, and the error that ended the
        connection.
        """
        if weight < 1:
            raise UserError(f"weight: expected 1 or more, not {weight}")
        self._work.arrays, self._mean = self._checked(arrays), None
        session, samples = self._session, self._session.samples
        while self._mean is None:
            readiness = session.settle()
            missing = weight - samples.in_round
            if readiness is Readiness.OVER:
                return None
            if readiness is Readiness.NOT_YET:
                continue
            if missing <= 0:
                with suppress(Interrupted):
                    session.wait_for_change()
            elif samples.next_batch(missing) is None:
                session.fetch_lease(missing)
            else:
                samples.finish_batch(torch.tensor(math.nan))
                session.report_progress()
        return self._named(self._mean, arrays)

    def close(self) -> None:
        """Leave the run."""
        self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _make_work(self, vector: ParameterVector) -> _GivenArrays:
        self._work = _GivenArrays(vector)
        return self._work

    def _on_mean(self, mean: Tensor, included: bool) -> None:
        if included:
            self._mean = mean

    def _checked(self, arrays: Mapping[str, Any]) -> TensorSequence:
        if list(arrays) != self._names:
            raise UserError(f"arrays: expected {', '.join(self._names)} in this order, not {', '.join(arrays)}")
        tensors = []
        for (name, array), shape in zip(arrays.items(), self._shapes, strict=True):
            tensor = array.detach() if isinstance(array, Tensor) else _tensor_of(np.asarray(array))
            if tuple(tensor.shape) != shape:
                raise UserError(f"{name}: expected the shape {shape}, not {tuple(tensor.shape)}")
            if not bool(torch.isfinite(tensor).all()):
                raise UserError(f"{name}: holds NaN or infinity, which cannot be averaged")
            tensors.append(tensor)
        return TensorSequence(tensors)

    def _named(self, mean: Tensor, arrays: Mapping[str, Any]) -> dict[str, Any]:
        named, at = {}, 0
        for (name, array), shape in zip(arrays.items(), self._shapes, strict=True):
            values = mean[at : at + math.prod(shape)].reshape(shape).clone()
            named[name] = values if isinstance(array, Tensor) else values.numpy()
            at += math.prod(shape)
        return named


def _tensor_of(array: np.ndarray[Any, Any]) -> Tensor:
    """Return a tensor that shares the array's memory, or a copy where torch cannot: read-only or reversed arrays."""
    if not array.flags.writeable or any(stride < 0 for stride in array.strides):
        array = array.copy()
    return torch.from_numpy(array)
