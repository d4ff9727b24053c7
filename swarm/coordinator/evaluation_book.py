"""Book of evaluations: what validators measured of each version, which figure is used, and when it ends the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median_low

from shoal.swarm.coordinator import events as ev
from shoal.swarm.protocol.evaluations import (
    MAX_EVALUATORS,
    MAX_FIGURES,
    MAX_SAMPLED,
    ClaimedLoss,
    EvaluationStatus,
    FigureStanding,
    HeldOutFigure,
    VersionTexts,
)
from shoal.swarm.protocol.run_file import StopSection

TOLERANCE = 2.0**-10
"""How far two validators' losses may be apart, relative to the loss, or to one nat if that is more.

Both compute in float32 on the same samples. Where a device rounds the factors of matrix products to the ten bits of
TF32, each logit is off by some 2**-11 of its size, and the mean over thousands of tokens by far less; two CPUs differ
in the seventh digit. Tampering that is to end a run, or to keep it from ending, changes the third."""

_KEPT = 1024
"""Versions that are kept; of more, every second one of the older half goes, but not the best."""

_RECENT = 8
"""Newest versions by whose reports it is known how many validators there are."""

_NEW_TEXTS = 8
"""Newest versions whose texts are kept, beside some old ones."""


@dataclass
class EvaluatedVersion:
    """A version, and each validator's evaluation of it, in the order in which they came."""

    version: int
    reports: list[ev.ModelEvaluated] = field(default_factory=list)
    _shown: tuple[int, HeldOutFigure] | None = field(default=None, compare=False, repr=False)

    def add(self, report: ev.ModelEvaluated) -> None:
        self.reports.append(report)
        self._shown = None

    @property
    def losses(self) -> list[float | None]:
        return [one.signed.evaluation.loss for one in self.reports]

    def agreeing(self) -> list[ev.ModelEvaluated]:
        """Return the largest number of reports that say the same; the first such ones."""
        groups = [[other for other in self.reports if same_loss(_loss(one), _loss(other))] for one in self.reports]
        return max(groups, key=len)

    def figure(self, needed: int) -> HeldOutFigure:
        """Return what is told of the version. ``needed``: validators behind a figure that can end the run."""
        if self._shown is None or self._shown[0] != needed:
            self._shown = needed, self._figure(needed)
        return self._shown[1]

    def _figure(self, needed: int) -> HeldOutFigure:
        same = self.agreeing()
        standing: FigureStanding = "claim"
        if len(self.reports) > 1:
            standing = "agreed" if 2 * len(same) > len(self.reports) else "disputed"
        finite = [loss for one in same if (loss := _loss(one)) is not None]
        loss = median_low(finite) if finite and standing != "disputed" else None
        shown = next((one.signed.evaluation for one in same if _loss(one) == loss), same[0].signed.evaluation)
        is_used = standing != "disputed"
        first, last = self.reports[0], self.reports[-1]
        return HeldOutFigure(
            version=self.version,
            round=first.round,
            tokens=first.tokens,
            at_s=last.at_s,
            loss=loss,
            standing=standing,
            counts=is_used and len(same) >= needed,
            claims=tuple(ClaimedLoss(validator=one.by, loss=_loss(one)) for one in self.reports),
            accuracy=shown.accuracy if is_used else None,
            sources=shown.sources if is_used else (),
        )


def _loss(report: ev.ModelEvaluated) -> float | None:
    return report.signed.evaluation.loss


def same_loss(one: float | None, other: float | None) -> bool:
    """Whether two validators have measured the same, as far as numbers of two machines are the same."""
    if one is None or other is None:
        return one is other
    return abs(one - other) <= TOLERANCE * max(1.0, abs(one), abs(other))


@dataclass
class EvaluationBook:
    """Evaluations of the versions behind the run's anchor, oldest first; changed by events alone."""

    versions: list[EvaluatedVersion] = field(default_factory=list)

    # Events -------------------------------------------------------------------------------------------------

    def take(self, event: ev.ModelEvaluated) -> None:
        """Take a report that ``may_take``."""
        version = event.signed.evaluation.version
        at = next((one for one in self.versions if one.version == version), None)
        if at is None:
            at = EvaluatedVersion(version)
            self.versions.append(at)
            self.versions.sort(key=lambda one: one.version)
        at.add(event)
        self._drop_texts()
        self._thin_out()

    def undo(self, version: int) -> None:
        """Forget versions after this one, as the run goes back to it."""
        self.versions = [one for one in self.versions if one.version <= version]

    def kept(self) -> tuple[ev.ModelEvaluated, ...]:
        """Return all reports for a snapshot."""
        return tuple(report for one in self.versions for report in one.reports)

    def restore(self, kept: Sequence[ev.ModelEvaluated]) -> None:
        """Take over the reports of a snapshot."""
        self.versions = []
        for report in kept:
            version = report.signed.evaluation.version
            if not self.versions or self.versions[-1].version != version:
                self.versions.append(EvaluatedVersion(version))
            self.versions[-1].add(report)

    def _drop_texts(self) -> None:
        """Keep the texts of the newest versions and of some old ones: what a model wrote early on is worth a look."""
        sampled = [one for one in self.versions if any(report.signed.evaluation.texts for report in one.reports)]
        old = sampled[:-_NEW_TEXTS]
        while len(old) > MAX_SAMPLED - _NEW_TEXTS:
            # Of neighbours that are close to each other one goes: the rest spreads over the run.
            gaps = [after.version - before.version for before, after in zip(old[:-2], old[2:], strict=True)]
            dropped = old.pop(1 + gaps.index(min(gaps)) if gaps else 0)
            dropped.reports = [_without_texts(report) for report in dropped.reports]

    def _thin_out(self) -> None:
        if len(self.versions) <= _KEPT:
            return
        best = min(self.versions, key=lambda one: min((loss for loss in one.losses if loss is not None), default=1e30))
        half = _KEPT // 2
        older = [one for number, one in enumerate(self.versions[:half]) if number % 2 == 0 or one is best]
        self.versions = older + self.versions[half:]

    # Questions ----------------------------------------------------------------------------------------------

    def may_take(self, validator: str, invite: str, version: int) -> bool:
        """Whether a validator's evaluation of this version is wanted: it is newer than its last one, and the first by
        this invite.

        So a validator reports at most once a version, in the order of versions, and an invite is one witness: whoever
        has it may make many identities. Of versions so old that some have been thinned out none is taken, as there
        those could be reported again and again until nothing else is left."""
        mine = [one.version for one in self.versions if any(report.by == validator for report in one.reports)]
        at = next((one for one in self.versions if one.version == version), None)
        if mine and version <= mine[-1]:
            return False
        if len(self.versions) >= _KEPT // 2 and version < self.versions[-_KEPT // 2].version:
            return False
        return at is None or (len(at.reports) < MAX_EVALUATORS and invite not in [one.invite for one in at.reports])

    @property
    def witnesses(self) -> int:
        """Number of validators that have reported of late; those of one invite are one."""
        return len({report.invite for one in self.versions[-_RECENT:] for report in one.reports})

    def figures(self, asked: int) -> list[HeldOutFigure]:
        """Return the figures of all versions. ``asked``: validators behind a figure that can end the run, by the run
        file; where there are several, none decides alone."""
        needed = self._needed(asked)
        return [one.figure(needed) for one in self.versions]

    def _needed(self, asked: int) -> int:
        return max(asked, min(2, self.witnesses))

    def losses(self) -> list[tuple[int, float | None]]:
        """Return what to warn by: version and loss that two have agreed on, or, of a run's only validator, its claims;
        None for no finite number."""
        standings = ("agreed", "claim") if self.witnesses < 2 else ("agreed",)
        return [(one.version, one.loss) for one in self.figures(1) if one.standing in standings]

    def status(self, asked: int) -> EvaluationStatus:
        """Return what readers are told. ``asked``: as of ``figures``."""
        needed = self._needed(asked)
        texts = [
            VersionTexts(
                version=one.version, round=report.round, validator=report.by, texts=report.signed.evaluation.texts
            )
            for one in self.versions
            if (report := next((report for report in one.reports if report.signed.evaluation.texts), None)) is not None
        ]
        return EvaluationStatus(
            figures=tuple(one.figure(needed) for one in self.versions[-MAX_FIGURES:]),
            texts=tuple(texts[-MAX_SAMPLED:]),
            newest=tuple(one.signed for one in self.versions[-1].reports) if self.versions else (),
        )


def _without_texts(report: ev.ModelEvaluated) -> ev.ModelEvaluated:
    """A report whose texts are forgotten; its signature, which covers them, proves nothing any more."""
    bare = report.signed.evaluation.model_copy(update={"texts": ()})
    return report.model_copy(update={"signed": report.signed.model_copy(update={"evaluation": bare})})


# The end of a run -------------------------------------------------------------------------------------------


def stop_reason(stop: StopSection, figures: Sequence[HeldOutFigure]) -> str:
    """Return why the run is to end by its figures, empty while it is not. Only figures that count are looked at."""
    counted = [(one.version, one.loss) for one in figures if one.counts and one.loss is not None]
    if not counted:
        return ""
    version, loss = counted[-1]
    if stop.held_out_loss is not None and loss <= stop.held_out_loss:
        return (
            f"the held-out loss of version {version} is {loss:.4g}, and run.stop_when asks for {stop.held_out_loss:.4g}"
        )
    if stop.patience is None:
        return ""
    best_version, best, waited = counted[0][0], counted[0][1], 0
    for version, loss in counted[1:]:
        if loss < best - stop.min_improvement:
            best_version, best, waited = version, loss, 0
        else:
            waited += 1
    if waited < stop.patience:
        return ""
    return (
        f"{waited} evaluations in a row have not improved on the held-out loss {best:.4g} of version {best_version}, "
        "as run.stop_when asks for"
    )
