"""Averaging alone: weighted means of named arrays over everybody in a run, for training loops of any framework.

::

    with ArrayAverager.join(invite, {"w": w}) as averager:
        while (means := averager.average({"w": gradient}, weight=samples)) is not None:
            w -= 0.1 * means["w"]

Arrays are NumPy's, torch's, or whatever ``numpy.asarray`` takes (JAX, TensorFlow); means come as NumPy arrays, or as
torch tensors where tensors went in. The run file has ``recipe.name = "own"``, ``data.source = "own"``; a round closes
when the weights of all members reach ``round.tokens``, or after ``round.max_s``.
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

from shoal.peer.member.replica import TrainingSetup
from shoal.peer.network_thread import Interrupted
from shoal.peer.options import SessionOptions
from shoal.peer.session import Readiness, Session
from shoal.peer.training.parameters import ParameterVector
from shoal.swarm.errors import UserError


class _Arrays(nn.Module):
    """The arrays' names and shapes as a model's; its values are the run's anchor, which nobody here reads."""

    def __init__(self, like: Mapping[str, Any]) -> None:
        super().__init__()
        for name, array in like.items():
            shape = array.shape if isinstance(array, Tensor) else np.shape(array)
            # A dot would be a module within a module.
            self.register_parameter(name.replace(".", "/"), nn.Parameter(torch.zeros(tuple(shape))))


class _Given:
    """Local work that is given, not done (a ``LocalWork``)."""

    def __init__(self, vector: ParameterVector) -> None:
        self._vector = vector
        self.values: Tensor | None = None

    def step(self, samples: int, lr_factor: float) -> None:
        """Nothing to do."""

    def contribution(self, anchor: Tensor) -> Tensor:
        """See ``LocalWork.contribution``."""
        return torch.zeros_like(anchor) if self.values is None else self.values.clone()

    def reset_optimizer(self) -> None:
        """There are none here: who gives the arrays has them."""

    def restart_from(self, anchor: Tensor) -> None:
        """Keep the given arrays: they are offered until they have been in a mean."""
        self._vector.write(anchor)

    def continue_from(self, anchor: Tensor) -> None:
        """See ``restart_from``."""
        self.restart_from(anchor)


class ArrayAverager:
    """Made with ``join``; a context manager that leaves the run at its end. For one thread."""

    def __init__(self, session: Session, like: Mapping[str, Any]) -> None:
        """``session``: connected and not started. Raises ``UserError`` for a run with ``overlap``."""
        if session.run_file.averaging.overlap:
            raise UserError("the run has averaging.overlap = true, but average() waits for its mean: host it without")
        self._session = session
        self._names = list(like)
        self._work: _Given
        self._mean: Tensor | None = None
        model = _Arrays(like)
        self._shapes = [tuple(one.shape) for one in model.parameters()]
        session.start(TrainingSetup(model, make_work=self._make_work, on_mean=self._on_mean))

    @classmethod
    def join(cls, invite: str, like: Mapping[str, Any], options: SessionOptions | None = None) -> ArrayAverager:
        """Join the run with arrays of these names and shapes. Raises the errors of a failed join, ``ModelMismatch``
        when the run's other members average something else."""
        if not like:
            raise UserError("give at least one array to average")
        session = Session.connect(invite, options)
        try:
            return cls(session, like)
        except BaseException:
            session.close()
            raise

    def average(self, arrays: Mapping[str, Any], weight: int = 1) -> dict[str, Any] | None:
        """The weighted mean of everybody's arrays in the round that these got into; None when the run has ended.

        ``arrays``: of the names and shapes of ``join``, any float type; ``weight``: 1 or more, such as the samples
        behind them. Blocks until the round is committed; goes on over aborted rounds, restarts of the coordinator and
        dead members. Raises ``UserError`` for other names, shapes or values.
        """
        if weight < 1:
            raise UserError(f"weight: expected 1 or more, not {weight}")
        self._work.values, self._mean = self._flat(arrays), None
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

    def _make_work(self, vector: ParameterVector) -> _Given:
        self._work = _Given(vector)
        return self._work

    def _on_mean(self, mean: Tensor, included: bool) -> None:
        if included:
            self._mean = mean

    def _flat(self, arrays: Mapping[str, Any]) -> Tensor:
        if list(arrays) != self._names:
            raise UserError(f"arrays: expected {', '.join(self._names)}, in this order, not {', '.join(arrays)}")
        pieces = []
        for (name, array), shape in zip(arrays.items(), self._shapes, strict=True):
            tensor = array.detach().cpu() if isinstance(array, Tensor) else torch.from_numpy(np.array(array))
            if tuple(tensor.shape) != shape:
                raise UserError(f"{name}: expected the shape {shape}, not {tuple(tensor.shape)}")
            if not bool(torch.isfinite(tensor).all()):
                raise UserError(f"{name}: holds NaN or infinity")
            pieces.append(tensor.to(torch.float32).reshape(-1))
        return torch.cat(pieces)

    def _named(self, mean: Tensor, arrays: Mapping[str, Any]) -> dict[str, Any]:
        named, at = {}, 0
        for (name, array), shape in zip(arrays.items(), self._shapes, strict=True):
            values = mean[at : at + math.prod(shape)].reshape(shape).clone()
            named[name] = values if isinstance(array, Tensor) else values.numpy()
            at += math.prod(shape)
        return named
