"""Who may take part: members come, describe their model and go, and every request's key is one of theirs. Pure."""

from __future__ import annotations

from shoal.swarm.coordinator import facts as f
from shoal.swarm.coordinator.scope import Scope
from shoal.swarm.errors import CorpusError, ModelMismatch, NotAdmitted, RunEnded, Superseded
from shoal.swarm.messages import DeviceInfo, PeerToCoordinatorDescribeModel, RosterEntry, TensorSpec

_MAX_ELEMENTS = 2**40
_EXACT_DTYPES = ("float32", "float64")
"""Parameters of these types hold every value of a float32 anchor."""


class Admission(Scope):
    """A scope's door. All but ``leave`` may raise a typed error for the peer that knocked."""

    def join(self, entry: RosterEntry, device: DeviceInfo, now_s: float) -> None:
        """Admit a member. The same identity with another key is a new process: the old one's work is free again."""
        self.now_s = now_s
        self.refuse_replaced(entry.certificate.curve_key)
        if self.has_ended and entry.role != "observer":
            raise RunEnded(f"the run {self.run.run.name} is over; `shoal export` still gives its model")
        known = self.membership.members.get(entry.peer)
        if known is not None and known.entry.role != "observer" and entry.role == "observer":
            raise NotAdmitted("this identity trains in the run; look at the run with another one")
        if known is not None and known.alive:
            if known.entry.certificate.curve_key == entry.certificate.curve_key:
                known.heard_s = now_s
                return
            self.record(f.MemberLost(peer=entry.peer, reason="joined again"))
        if not self.membership.places_left(entry.role):
            raise NotAdmitted(f"the run {self.run.run.name} is full; try again later")
        is_new = known is None or known.entry.certificate.curve_key != entry.certificate.curve_key
        if is_new and entry.role != "observer":
            self.sent_bytes.begin(entry.peer, entry.certificate.curve_key)
        self.record(f.MemberJoined(entry=entry, device=device))

    def describe_model(self, peer: str, model: PeerToCoordinatorDescribeModel) -> None:
        """Raises ``ModelMismatch`` or ``CorpusError`` naming the first difference to the run's first peer."""
        if self.membership.is_observer(peer):
            raise NotAdmitted("observers have no model")
        if self.model is None:
            elements = model.elements
            if not 0 < elements <= _MAX_ELEMENTS:
                raise ModelMismatch(f"a run's model has 1 to {_MAX_ELEMENTS} parameters, this one {elements}")
            inexact = next((spec for spec in model.layout if spec.dtype not in _EXACT_DTYPES), None)
            if inexact is not None:
                raise ModelMismatch(f"parameter {inexact.name} is {inexact.dtype}, and a run's anchor is float32")
            self._check_start(model.layout)
            self._check_pins(model)
            self.record(f.ModelDescribed(model=model))
            return
        difference = first_difference(self.model.layout, model.layout)
        if difference:
            raise ModelMismatch(f"this model is not the run's: {difference}")
        if self.model.tokens_per_sample != model.tokens_per_sample:
            raise ModelMismatch(
                f"this model takes {model.tokens_per_sample} tokens a sample, the run's {self.model.tokens_per_sample}"
            )
        self._check_pins(model)
        if self._is_news(self.model, model):
            self.record(f.ModelDescribed(model=model))
        if model.corpus_digest not in (None, self.model.corpus_digest):
            raise CorpusError(
                f"this machine's data differs from the run's.\n  here:    {model.corpus_about}\n"
                f"  the run: {self.model.corpus_about}\n"
                "Use the same Python version as the others, or ask the host for a run on the same files "
                '(data.source = "text:GLOB" or "tokens:FILE")'
            )

    def _check_start(self, layout: tuple[TensorSpec, ...]) -> None:
        start = self.run.start
        difference = start.difference(layout, whole=self.run.pipeline is None) if start else ""
        if start and difference:
            raise ModelMismatch(f"this model is not that of {start.source}, where the run starts: {difference}")

    def _check_pins(self, model: PeerToCoordinatorDescribeModel) -> None:
        """Whoever comes first: what the run file pins is not for members to say."""
        if self.run.pins is not None:
            self.run.pins.check_model(model)

    @staticmethod
    def _is_news(known: PeerToCoordinatorDescribeModel, model: PeerToCoordinatorDescribeModel) -> bool:
        """Whether it tells of the data what nobody has told before."""
        if known.corpus_digest is None:
            return model.corpus_digest is not None
        return known.samples is None and model.samples is not None and known.corpus_digest == model.corpus_digest

    def leave(self, peer: str, reason: str, now_s: float, trouble: str = "") -> None:
        self.now_s = now_s
        if self.membership.members[peer].alive:
            self.record(f.MemberLost(peer=peer, reason=reason, trouble=trouble))

    def require_member(self, curve_key: bytes) -> str:
        """The live member that holds this key. Raises ``NotAdmitted``, or ``Superseded`` for its predecessor."""
        self.refuse_replaced(curve_key)
        peer = self.membership.holder(curve_key)
        if peer is None:
            raise NotAdmitted("not a member of this run (any more): join again")
        return peer

    def refuse_replaced(self, curve_key: bytes) -> None:
        """Raises ``Superseded``: two processes of one identity would put each other out for ever."""
        if curve_key in self.membership.replaced:
            raise Superseded


def first_difference(expected: tuple[TensorSpec, ...], found: tuple[TensorSpec, ...]) -> str:
    """A sentence on the first tensor that differs; empty when none does."""
    for index, (theirs, ours) in enumerate(zip(expected, found, strict=False)):
        if theirs != ours:
            return (
                f"parameter {index} is {ours.name} {list(ours.shape)} {ours.dtype} here, "
                f"{theirs.name} {list(theirs.shape)} {theirs.dtype} in the run"
            )
    if len(expected) != len(found):
        return f"it has {len(found)} parameters here, {len(expected)} in the run"
    return ""
