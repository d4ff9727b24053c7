"""``shoal``, but what it brings to rounds is multiplied: ``poison_member.py FACTOR join INVITE …``.

A factor of ``nan`` is a machine that is at fault: nothing ever comes of its work."""

import sys
from typing import Any

from torch import Tensor

from shoal.compression.range_reader import RangeReader, TensorReader, whole_vector
from shoal.peer.cli.main import main
from shoal.peer.training.algorithms import PseudoGradient


def poison(factor: float) -> None:
    real = PseudoGradient.contribution

    def contribution(self: Any, anchor: Tensor) -> RangeReader:
        return TensorReader(whole_vector(real(self, anchor)).mul_(factor))

    PseudoGradient.contribution = contribution  # type: ignore[method-assign]


if __name__ == "__main__":
    _, factor, *arguments = sys.argv
    poison(float(factor))
    sys.argv = ["shoal", *arguments]
    main()
