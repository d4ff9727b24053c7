"""Connection of a process to a run of any kind: its network thread, memberships, folder and checkpoint stores."""

from __future__ import annotations

import logging
import socket
from pathlib import Path
from typing import Any

from shoal.peer.checkpoints.remote.upload import CheckpointUploader, CopyDestination
from shoal.peer.checkpoints.store import CHECKPOINTS, CheckpointStore
from shoal.peer.event_schema import make_event
from shoal.peer.history.round_records import RECORDS
from shoal.peer.member.member import LocalMember
from shoal.peer.member.memberships import Memberships
from shoal.peer.member.replica import Emit, TrainingReplica, TrainingSetup
from shoal.peer.network_thread import NetworkThread
from shoal.peer.options import SessionOptions
from shoal.peer.state_transfer.start import RunStart, StartFiles
from shoal.peer.training.device import describe_device
from shoal.peer.training.outer_optimizer import outer_of
from shoal.swarm.client.bandwidth_probe import witnesses
from shoal.swarm.client.coordinator_client import MemberInfo
from shoal.swarm.errors import Diverged, StateFileError, UserError
from shoal.swarm.protocol.identity import Identity
from shoal.swarm.protocol.invite import Invite
from shoal.swarm.protocol.run_file import RunFile
from shoal.swarm.protocol.types import LeaveReason

log = logging.getLogger(__name__)


class RunConnection:
    """Joined when it is made; ``close`` leaves the run. A run without stages is ``members.run`` alone."""

    def __init__(self, invite: str, options: SessionOptions, device: str) -> None:
        """Raises the errors of a failed join."""
        self.invite = Invite.parse(invite)
        self.options = options
        self.device = device
        self._identity = Identity.load_or_create(options.identity)
        self._advertised = _address_of(*options.advertise)
        self.peer = self._identity.peer_id
        self.network = NetworkThread(
            lambda: Memberships.open(self.invite, self._identity, options.bind, self._introduction)
        )
        self.members: Memberships = self.network.start()
        self._stores: dict[Path, CheckpointStore] = {}
        self._copies: list[NetworkThread[CheckpointUploader]] = []
        client = self.members.run.client
        self.run_file: RunFile = client.run_file
        if not client.reachable:
            log.warning(
                "other peers cannot open connections to this machine: it can still train and average, "
                "but reduces nothing; if it has a public address, give it with --advertise HOST:PORT"
            )
        try:
            self.members.run.start = self._run_start()
        except BaseException:
            self.network.stop()
            raise
        self.emit("joined", run=self.invite.run, peer=self.peer, reachable=client.reachable)

    def _run_start(self) -> RunStart | None:
        """What the run starts from, offered to others if its files are here. Raises ``StateFileError`` where they are
        needed and are not what they should be."""
        start, folder, client = self.run_file.start, self.options.start_from, self.members.run.client
        if start is None:
            if folder is not None:
                raise UserError(f"the run {self.run_file.run.name} starts from no checkpoint: leave out --from")
            return None
        files = None
        if folder is not None:
            try:
                files = StartFiles.find(folder, start, self._identity)
            except StateFileError as error:
                if client.view.anchor_version == 0:
                    raise
                log.warning("the run has begun without them: %s", error)
        node = self.members.run.node
        slots, silent_s = outer_of(self.run_file.outer).slots, client.deadlines.patience_s / 2
        found = RunStart(start, slots, files, node, lambda: witnesses(node.trainers(), self.peer), silent_s)
        if files is not None:
            self.network.post(found.offer)
        return found

    @property
    def folder(self) -> Path:
        """This peer's, in this run."""
        return self.options.folder(self.run_file, self.peer)

    def replica(self, member: LocalMember, setup: TrainingSetup, folder: Path, emit: Emit) -> TrainingReplica:
        """Make this peer's replica of the run, or of a stage: ``TrainingReplica.register`` comes next.

        ``member``: of the same; ``folder``: where its checkpoints, records and history are. The checkpoints are copied
        to where the options say from now on, also once a stage is not held any more.
        """
        store = self._open_store(folder)
        needed_since = store.oldest_of_newest if store else lambda: None
        self.network.call(member.keep_records(folder / RECORDS, needed_since))
        return TrainingReplica(self.run_file, setup, self.network, member, folder, store, emit)

    def _open_store(self, folder: Path) -> CheckpointStore | None:
        """Return the store of the checkpoints below ``folder``, the same one each time; None when none are kept."""
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

    def _copy(self, store: CheckpointStore, to: CopyDestination) -> None:
        """Copy the store's checkpoints to ``to``, where they get the same paths as below this peer's folder."""
        inside = store.folder.parent.relative_to(self.folder.parent.parent)
        # On a loop of its own: what is left to copy at the end must not keep this peer in the run.
        copies = CheckpointUploader(store, to, inside.as_posix(), in_step=self.run_file.pipeline is not None)
        self._copies.append(NetworkThread(copies.running))
        self._copies[-1].start()

    def emit(self, event: str, **fields: Any) -> None:
        """Tell whoever listens, from any thread."""
        if self.options.on_event is not None:
            self.options.on_event(make_event(event, **fields))

    def close(self, error: BaseException | None = None) -> None:
        """Leave the run and end the threads; copies that are due are finished. ``error``: what ended the training, for
        the others to know."""
        if error is not None:
            client = self.members.run.client
            self.network.post(lambda: setattr(client, "farewell", _farewell(error)))
        self.network.stop()
        for copies in self._copies:
            copies.post(copies.resource.finish)
        for copies in self._copies:
            copies.stop()
            if copies.failure is not None:
                log.warning("checkpoints were not copied any more: %s", copies.failure)

    def _introduction(self) -> MemberInfo:
        _, port = self.options.advertise
        return MemberInfo(
            name=(self.options.name or socket.gethostname())[:64],
            role=self.options.role,
            device=describe_device(self.device),
            host=self._advertised,
            ports=(port, port + 1) if port else None,
        )


def _address_of(host: str, port: int) -> str:
    """Look up the name under which others shall reach this peer, as nobody else looks up names that members give.
    Raises ``UserError`` for one without an address."""
    try:
        return str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0]) if host else ""
    except (OSError, UnicodeError) as error:
        raise UserError(f"--advertise {host}: it has no address ({error}); give the address itself") from error


def _farewell(error: BaseException) -> tuple[LeaveReason, str]:
    """Others read it: the words of most errors are about this machine only."""
    match error:
        case Diverged():
            return "diverged", str(error)
        case Exception():
            return "failed", f"{type(error).__name__}; what was printed there says more"
        case _:
            return "done", ""
