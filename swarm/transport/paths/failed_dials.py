"""Dials that have just failed, so that the next way to a member is taken at once instead of after another wait."""

from __future__ import annotations

from collections.abc import Iterable

_REMEMBERED_S = 60.0


class FailedDials:
    """Members' processes, by CURVE key, towards which one way has failed lately. Moments are on any one clock."""

    def __init__(self) -> None:
        self._failed_s: dict[bytes, float] = {}

    def note(self, key: bytes, now_s: float) -> None:
        self._failed_s[key] = now_s

    def has(self, key: bytes, now_s: float) -> bool:
        """Whether the way has failed so lately that it is not worth another wait."""
        failed_s = self._failed_s.get(key)
        return failed_s is not None and now_s - failed_s < _REMEMBERED_S

    def forget(self, keys: Iterable[bytes]) -> None:
        """Have the way tried again, or forget processes that are gone."""
        for key in keys:
            self._failed_s.pop(key, None)
