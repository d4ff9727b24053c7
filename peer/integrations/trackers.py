"""Trackers: metrics of a peer or of a whole run in Weights & Biases, trackio, MLflow or TensorBoard.

They are made from the events that a peer or a host reports, one step a round, in a thread of their own: a tracker that
is slow, away or broken costs its metrics and nothing else. The same command continues the same curves."""

from __future__ import annotations

import importlib.util
import logging
import math
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Protocol, Self

from shoal.peer.event_schema import Event
from shoal.peer.options import SHOAL_HOME
from shoal.swarm.errors import UserError
from shoal.swarm.protocol.run_file import RunFile

log = logging.getLogger(__name__)

_WAITING = 1024
"""Events that wait for a slow tracker; further ones are dropped."""

_LAST_WORDS_S = 20.0
"""Time that a tracker has to send the rest when the peer or host ends."""

_METRICS: Mapping[str, Mapping[str, str]] = {
    "committed": {
        "loss": "loss",
        "tokens": "tokens_total",
        "members": "members",
        "included": "included",
        "bytes_sent": "bytes_sent",
        "bytes_received": "bytes_received",
    },
    "aborted": {},
    "verdict": {"loss": "loss", "tokens_total": "tokens_total", "members": "members", "elapsed_s": "round_s"},
    "evaluated": {"loss": "held_out/loss", "accuracy": "held_out/accuracy"},
}
"""Names of metrics by the event, and by the event's field, that they come from. Each of these events ends a round, but
for evaluations: those are of the round that made the model."""


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker shows curves of: a run, seen by ``who``, which is a peer's id or the host.

    ``settings``: of the run file, by dotted name."""

    name: str
    run_hash: str
    who: str
    settings: Mapping[str, Any]

    @classmethod
    def of(cls, run: RunFile, who: str) -> TrackedRun:
        return cls(run.run.name, run.hash.hex(), who, dict(_flat(run.model_dump(mode="json", exclude_none=True))))

    @property
    def title(self) -> str:
        return f"{self.name} {self.who}"

    @property
    def lasting_id(self) -> str:
        """Name of these curves that a later process of the same peer or host uses again."""
        return f"{self.run_hash[:16]}-{self.who}"


def _flat(settings: Mapping[str, Any], above: str = "") -> list[tuple[str, Any]]:
    items: list[tuple[str, Any]] = []
    for key, value in settings.items():
        items += _flat(value, f"{above}{key}.") if isinstance(value, Mapping) else [(f"{above}{key}", value)]
    return items


def metrics_of(event: Event) -> dict[str, float]:
    """Read the numbers that an event says about its round; empty for an event that ends none."""
    names = _METRICS.get(str(event.get("event")))
    if names is None or not isinstance(event.get("round"), int):
        return {}
    prefix = f"stage_{event['stage']}/" if "stage" in event else ""
    metrics: dict[str, float] = {}
    if event["event"] != "evaluated":
        metrics[f"{prefix}committed"] = float(bool(event.get("committed", event["event"] != "aborted")))
    for key, name in names.items():
        value = event.get(key)
        number = len(value) if isinstance(value, Sequence) and not isinstance(value, str) else value
        if isinstance(number, int | float) and math.isfinite(number):
            metrics[f"{prefix}{name}"] = float(number)
    sources = event.get("sources")
    for name, loss in sources.items() if isinstance(sources, Mapping) else ():
        if isinstance(loss, int | float) and math.isfinite(loss):
            metrics[f"held_out/{name}/loss"] = float(loss)
    return metrics


# The trackers' own interfaces ------------------------------------------------------------------------------------


class _Sink(Protocol):
    """A tracker's curves of one run. Both methods may raise whatever its package raises."""

    def log(self, metrics: Mapping[str, float], step: int) -> None: ...

    def close(self) -> None: ...


class _Wandb:
    def __init__(self, wandb: ModuleType, project: str, about: TrackedRun) -> None:
        self._run = wandb.init(
            project=project or "shoal",
            name=about.title,
            group=about.run_hash[:16],
            id=about.lasting_id,
            resume="allow",
            config=dict(about.settings),
            settings=wandb.Settings(console="off", silent=True),
        )

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class _Trackio:
    def __init__(self, trackio: ModuleType, project: str, about: TrackedRun) -> None:
        self._trackio = trackio
        trackio.init(
            project=project or "shoal",
            name=about.lasting_id,
            group=about.run_hash[:16],
            resume="allow",
            config=dict(about.settings),
        )

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._trackio.log(dict(metrics), step=step)

    def close(self) -> None:
        self._trackio.finish()


class _Mlflow:
    def __init__(self, mlflow: ModuleType, uri: str, about: TrackedRun) -> None:
        self._client = mlflow.MlflowClient(tracking_uri=uri or None)
        experiment = self._client.get_experiment_by_name("shoal")
        number = self._client.create_experiment("shoal") if experiment is None else experiment.experiment_id
        tags = {"shoal.id": about.lasting_id, "shoal.run_hash": about.run_hash}
        earlier = self._client.search_runs([number], f"tags.`shoal.id` = '{about.lasting_id}'", max_results=1)
        run = earlier[0] if earlier else self._client.create_run(number, tags=tags, run_name=about.title)
        self._id: str = run.info.run_id
        if earlier:
            self._client.update_run(self._id, status="RUNNING")
        else:
            for key, value in about.settings.items():
                self._client.log_param(self._id, key, str(value)[:500])

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for key, value in metrics.items():
            self._client.log_metric(self._id, key, value, step=step)

    def close(self) -> None:
        self._client.set_terminated(self._id)


class _TensorBoard:
    def __init__(self, tensorboard: ModuleType, folder: str, about: TrackedRun) -> None:
        place = Path(folder) if folder else SHOAL_HOME / "tensorboard"
        self._writer = tensorboard.SummaryWriter(str(place / about.lasting_id))
        self._writer.add_text("settings", "\n".join(f"    {key} = {value}" for key, value in about.settings.items()))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for key, value in metrics.items():
            self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


_KINDS: Mapping[str, tuple[str, Callable[[ModuleType, str, TrackedRun], _Sink]]] = {
    "wandb": ("wandb", _Wandb),
    "trackio": ("trackio", _Trackio),
    "mlflow": ("mlflow", _Mlflow),
    "tensorboard": ("torch.utils.tensorboard", _TensorBoard),
}
"""By kind, which is also the name of its package: the module that it is used by, and how."""

KINDS = tuple(_KINDS)


@dataclass(frozen=True)
class TrackerChoice:
    """A tracker that a person has chosen, and where it keeps its curves: a project of wandb or trackio, a tracking URI
    of MLflow, a folder of TensorBoard."""

    kind: str
    where: str

    @classmethod
    def parse(cls, text: str) -> TrackerChoice:
        """Parse ``KIND`` or ``KIND:WHERE``. Raises ``UserError`` for another kind and for a missing package."""
        kind, _, where = text.partition(":")
        if kind not in _KINDS:
            raise UserError(f"--track {text}: no such tracker; there are {', '.join(KINDS)}")
        if importlib.util.find_spec(kind) is None:  # not imported yet: some bring torch along
            raise UserError(f"--track {kind}: needs a package: pip install 'shoal[{kind}]'")
        return cls(kind, where)

    def open(self, about: TrackedRun) -> _Sink:
        """Open the tracker. Raises whatever its package raises."""
        module, sink = _KINDS[self.kind]
        return sink(importlib.import_module(module), self.where, about)


# Beside the training ---------------------------------------------------------------------------------------------


class Tracker:
    """One tracker's curves of one run, from the first event to the end of the context."""

    def __init__(self, choice: TrackerChoice, about: TrackedRun) -> None:
        self._choice = choice
        self._about = about
        self._events: queue.Queue[Event | None] = queue.Queue(_WAITING)
        self._is_late = False
        self._thread = threading.Thread(target=self._work, name=f"shoal-{choice.kind}", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(queue.Full):
            self._events.put(None, timeout=_LAST_WORDS_S if self._thread.is_alive() else 0.0)
        self._thread.join(_LAST_WORDS_S)
        if self._thread.is_alive():
            log.warning("%s has not taken all metrics within %g s; the rest is lost", self._choice.kind, _LAST_WORDS_S)

    def on_event(self, event: Event) -> None:
        """Take an event; never waits. Thread-safe."""
        if not metrics_of(event) or not self._thread.is_alive():
            return
        try:
            self._events.put_nowait(event)
        except queue.Full:
            if not self._is_late:
                self._is_late = True
                log.warning("%s is too slow: some rounds will be missing there", self._choice.kind)

    def _work(self) -> None:
        try:
            with closing(self._choice.open(self._about)) as sink:
                while (event := self._events.get()) is not None:
                    sink.log(metrics_of(event), event["round"])
        except Exception as error:  # noqa: BLE001 a stranger's package, whose errors have no common class; training goes on
            log.warning("%s gets no more metrics: %s: %s", self._choice.kind, type(error).__name__, error)


class RunTrackers:
    """Trackers of the runs of a host; a context manager that ends them."""

    def __init__(self, choices: Sequence[TrackerChoice]) -> None:
        self._choices = choices
        self._trackers: dict[str, list[Tracker]] = {}
        self._ending = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ending.close()

    def start(self, about: TrackedRun) -> None:
        """Track a run from now on, if it is not tracked yet."""
        if about.name not in self._trackers:
            self._trackers[about.name] = [self._ending.enter_context(Tracker(one, about)) for one in self._choices]

    def on_event(self, event: Event) -> None:
        """Give an event to the trackers of its run."""
        for tracker in self._trackers.get(event["run"], ()):
            tracker.on_event(event)
