"""Views that a simulated coordinator sends: what each member knows by then, and the bytes of what it is told."""

from __future__ import annotations

from shoal.swarm.coordinator.round_scope import RoundScope
from shoal.swarm.protocol.messages import CoordinatorToPeerView
from shoal.swarm.protocol.rounds import RunView
from shoal.swarm.protocol.wire import Envelope, encode

NO_LIMIT_BYTES = 2**50
_KEPT = 64


def encoded_bytes(view: RunView) -> int:
    """Return the size of a view as it is sent."""
    return len(encode(Envelope("notice", 0, CoordinatorToPeerView(view=view)), NO_LIMIT_BYTES))


class ToldViews:
    """Members' knowledge of a scope, as the coordinator's service keeps it: what they name is not told again."""

    def __init__(self, scope: RoundScope) -> None:
        self._scope = scope
        self._known: dict[str, tuple[int, bytes | None, bytes | None]] = {}
        self._sizes: dict[int, tuple[RunView, int, int]] = {}
        """By view, which is kept here: its bytes with the plan and without."""

    def joined(self, peer: str) -> None:
        """A newcomer knows nothing."""
        self._known.pop(peer, None)

    def heard(self, peer: str, chain: bytes | None, plan_digest: bytes | None) -> None:
        """A member has named the newest verdict and plan that it knows."""
        self._known[peer] = self._known.get(peer, (-1, None, None))[0], chain, plan_digest

    def tell(self, peer: str, now_s: float, *, is_answer: bool) -> int:
        """Return the bytes of the view that a member is sent now. ``is_answer``: which never has the plan."""
        roster_version, chain, plan_digest = self._known.get(peer, (-1, None, None))
        view = self._scope.view(peer, now_s, roster_version, chain, plan_digest)
        self._known[peer] = view.roster_version, chain, plan_digest
        known = self._sizes.get(id(view))
        if known is None:
            if len(self._sizes) >= _KEPT:
                self._sizes.clear()
            whole = encoded_bytes(view)
            bare = whole if view.plan is None else encoded_bytes(view.model_copy(update={"plan": None}))
            known = self._sizes[id(view)] = view, whole, bare
        return known[2] if is_answer else known[1]
