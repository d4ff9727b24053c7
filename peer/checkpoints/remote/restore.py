"""Restore of checkpoints from their copies at a URL: choice, download with resume, and every check.

The newest complete copy, or that of one round, is downloaded to where ``shoal join`` looks; of a pipeline one of each
stage."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shoal.peer.checkpoints.checkpoint import check_checkpoint
from shoal.peer.checkpoints.encryption import MAX_ENVELOPE_BYTES, SUFFIX, open_source
from shoal.peer.checkpoints.manifest import FileEntry, Manifest, read_manifest
from shoal.peer.checkpoints.remote.copies import (
    LAST_FILES,
    CopyListing,
    RemoteCopy,
    by_preference,
    entry_of,
    in_step,
    read_listing,
    say_rounds,
    stages_needed,
)
from shoal.peer.checkpoints.remote.store import RemoteStore
from shoal.peer.checkpoints.source import FolderSource, refusal
from shoal.peer.checkpoints.store import CHECKPOINTS, checkpoint_folders, folder_name, round_of
from shoal.peer.folders import stage_folder
from shoal.peer.regular_file import open_regular
from shoal.swarm import durable
from shoal.swarm.errors import RemoteStorageError, SealedForOthers, StateFileError, StorageError, UserError
from shoal.swarm.protocol.identity import Identity

_BLOCK_BYTES = 16 * 2**20
_TRIES = 6
_INCOMING = "restoring"


@dataclass(frozen=True)
class _Fetched:
    """A checked copy on this machine.

    ``incoming``: where it is now, None where ``place`` has it already; ``stages``: number of the run's stages, 0 for a
    run without."""

    incoming: Path | None
    place: Path
    stages: int


class CheckpointRestorer:
    """Downloads copies to below ``to``, for the peer of ``identity``.

    ``say``: called with each message about progress; ``pause``: sleeps."""

    def __init__(
        self,
        remote: RemoteStore,
        to: Path,
        identity: Identity,
        say: Callable[[str], object],
        pause: Callable[[float], object] = time.sleep,
    ) -> None:
        self._remote = remote
        self._to = to
        self._identity = identity
        self._say = say
        self._pause = pause

    def restore(
        self, copies: Sequence[RemoteCopy], *, all_stages: bool = False, number: int | None = None
    ) -> list[Path]:
        """Restore the newest copy that is complete and can be opened; return its folder.

        A checkpoint that is here already is not touched; if it is as new, its folder is returned. ``number``: restore
        that round and no other.

        Of a pipeline it restores one copy of each stage that this peer has copied, or of every stage (with
        ``all_stages``, or where it has copied none). They are of the newest round of which all stages of the run have a
        copy, as nobody can go on from anything else.

        Raises ``StateFileError`` where there is none, ``SealedForOthers`` where all are sealed for others,
        ``UserError`` for copies of several runs, ``RemoteStorageError``, ``StorageError``."""
        if runs := sorted({copy.run for copy in copies})[1:]:
            raise UserError(
                f"{self._remote.url}: has copies of several runs, {runs[0]} among them; give the URL of one: "
                f"{self._remote.shown(runs[0])}"
            )
        staged = [copy for copy in copies if copy.stage is not None]
        stages = stages_needed(staged, "" if all_stages else self._identity.peer_id)
        if number is not None:
            copies = self._of_round(number, [copy for copy in copies if not staged or copy.stage in stages])
        if not staged:
            return self._install_all([self._fetch_best(copies, is_exact=number is not None)])
        if number is not None:
            there = [stage for stage in stages if any(copy.stage == stage for copy in copies)]
            fetched = self._fetch_each(copies, there)
            for stage in sorted(set(stages).difference(there)):
                self._say(f"there is no copy of round {number} of stage {stage}")
        else:
            fetched = self._fetch_in_step(staged, stages)
        missing = sorted(set(range(fetched[0].stages)) - {copy.stage for copy in staged})
        if missing:
            which = ", ".join(f"stage {one}" for one in missing)
            self._say(f"there is no copy of {which}: unless a peer has kept what is missing, the run starts anew")
        return self._install_all(fetched)

    def _of_round(self, number: int, copies: Sequence[RemoteCopy]) -> list[RemoteCopy]:
        found = [copy for copy in copies if copy.round == number]
        if copies and not found:
            raise StateFileError(f"{self._remote.url}: there is no copy of round {number}: {say_rounds(copies)}")
        return found

    def _fetch_in_step(self, staged: Sequence[RemoteCopy], stages: Sequence[int]) -> list[_Fetched]:
        """Fetch these stages of the newest round that all stages have and that can be used."""
        refusals: list[StateFileError] = []
        for number in in_step(staged):
            try:
                fetched = self._fetch_each([copy for copy in staged if copy.round == number], stages)
            except StateFileError as error:
                self._say(f"round {number} of the stages cannot be restored: {error}")
                refusals.append(error)
                continue
            newest = max(copy.round for copy in staged if copy.stage in stages and copy.last is not None)
            if refusals:
                self._say(
                    f"restore this round on the peers of the other stages, too: `shoal restore URL --round {number}`"
                )
            elif number < newest:
                self._say(
                    f"round {number} is the newest of which all stages have a copy ({say_rounds(staged)}); where the "
                    f"peers of other stages have kept what they held, `--round {newest}` restores a newer one beside it"
                )
            return fetched
        if refusals and all(isinstance(refusal, SealedForOthers) for refusal in refusals):
            raise refusals[0]
        raise StateFileError(
            f"{self._remote.url}: there is no round of which all stages have a copy that can be used: "
            f"{say_rounds(staged)}; where peers have kept what is missing, `shoal restore URL --round N` restores the "
            "stages that have a copy of round N, else the run can only start anew"
        )

    def _fetch_each(self, copies: Sequence[RemoteCopy], stages: Sequence[int]) -> list[_Fetched]:
        """Fetch one copy of each stage, or none at all; ``copies``: all of one round."""
        fetched: list[_Fetched] = []
        try:
            for stage in stages:
                fetched.append(self._fetch_best([copy for copy in copies if copy.stage == stage], is_exact=True))
        except StateFileError:
            for one in fetched:
                if one.incoming is not None:
                    shutil.rmtree(one.incoming, ignore_errors=True)
            raise
        return fetched

    def _install_all(self, fetched: Sequence[_Fetched]) -> list[Path]:
        for one in fetched:
            if one.incoming is not None:
                try:
                    self._install(one.incoming, one.place)
                except OSError as error:
                    raise StorageError(f"{self._to}: cannot be written: {error}") from error
        with suppress(OSError):  # others may be restoring too
            (self._to / _INCOMING).rmdir()
        return [one.place for one in fetched]

    def _fetch_best(self, copies: Sequence[RemoteCopy], *, is_exact: bool) -> _Fetched:
        """Fetch the newest copy that can be used; with ``is_exact`` a newer local checkpoint is no substitute.

        Raises ``StateFileError``, ``SealedForOthers``, ``StorageError``."""
        refusals: list[StateFileError] = []
        for copy in by_preference(copies, self._identity.peer_id):
            try:
                return self._fetch_copy(copy, is_exact=is_exact)
            except StateFileError as error:
                refusals.append(error)
                self._say(f"{self._remote.shown(copy.path)}: cannot be used: {error}")
            except OSError as error:
                raise StorageError(f"{self._to}: cannot be written: {error}") from error
        if refusals and all(isinstance(refusal, SealedForOthers) for refusal in refusals):
            raise refusals[0]
        raise StateFileError(
            f"{self._remote.url}: none of the {len(copies)} copies there can be used"
            if copies
            else f"{self._remote.url}: there is no copy of a checkpoint; give the URL that `shoal join --copy-to` had"
        )

    def _fetch_copy(self, copy: RemoteCopy, *, is_exact: bool) -> _Fetched:
        if copy.last is None:
            raise StateFileError(f"{self._remote.shown(copy.path)}: is unfinished: it lacks its {LAST_FILES[0]}")
        # Not yet below the run's own folder: its name is in the manifest, which may be sealed.
        stage = "" if copy.stage is None else f"-{copy.stage}"
        incoming = self._to / _INCOMING / f"{copy.run}-{copy.peer}{stage}-{copy.round:08}"
        incoming.mkdir(parents=True, exist_ok=True)
        try:
            listing, manifest = self._list(copy, incoming)
            place = self._place(manifest)
            stages = manifest.stage.stages if manifest.stage is not None else 0
            here = self._whole_here([place] if is_exact else reversed(checkpoint_folders(place.parent)))
            if here is not None and round_of(here) >= copy.round:
                self._say(f"{here}: is as new as the copy of round {copy.round}; it stays")
                shutil.rmtree(incoming)
                return _Fetched(None, here, stages)
            if place.exists():
                raise StateFileError(f"{place}: is there and is no undamaged checkpoint; move it away first")
            which = f"{manifest.run}" if copy.stage is None else f"{manifest.run}, stage {copy.stage}"
            self._say(f"round {copy.round} of {which}, by peer {manifest.peer}, from {self._remote.shown(copy.path)}")
            self._fetch_all(copy, listing, incoming, own=manifest.peer == self._identity.peer_id)
            self._check(incoming, manifest)
        except StateFileError:
            shutil.rmtree(incoming, ignore_errors=True)
            raise
        return _Fetched(incoming, place, stages)

    def _list(self, copy: RemoteCopy, incoming: Path) -> tuple[CopyListing, Manifest]:
        """Fetch the copy's list of files and its manifest, which alone say of which run it is."""
        assert copy.last is not None
        sizes = self._remote.sizes(copy.path)
        # Fetched anew each time: it is small, and a copy of another history may have taken its place.
        self._fetch(copy, copy.last, incoming, min(sizes.get(copy.last, 0), MAX_ENVELOPE_BYTES))
        source = FolderSource(incoming)
        listing = read_listing(source)
        for name, (size_bytes, _) in listing.files.items():
            if sizes.get(name) != size_bytes and name not in listing.private:
                found = "missing" if name not in sizes else f"{sizes[name]} bytes"
                raise refusal(self._remote.shown(f"{copy.path}/{name}"), "size", f"{size_bytes} bytes", found)
        if listing.is_sealed:
            sealed = LAST_FILES[0] + SUFFIX
            if sealed not in listing.files:
                raise refusal(self._remote.shown(copy.path), "files", f"also {sealed}", "none")
            self._fetch_checked(copy, sealed, listing.files[sealed], incoming)
        manifest = read_manifest(open_source(source, self._identity))
        if manifest.round != copy.round:
            raise refusal(self._remote.shown(copy.path), "round", str(copy.round), f"{manifest.round} in its manifest")
        stage = manifest.stage.number if manifest.stage is not None else None
        if stage != copy.stage:
            raise refusal(self._remote.shown(copy.path), "stage", str(copy.stage), f"{stage} in its manifest")
        return listing, manifest

    def _place(self, manifest: Manifest) -> Path:
        peer = self._to / manifest.run_folder / self._identity.peer_id
        folder = peer if manifest.stage is None else stage_folder(peer, manifest.stage.number)
        return folder / CHECKPOINTS / folder_name(manifest.round)

    def _whole_here(self, places: Iterable[Path]) -> Path | None:
        """The first undamaged checkpoint among these local folders."""
        for place in places:
            with suppress(StateFileError):
                check_checkpoint(open_source(FolderSource(place), self._identity))
                return place
        return None

    def _fetch_all(self, copy: RemoteCopy, listing: CopyListing, incoming: Path, *, own: bool) -> None:
        there = self._remote.sizes(copy.path)
        for name in listing.to_copy()[:-1]:
            if name not in listing.private or (own and name in there):
                self._fetch_checked(copy, name, listing.files[name], incoming)

    def _fetch_checked(self, copy: RemoteCopy, name: str, entry: FileEntry, incoming: Path) -> None:
        """Fetch a file unless it is here already. Raises ``StateFileError`` where it is not as listed."""
        path = incoming / name
        if path.exists() and entry_of(path) == entry:
            return
        resumed = path.with_name(f"{name}.part").exists()
        self._fetch(copy, name, incoming, entry[0])
        if entry_of(path) != entry and resumed:  # its first part may have come from another checkpoint
            path.unlink()
            self._fetch(copy, name, incoming, entry[0])
        found = entry_of(path)
        if found != entry:
            raise refusal(self._remote.shown(f"{copy.path}/{name}"), "bytes and SHA-256", str(entry), str(found))

    def _fetch(self, copy: RemoteCopy, name: str, incoming: Path, size_bytes: int) -> None:
        """Fetch a file, or the rest of it."""
        part = incoming / f"{name}.part"
        with open_regular(part, "ab") as file:
            if name == copy.last:
                file.truncate(0)
            at = file.seek(0, os.SEEK_END)
            while block := self._read(copy, name, at, min(at + _BLOCK_BYTES, size_bytes)):
                file.write(block)
                at += len(block)
            durable.sync(file)
        part.replace(incoming / name)

    def _read(self, copy: RemoteCopy, name: str, start: int, stop: int) -> bytes:
        """Read a block, with further attempts after growing pauses. Raises the last ``RemoteStorageError``."""
        if start >= stop:  # some stores refuse to read no bytes
            return b""
        path = f"{copy.path}/{name}"
        for tries in range(1, _TRIES + 1):
            try:
                return self._remote.read(path, start, stop)
            except FileNotFoundError as error:
                raise StateFileError(f"{self._remote.shown(path)}: is missing") from error
            except RemoteStorageError as error:
                if tries == _TRIES:
                    raise
                self._say(f"tried again: {error}")
                self._pause(2.0**tries)
        raise AssertionError("the last try returns or raises")

    def _check(self, incoming: Path, manifest: Manifest) -> None:
        """Check everything, as before every use: signature, digests, tensors."""
        source = open_source(FolderSource(incoming), self._identity)
        checked = check_checkpoint(source, bytes.fromhex(manifest.run_hash))
        if checked.manifest != manifest:
            raise refusal(str(incoming), "manifest", "the one that was checked before", "another")

    def _install(self, incoming: Path, place: Path) -> None:
        """Give the folder its place in one step; if killed before, the same command resumes."""
        place.parent.mkdir(parents=True, exist_ok=True)
        durable.sync_folder(incoming)
        incoming.rename(place)
        durable.sync_folder(place.parent)
