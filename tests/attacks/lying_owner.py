"""``shoal``, but of the means that it makes it sends the opposite, which is as long: ``lying_owner.py join …``.

To auditors it shows what it was sent, masked contributions and their opening in secure rounds."""

from typing import Any

from torch import Tensor

from shoal.compression.codec import Codec
from shoal.compression.weighted_mean import EncodingLoss, WeightedMean
from shoal.peer.cli.main import main
from shoal.swarm.averaging import secure_exchange
from shoal.swarm.averaging.chunk_header import ChunkHeader
from shoal.swarm.averaging.reduction import ReducedChunk
from shoal.swarm.averaging.results import ResultStore


def lie() -> None:
    real = WeightedMean.encode

    def encode(self: Any, codec: Codec, divisor: float, left: Tensor, packed: Tensor) -> EncodingLoss:
        self._sum().neg_()
        return real(self, codec, divisor, left, packed)

    encoded = secure_exchange.encoded_mean

    def opposite(store: ResultStore, chunk: int, mean: Tensor, header: ChunkHeader) -> ReducedChunk:
        return encoded(store, chunk, mean.neg_(), header)

    WeightedMean.encode = encode  # type: ignore[method-assign]
    secure_exchange.encoded_mean = opposite


if __name__ == "__main__":
    lie()
    main()
