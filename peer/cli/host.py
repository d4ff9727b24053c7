"""``shoal host``: the coordinators of one or several runs with their journals, on one port, until they are stopped."""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import socket
import sys
import tempfile
import time
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import zmq

from shoal.peer.cli.host_events import describe_event
from shoal.peer.cli.last_model import MODEL_FILE, LastModel, keeps_model
from shoal.peer.cli.short_rounds import ShortRounds
from shoal.peer.cli.standby import MOST_COORDINATORS, SharedHosting, SharedPlace
from shoal.peer.cli.supervisor import Restarts
from shoal.peer.data_places import NOWHERE, DataPlaces
from shoal.peer.directory.card import CardSource
from shoal.peer.directory.card_writer import (
    PAGE_PAUSE_S,
    RENEW_S,
    PlaceWriter,
    card_place,
    page_place,
    write_card,
    write_files,
)
from shoal.peer.directory.local_fit import shoal_version
from shoal.peer.directory.places import Place
from shoal.peer.event_schema import Event, make_event
from shoal.peer.history.history_file import HistoryOrigin, pack_origin
from shoal.peer.options import DEFAULT_PORT, SHOAL_HOME, StartFrom
from shoal.peer.relay.host_relays import HostRelays
from shoal.peer.relay.process import RELAY_IDENTITY_FILE, RelayProcess
from shoal.swarm import durable
from shoal.swarm.aio import Changes, in_thread, task_scope
from shoal.swarm.coordinator.events import JournalEvent, VerdictGiven
from shoal.swarm.coordinator.front import CoordinatorFront
from shoal.swarm.coordinator.host_commands import replayed
from shoal.swarm.coordinator.journal import Journal
from shoal.swarm.coordinator.local_journal import (
    JOURNAL,
    SHARED_JOURNAL,
    Backup,
    JournalFiles,
    LocalJournal,
    check_not_shared,
    check_run,
)
from shoal.swarm.coordinator.round_scope import RoundScope
from shoal.swarm.coordinator.run import PlainRun
from shoal.swarm.coordinator.service import CoordinatorService
from shoal.swarm.coordinator.shared_journal import SharedJournal, SharedRun
from shoal.swarm.errors import (
    NEEDS_A_PERSON,
    CorpusError,
    DeadlineExceeded,
    DeviceError,
    HostCrashed,
    IdentityError,
    JournalUnavailable,
    ModelMismatch,
    NotAdmitted,
    RecipeError,
    RunFileError,
    SealedForOthers,
    ShoalError,
    StateFileError,
    StorageError,
    Unreachable,
    UserError,
    WireError,
)
from shoal.swarm.protocol.addresses import MAX_ADDRESSES, join_host_port, parse_ip, reach_of
from shoal.swarm.protocol.identity import CurveKeys, Identity, key_text
from shoal.swarm.protocol.invite import Invite
from shoal.swarm.protocol.messages import CoordinatorToPeerStatus
from shoal.swarm.protocol.pins import PinsSection
from shoal.swarm.protocol.relay_url import RelayUrl
from shoal.swarm.protocol.rounds import Verdict
from shoal.swarm.protocol.run_file import RecipeSection, RunFile, load_run_file, unused_inner_settings
from shoal.swarm.protocol.types import RUN_MEMBERS, Address
from shoal.swarm.protocol.verdict_chain import check_verdict
from shoal.swarm.system import call_on_signals
from shoal.swarm.transport.tcp.sockets import own_end
from shoal.swarm.web.files import PageCopy
from shoal.swarm.web.source import HostedPage

if TYPE_CHECKING:
    from shoal.swarm.web.server import PageServer

log = logging.getLogger(__name__)

RUN_FILE = "run.toml"
IDENTITY_FILE = "identity"
ORIGIN_FILE = "origin.msgpack"
"""File with the origin of the run's history: the head of a history file, without verdicts."""

INVITE_FILE = "invite.txt"
"""File with the invite that the host prints. Who can read it may join, so others on this machine cannot."""

CONTROL_FILE = "control.txt"
"""File with the address at which this machine itself reaches the coordinator, for ``shoal invite`` and the like."""

PORT_KEY_FILE = "port.key"
"""File with the secret of the CURVE keys that a run shares with others on its port. Without it they are the run's own,
made from its identity."""

_PORT_FILE = "port.txt"
_LAST_PORT = 65_535
_LOOK_FOR_HOSTS_S = 5.0
_REGISTER_S = 15.0
"""Time for the first registration with a relay of ``--via``."""

_MOST_COPIED_ROUNDS = 20_000
"""Newest rounds in a published copy of the page, which has some megabytes then."""

_ROUNDS_A_READ = 256

HOST_DESCRIPTORS = 2 * RUN_MEMBERS + 128
"""Open files and sockets of a host of a full run: one for each member and observer, and some of its own."""

_CANNOT = (
    "{}\nThis machine cannot pin what the run's members have to bring. Put that right; or run `shoal prepare RUN.toml "
    "--out PREPARED.toml` on a machine that can, and host that file; or give --no-pins: then the first member to join "
    "defines the run's model, data and first state."
)
_SETTINGS = "recipe.settings"
_ERRORS: tuple[type[ShoalError], ...] = (
    *(RunFileError, RecipeError, CorpusError, ModelMismatch, DeviceError, StateFileError, SealedForOthers),
    *(StorageError, IdentityError, NotAdmitted, Unreachable, DeadlineExceeded),
)
"""Errors that a command of ``_run_command`` may end with."""


@dataclass(frozen=True)
class HostOptions:
    """``identity``: the file with the host's keys, by default the run's own in its folder under ``state``.
    ``bind``: where to listen; port 0 takes any free one, and the same one again after a restart.
    ``advertise``: what the invite says, by default this machine's address and the bound port; port 0: the bound one.
    ``backup``: another place for all that is kept in ``state``. ``start_from``: the checkpoint that the run starts
    from, if its file does not name one. ``pin``: fix what members have to bring, if the run file does not yet;
    ``data``: where the run's data is looked for, for that. ``publish``: path or URL where the run's
    card is kept up to date; empty for nowhere.
    ``via``: relays that this host is reached over; ``relay``: run one beside it for members that cannot be dialed,
    unless it is reached over others. ``web``: where to serve the page of the runs, ``metrics``: where to serve their
    metrics alone; None for nowhere. ``journal``: the journal that other
    hosts share; None for one in ``state``.
    ``keep_model``: whether to fetch the last model from the members at the run's end; None for small ones."""

    identity: Path | None
    state: Path
    bind: tuple[str, int] = ("0.0.0.0", DEFAULT_PORT)
    advertise: tuple[tuple[str, int], ...] = ()
    backup: Path | None = None
    start_from: StartFrom | None = None
    pin: bool = True
    data: DataPlaces = NOWHERE
    publish: str = ""
    via: tuple[RelayUrl, ...] = ()
    relay: bool = True
    web: tuple[str, int] | None = None
    metrics: tuple[str, int] | None = None
    journal: SharedPlace | None = None
    keep_model: bool | None = False


@dataclass(frozen=True)
class Hosting:
    """Facts of a started host that are printed for the person who runs it. ``card``: where its card is published,
    empty for nowhere; ``key``: that the card is signed with, as directories name it. ``page``: address of the runs'
    page, ``metrics``: of their metrics without a page; empty without one."""

    run: RunFile
    invite: Invite
    state: Path
    resumed_round: int
    resumed_version: int
    card: str = ""
    key: str = ""
    page: str = ""
    metrics: str = ""


@dataclass(frozen=True)
class HostedRun:
    """A run that is about to be served. ``pem``: the bytes of its host's identity file; ``sharing``: the journal that
    other hosts share, if there is one."""

    text: str
    run: RunFile
    state: Path
    identity: Identity
    pem: bytes
    backup: Backup | None
    sharing: SharedHosting | None = None

    @property
    def name(self) -> str:
        return self.run.run.name


async def host(
    run_paths: Sequence[Path],
    options: HostOptions,
    on_start: Callable[[Hosting], None],
    on_event: Callable[[Event], None],
) -> None:
    """Serve until SIGINT or SIGTERM. Raises ``RunFileError``, ``Unreachable``, ``StorageError``, …

    One run's errors end this. Of several runs, one that cannot be served is left out, one that fails begins again if
    that may help, and the others go on meanwhile.
    ``on_event``: called with every decision that people want to read, once it is journaled."""
    if options.backup is not None and options.backup.resolve() == options.state.resolve():
        raise UserError(f"--backup {options.backup}: is the --state folder itself; give one on another disk or machine")
    if options.journal is not None:
        if len(run_paths) > 1 or options.backup is not None:
            raise UserError(
                "--journal is for one run, and needs no --backup: its engine keeps copies. Start a host for each run, "
                "each with a --bind of its own; they may share the engine and its prefix"
            )
        await _host_shared(run_paths[0], options, options.journal, on_start, on_event)
        return
    if len(run_paths) > 1 and options.publish.endswith(".json"):
        raise UserError(f"--publish {options.publish}: is one file, and each run has a card of its own: name a folder")
    runs = await _prepared_runs(run_paths, options)
    names = tuple(one.name for one in runs)
    if len(set(names)) < len(names):
        raise UserError(f"two of the run files have the same [run] name: {', '.join(sorted(names))}")
    keys = port_keys(runs)
    stop = asyncio.Event()
    call_on_signals(stop.set)
    address = (options.bind[0], options.bind[1] or next(filter(None, (earlier_port(one.state) for one in runs)), 0))
    async with AsyncExitStack() as ending:
        journal = await ending.enter_async_context(leased(runs[0], options, keys)) if len(run_paths) == 1 else None
        front = await ending.enter_async_context(CoordinatorFront.open(keys, address, names))
        pages = ending.enter_context(page_server(options.web)) if options.web is not None else None
        metrics = ending.enter_context(metrics_server(options.metrics)) if options.metrics is not None else None
        shared = ServingHost(front, pages, options, stop, on_start, on_event, metrics)
        if journal is not None:
            await serve(shared, runs[0], journal)
            return
        async with task_scope() as tasks:
            kept = [tasks.create_task(_keep_serving(shared, one)) for one in runs]
            await asyncio.wait(kept)
    if not any(one.result() for one in kept):
        raise HostCrashed("none of the runs could go on, as was said above: their journals are kept")


async def _host_shared(
    run_path: Path,
    options: HostOptions,
    place: SharedPlace,
    on_start: Callable[[Hosting], None],
    on_event: Callable[[Event], None],
) -> None:
    """As ``host``, for a run whose journal other hosts share: stand by, and lead when nobody does.

    Raises ``LeaseLost`` when another one leads after that: it is for a new process to stand by again."""
    _, run = load_run_file(run_path)
    state = options.state / run.run.name
    stop = asyncio.Event()
    call_on_signals(stop.set)
    async with AsyncExitStack() as ending:
        sharing = await ending.enter_async_context(SharedHosting.open(place, run.run.name, state))
        if (state / JOURNAL).exists():
            raise UserError(
                f"{state}: has a journal of this run, and another one in {sharing.journal.location} would tell another "
                "history under the same keys: host the run without --journal as before, or give --state another folder "
                "and the run another name, and begin it --from its checkpoint"
            )
        sharing.check_place(state)
        _write(state / SHARED_JOURNAL, f"{sharing.journal.location}\n".encode())
        path = options.identity or state / IDENTITY_FILE
        await in_thread(sharing.fetch_identity, path)
        one = await prepared(run_path, options, sharing)
        sharing.check_identity(one.identity, path)
        address = options.bind[0], options.bind[1] or earlier_port(state)
        keys = one.identity.coordinator_keys()
        front = await ending.enter_async_context(CoordinatorFront.open(keys, address, (one.name,)))
        pages = ending.enter_context(page_server(options.web)) if options.web is not None else None
        metrics = ending.enter_context(metrics_server(options.metrics)) if options.metrics is not None else None
        # A host that stands by answers commands on its machine, too: that it does.
        about = _about(one, options, keys, front.node.control_port)
        for name, data in (about | {RUN_FILE: one.text.encode()}).items():
            _write(state / name, data)

        def on_standby(leader: str) -> None:
            on_event(make_event("standing_by", leader=leader) | {"run": one.name})

        shown = _advertised(options, front.node.control_port) + _relays_of(options)
        await in_thread(sharing.show_addresses, shown)
        shared_run = SharedRun(one.run.hash, one.text, one.identity.public_key)
        epoch = await sharing.become_leader(shared_run, front, stop, on_standby)
        if epoch is None:
            return
        async with sharing.leading(stop):
            await in_thread(check_keys, one.identity, sharing.journal, path)
            await in_thread(sharing.seal_identity, one.pem)
            leading = make_event("leading", epoch=epoch, round=sharing.journal.rounds)
            on_event(leading | {"run": one.name})
            serving = ServingHost(front, pages, options, stop, on_start, on_event, metrics)
            await serve(serving, one, (sharing.journal, epoch))


def _about(one: HostedRun, options: HostOptions, keys: CurveKeys, port: int) -> dict[str, bytes]:
    """Make the files of a host's folder that say where it is reached and whose run it is."""
    return {
        _PORT_FILE: f"{port}\n".encode(),
        CONTROL_FILE: f"{join_host_port(own_end(options.bind[0]), port)}\n".encode(),
        ORIGIN_FILE: pack_origin(HistoryOrigin(run_toml=one.text, coordinator=one.identity.certify(keys))),
    }


def _advertised(options: HostOptions, port: int) -> tuple[Address, ...]:
    """The addresses of this host for its invites, without relays."""
    named = options.advertise or (() if options.via else ((own_address(options.bind[0]), port),))
    return tuple(Address(host=host, control_port=own_port or port) for host, own_port in named)


def _relays_of(options: HostOptions) -> tuple[Address, ...]:
    """The relays that this host is reached over, as invites name them."""
    return tuple(url.address.model_copy(update={"relay_key": None}) for url in options.via)


@dataclass(frozen=True)
class ServingHost:
    """Parts of a host that all its runs share. ``pages``: the server of their page, ``metrics``: of their metrics
    alone, if there is one."""

    front: CoordinatorFront
    pages: PageServer | None
    options: HostOptions
    stop: asyncio.Event
    on_start: Callable[[Hosting], None]
    on_event: Callable[[Event], None]
    metrics: PageServer | None = None


@contextmanager
def page_server(web: tuple[str, int]) -> Iterator[PageServer]:
    """Serve pages of a host's or a peer's runs. Raises ``UserError`` and ``Unreachable``."""
    from shoal.swarm.web.server import PageServer, connections_beside

    server = PageServer(web, connections_beside(HOST_DESCRIPTORS))
    try:
        yield server
    finally:
        server.close()


@contextmanager
def metrics_server(place: tuple[str, int]) -> Iterator[PageServer]:
    """Serve metrics without a page. Raises ``UserError`` and ``Unreachable``."""
    from shoal.swarm.web.server import METRICS_CONNECTIONS, PageServer

    server = PageServer(place, METRICS_CONNECTIONS, only_metrics=True)
    try:
        yield server
    finally:
        server.close()


async def _prepared_runs(run_paths: Sequence[Path], options: HostOptions) -> list[HostedRun]:
    """Prepare all runs that can be served. Raises the error of a single one, and ``HostCrashed`` when none is left."""
    if len(run_paths) == 1:
        return [await prepared(run_paths[0], options)]
    runs: list[HostedRun] = []
    for path in run_paths:
        try:
            one = await prepared(path, options)
            kept_port_keys(one.state, one.identity)
            runs.append(one)
        except ShoalError as error:
            log.error("%s is not served: %s. Other runs are; put this right and start the host again", path, error)
    if not runs:
        raise HostCrashed("none of the run files can be served, as was said above")
    return runs


async def prepared(run_path: Path, options: HostOptions, sharing: SharedHosting | None = None) -> HostedRun:
    """Read a run file, and complete it. Raises ``RunFileError`` and what is wrong with the run on this machine."""
    text, run = load_run_file(run_path)
    if sharing is None:
        check_not_shared(options.state / run.run.name)
    hosted = sharing.run_file(run) if sharing is not None else None
    if hosted is not None:
        identity, pem = host_identity(options.identity, options.state / run.run.name)
        return HostedRun(*hosted, options.state / run.run.name, identity, pem, None, sharing)
    if unused := unused_inner_settings(run, own_loop=run.recipe.name == "own"):
        log.warning("%s: %s has no effect in this run", run_path, ", ".join(unused))
    state = options.state / run.run.name
    if options.start_from is not None:
        text, run = await started_run_file(run_path, state, options.start_from)
    text, run = await pinned_run_file(text, run, state, pin=options.pin, places=options.data)
    identity, pem = host_identity(options.identity, state)
    backup = Backup(options.backup / run.run.name) if options.backup else None
    return HostedRun(text, run, state, identity, pem, backup, sharing)


@asynccontextmanager
async def leased(one: HostedRun, options: HostOptions, keys: CurveKeys) -> AsyncIterator[tuple[LocalJournal, int]]:
    """Hold a run's journal, which its host's keys fit; yields it with the lease's epoch. Raises ``FolderInUse``,
    ``IdentityError`` and ``StorageError``."""
    journal = LocalJournal(one.state, one.run.hash, one.text, one.backup)
    try:
        # In a worker thread, as it reads all that is kept: the loop may be serving other runs.
        yield journal, await in_thread(_take_lease, journal, one, options, keys)
    finally:
        journal.close()


def _take_lease(journal: LocalJournal, one: HostedRun, options: HostOptions, keys: CurveKeys) -> int:
    epoch = journal.lease()
    check_keys(one.identity, journal, options.identity or one.state / IDENTITY_FILE)
    if keys != one.identity.coordinator_keys():
        _write(one.state / PORT_KEY_FILE, keys.secret.hex().encode() + b"\n", 0o600)
    if one.backup is not None:  # only after the check: the backup may hold the only copy of the right keys
        one.backup.keep(RUN_FILE, one.text.encode())
        one.backup.keep(IDENTITY_FILE, one.pem, 0o600)
        if keys != one.identity.coordinator_keys():
            one.backup.keep(PORT_KEY_FILE, keys.secret.hex().encode() + b"\n", 0o600)
    return epoch


async def _keep_serving(shared: ServingHost, one: HostedRun) -> bool:
    """Serve one of several runs; begin again, after longer and longer pauses, when it fails. Returns False when it has
    failed too often, or for a reason that does not pass by itself."""
    restarts = Restarts()
    while not shared.stop.is_set():
        try:
            async with leased(one, shared.options, shared.front.node.control.keys) as journal:
                await serve(shared, one, journal)
        except NEEDS_A_PERSON as error:
            log.error(
                "the run %s cannot go on: %s. It is not served until that is put right and the host is started again; "
                "its members wait, other runs go on",
                one.name,
                error,
            )
            return False
        except Exception as error:  # whatever it is, the other runs go on
            pause_s = restarts.pause_s(asyncio.get_running_loop().time())
            about = "" if isinstance(error, ShoalError) else f"{type(error).__name__}: "
            if pause_s is None:
                log.exception("the run %s has failed again and again, and is not served any more", one.name)
                return False
            log.error(
                "the run %s cannot go on: %s%s; it begins again in %g s, other runs go on",
                one.name,
                about,
                error,
                pause_s,
            )
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await shared.stop.wait()
    return True


async def serve(shared: ServingHost, one: HostedRun, leased: tuple[Journal, int]) -> None:
    """Serve a run until ``stop``. Raises what it cannot go on from."""

    def report(decided: JournalEvent) -> None:
        event = describe_event(decided)
        if event is not None:
            shared.on_event(event | {"run": one.name})
        if isinstance(decided, VerdictGiven) and decided.verdict.committed:
            advice = short_rounds.note(service.scope.run, decided.verdict.tokens)
            if advice is not None:
                shared.on_event(advice | {"run": one.name})

    short_rounds = ShortRounds()
    options = shared.options
    text, run, state, identity, backup = one.text, one.run, one.state, one.identity, one.backup
    kept = state / MODEL_FILE if keeps_model(options.keep_model, run) else None
    async with AsyncExitStack() as ending, shared.front.serving(text, run, identity, *leased) as service:
        # Before any member is answered: those of a run that has ended go when nobody wants its last state.
        last = LastModel(service, kept, _run_silently, lambda event: shared.on_event(event | {"run": one.name}))
        port = service.node.control_port
        addresses = _advertised(options, port)
        own_host = addresses[0].host if addresses else ""
        relays = HostRelays(identity, run.hash, service.node)
        service.relays.host = relays
        ending.push_async_callback(relays.close)
        if options.via:
            await relays.register(options.via, _REGISTER_S)
            addresses += _relays_of(options)
        elif options.relay:
            place = options.bind[0], port + 1 if port < _LAST_PORT else 0
            beside = RelayProcess(state / RELAY_IDENTITY_FILE, place, identity.public_key)
            relays.run_beside(beside, own_host)

        async def make_invite() -> Invite:
            token = await service.printed_token()
            return Invite(
                await _with_others(addresses, one.sharing),
                run.run.name,
                service.node.control.keys.public,
                run.hash,
                token,
            )

        def keep(name: str, data: bytes, mode: int = 0o644) -> None:
            _write(state / name, data, mode)
            if backup is not None:
                backup.keep(name, data, mode)

        for name, data in _about(one, options, service.node.control.keys, port).items():
            keep(name, data)
        _write(state / RUN_FILE, text.encode())
        service.observe(report)
        scope = service.scope
        resumed = scope.round_number, scope.anchor_version
        at = card_place(options.publish, run.run.name) if options.publish else None
        shown, key = at.shown if at else "", key_text(identity.public_key)
        folders = {"host": state} | ({"backup": backup.folder} if backup is not None else {})
        page, loop = HostedPage(service, folders), asyncio.get_running_loop()
        for server in filter(None, (shared.pages, shared.metrics)):
            ending.enter_context(server.showing(page, loop))
        urls = [server.url if server is not None else "" for server in (shared.pages, shared.metrics)]

        def announce(invite: Invite) -> None:
            keep(INVITE_FILE, f"{invite}\n".encode(), 0o600)
            shared.on_start(Hosting(run, invite, state, *resumed, shown, key, *urls))

        invite = await make_invite()
        announce(invite)
        async with task_scope() as tasks:
            here = Address(host=own_end(options.bind[0]), control_port=port)
            following = [
                tasks.create_task(_follow_admission(service, make_invite, announce)),
                tasks.create_task(last.run(make_invite, here)),
            ]
            if one.sharing is not None:
                following.append(tasks.create_task(_follow_hosts(invite, make_invite, announce)))
            try:
                await (service.wait(shared.stop) if at is None else _publishing(service, invite, at, shared.stop))
            finally:
                for task in following:
                    task.cancel()


async def _follow_admission(
    service: CoordinatorService, make_invite: Callable[[], Awaitable[Invite]], announce: Callable[[Invite], None]
) -> None:
    """Announce another invite whenever an amendment has begun to count by which the one before lets nobody in."""
    changes = Changes()
    service.observe(lambda _: changes.announce())
    admission = service.scope.run.access.admission
    while True:
        await changes.until(lambda told=admission: service.scope.run.access.admission != told)  # type: ignore[misc]
        admission = service.scope.run.access.admission
        with suppress(DeadlineExceeded):  # the journal has failed, which ``service.wait`` raises
            announce(await make_invite())


async def _with_others(own: tuple[Address, ...], sharing: SharedHosting | None) -> tuple[Address, ...]:
    """Add the addresses and relays of the hosts that stand by to those of the one that leads."""
    if sharing is None:
        return own
    found = dict.fromkeys([*own, *await in_thread(sharing.others)])
    direct = [one for one in found if not one.is_relayed][:MOST_COORDINATORS]
    relayed = [one for one in found if one.is_relayed]
    return (*direct, *relayed[: MAX_ADDRESSES - len(direct)])


async def _follow_hosts(
    announced: Invite, make_invite: Callable[[], Awaitable[Invite]], announce: Callable[[Invite], None]
) -> None:
    """Announce another invite whenever hosts have come that the one before does not name."""
    while True:
        await asyncio.sleep(_LOOK_FOR_HOSTS_S)
        with suppress(DeadlineExceeded, JournalUnavailable):
            found = await make_invite()
            if set(found.addresses) - set(announced.addresses):
                announced = found
                announce(found)


async def _publishing(service: CoordinatorService, invite: Invite, place: Place, stop: asyncio.Event) -> None:
    """As ``service.wait``, with the run's card kept up to date at a place, and a copy of its page beside it."""
    run, identity = service.scope.run, service.identity
    if run.access.admission == "open" and all(reach_of(one.host) != "public" for one in invite.addresses):
        log.warning("the card's invite names no public address, so others may not reach this host: see --advertise")
    if run.access.admission != "open" and not run.card.contact:
        log.warning("the card says nobody whom to ask for an invite: name one in the run file, [card] contact")
    source = CardSource(invite, identity, service.node.control.keys, shoal_version(), platform.python_version())

    async def make_card(stopped: bool) -> bytes:
        async with service.lock:  # what is not in the journal yet, nobody is told
            scope = service.scope
            elements = scope.elements if isinstance(scope, RoundScope) and scope.model is not None else None
            run, status = scope.run, scope.status(time.monotonic())
        return source.card(run, status, elements, time.time(), stopped=stopped).file_bytes

    page, copy, known = HostedPage(service, {}), PageCopy(_MOST_COPIED_ROUNDS), dict[str, bytes]()

    async def make_page(stopped: bool) -> Mapping[str, bytes]:
        status = await page.status()
        first = max(copy.next_round, status.round - _MOST_COPIED_ROUNDS)
        timings = await page.timings(first)
        while verdicts := await page.verdicts(first, _ROUNDS_A_READ):
            copy.take(verdicts, timings)
            first = copy.next_round
        renewed_s = None if stopped or status.phase == "ended" else RENEW_S
        return await in_thread(copy.files, page.run_file(), status, time.time(), renewed_s)

    def write_page(place: Place, files: Mapping[str, bytes]) -> None:
        write_files(place, files, known)

    cards = PlaceWriter(place, make_card, write_card)
    pages = PlaceWriter(page_place(place), make_page, write_page, "the copy of the run's page", PAGE_PAUSE_S)

    def note_change(_: JournalEvent) -> None:
        cards.changed()
        pages.changed()

    service.observe(note_change)
    async with task_scope() as tasks:
        keeping = tasks.create_task(cards.keep()), tasks.create_task(pages.keep())
        try:
            await service.wait(stop)
        finally:
            for task in keeping:
                task.cancel()
    await asyncio.gather(cards.close(), pages.close())


# A host's folder ------------------------------------------------------------------------------------------------


def is_host_folder(folder: Path) -> bool:
    """Return whether a coordinator keeps a run in the folder, with its journal or the place of a shared one."""
    return (folder / JOURNAL).exists() or (folder / SHARED_JOURNAL).exists()


def find_host_folder(run: str) -> Path | None:
    """Return the folder of a run that this machine hosts, by that folder's path or the run's name; None without one."""
    places = Path(run).expanduser(), SHOAL_HOME / "host" / run
    return next((folder for folder in places if is_host_folder(folder)), None)


def hosted_verdicts(folder: Path, *, has_stages: bool) -> tuple[int, tuple[Verdict, ...]]:
    """Read the verdicts in a host's folder, also while the host runs. Returns their scope, too: the run's, or in a
    pipeline the last stage's, whose verdicts have the loss. Raises ``StorageError``."""
    scope = 0
    with closing(JournalFiles(folder, live=True)) as journal:
        while has_stages and journal.verdicts(0, 1, scope + 1):
            scope += 1
        return scope, tuple(event.verdict for event in journal.verdicts(scope=scope or None))


def hosted_status(folder: Path, run: RunFile) -> CoordinatorToPeerStatus:
    """Read how a run is by its host's folder, also while the host runs. Raises ``StorageError``, and
    ``RunFileError`` for the journal of another run file."""

    def sign(message: bytes) -> bytes:
        raise AssertionError("nothing is decided while a journal is read")

    now_s = time.monotonic()
    with closing(JournalFiles(folder, live=True)) as journal:
        check_run(journal, run.hash)
        machine = replayed(run, sign, journal.read(0), now_s, 0)
    return (machine.scope if isinstance(machine, PlainRun) else machine).status(now_s)


# The run file ---------------------------------------------------------------------------------------------------


def _hosted_run_file(kept: Path) -> tuple[str, RunFile] | None:
    """The run file of a run that is being hosted already, in the folder ``kept``."""
    return load_run_file(kept / RUN_FILE) if (kept / JOURNAL).exists() and (kept / RUN_FILE).exists() else None


async def started_run_file(path: Path, kept: Path, start_from: StartFrom) -> tuple[str, RunFile]:
    """The run file at ``path`` with its ``[start]``: text, and validated.

    A process of its own reads the checkpoint. Where the run is being hosted already, in the folder ``kept``, its
    section stays what it is, and the checkpoint is not needed any more.

    Raises ``StateFileError``, ``RunFileError``, and ``ModelMismatch`` for a checkpoint of another model."""
    _, run = load_run_file(path)
    hosted = _hosted_run_file(kept)
    if hosted is not None:
        before = hosted[1]
        recipe = _as_it_was(before.recipe, run.recipe)
        if before.start is not None:
            same = before.model_copy(update={"start": None, "pins": run.pins, "recipe": recipe})
            if same == run:
                return hosted
    with tempfile.TemporaryDirectory(prefix="shoal-start-") as folder:
        out = Path(folder) / RUN_FILE
        arguments = ["start-section", str(path), "--out", str(out), "--from", str(start_from.folder)]
        arguments += ["--identity", str(start_from.identity)] if start_from.identity is not None else []
        arguments += ["--parameters-only"] if start_from.only_parameters else []
        await _run_command(arguments)
        return load_run_file(out)


def _as_it_was(written: RecipeSection, given: RecipeSection) -> RecipeSection:
    """Return a recipe's section without the configuration that came from the model that the run starts from."""
    if given.name != "hf" or "config" in given.settings:
        return written
    settings = {name: value for name, value in written.settings.items() if name != "config"}
    return written.model_copy(update={"settings": settings})


async def pinned_run_file(
    text: str, run: RunFile, kept: Path, *, pin: bool, places: DataPlaces = NOWHERE
) -> tuple[str, RunFile]:
    """The run file that a host publishes: with pins, unless its members bring loops of their own or these are not
    wanted (``pin``). ``places``: where its data may be. Where the run is being hosted already, in the folder ``kept``,
    it stays what it is.

    Raises what went wrong in the process that builds the model, with what else can be done."""
    if run.pins is not None:
        return text, run
    hosted = _hosted_run_file(kept)
    if hosted is not None and hosted[1].model_copy(update={"pins": None}) == run:
        return hosted
    if not pin or run.recipe.name == "own":
        return text, run
    with tempfile.TemporaryDirectory(prefix="shoal-prepare-") as folder:
        given, out = Path(folder) / RUN_FILE, Path(folder) / "prepared.toml"
        given.write_text(text)
        await _prepare_apart(given, out, places)
        return load_run_file(out)


async def _prepare_apart(given: Path, out: Path, places: DataPlaces) -> None:
    """Run `shoal prepare`. Raises its error, with what else can be done, under the run file's usual name."""
    arguments = ["prepare", str(given), "--out", str(out)]
    arguments += [word for one in places.named for word in ("--data", one)]
    try:
        await _run_command(arguments)
    except ShoalError as error:
        words = str(error).replace(str(given), RUN_FILE)
        if words.startswith(_SETTINGS):  # wrong on every machine
            raise
        raise type(error)(_CANNOT.format(words)) from error


async def _run_silently(arguments: Sequence[str], variables: Mapping[str, str]) -> None:
    await _run_command(arguments, variables, DEVNULL)


async def _run_command(
    arguments: Sequence[str], variables: Mapping[str, str] | None = None, stdout: int | None = None
) -> None:
    """Run a ``shoal`` command as a process of its own, so that the memory it takes is free when it ends.

    It prints how far it is to ``stdout``, by default ours. ``variables``: of its environment, beside ours. Raises the
    error that it ended with."""
    command = [sys.executable, "-m", "shoal.peer", *arguments]
    environment = {**os.environ, **(variables or {})}
    process = await asyncio.create_subprocess_exec(*command, stdout=stdout, stderr=PIPE, env=environment)
    try:
        _, told = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        lines = told.decode(errors="replace").strip().splitlines()
        name, _, words = (lines[-1] if lines else "").partition(": ")
        kind = next((one for one in _ERRORS if one.__name__ == name), ShoalError)
        raise kind(words or f"`shoal {arguments[0]}` ended with {process.returncode} {name}".rstrip())


def say_pins(pins: PinsSection | None) -> str:
    """Describe the pins for people."""
    if pins is None:
        return "none: the first member to join defines the run's model, data and first state"
    first = f"first state {pins.state[:16]}" if pins.state else "first state not pinned here"
    corpus = f"data {pins.corpus[:16]}" if pins.corpus else "data of the members' own"
    return f"{pins.elements:,} parameters {pins.layout[:16]}, {corpus}, {first}"


def say_reach(addresses: Sequence[Address]) -> str:
    """Warn of an invite by which nobody outside of this machine, or of its network, can join; else empty."""
    if any(one.is_relayed or parse_ip(one.host) is None or reach_of(one.host) == "public" for one in addresses):
        return ""
    who = "machines of this network" if any(reach_of(one.host) == "private" for one in addresses) else "this machine"
    return (
        f"{', '.join(dict.fromkeys(one.host for one in addresses))} is known to {who} only, so nobody else can join by "
        "this invite. For others, forward the port to this machine and give --advertise PUBLIC_NAME:PORT, or give a "
        "relay's --via URL; `shoal doctor` says what is possible here."
    )


# Ports, keys and limits -----------------------------------------------------------------------------------------


def earlier_port(state: Path) -> int:
    """Read the port of the last start, so that invites stay valid; 0 when there was none."""
    try:
        return int((state / _PORT_FILE).read_text())
    except (OSError, ValueError):
        return 0


def host_identity(given: Path | None, state: Path) -> tuple[Identity, bytes]:
    """Load or create the host's keys; returns them and the bytes of their file.

    A run's own keys lie in its folder, so that the folder is all that another machine needs."""
    path = given or state / IDENTITY_FILE
    try:
        if given is None and not path.exists() and (state / JOURNAL).exists():
            raise IdentityError(
                f"{path} is missing, and members trust no other: restore it from the backup, or name the file with "
                "--identity"
            )
        identity = Identity.load_or_create(path)
        return identity, path.read_bytes()
    except OSError as error:
        raise StorageError(f"{path}: cannot be used as identity file: {error}") from error


def kept_port_keys(folder: Path, identity: Identity) -> CurveKeys:
    """Return the CURVE keys with which a run is served, whose folder and identity these are. Raises ``IdentityError``
    for a damaged file."""
    path = folder / PORT_KEY_FILE
    try:
        return CurveKeys.from_secret(bytes.fromhex(path.read_text().strip()))
    except FileNotFoundError:
        return identity.coordinator_keys()
    except (OSError, ValueError, zmq.ZMQError) as error:
        raise IdentityError(f"{path}: cannot be used, restore it from the backup: {error}") from error


def port_keys(runs: Sequence[HostedRun]) -> CurveKeys:
    """Choose the CURVE keys of the port: those that invites of the runs name already, if there are any.

    Raises ``UserError`` for runs whose invites name different ones."""
    kept = {one.name: kept_port_keys(one.state, one.identity) for one in runs if is_host_folder(one.state)}
    if len({keys.public for keys in kept.values()}) > 1:
        raise UserError(
            f"the runs {', '.join(kept)} were hosted apart, and their invites name different keys: host each by "
            "itself, with another --bind"
        )
    if kept:
        return next(iter(kept.values()))
    return runs[0].identity.coordinator_keys() if len(runs) == 1 else CurveKeys.fresh()


def check_keys(identity: Identity, journal: LocalJournal | SharedJournal, path: Path) -> None:
    """Check that these keys signed the journal's newest verdict. Raises ``IdentityError`` if others did."""
    for event in journal.verdicts(max(0, journal.rounds - 1), 1):
        try:
            check_verdict(event.verdict, identity.public_key)
        except WireError as error:
            raise IdentityError(
                f"{path} has not the keys of this run's host, and members trust no other ({error}): restore it from "
                "the backup, or name the file with --identity"
            ) from error


def _write(path: Path, data: bytes, mode: int = 0o644) -> None:
    try:
        durable.put(path, data, mode)
    except OSError as error:
        raise StorageError(f"{path}: cannot be written: {error}") from error


def own_address(bind: str) -> str:
    """Find the address for the invite: the bound one, or that of the interface that leads outside."""
    if bind not in ("0.0.0.0", "::", "*"):
        return bind
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # a documentation address (RFC 5737); UDP connects without a packet
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


def warn_descriptors(allowed: int) -> None:
    """Warn when this process may not open enough files and sockets for a full run; ``allowed``: how many it may."""
    if allowed < HOST_DESCRIPTORS:
        log.warning(
            "this machine allows %d open files and sockets, a host of %d members needs %d: the last ones will not get "
            "in; if there may be so many, raise the hard limit (ulimit -Hn, or LimitNOFILE= in a systemd unit)",
            allowed,
            RUN_MEMBERS,
            HOST_DESCRIPTORS,
        )
