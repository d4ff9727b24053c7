"""Ledger of a study's trials: Optuna, which chooses values and says what to prune, in a database in the study's folder.

Each decision is in the database before it is acted on, so a study that was killed goes on with the trials that were
running, and counts none twice."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from shoal.peer.trials.study_file import StudyFile, Values
from shoal.swarm.errors import StudyError

if TYPE_CHECKING:
    import optuna

DATABASE = "trials.db"
_HASH, _PRUNED = "hash", "pruned"

State = Literal["running", "complete", "pruned", "failed"]


@dataclass(frozen=True)
class TrialRow:
    """What is known of a trial. ``losses``: held-out loss by evaluation; ``loss``: the last one of a whole trial."""

    number: int
    state: State
    values: Values
    losses: dict[int, float]
    loss: float | None

    @property
    def last(self) -> float:
        """Newest held-out loss; infinite before the first."""
        return self.losses[max(self.losses)] if self.losses else math.inf

    @property
    def text(self) -> str:
        """One line for people."""
        how = f", held-out loss {self.last:.4f} in evaluation {max(self.losses)}" if self.losses else ""
        return f"trial {self.number}: {self.state}{how}"


class TrialLedger:
    """Trials of a study. Its methods block; from several threads, for different trials."""

    def __init__(self, study: StudyFile, folder: Path) -> None:
        """``folder``: of the study. Raises ``StudyError`` without Optuna, and for a folder of another study."""
        try:
            import optuna
            from sqlalchemy.exc import SQLAlchemyError
        except ImportError as error:
            raise StudyError(f"trials are chosen by Optuna: pip install 'shoal[trials]' ({error})") from error
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._optuna, self._file = optuna, study
        about, path = study.study, folder / DATABASE
        try:
            # Values are drawn anew after a restart, not those of the first trials again.
            storage = optuna.storages.RDBStorage(f"sqlite:///{path}")
            known = optuna.get_all_study_names(storage)
            drawn = len(optuna.load_study(study_name=about.name, storage=storage).trials) if about.name in known else 0
            self._study = optuna.create_study(
                storage=storage,
                study_name=about.name,
                direction="minimize",
                sampler=self._sampler(drawn),
                pruner=self._pruner(),
                load_if_exists=True,
            )
        except (optuna.exceptions.OptunaError, SQLAlchemyError, OSError) as error:
            raise StudyError(f"{path}: cannot be used: {error}") from error
        kept = self._study.user_attrs.get(_HASH)
        if kept is None:
            for values in study.first:
                self._study.enqueue_trial(dict(values), skip_if_exists=True)
            self._study.set_user_attr(_HASH, study.hash.hex())
        elif kept != study.hash.hex():
            raise StudyError(
                f"{folder}: has the trials of another study of that name: its file or run file has changed; put it "
                "back, or give another --folder"
            )
        self._live: dict[int, optuna.Trial] = {}
        self._beginning = threading.Lock()

    def _sampler(self, drawn: int) -> optuna.samplers.BaseSampler:
        about = self._file.study
        if about.sampler == "random":
            return self._optuna.samplers.RandomSampler(seed=about.seed + drawn)
        return self._optuna.samplers.TPESampler(n_startup_trials=about.startup_trials, seed=about.seed + drawn)

    def _pruner(self) -> optuna.pruners.BasePruner:
        about, pruners = self._file.study, self._optuna.pruners
        made: dict[str, Callable[[], optuna.pruners.BasePruner]] = {
            "median": lambda: pruners.MedianPruner(about.startup_trials, about.warmup_evaluations),
            "halving": lambda: pruners.SuccessiveHalvingPruner(min_resource=1 + about.warmup_evaluations),
            "none": pruners.NopPruner,
        }
        return made[about.pruner]()

    def resume(self) -> list[int]:
        """Return the numbers of trials that were running when the study ended, which go on."""
        running = self._study.get_trials(deepcopy=False, states=(self._optuna.trial.TrialState.RUNNING,))
        for one in running:
            self._live[one.number] = self._optuna.Trial(self._study, one._trial_id)  # as ``ask`` does
        return [one.number for one in running]

    def begin(self) -> int | None:
        """Begin a trial and return its number; None when the study has all of its trials."""
        states = self._optuna.trial.TrialState
        with self._beginning:
            begun = self._study.get_trials(
                deepcopy=False, states=(states.RUNNING, states.COMPLETE, states.PRUNED, states.FAIL)
            )
            if len(begun) >= self._file.study.trials:
                return None
            trial = self._study.ask()
        self._live[trial.number] = trial
        return trial.number

    def values(self, number: int) -> Values:
        """Return a trial's values, chosen now if they were not before."""
        trial, found = self._live[number], Values()
        for key, one in self._file.space.items():
            if one.choices:
                chosen = trial.suggest_categorical(key, one.choices)
                assert chosen is not None
                found[key] = chosen
                continue
            assert one.low is not None
            assert one.high is not None
            if one.is_integer:
                low, high = int(one.low), int(one.high)
                found[key] = trial.suggest_int(key, low, high, step=one.step or 1, log=one.log)
            else:
                found[key] = trial.suggest_float(key, float(one.low), float(one.high), log=one.log)
        return found

    def report(self, number: int, evaluation: int, loss: float) -> bool:
        """Note a held-out loss; returns whether the trial is to end now. Losses that are not finite end it."""
        trial = self._live[number]
        if evaluation not in self.row(number).losses:
            trial.report(loss, evaluation)
        if math.isfinite(loss) and not trial.should_prune():
            return False
        trial.set_user_attr(_PRUNED, True)
        return True

    def is_pruned(self, number: int) -> bool:
        """Whether the trial was to be ended early."""
        return bool(self._study.trials[number].user_attrs.get(_PRUNED))

    def finish(self, number: int) -> TrialRow:
        """Count a trial whose run has ended, by its last held-out loss; one without any has failed."""
        states, trial, losses = self._optuna.trial.TrialState, self._live.pop(number), self.row(number).losses
        if self.is_pruned(number):
            self._study.tell(trial, state=states.PRUNED)
        elif losses:
            self._study.tell(trial, losses[max(losses)])
        else:
            self._study.tell(trial, state=states.FAIL)
        return self.row(number)

    def rows(self) -> list[TrialRow]:
        """Return all trials in their order, without those that wait for their turn."""
        waiting = self._optuna.trial.TrialState.WAITING
        return [self.row(one.number) for one in self._study.get_trials(deepcopy=False) if one.state != waiting]

    def row(self, number: int) -> TrialRow:
        """Return what is known of a trial."""
        found, states = self._study.get_trials(deepcopy=False)[number], self._optuna.trial.TrialState
        names: dict[optuna.trial.TrialState, State] = {
            states.COMPLETE: "complete",
            states.PRUNED: "pruned",
            states.FAIL: "failed",
        }
        losses = dict(found.intermediate_values)
        state = names.get(found.state, "running")
        return TrialRow(number, state, dict(found.params), losses, found.value if state == "complete" else None)
