"""Connection of a process to a run of any kind: its network thread, memberships, folder and checkpoint stores."""

from __future__ import annotations

import logging
import socket
from pathlib import Path
from typing import Any

from shoal.peer.checkpoints.remote.upload import CheckpointUploader, CopyDestination
from shoal.peer.checkpoints.store import CHECKPOINTS, CheckpointStore, StoredCheckpoint
from shoal.peer.event_schema import make_event
from shoal.peer.history.round_records import RECORDS
from shoal.peer.member.member import LocalMember
from shoal.peer.member.memberships import Memberships
from shoal.peer.member.replica import Emit, TrainingReplica, TrainingSetup
from shoal.peer.network_thread import NetworkThread
from shoal.peer.options import SessionOptions
from shoal.peer.relay.offer import RelayOffer
from shoal.peer.relay.process import RELAY_IDENTITY_FILE
from shoal.peer.state_transfer.start import RunStart, StartFiles
from shoal.peer.training.device import describe_device
from shoal.peer.training.device_use import DeviceUseMeter
from shoal.swarm.client.bandwidth_probe import witnesses
from shoal.swarm.client.coordinator_client import MemberInfo
from shoal.swarm.errors import Diverged, RunAmended, StateFileError, UserError
from shoal.swarm.protocol.addresses import reach_of
from shoal.swarm.protocol.amendments import asks_for_more, ends_of
from shoal.swarm.protocol.identity import Identity
from shoal.swarm.protocol.invite import Invite
from shoal.swarm.protocol.run_file import RunFile
from shoal.swarm.protocol.types import MAX_PRICE, Amendments, LeaveReason

log = logging.getLogger(__name__)


class RunConnection:
    """Connection to a run, which it joins when it is made and leaves at ``close``.

    ``members``: memberships in the run and, in a pipeline, in the stages held.
    """

    def __init__(self, invite: str, options: SessionOptions, device: str, devices: int = 1) -> None:
        """``device``: name of the torch device, for other members to read; ``devices``: how many such an island has.

        Raises ``UserError`` for options that do not fit the run, ``StateFileError`` if the run's start cannot be read,
        and the errors of ``CoordinatorClient.join``.
        """
        self.invite = Invite.read(invite)
        price = options.price_per_hour
        if price is not None and not 0 <= price <= MAX_PRICE:
            raise UserError(f"--price-per-hour {price}: expected a number from 0 to {MAX_PRICE:,.0f}")
        self.options = options
        self.device = device
        self._devices = devices
        self._identity = Identity.load_or_create(options.identity)
        self._advertised = _address_of(*options.advertise)
        self.peer = self._identity.peer_id
        self.network = NetworkThread(
            lambda: Memberships.open(
                self.invite,
                self._identity,
                options.bind,
                self._introduction,
                options.limits,
                maps_ports=self._may_map_ports(),
                offer=self._relay_offer(),
            )
        )
        self.members: Memberships = self.network.start()
        self.members.run.read_use = DeviceUseMeter(device).read
        self._amendments: Amendments = ()
        self._stores: dict[Path, CheckpointStore] = {}
        self._copies: list[NetworkThread[CheckpointUploader]] = []
        client = self.members.run.client
        self.run_file: RunFile = client.run_file
        if not client.reachable:
            log.warning(
                "other peers cannot connect to this machine (%s): it trains and contributes, but reduces no parts of "
                "the mean. If it has a public address, give it with --advertise HOST:PORT; behind a router, forward "
                "both ports, PORT and PORT + 1, to it. `shoal doctor INVITE` says more",
                client.unreachable,
            )
        try:
            self.members.run.start = self._run_start()
        except BaseException:
            self.network.stop()
            raise
        self.emit("joined", run=self.invite.run, peer=self.peer, reachable=client.reachable)

    def _may_map_ports(self) -> bool:
        """Return whether to ask the router for ports: not where others are told another address, or on loopback."""
        host, _ = self.options.bind
        return self.options.maps_ports and not self._advertised and reach_of(host) != "machine"

    def _relay_offer(self) -> RelayOffer | None:
        """Return the relay that the options offer to others, if any."""
        options, (host, port) = self.options, self.options.bind
        if not options.relay_bps:
            return None
        place = host, port + 2 if port else 0
        return RelayOffer(options.state / RELAY_IDENTITY_FILE, place, options.relay_bps, options.limits)

    def look_at_amendments(self) -> None:
        """Report what the host has amended since the last call. Raises ``RunAmended`` once the run is to last longer
        than its members have agreed to, unless the options accept that, and ``RunChanged``."""
        client = self.members.run.client
        view = client.view
        if view.amendments != self._amendments:
            new = [one for one in view.amendments if one not in self._amendments]
            self._amendments = view.amendments
            for at_round in sorted({one.at_round for one in new}):
                changes = {one.key: one.value for one in new if one.at_round == at_round}
                self.emit("amended", round=at_round, changes=changes)
        if view.amendments and not self.options.accept_amendments:
            longer = asks_for_more(self.run_file, client.run_now, self.options.agreed_ends)
            if longer:
                told = "; ".join(one.text for one in view.amendments if one.key in longer)
                raise RunAmended(
                    f"the host has made the run longer than you have agreed to: {told}. What this peer has contributed "
                    "is kept. If you agree, join again with --accept-amendments",
                    ends_of(client.run_now),
                )

    def _run_start(self) -> RunStart | None:
        """Return the checkpoint that the run starts from, if any; offer it to other peers if its files are here.

        Raises ``StateFileError`` for wrong files before the first round; ``UserError`` if the run starts from none.
        """
        start, folder, client = self.run_file.start, self.options.start_from, self.members.run.client
        if start is None:
            if folder is not None:
                raise UserError(f"the run {self.run_file.run.name} does not start from a checkpoint: leave out --from")
            return None
        files = None
        if folder is not None:
            try:
                files = StartFiles.find(folder, start, self._identity)
            except StateFileError as error:
                if client.view.anchor_version == 0:
                    raise
                log.warning("going on without the checkpoint that the run started from: %s", error)
        node = self.members.run.node
        slots, silent_s = self.run_file.outer.slots, client.deadlines.patience_s / 2
        found = RunStart(start, slots, files, node, lambda: witnesses(node.trainers(), self.peer), silent_s)
        if files is not None:
            self.network.post(found.offer)
        return found

    @property
    def folder(self) -> Path:
        """Folder of this peer in this run."""
        return self.options.folder(self.run_file, self.peer)

    def replica(self, member: LocalMember, setup: TrainingSetup, folder: Path, emit: Emit) -> TrainingReplica:
        """Make this peer's replica of the run or of a stage; ``TrainingReplica.register`` comes next.

        ``member``: membership in the run or the stage; ``folder``: its checkpoints, records and history. Checkpoints
        in the folder are copied to where the options say, also after the stage is left.
        """
        store = self._open_store(folder)
        needed_since = store.oldest_of_newest if store else lambda: None
        self.network.call(member.keep_records(folder / RECORDS, needed_since))
        return TrainingReplica(self.run_file, setup, self.network, member, folder, store, emit)

    def _open_store(self, folder: Path) -> CheckpointStore | None:
        """Return the one store of the checkpoints below ``folder``; None if the options keep none."""
        run, retention = self.run_file, self.options.checkpoints
        if retention is None:
            return None
        if folder not in self._stores:
            sealed_for = run.checkpoints.sealed_for
            store = CheckpointStore(folder / CHECKPOINTS, run.hash, self._identity, retention, sealed_for)
            self._stores[folder] = store
            if self.options.copy_to is not None:
                self._copy(store, self.options.copy_to)
        return self._stores[folder]

    def checkpoints(self) -> list[StoredCheckpoint]:
        """The checkpoints that are kept here, newest round first; in a pipeline those of all stages."""
        kept = [one for store in list(self._stores.values()) for one in store.kept()]
        return sorted(kept, key=lambda one: -one.round)

    def _copy(self, store: CheckpointStore, to: CopyDestination) -> None:
        """Copy the store's checkpoints to ``to``, under the same paths as on this machine."""
        inside = store.folder.parent.relative_to(self.folder.parent.parent)
        # On a loop of its own, so that copies that are left at the end do not keep this peer in the run.
        copies = CheckpointUploader(store, to, inside.as_posix(), in_step=self.run_file.pipeline is not None)
        self._copies.append(NetworkThread(copies.running))
        self._copies[-1].start()

    def emit(self, event: str, **fields: Any) -> None:
        """Report an event to the listener of the options, if any; from any thread."""
        if self.options.on_event is not None:
            self.options.on_event(make_event(event, **fields))

    def say_farewell(self, reason: LeaveReason, text: str) -> None:
        """Have other members told why this peer leaves, when it does; from any thread."""
        client = self.members.run.client
        self.network.post(lambda: setattr(client, "farewell", (reason, text)))

    def close(self, error: BaseException | None = None) -> None:
        """Leave the run, finish the copies that are due, and end the threads.

        ``error``: what ended the training; other members learn its kind.
        """
        if error is not None:
            self.say_farewell(*_farewell(error))
        self.network.stop()
        for copies in self._copies:
            copies.post(copies.resource.finish)
        for copies in self._copies:
            copies.stop()
            if copies.failure is not None:
                log.warning("copying checkpoints has failed, so the newest may be missing there: %s", copies.failure)

    def _introduction(self) -> MemberInfo:
        _, port = self.options.advertise
        return MemberInfo(
            name=(self.options.name or socket.gethostname())[:64],
            role=self.options.role,
            device=describe_device(self.device, self._devices).model_copy(
                update={"price_per_hour": self.options.price_per_hour}
            ),
            host=self._advertised,
            ports=(port, port + 1) if port else None,
        )


def _address_of(host: str, port: int) -> str:
    """Resolve the name of ``--advertise``, because other peers do not resolve names that members give.

    Raises ``UserError`` for a name without an address.
    """
    try:
        return str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0]) if host else ""
    except (OSError, UnicodeError) as error:
        raise UserError(f"--advertise {host}: the name has no address ({error}); give an IP address") from error


def _farewell(error: BaseException) -> tuple[LeaveReason, str]:
    """Return reason and text for other members, without messages of errors that concern this machine alone."""
    match error:
        case Diverged():
            return "diverged", str(error)
        case Exception():
            return "failed", f"{type(error).__name__}; its own output says more"
        case _:
            return "done", ""
