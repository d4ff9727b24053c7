"""Hosts that share a run's journal: one leads by its lease, the others follow it warm and take over."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from shoal.swarm import durable
from shoal.swarm.aio import in_thread, task_scope
from shoal.swarm.coordinator.front import CoordinatorFront
from shoal.swarm.coordinator.local_journal import SHARED_JOURNAL, shared_place
from shoal.swarm.coordinator.shared_journal import SharedJournal, SharedRun
from shoal.swarm.coordinator.stores.place import open_store
from shoal.swarm.errors import (
    IdentityError,
    JournalUnavailable,
    LeaseLost,
    RunFileError,
    ShoalError,
    StorageError,
    UserError,
)
from shoal.swarm.protocol.identity import Identity, key_text, parse_key, peer_id, seal_to
from shoal.swarm.protocol.invite import parse_advertised
from shoal.swarm.protocol.run_file import RunFile, parse_run_file
from shoal.swarm.protocol.types import Address

log = logging.getLogger(__name__)

LEASE_S = 5.0
"""Time after which another host takes over from a silent one. It takes twice as long at most."""

MOST_COORDINATORS = 5
"""Coordinators that an invite names."""

_RENEWALS = 4
"""Renewals in the time of a lease."""

_POLL_S = 0.25
_START_S = 20.0
"""Time in which a journal has to answer when a host starts."""

_SEAL_CONTEXT = b"shoal standby key, version 1"
_GIVE_UP_S = 2.0


@dataclass(frozen=True)
class SharedPlace:
    """``url``: of the engine; ``standby_keys``: public keys of the machines that may lead the run, too; ``machine``:
    file of this machine's own keys, for which other hosts seal the run's; ``lease_s``: the lease's time."""

    url: str
    standby_keys: tuple[str, ...] = ()
    machine: Path = Path("identity")
    lease_s: float = LEASE_S


class SharedHosting:
    """A run's shared journal as one host sees it; made with ``open``."""

    def __init__(self, journal: SharedJournal, place: SharedPlace, name: str, found: SharedRun | None) -> None:
        self.journal, self.place, self.name, self.found = journal, place, name, found
        self.machine = Identity.load_or_create(place.machine)

    @classmethod
    @asynccontextmanager
    async def open(cls, place: SharedPlace, run: str, state: Path) -> AsyncIterator[SharedHosting]:
        """Connect to the journal of a run, for a host whose folder is ``state``. Raises ``FolderInUse``, ``UserError``,
        and ``JournalUnavailable`` after some attempts."""
        lock = _locked(state)
        journal = SharedJournal(open_store(place.url, run), f"{socket.gethostname()} ({state})", place.lease_s, state)
        try:
            give_up_s = time.monotonic() + _START_S
            while True:
                try:
                    found = await in_thread(journal.open)
                    break
                except JournalUnavailable as error:
                    if time.monotonic() > give_up_s:
                        raise
                    log.warning("%s; trying again", error)
                await asyncio.sleep(1.0)
            yield cls(journal, place, run, found)
        finally:
            await in_thread(journal.close)
            lock.release()

    def run_file(self, given: RunFile) -> tuple[str, RunFile] | None:
        """Return the run file that the journal is of, as text and validated; None for a new journal.

        Raises ``RunFileError`` if ``given`` has other settings; pins and start are the hosted one's."""
        if self.found is None:
            return None
        hosted = parse_run_file(self.found.run_toml, f"the run file in {self.journal.location}")
        same: dict[str, object] = {"pins": given.pins}
        if hosted.start is not None and given.start is None:  # the host that began it was given --from
            same |= {"start": None, "recipe": given.recipe}
        if hosted != given and hosted.model_copy(update=same) != given:
            raise RunFileError(
                f"{self.journal.location} has the journal of the run {self.name} with other settings. A run's settings "
                "never change: restore its run file, or give the new one another run.name"
            )
        return self.found.run_toml, hosted

    def check_place(self, folder: Path) -> None:
        """Check that a journal that would be begun here is not the second one of this run. Raises ``UserError``.

        ``folder``: the host's, which says where the journal was when the host was started last."""
        before = shared_place(folder)
        if self.found is None and before and before != self.journal.location:
            raise UserError(
                f"{self.journal.location} has no journal of the run {self.name}, which this host has in {before}: "
                "another history under the same keys would stop its members. Name that place with --journal; if the "
                f"one there is not needed any more, remove {folder / SHARED_JOURNAL}"
            )

    def fetch_identity(self, path: Path) -> None:
        """Write the run's keys to ``path``, if another host has sealed them for this machine. Raises
        ``IdentityError``."""
        if self.found is None or path.exists():
            return
        sealed = self.journal.read_key(f"key/{self.machine.peer_id}")
        if sealed is None:
            raise IdentityError(
                f"{self.journal.location}: another host began this run, and has not given its keys to this machine: "
                f"there, start `shoal host` with --standby-key {key_text(self.machine.public_key)} once, then repeat "
                "this command"
            )
        try:
            pem = self.machine.unseal(sealed, _SEAL_CONTEXT)
        except ValueError as error:
            raise IdentityError(f"{self.journal.location}: the run's keys for this machine: {error}") from error
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            durable.put(path, pem, 0o600)
        except OSError as error:
            raise StorageError(f"{path}: cannot be written: {error}") from error

    def check_identity(self, identity: Identity, path: Path) -> None:
        """Check that these are the run's keys. Raises ``IdentityError``."""
        if self.found is not None and self.found.host_key != identity.public_key:
            raise IdentityError(
                f"{path} has not the keys of the run in {self.journal.location}: restore them, or "
                "move that file away, and this machine takes those that another host has sealed for it"
            )

    def seal_identity(self, pem: bytes) -> None:
        """Give the run's keys to the machines of ``standby_keys``, each sealed for its own."""
        for text in self.place.standby_keys:
            key = parse_key(text)
            self.journal.put_key(f"key/{peer_id(key)}", seal_to(key, pem, _SEAL_CONTEXT))

    def show_addresses(self, addresses: Sequence[Address]) -> None:
        """Tell the other hosts where members reach this one: its own addresses, then relays."""
        direct, relayed = (
            ",".join(str(one) for one in addresses if one.is_relayed == over_relays) for over_relays in (False, True)
        )
        self.journal.put_key(f"host/{self.machine.peer_id}", f"{direct} {relayed}".encode())

    def others(self) -> list[Address]:
        """Read where members reach the other hosts; what is no address is left out."""
        found: list[Address] = []
        for name, value in sorted(self.journal.read_keys("host/").items()):
            if name != f"host/{self.machine.peer_id}":
                direct, _, relayed = value.decode(errors="replace").partition(" ")
                try:
                    found += [Address(host=host, control_port=port) for host, port in parse_advertised(direct)]
                    for host, port in parse_advertised(relayed):
                        found.append(Address(host=host, control_port=port, kind="relayed"))
                except ShoalError as error:
                    log.warning("%s: the addresses of another host are damaged: %s", self.journal.location, error)
        return found

    # Leading ----------------------------------------------------------------------------------------------

    async def become_leader(
        self, run: SharedRun, front: CoordinatorFront, stop: asyncio.Event, on_standby: Callable[[str], None]
    ) -> int | None:
        """Follow the journal until nobody leads, and take the lease; return its epoch, None if ``stop`` came first.

        Troubles of the engine are waited out. Raises ``StorageError`` for a damaged journal, and ``UserError``."""
        told: str | None = None
        trouble = ""
        while not stop.is_set():
            try:
                await in_thread(self.journal.follow)
                leader = await in_thread(self.journal.holder)
                if not leader and (epoch := await in_thread(self.journal.begin, run)) is not None:
                    return epoch
                trouble = ""
                front.expect(self.name, f"this host stands by; {leader or 'nobody'} leads")
                if leader and leader != told:
                    told = leader
                    on_standby(leader)
            except (JournalUnavailable, LeaseLost) as error:
                if not trouble:
                    log.warning("%s; this host stands by until it answers", error)
                trouble = str(error)
                front.expect(self.name, f"this host stands by, and waits for the journal: {trouble}")
            try:
                async with asyncio.timeout(_POLL_S):
                    await stop.wait()
            except TimeoutError:
                pass
        return None

    @asynccontextmanager
    async def leading(self, stop: asyncio.Event) -> AsyncIterator[None]:
        """Renew the lease until the context ends. Raises ``LeaseLost`` once it is lost."""
        async with task_scope() as tasks:
            helpers = [tasks.create_task(self._renew()), tasks.create_task(self._give_up(stop))]
            try:
                yield
            finally:
                for one in helpers:
                    one.cancel()

    async def _renew(self) -> None:
        while True:
            await in_thread(self.journal.renew)
            await asyncio.sleep(self.place.lease_s / _RENEWALS)

    async def _give_up(self, stop: asyncio.Event) -> None:
        """End a write that waits for its engine when this host is stopped."""
        await stop.wait()
        await asyncio.sleep(_GIVE_UP_S)
        self.journal.give_up()


def _locked(state: Path) -> FileLock:
    try:
        return durable.lock_folder(state)
    except OSError as error:
        raise StorageError(f"{state}: cannot be locked: {error}") from error
