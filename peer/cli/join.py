"""``shoal join``: train a run's recipe in a ``Session``, or in stages by a ``PipelinePeer``, until the run ends.

Whatever can be wrong with the run on this machine is found before joining: until then the coordinator has only been
asked for the run file, anonymously."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import FrameType

import torch

from shoal.peer.cli.consent import RunTerms
from shoal.peer.guest.gate import Pause
from shoal.peer.guest.keeper import GuestKeeper, KeeperThread
from shoal.peer.guest.spot import SpotNotices, SpotThread
from shoal.peer.island.devices import check_island_can_train, choose_devices
from shoal.peer.member.connection import RunConnection
from shoal.peer.network_thread import Interrupted
from shoal.peer.options import STOPPED_AT_ONCE, TERMINATED, SessionOptions
from shoal.peer.pipeline.peer import PipelinePeer
from shoal.peer.recipes import Recipe, load_recipe
from shoal.peer.recipes.local_loop import LocalLoop
from shoal.peer.recipes.model_memory import check_model_fits
from shoal.peer.session import Session
from shoal.peer.terminal.keyboard import restore_terminal
from shoal.peer.terminal.snapshot import Watched
from shoal.peer.terminal.views import LEAVING
from shoal.peer.training.device import MemoryLimits, allow_tf32, choose_device
from shoal.peer.validation.validator import Validator
from shoal.swarm.client.observer import look_up_run
from shoal.swarm.errors import DeviceError, IslandBroken, RecipeError
from shoal.swarm.protocol.identity import Identity
from shoal.swarm.protocol.invite import Invite
from shoal.swarm.protocol.run_file import RunFile
from shoal.swarm.system import run_loop

log = logging.getLogger(__name__)


_LEAVING_S = 10.0
"""Longest time that leaving the run may take when a rank of an island has ended."""


@dataclass(frozen=True)
class Work:
    """Limits of training. ``devices``: of an island, as of ``--devices``, empty for a single ``device``;
    ``tensor_parallel``: ranks of it that train on the same samples; ``threads`` None: torch decides."""

    device: str = "auto"
    devices: str = ""
    tensor_parallel: int = 1
    memory: MemoryLimits = field(default_factory=MemoryLimits)
    threads: int | None = None


class Ending(Enum):
    """Ways in which a membership ends without an error."""

    RUN_ENDED = "the run ended"
    STOPPED = "Ctrl-C asked this peer to stop"
    TERMINATED = "SIGTERM, or the notice of a spot machine's provider, asked this peer to stop"
    PAUSED = "the machine is not lent to the run any more"


Agree = Callable[[RunTerms, Path], None]
"""Asks the owner of this machine for consent to the terms. Raises ``NotAccepted``. The path is the peer's folder."""


def run_member(
    invite: str,
    options: SessionOptions,
    work: Work,
    agree: Agree,
    keeper: GuestKeeper,
    watch: Callable[[RunConnection, Watched], None],
    spot: SpotNotices | None = None,
) -> Ending:
    """Join and train until the run ends, the owner's terms end it, or a signal comes: the first leaves gracefully, the
    second stops at once.

    ``agree`` is called before joining, and before any file that the run names is opened; ``keeper``: of the owner's
    terms; ``watch`` is called before training, with the connection and the session or pipeline peer; ``spot``: where
    a notice comes from that this machine is taken back. Raises the errors of joining and training.
    """
    devices = _devices_of(work)
    device, ranks = devices[0], len(devices)
    work.memory.check(device)
    if work.threads is not None:
        torch.set_num_threads(work.threads)
    run = run_loop(look_up_run(Invite.parse(invite))).run_file
    recipe = _prepare(run, options, agree)
    if ranks > 1:
        check_island_can_train(run, options.role)
    allow_tf32(device, run.inner.precision)
    if run.pipeline is None:
        check_model_fits(run, recipe, device, work.memory, ranks)
    stops: list[int] = []
    peers: list[Session | PipelinePeer] = []

    def request_stop() -> None:
        if peers:
            peers[0].request_stop()
        elif signal.SIGTERM in stops:  # not joined yet, so there is nothing to leave in order
            raise SystemExit(TERMINATED)
        else:
            raise KeyboardInterrupt

    def give_up(pause: Pause) -> None:
        log.info("this machine is given up: %s; it comes back %s", pause.reason, _when(pause))
        connection.say_farewell("paused", pause.words)
        request_stop()

    def take_notice(notice: str) -> None:
        log.warning("the provider takes this machine back (%s): this peer leaves the run", notice)
        request_stop()

    with ExitStack() as behind_session, _handled_signals(request_stop, stops):
        connection = RunConnection(invite, options, str(device), ranks)
        try:
            peer = (
                PipelinePeer(connection, recipe, device, work.memory)
                if run.pipeline is not None
                else Session(connection)
            )
        except BaseException:
            connection.close()
            raise
        peers.append(peer)
        noticed = SpotThread(spot, take_notice) if spot is not None else nullcontext()
        with peer, KeeperThread(keeper, give_up) as kept, noticed as taken_back:
            try:
                watch(connection, peer)
                if options.role == "validator" and isinstance(peer, Session):
                    Validator(connection, peer, recipe, device).run()
                elif ranks > 1:
                    _train_island(connection, peer, recipe, devices, work, behind_session)
                elif isinstance(peer, PipelinePeer):
                    peer.train()
                else:
                    _train(peer, recipe, device, work.memory)
            except Interrupted:
                log.info("stopped before the run had a state to give")
    if signal.SIGTERM in stops or (taken_back is not None and taken_back.notice):
        return Ending.TERMINATED
    if stops:
        return Ending.STOPPED
    return Ending.RUN_ENDED if kept.pause is None else Ending.PAUSED


def _when(pause: Pause) -> str:
    return f"{'at' if pause.until[:1].isdigit() else 'when'} {pause.until}"


def _prepare(run: RunFile, options: SessionOptions, agree: Agree) -> Recipe:
    """Load the run's recipe and open its data, after the owner of this machine has agreed.

    Raises ``RecipeError``, ``CorpusError``, ``RunFileError`` and what ``agree`` raises."""
    if run.recipe.name == "own":
        raise RecipeError("the members of this run bring their own training loop: start the host's script instead")
    recipe = load_recipe(run, options.data)
    terms = RunTerms.of(run, recipe, options.data)
    agree(terms, options.folder(run, Identity.load_or_create(options.identity).peer_id))
    if run.pins is not None:  # other data is refused here, before the host learns of it
        run.pins.check_data(recipe.tokens_per_sample, recipe.corpus_digest, len(recipe.training_data()))
    log.info("data: %s", recipe.corpus_about)
    return recipe


def _train(session: Session, recipe: Recipe, device: torch.device, limits: MemoryLimits) -> None:
    local = LocalLoop.prepare(session.run_file, recipe, device, limits)
    session.start(local.setup)
    for batch in session.batches(local.data):
        session.step(local.inner.backward(batch))


def _devices_of(work: Work) -> tuple[torch.device, ...]:
    """Return the device of each rank. Raises ``DeviceError``."""
    if work.devices and work.device != "auto":
        raise DeviceError("--device is for one device and --devices for several: give one of them")
    devices = choose_devices(work.devices) if work.devices else (choose_device(work.device),)
    if len(devices) % work.tensor_parallel:
        raise DeviceError(
            f"--tensor-parallel {work.tensor_parallel}: --devices gives {len(devices)} ranks, no multiple of it"
        )
    return devices


def _train_island(
    connection: RunConnection,
    peer: Session | PipelinePeer,
    recipe: Recipe,
    devices: tuple[torch.device, ...],
    work: Work,
    behind_session: ExitStack,
) -> None:
    """Train as rank 0 of an island. ``behind_session``: ends once the session has."""
    from shoal.peer.island.training import RankTask, lead_island, lead_stages, started_ranks

    def leave_at_once(words: str) -> None:
        """End the membership and this process: its training thread may wait for ever for a rank that has ended."""
        log.error("%s: this member leaves the run. What it has contributed is kept; give the same command again", words)
        connection.say_farewell("failed", words)
        leaving = threading.Thread(target=connection.network.stop, daemon=True)
        leaving.start()
        leaving.join(_LEAVING_S)
        restore_terminal()
        os._exit(IslandBroken.exit_code)

    toml, names = connection.members.run.client.run_toml, [str(device) for device in devices]
    task = RankTask(toml, connection.options.data.arguments, names, work.tensor_parallel, work.threads)
    started = behind_session.enter_context(started_ranks(task, leave_at_once))
    if isinstance(peer, PipelinePeer):
        lead_stages(peer, recipe, connection.run_file, started)
    else:
        lead_island(peer, recipe, started, work.memory)


@contextmanager
def _handled_signals(request_stop: Callable[[], None], stops: list[int]) -> Iterator[None]:
    """Have signals stop the peer meanwhile; those that came are added to ``stops``."""

    def stop(number: int, frame: FrameType | None) -> None:
        stops.append(number)
        # Launchers send SIGTERM twice, to a job's shell and to all of its processes; who has no patience has SIGKILL.
        if number == signal.SIGINT and len(stops) > 1:
            restore_terminal()
            os._exit(STOPPED_AT_ONCE)
        if len(stops) == 1 and not sys.stdout.isatty():  # the live view says it by itself
            os.write(sys.stdout.fileno(), f"{LEAVING}\n".encode())
        request_stop()

    earlier = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
