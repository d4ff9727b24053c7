"""Amendments of a run that its host has made, and the run file of each round with them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from shoal.swarm.errors import CommandRefused, RunFileError
from shoal.swarm.protocol.amendments import (
    amended,
    changes_at,
    check_changes,
)
from shoal.swarm.protocol.rounds import Verdict
from shoal.swarm.protocol.run_file import RunFile
from shoal.swarm.protocol.types import MAX_AMENDMENTS, Amendment, Changes


@dataclass
class RunSettings:
    """Settings of a run by round: the run file, and what its host has ``made`` of it. Shared by a pipeline's stages."""

    run: RunFile
    made: tuple[Amendment, ...] = field(default=())

    def changes(self, round_number: int) -> Changes:
        """Return the settings of a round that differ from the run file."""
        return changes_at(self.made, round_number) if self.made else ()

    def at(self, round_number: int) -> RunFile:
        """Return the run file as it is in a round."""
        return amended(self.run, self.changes(round_number)) if self.made else self.run

    def check(self, wanted: Iterable[Amendment], open_round: int) -> None:
        """Check amendments together with those that are to come. Raises ``CommandRefused``."""
        new = tuple(wanted)
        if not new:
            raise CommandRefused("name a setting and its value, such as outer.lr=0.5")
        late = [one for one in new if one.at_round <= open_round]
        if late:
            raise CommandRefused(f"round {open_round} has begun: an amendment can take effect from the next one on")
        after = RunSettings(self.run, self._with(new, open_round))
        if len(after.made) > MAX_AMENDMENTS:
            raise CommandRefused(f"the run has {MAX_AMENDMENTS} amendments in force or to come, and cannot have more")
        try:
            for at_round in sorted({one.at_round for one in after.made if one.at_round > open_round}):
                check_changes(self.run, after.changes(at_round))
        except RunFileError as error:
            raise CommandRefused(str(error)) from error

    def add(self, new: tuple[Amendment, ...], open_round: int) -> None:
        """Take in amendments, and forget those that others have replaced."""
        self.made = self._with(new, open_round)

    def adopt(self, verdict: Verdict) -> None:
        """Take over a verdict's settings, where the journal has lost the amendment behind them.

        Of those to come, the last ones are given up where there would be too many: what is in force comes first."""
        if verdict.amended != self.changes(verdict.round):
            theirs = [Amendment(at_round=max(1, verdict.round), key=key, value=text) for key, text in verdict.amended]
            to_come = [one for one in self.made if one.at_round > verdict.round]
            self.made = (*theirs, *to_come[: MAX_AMENDMENTS - len(theirs)])

    def _with(self, new: tuple[Amendment, ...], open_round: int) -> tuple[Amendment, ...]:
        replaced = {(one.at_round, one.key) for one in new}
        kept = [one for one in self.made if (one.at_round, one.key) not in replaced]
        newest: dict[str, int] = {}
        for one in kept:
            if one.at_round <= open_round:
                newest[one.key] = max(newest.get(one.key, 0), one.at_round)
        kept = [one for one in kept if one.at_round > open_round or newest[one.key] == one.at_round]
        return tuple(sorted([*kept, *new], key=lambda one: (one.at_round, one.key)))
