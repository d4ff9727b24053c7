"""``shoal``, but what it contributes is its real work with the other sign: within every bound on norms.

``flipping_member.py join …``. Its residual stays what it would be, so that its norms do."""

import sys

from tests.integration.slow_member import slow_down
from torch import Tensor

from shoal.compression.error_feedback import ErrorFeedback
from shoal.compression.range_reader import RangeReader
from shoal.peer.cli.main import main


class Flipped:
    """Reader of another reader's values times -1."""

    def __init__(self, reader: RangeReader) -> None:
        self.elements = reader.elements
        self._reader = reader

    def read(self, start: int, stop: int, out: Tensor) -> None:
        self._reader.read(start, stop, out)
        out.neg_()


def flip() -> None:
    real = ErrorFeedback.begin

    def begin(self: ErrorFeedback, contribution: RangeReader, largest: float | None = None) -> None:
        real(self, Flipped(contribution), largest)

    ErrorFeedback.begin = begin  # type: ignore[method-assign]


if __name__ == "__main__":
    slow_down(0.02)
    flip()
    sys.argv = ["shoal", *sys.argv[1:]]
    main()
