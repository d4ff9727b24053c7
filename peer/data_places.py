"""Places on this machine and elsewhere that a run's data may come from, as the machine's owner has named them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.swarm.transport.limits.traffic_limits import TrafficLimits

DEFAULT_CACHE_BYTES = 8 * 2**30


@dataclass(frozen=True)
class DataPlaces:
    """What ``--data`` and ``--data-cache`` name.

    ``folders``: below which the run may read the files that it names; ``mirrors``: URLs to take token shards from
    instead of those in the run file, any scheme and address, as the owner has named them; ``cache``: folder of blocks
    that were downloaded, by default below ``SHOAL_HOME``, of at most ``cache_bytes``; ``traffic``: limits that
    downloads keep to."""

    folders: tuple[Path, ...] = ()
    mirrors: tuple[str, ...] = ()
    cache: Path | None = None
    cache_bytes: int = DEFAULT_CACHE_BYTES
    traffic: TrafficLimits | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(
        cls,
        named: Iterable[str | Path] = (),
        cache_bytes: int | None = None,
        traffic: TrafficLimits | None = None,
        cache: str | None = None,
    ) -> DataPlaces:
        """Sort the values of ``--data`` into folders and URLs."""
        words = list(named)
        folders = tuple(Path(one) for one in words if not is_url(one))
        mirrors = tuple(str(one) for one in words if is_url(one))
        kept = Path(cache) if cache else None
        return cls(folders, mirrors, kept, cache_bytes or DEFAULT_CACHE_BYTES, traffic)

    @property
    def named(self) -> list[str]:
        """The values of ``--data``."""
        return [*map(str, self.folders), *self.mirrors]

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of ``of`` that JSON can hold, for another process, whose traffic nobody counts."""
        kept = str(self.cache) if self.cache else None
        return {"named": self.named, "cache_bytes": self.cache_bytes, "cache": kept}


NOWHERE = DataPlaces()
"""What a run may use where its owner has named nothing."""


def is_url(named: str | Path) -> bool:
    """Whether a value of ``--data`` is a URL."""
    return isinstance(named, str) and "://" in named
