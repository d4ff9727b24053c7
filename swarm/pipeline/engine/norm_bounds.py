"""Bounds on the norms of activations and gradients that a peer of a pipeline receives.

Replicas of a stage have the same parameters, so what they send is of about the same size, whatever the samples. What is
far above it would spoil every later stage, or all earlier ones, and is refused. Direction and smaller errors are not
seen here.
"""

from __future__ import annotations

from collections import deque
from statistics import median

from shoal.swarm.pipeline.engine.effects import TensorKind

Hop = tuple[TensorKind, int]

FIRST_BOUND = 65504.0
"""Root mean square allowed while too few tensors are known: the largest number of float16."""

_FACTORS: dict[TensorKind, float] = {"activation": 16.0, "gradient": 64.0}
"""Multiples of the usual size that are accepted. Gradients vary more: they are small for samples that the model knows
well."""

_WINDOW = 32
_ENOUGH = 8
_RISE = 4.0
"""Largest rise of the usual size from one round to the next, so that no replica raises it quickly."""


class NormBounds:
    """Bounds of one receiver, by hop: a kind of tensor and the stage that receives it.

    The usual size is the median over senders of the median of each one's recent accepted tensors: a replica that sends
    much counts no more than the others. Only its own sizes are known of a lone replica.
    """

    def __init__(self) -> None:
        self._round = -1
        self._recent: dict[Hop, dict[str, deque[float]]] = {}
        self._before: dict[Hop, float] = {}

    def round_opened(self, number: int) -> None:
        """Remember the usual sizes at the begin of a round; a reopened one has begun before."""
        if number != self._round:
            self._round = number
            self._before = {hop: size for hop in self._recent if (size := self._usual(hop)) is not None}

    def bound(self, hop: Hop) -> float:
        """Return the largest size accepted now."""
        usual = self._usual(hop)
        return FIRST_BOUND if usual is None else usual * _FACTORS[hop[0]]

    def accepts(self, hop: Hop, size: float) -> bool:
        """Return whether a tensor of this size may be used; False for NaN and infinity."""
        return size <= self.bound(hop)

    def learn(self, hop: Hop, sender: str, size: float) -> None:
        """Learn from an accepted tensor of one of the hop's replicas.

        Zeros say nothing of what follows, such as those before an output layer that begins with zeros.
        """
        if size > 0:
            self._recent.setdefault(hop, {}).setdefault(sender, deque(maxlen=_WINDOW)).append(size)

    def forget(self, sender: str) -> None:
        """Forget a sender that is gone, unless nobody else is known, for its successor is bounded by its sizes."""
        for senders in self._recent.values():
            if len(senders) > 1:
                senders.pop(sender, None)

    def _usual(self, hop: Hop) -> float | None:
        """Return the usual size; None while too few are known."""
        known = self._recent.get(hop, {}).values()
        if sum(len(sizes) for sizes in known) < _ENOUGH:
            return None
        usual = median(median(sizes) for sizes in known)
        return min(usual, self._before.get(hop, usual) * _RISE)
