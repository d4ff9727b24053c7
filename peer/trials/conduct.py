"""``shoal trials``: hosts the runs of a study one after the other, or some at once, on one port and under one key.

Whatever ends this process, the same command goes on: the runs from their journals, the trials from the ledger."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from shoal.peer.cli.host import (
    HostedRun,
    Hosting,
    HostOptions,
    ServingHost,
    earlier_port,
    leased,
    own_address,
    prepared,
    serve,
)
from shoal.peer.event_schema import Event
from shoal.peer.options import SessionOptions
from shoal.peer.trials.door import OpenTrial, StudyDoor
from shoal.peer.trials.evaluator import Evaluator
from shoal.peer.trials.ledger import TrialLedger, TrialRow
from shoal.peer.trials.report import write_results
from shoal.peer.trials.study_file import StudyFile
from shoal.swarm import durable
from shoal.swarm.aio import in_thread, task_scope
from shoal.swarm.client.host_control import command_coordinator
from shoal.swarm.coordinator.front import CoordinatorFront
from shoal.swarm.errors import (
    CommandRefused,
    DeadlineExceeded,
    DeviceError,
    Diverged,
    LinkClosed,
    LinkError,
    ModelMismatch,
    RecipeError,
    RunEnded,
    RunFileError,
    StorageError,
    Unreachable,
)
from shoal.swarm.protocol.identity import Identity
from shoal.swarm.protocol.invite import Invite
from shoal.swarm.protocol.messages import AmendRun, CoordinatorToHostAmended
from shoal.swarm.protocol.run_file import RunFile
from shoal.swarm.protocol.types import Address
from shoal.swarm.system import call_on_signals
from shoal.swarm.transport.tcp.sockets import own_end

log = logging.getLogger(__name__)

IDENTITY_FILE, INVITE_FILE = "identity", "invite.txt"
_RUNS, _EVALUATOR = "runs", "evaluator"
_AGAIN_S = 1.0

_END = AmendRun(changes=(("run.rounds", "1"),))
"""Has a run end after the round that is open."""

_OF_THE_TRIAL = (RunFileError, RecipeError, ModelMismatch, DeviceError)
"""Errors of a trial's settings, which other trials do not have."""

_PASSING = (DeadlineExceeded, LinkClosed, Unreachable)
"""Errors after which a trial's run can be followed again."""


@dataclass(frozen=True)
class StudyOptions:
    """``folder``: of the study; ``host``: of its runs; ``device``: on which the held-out loss is computed."""

    folder: Path
    host: HostOptions
    device: torch.device


class StudyConductor:
    """One study, from its first trial or from where it was."""

    def __init__(
        self,
        study: StudyFile,
        options: StudyOptions,
        on_start: Callable[[Invite], None],
        on_event: Callable[[Event], None],
        on_trial: Callable[[TrialRow], None],
    ) -> None:
        """``on_start``: called with the study's invite; ``on_event``: with what the runs decide; ``on_trial``: with a
        trial whenever something is known of it.

        Raises ``StudyError``, ``RunFileError``, ``IdentityError`` and ``StorageError``."""
        self._study, self._options = study, options
        self._base: RunFile = study.check()
        self._told = on_start, on_event, on_trial
        folder = options.folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = durable.lock_folder(folder)
        except OSError as error:
            raise StorageError(f"{folder}: cannot be used as the study's folder: {error}") from error
        self._identity = Identity.load_or_create(folder / IDENTITY_FILE)
        self._ledger = TrialLedger(study, folder)
        self._stop = asyncio.Event()
        self._reporting = asyncio.Lock()
        self._door: StudyDoor
        self._front: CoordinatorFront
        self._serving: asyncio.TaskGroup

    async def run(self) -> list[TrialRow]:
        """Conduct trials until there are enough, or SIGINT or SIGTERM. Returns all of them."""
        call_on_signals(self._stop.set)
        folder, host, study = self._options.folder, self._options.host, self._study.study
        keys, address = self._identity.coordinator_keys(), (host.bind[0], host.bind[1] or earlier_port(folder))
        resumed = await in_thread(self._ledger.resume)
        names = (study.name, *(self._name(number) for number in resumed))
        try:
            async with CoordinatorFront.open(keys, address, names) as front:
                self._front = front
                self._door = StudyDoor(self._study, self._base, self._identity, front.node)
                self._announce(front.node.control_port)
                async with task_scope() as self._serving:
                    await self._conduct_all(resumed)
                    self._door.has_ended = not self._stop.is_set()
                    if self._door.has_ended:  # members ask once more, and are told
                        await self._rest(self._base.round.patience_s)
        finally:
            self._lock.release()
        return await in_thread(self._ledger.rows)

    def _announce(self, port: int) -> None:
        folder, host = self._options.folder, self._options.host
        advertised = host.advertise or ((own_address(host.bind[0]), port),)
        invite = self._door.invite([Address(host=name, control_port=own or port) for name, own in advertised])
        try:
            durable.put(folder / "port.txt", f"{port}\n".encode())
            durable.put(folder / INVITE_FILE, f"{invite}\n".encode(), 0o600)
        except OSError as error:
            raise StorageError(f"{folder}: cannot be written: {error}") from error
        self._told[0](invite)

    def _name(self, number: int) -> str:
        return f"{self._study.study.name}-{number}"

    async def _rest(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stop.wait()

    async def _conduct_all(self, resumed: Sequence[int]) -> None:
        waiting = list(resumed)

        async def conduct() -> None:
            """Conduct one trial after the other."""
            while not self._stop.is_set():
                number = waiting.pop(0) if waiting else await self._begin()
                if number is None:
                    return
                await self._trial(number)

        async with task_scope() as tasks:
            for _ in range(self._study.study.parallel):
                tasks.create_task(conduct())

    async def _begin(self) -> int | None:
        number = await in_thread(self._ledger.begin)
        if number is not None:
            self._front.expect(self._name(number))
        return number

    # One trial ----------------------------------------------------------------------------------------------

    async def _trial(self, number: int) -> None:
        """Conduct a trial until its run has ended, or until ``self._stop``."""
        stop, ended = asyncio.Event(), True
        try:
            values = await in_thread(self._ledger.values, number)
            text, run = self._study.trial(number, values)
            hosted = await prepared(self._write(number, text), self._host_options())
            invite = await self._served(hosted, stop)
            ended = await self._follow(OpenTrial(number, values, invite), run)
        except _OF_THE_TRIAL as error:
            log.warning("trial %d cannot be run with its settings: %s", number, error)
        finally:
            self._door.close(number)
            if not ended:
                stop.set()
        if ended:
            self._front.forget(self._name(number))
            self._told[2](await in_thread(self._ledger.finish, number))
            async with self._reporting:  # trials that end at the same time write the same files
                await in_thread(self._write_results)
            self._serving.create_task(self._stop_later(stop))

    def _write_results(self) -> None:
        write_results(self._study, self._ledger.rows(), self._options.folder)

    def _write(self, number: int, text: str) -> Path:
        path = self._options.folder / _RUNS / f"{self._name(number)}.toml"
        try:
            path.parent.mkdir(exist_ok=True)
            durable.put(path, text.encode())
        except OSError as error:
            raise StorageError(f"{path}: cannot be written: {error}") from error
        return path

    def _host_options(self) -> HostOptions:
        folder = self._options.folder
        return replace(self._options.host, identity=folder / IDENTITY_FILE, state=folder / _RUNS)

    async def _served(self, hosted: HostedRun, stop: asyncio.Event) -> Invite:
        """Begin to serve a run, until ``stop``; return its invite."""
        started = asyncio.get_running_loop().create_future()

        def on_start(hosting: Hosting) -> None:
            if not started.done():
                started.set_result(hosting.invite)

        async def serving() -> None:
            options = self._host_options()
            async with leased(hosted, options, self._front.node.control.keys) as journal:
                shared = ServingHost(self._front, None, options, stop, on_start, self._told[1])
                await serve(shared, hosted, journal)

        task = self._serving.create_task(serving())
        await asyncio.wait({task, started}, return_when=asyncio.FIRST_COMPLETED)
        if not started.done():
            await task  # raises its error
        found: Invite = started.result()
        return found

    async def _stop_later(self, stop: asyncio.Event) -> None:
        """Stop serving a run that has ended, once its members have left it."""
        await self._rest(self._base.round.patience_s)
        stop.set()

    async def _follow(self, trial: OpenTrial, run: RunFile) -> bool:
        """Have a trial joined and evaluated; returns whether its run has ended."""
        folder, study, loop = self._options.folder, self._study.study, asyncio.get_running_loop()
        options = SessionOptions(
            identity=folder / _EVALUATOR / IDENTITY_FILE,
            state=folder / _EVALUATOR,
            name="held-out loss",
            bind=(self._options.host.bind[0], 0),
            maps_ports=False,
            role="follower",
            data=self._options.host.data,
        )
        make = partial(Evaluator, run, options, self._options.device, study.samples, study.every_rounds)
        evaluator, is_pruned = await in_thread(make), asyncio.Event()

        def on_loss(evaluation: int, loss: float) -> None:
            """Note a loss, in the evaluator's thread."""
            if self._ledger.report(trial.number, evaluation, loss):
                loop.call_soon_threadsafe(is_pruned.set)
            loop.call_soon_threadsafe(self._told[2], self._ledger.row(trial.number))

        if await in_thread(self._ledger.is_pruned, trial.number):
            is_pruned.set()
        host, port = own_end(self._options.host.bind[0]), self._front.node.control_port
        own = Address(host=host, control_port=port)
        self._door.open(trial)
        async with task_scope() as tasks:
            others = [
                tasks.create_task(self._stop_with(evaluator)),
                tasks.create_task(self._prune(trial.invite, own, is_pruned)),
            ]
            try:
                while True:
                    try:
                        return await in_thread(evaluator.run, replace(trial.invite, addresses=(own,)), on_loss)
                    except _PASSING as error:  # on a busy machine; the trial's members go on meanwhile
                        log.warning("trial %d is followed again soon: %s", trial.number, error)
                        await asyncio.sleep(_AGAIN_S)
            except (RunEnded, Diverged) as error:
                log.info("trial %d: %s", trial.number, error)
                await in_thread(evaluator.run_ended, on_loss)
                return True
            finally:
                for one in others:
                    one.cancel()

    async def _stop_with(self, evaluator: Evaluator) -> None:
        await self._stop.wait()
        evaluator.request_stop()

    async def _prune(self, invite: Invite, own: Address, is_pruned: asyncio.Event) -> None:
        """End a run that is to be pruned with its next round, as an amendment that its members see."""
        await is_pruned.wait()
        while True:
            about = own, self._front.node.control.keys.public, self._identity, (invite.run, invite.run_hash)
            try:
                await command_coordinator(*about, _END, CoordinatorToHostAmended)
                return
            except (RunEnded, CommandRefused):
                return
            except LinkError as error:
                log.warning("%s cannot be ended yet: %s", invite.run, error)
                await asyncio.sleep(_AGAIN_S)
