"""The results of recent rounds on one member, from which others may still fetch."""

from __future__ import annotations

from shoal.swarm.averaging.results import Archive, HeldResults, ResultStore
from shoal.swarm.transport.transport import Endpoint


class OfferedResults(dict[int, ResultStore]):
    """Stores by the number of their round. ``archive``: what those that are dropped are then offered from, if any."""

    def __init__(self, endpoint: Endpoint, archive: Archive | None) -> None:
        super().__init__()
        self._endpoint = endpoint
        self._archive = archive
        self._moved_before = 0

    @property
    def moved(self) -> int:
        """Result chunks made or received so far, of all rounds."""
        return self._moved_before + sum(store.moved for store in self.values())

    def add(self, store: ResultStore) -> ResultStore:
        """Offer what it holds, and what it will."""
        self[store.plan.round] = store
        self._endpoint.publish(store.blob, store)
        self._endpoint.publish(store.held, HeldResults(store))
        return store

    async def drop(self, *rounds: int) -> None:
        """Of those that are here."""
        for number in rounds:
            store = self.pop(number, None)
            if store is not None:
                self._endpoint.retract(store.blob)
                self._endpoint.retract(store.held)
                self._moved_before += store.moved
                await store.close()
                if self._archive is not None:
                    self._archive.take_over(number)
