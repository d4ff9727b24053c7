"""Evidence that members show, taken piece by piece within bounds on memory, and judged.

The one data of a round that a coordinator ever reads: a proof that a mean is wrong, which is rare. A member whose
evidence proved nothing is not heard for a while, for twice as long each time, so forged evidence costs a run next to
nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from shoal.swarm.errors import TryLater, WireError
from shoal.swarm.protocol.evidence import MAX_EVIDENCE_BYTES, evidence_id
from shoal.swarm.protocol.messages import PeerToCoordinatorShowEvidence

_MAX_BYTES = 2 * MAX_EVIDENCE_BYTES
"""Memory for all evidence that is not complete yet."""

_BARRED_S, _MAX_DOUBLINGS = 600.0, 10
"""For how long a member is not heard after its first evidence that proves nothing, and how often that doubles."""

_REPEATED_S = 60.0
"""The same after evidence that is right and changes nothing, as of a member that is expelled already: a friend of its
could have one piece after the other judged, of which it signs as many as it likes."""

_SLOWEST_BYTES_S = 2**16
"""Rate below which incomplete evidence is stale, or single bytes now and then would hold all the memory."""

_MAX_JUDGED = 256

_MAX_BARRED = 4096
"""Members whose bars are remembered, the newest ones: identities cost nothing."""

Word = Literal["guilty", "innocent", "void"]


@dataclass
class _Incomplete:
    id: bytes
    size_bytes: int
    began_s: float
    at_s: float
    data: bytearray = field(default_factory=bytearray)


class EvidenceIntake:
    """Evidence on its way, by member: one each."""

    def __init__(self, stale_s: float) -> None:
        """``stale_s``: incomplete evidence without a new piece for so long, or that came too slowly since then, is
        dropped where memory is needed. Like evidence that its member leaves for other, it counts as one that proves
        nothing: two members could otherwise take up all memory for ever."""
        self._stale_s = stale_s
        self._coming: dict[str, _Incomplete] = {}
        self._judged: dict[tuple[str, bytes], Word] = {}
        """By evidence; what is void, by who showed it, too, so that nobody makes another's evidence void by its name.
        """
        self._barred: dict[str, tuple[float, int]] = {}
        """By member, until when it is not heard, and how often that was so."""

    def judged(self, peer: str, evidence: bytes) -> Word | None:
        """Return what evidence of this peer has shown lately: its last piece is sent again where judging took long."""
        return self._judged.get(("", evidence)) or self._judged.get((peer, evidence))

    def add(self, peer: str, piece: PeerToCoordinatorShowEvidence, now_s: float) -> bytes | None:
        """Take a piece; returns the evidence once it is complete. Raises ``TryLater`` or ``WireError``."""
        until_s, _ = self._barred.get(peer, (0.0, 0))
        if now_s < until_s:
            raise TryLater(f"this peer's evidence changed nothing: show other evidence in {until_s - now_s:.0f} s")
        one = self._coming.get(peer)
        if one is not None and piece.start == 0 and one.id != piece.evidence:
            self._drop(peer, now_s)
            raise TryLater("this peer has not shown the whole of its evidence before this: show this one later")
        if piece.start == 0 and one is None:
            one = self._coming[peer] = _Incomplete(piece.evidence, piece.size_bytes, now_s, now_s)
        if one is None or (piece.evidence, piece.size_bytes) != (one.id, one.size_bytes) or piece.start > len(one.data):
            raise WireError("a piece of evidence without those before it")
        if piece.start + len(piece.data) > one.size_bytes:
            raise WireError("evidence that is longer than it says")
        if piece.start == len(one.data):
            self._make_room(peer, len(piece.data), now_s)
            one.data += piece.data
            one.at_s = now_s
        if len(one.data) < one.size_bytes:
            return None
        del self._coming[peer]
        return bytes(one.data)

    def _make_room(self, peer: str, size_bytes: int, now_s: float) -> None:
        for other, one in list(self._coming.items()):
            fresh_s = min(one.at_s, one.began_s + len(one.data) / _SLOWEST_BYTES_S)
            if other != peer and now_s - fresh_s > self._stale_s:
                self._drop(other, now_s)
        if sum(len(one.data) for one in self._coming.values()) + size_bytes > _MAX_BYTES:
            raise TryLater("other evidence is being shown: try again in a minute")

    def conclude(self, peer: str, evidence: bytes, word: Word, now_s: float, *, is_news: bool = True) -> None:
        """Note a judgement; a member whose evidence proves nothing is not heard for a while. Not ``is_news``: it proves
        what changes nothing.

        ``void`` is only the member's: whoever shows other bytes under that id, or in another stage, must not make the
        evidence void for all."""
        self._judged[peer if word == "void" else "", evidence] = word
        if len(self._judged) > _MAX_JUDGED:
            del self._judged[next(iter(self._judged))]
        if word != "guilty":
            self._bar(peer, now_s)
        elif not is_news:
            self._set_bar(peer, now_s + _REPEATED_S, self._barred.get(peer, (0.0, 0))[1])

    def _drop(self, peer: str, now_s: float) -> None:
        del self._coming[peer]
        self._bar(peer, now_s)

    def _bar(self, peer: str, now_s: float) -> None:
        _, times = self._barred.get(peer, (0.0, 0))
        self._set_bar(peer, now_s + _BARRED_S * 2 ** min(times, _MAX_DOUBLINGS), times + 1)

    def _set_bar(self, peer: str, until_s: float, times: int) -> None:
        self._barred.pop(peer, None)  # the newest come last
        self._barred[peer] = until_s, times
        if len(self._barred) > _MAX_BARRED:
            del self._barred[next(iter(self._barred))]


def is_whole(data: bytes, evidence: bytes) -> bool:
    """Whether these are the bytes of that id. For a worker thread."""
    return evidence_id(data) == evidence
