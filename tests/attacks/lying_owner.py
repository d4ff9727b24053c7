"""``shoal``, but of the means that it makes it sends the opposite, which is as long: ``lying_owner.py join …``.

To auditors it shows what it was sent."""

from typing import Any

from torch import Tensor

from shoal.compression.codec import Codec
from shoal.compression.weighted_mean import EncodingLoss, WeightedMean
from shoal.peer.cli.main import main


def lie() -> None:
    real = WeightedMean.encode

    def encode(self: Any, codec: Codec, divisor: float, left: Tensor, packed: Tensor) -> EncodingLoss:
        self._sum().neg_()
        return real(self, codec, divisor, left, packed)

    WeightedMean.encode = encode  # type: ignore[method-assign]


if __name__ == "__main__":
    lie()
    main()
