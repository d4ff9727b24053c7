"""An endpoint as one of several scopes sees it: who averages there names blobs as if it were alone on the node."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping

from shoal.swarm.protocol.messages import Blob
from shoal.swarm.transport.links import Sink
from shoal.swarm.transport.source import ChunkSource
from shoal.swarm.transport.transport import Endpoint


class ScopedEndpoint:
    """Its blobs are those of ``scope`` (an ``Endpoint``)."""

    def __init__(self, endpoint: Endpoint, scope: int) -> None:
        self._endpoint = endpoint
        self._scope = scope

    def publish(self, blob: Blob, source: ChunkSource) -> None:
        self._endpoint.publish(self._own(blob), source)

    def retract(self, blob: Blob) -> None:
        self._endpoint.retract(self._own(blob))

    def share_uplink(self, shares: Mapping[str, float], scope: int = 0) -> None:
        self._endpoint.share_uplink(shares, scope or self._scope)

    def fetch(self, peer: str, blob: Blob, chunks: range, sink: Sink, progress_s: float) -> AsyncGenerator[int, None]:
        """As the endpoint's."""
        return self._endpoint.fetch(peer, self._own(blob), chunks, sink, progress_s)

    def _own(self, blob: Blob) -> Blob:
        return blob.model_copy(update={"scope": self._scope})
