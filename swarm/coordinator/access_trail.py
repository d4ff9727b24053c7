"""Trail of access: makes a signed record of each event about who takes part, and of refused joins once a minute."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

from shoal.swarm.coordinator import events as ev
from shoal.swarm.protocol.access_records import AccessRecord, Refusals, access_hash, genesis, signed_bytes

REFUSED_EVERY_S = 60.0
"""Refusals are counted for so long at least before they become a record: a flood of joins writes next to nothing."""


class AccessTrail:
    """Continues the chain of a run's access records."""

    def __init__(self, run_hash: bytes, sign: Callable[[bytes], bytes], last: AccessRecord | None) -> None:
        """``last``: the newest record of the run, None if it has none yet."""
        self._sign = sign
        self._number = 0 if last is None else last.number + 1
        self._chain = genesis(run_hash) if last is None else last.chain
        self._refused_s = -math.inf

    def records(
        self, events: Sequence[ev.JournalEvent], refusals: Counter[str], unix_s: float
    ) -> list[ev.AccessRecorded]:
        """Return the records of these events, for the same transaction of the journal.

        ``refusals``: joins that were refused, by reason; emptied when they are recorded."""
        made = [self._chained(record) for record in map(self._record_of, events, [unix_s] * len(events)) if record]
        if refusals and not 0.0 <= unix_s - self._refused_s < REFUSED_EVERY_S:
            counts = tuple(Refusals(reason=reason, count=count) for reason, count in sorted(refusals.items()))
            made.append(self._chained(self._new("refused", unix_s, refused=counts)))
            refusals.clear()
            self._refused_s = unix_s
        return made

    def _chained(self, record: AccessRecord) -> ev.AccessRecorded:
        record = record.model_copy(update={"number": self._number, "previous": self._chain})
        chain = access_hash(record)
        self._number, self._chain = self._number + 1, chain
        signed = {"chain": chain, "signature": self._sign(signed_bytes(chain))}
        return ev.AccessRecorded(record=record.model_copy(update=signed))

    def _new(self, kind: str, at_s: float, **fields: object) -> AccessRecord:
        return AccessRecord.model_validate({"number": 0, "at_s": at_s, "kind": kind} | fields)

    def _record_of(self, event: ev.JournalEvent, unix_s: float) -> AccessRecord | None:
        """Return the record of an event in the run's own scope, or of a wrong mean in any; None for all others."""
        match event:
            case ev.MemberJoined(entry=entry):
                about = {"peer": entry.peer, "name": entry.name, "role": entry.role}
                return self._new("joined", event.at_s, **about, invite=event.invite, network=event.network)
            case ev.MemberLost():
                return self._new("left", unix_s, peer=event.peer, text=event.reason)
            case ev.MemberKicked():
                return self._new("kicked", event.at_s, peer=event.peer, text=event.note)
            case ev.PeerBanned():
                return self._new("banned", event.at_s, peer=event.peer, network=event.network, text=event.note)
            case ev.MemberExpelled():
                evidence = {"evidence": event.evidence, "accuser": event.accuser, "round": event.round}
                return self._new("expelled", event.at_s, peer=event.peer, **evidence)
            case ev.MeanDisproved() | ev.InScope(event=ev.MeanDisproved()):
                wrong = event.event if isinstance(event, ev.InScope) else event
                assert isinstance(wrong, ev.MeanDisproved)
                evidence = {"evidence": wrong.evidence, "accuser": wrong.accuser, "round": wrong.round}
                return self._new("mean disproved", wrong.at_s, peer=wrong.maker, excess=wrong.excess, **evidence)
            case ev.PeerAllowed():
                return self._new("allowed", event.at_s, peer=event.peer)
            case ev.InviteMade(terms=terms):
                limits = {"uses": terms.uses, "expires_s": terms.expires_s}
                about = {"invite": terms.id, "role": terms.role, "text": terms.note}
                return self._new("invite made", event.at_s, **about, **limits)
            case ev.RunAmended(amendments=made):
                text = "; ".join(one.text for one in made)
                return self._new("amended", event.at_s, round=made[0].at_round, text=text[:2000])
            case ev.InviteRevoked():
                return self._new("invite revoked", event.at_s, invite=event.id)
            case ev.WorkScored(signed=signed):
                return self._new("scored", unix_s, peer=signed.score.peer, score=signed)
            case ev.ModelEvaluated(signed=evaluation):
                return self._new("evaluated", event.at_s, peer=event.by, round=event.round, evaluation=evaluation)
            case ev.StopDecided():
                return self._new("stops", event.at_s, round=event.round, text=event.reason)
            case _:
                return None
