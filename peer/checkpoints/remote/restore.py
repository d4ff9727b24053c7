"""Restore of checkpoints from their copies at a URL: search, choice, download with resume.

A copy is a checkpoint's folder, plain or sealed: the file that is uploaded last, and those that it lists. The newest
whole copy, or that of one round, is downloaded to where ``shoal join`` looks; of a pipeline one of each stage.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shoal.peer.checkpoints.checkpoint import read_checkpoint
from shoal.peer.checkpoints.encryption import ENVELOPE, MAX_ENVELOPE_BYTES, SUFFIX, opened, read_envelope
from shoal.peer.checkpoints.manifest import MANIFEST, OWN_FILE, FileEntry, Manifest, read_manifest
from shoal.peer.checkpoints.remote.store import RemoteStore
from shoal.peer.checkpoints.source import FolderSource, Source, refuse
from shoal.peer.checkpoints.store import CHECKPOINTS, checkpoint_folders
from shoal.peer.folders import stage_folder
from shoal.peer.regular_file import open_regular
from shoal.swarm import durable
from shoal.swarm.errors import RemoteStorageError, SealedForOthers, StateFileError, StorageError, UserError
from shoal.swarm.protocol.identity import Identity

LAST_FILES = (MANIFEST, ENVELOPE)
_PIECE_BYTES = 2**22
_ROUND = re.compile(r"round-([0-9]{8,19})")


def round_in(folder_name: str) -> int | None:
    """The round in the name of a checkpoint's folder; None for other names."""
    match = _ROUND.fullmatch(folder_name)
    return int(match.group(1)) if match else None


@dataclass(frozen=True)
class Listing:
    """``last``: the file that is written last and lists the others; ``files``: bytes and SHA-256 by name, of ``last``
    too; ``private``: the file of the peer's own."""

    last: str
    files: Mapping[str, FileEntry]
    private: str

    @property
    def is_sealed(self) -> bool:
        return self.last == ENVELOPE

    def to_copy(self) -> list[str]:
        """The files that a copy for elsewhere has, in the order of sending: what is the peer's own only sealed."""
        listed = [name for name in sorted(self.files) if name != self.last]
        return [name for name in listed if self.is_sealed or name != self.private] + [self.last]


def read_listing(source: Source) -> Listing:
    """Files of a folder that has one of ``LAST_FILES``. Raises ``StateFileError`` where it is damaged."""
    files: dict[str, FileEntry]
    if source.has(ENVELOPE):
        last, private = ENVELOPE, OWN_FILE + SUFFIX
        envelope = read_envelope(source)
        files, data = dict(envelope.files), envelope.file_bytes
    else:
        last, private = MANIFEST, OWN_FILE
        manifest = read_manifest(source)
        files, data = dict(manifest.files), manifest.file_bytes
    return Listing(last, {**files, last: (len(data), hashlib.sha256(data).hexdigest())}, private)


def entry_of(path: Path) -> FileEntry:
    """Bytes and SHA-256 of a file here. Raises ``OSError``."""
    digest, size_bytes = hashlib.sha256(), 0
    with open_regular(path) as file:
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
            size_bytes += len(piece)
    return size_bytes, digest.hexdigest()


_DEEPEST = 4  # URL / run / peer / stage / round
_SAID = 4
"""Rounds that a message names of each stage."""

_STAGE = re.compile(r"stage-([0-9]{5})")


@dataclass(frozen=True)
class Copy:
    """A checkpoint's folder at a URL, whole or not. ``last``: the file that lists the others; None where there is none,
    as in a copy that was not finished; ``stage``: of a pipeline, as the folder above it is named."""

    path: str
    run: str
    peer: str
    round: int
    size_bytes: int
    last: str | None
    stage: int | None = None

    @property
    def is_sealed(self) -> bool:
        return self.last == ENVELOPE


def find_copies(remote: RemoteStore) -> list[Copy]:
    """All below the URL, be it of a run, of a peer, of a stage, or of all; newest round first. Raises
    ``RemoteStorageError``."""
    found = _below(remote, "", _DEEPEST)
    return sorted(found, key=lambda copy: (-copy.round, copy.run, copy.peer, copy.stage or 0))


def _below(remote: RemoteStore, path: str, depth: int) -> list[Copy]:
    found = []
    for name in remote.folders(path):
        inside = f"{path}/{name}" if path else name
        number = round_in(name)
        if number is not None:
            sizes = remote.sizes(inside)
            last = next((one for one in reversed(LAST_FILES) if one in sizes), None)
            above = remote.shown(inside).split("/")[:-1]
            stage = _STAGE.fullmatch(above[-1])
            run, peer = (above[:-1] if stage else above)[-2:]
            size_bytes, in_stage = sum(sizes.values()), int(stage.group(1)) if stage else None
            found.append(Copy(inside, run, peer, number, size_bytes, last, in_stage))
        elif depth > 1:
            found += _below(remote, inside, depth - 1)
    return found


def by_preference(copies: Sequence[Copy], mine: str) -> list[Copy]:
    """Newest first, and of as new ones the peer's own."""
    return sorted(copies, key=lambda copy: (-copy.round, copy.peer != mine, copy.peer))


def stages_needed(copies: Sequence[Copy], mine: str) -> list[int]:
    """The stages that this peer has copied, as it held them; all that there are for one that has copied none."""
    own = {copy.stage for copy in copies if copy.peer == mine}
    return sorted({copy.stage for copy in copies if copy.stage is not None and (not own or copy.stage in own)})


def in_step(copies: Sequence[Copy]) -> Iterator[int]:
    """The rounds of which there is a finished copy of each stage that has any, newest first: the run goes on from a
    version that all its stages have."""
    yield from sorted(set.intersection(*map(set, _rounds(copies).values())), reverse=True)


def say_rounds(copies: Sequence[Copy]) -> str:
    """Rounds of finished copies, by stage if there are any."""
    said = []
    for stage, rounds in _rounds(copies).items():
        newest = [str(number) for number in sorted(rounds, reverse=True)]
        more = f" and {len(newest) - _SAID} older" if len(newest) > _SAID else ""
        which = ", ".join(newest[:_SAID]) + more if newest else "none that is finished"
        said.append(which if stage is None else f"stage {stage}: {which}")
    return "; ".join(said)


def _rounds(copies: Sequence[Copy]) -> dict[int | None, set[int]]:
    """The finished copies by stage."""
    stages = sorted({copy.stage for copy in copies}, key=lambda stage: -1 if stage is None else stage)
    return {stage: {copy.round for copy in copies if copy.stage == stage and copy.last is not None} for stage in stages}


_BLOCK_BYTES = 16 * 2**20
_TRIES = 6
_INCOMING = "restoring"


@dataclass(frozen=True)
class _Fetched:
    """A checked copy on this machine, and where it is to be; ``incoming``: None where it is there already; ``stages``:
    how many its run has, 0 for one without."""

    incoming: Path | None
    place: Path
    stages: int


class Restorer:
    """Puts copies below ``to``, for the peer of ``identity``. ``say``: told what is done; ``pause``: sleeps."""

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

    def restore(self, copies: Sequence[Copy], *, all_stages: bool = False, number: int | None = None) -> list[Path]:
        """The newest one that is whole and can be opened; the folder that it is in now. What is there already is not
        touched: where it is as new, it is what is returned. ``number``: of that round, and no other.

        Of a pipeline one of each stage that this peer has copied, or of all (``all_stages``, or where it has copied
        none), of the newest round of which all stages have a copy, whichever of them are brought here: nobody can go
        on from anything else.

        Raises ``StateFileError`` when there is none, ``SealedForOthers`` when they are all sealed for others,
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
            self._say(f"there is no copy of {which}: unless a peer has kept what is missing, the run begins anew")
        return self._install_all(fetched)

    def _of_round(self, number: int, copies: Sequence[Copy]) -> list[Copy]:
        found = [copy for copy in copies if copy.round == number]
        if copies and not found:
            raise StateFileError(f"{self._remote.url}: there is no copy of round {number}: {say_rounds(copies)}")
        return found

    def _fetch_in_step(self, staged: Sequence[Copy], stages: Sequence[int]) -> list[_Fetched]:
        """These stages, of the newest round that all have and that can be used."""
        refusals: list[StateFileError] = []
        for number in in_step(staged):
            try:
                fetched = self._fetch_each([copy for copy in staged if copy.round == number], stages)
            except StateFileError as error:
                self._say(f"round {number} of the stages cannot be had: {error}")
                refusals.append(error)
                continue
            newest = max(copy.round for copy in staged if copy.stage in stages and copy.last is not None)
            if refusals:
                self._say(
                    f"bring this round to the peers of the other stages, too: `shoal restore URL --round {number}`"
                )
            elif number < newest:
                self._say(
                    f"round {number} is the newest of which all stages have a copy ({say_rounds(staged)}); where the "
                    f"peers of other stages have kept what they held, `--round {newest}` brings a newer one beside it"
                )
            return fetched
        if refusals and all(isinstance(refusal, SealedForOthers) for refusal in refusals):
            raise refusals[0]
        raise StateFileError(
            f"{self._remote.url}: there is no round of which all stages have a copy that can be used: "
            f"{say_rounds(staged)}; where peers have kept what is missing, `shoal restore URL --round N` brings the "
            "stages that have a copy of round N, else the run can only begin anew"
        )

    def _fetch_each(self, copies: Sequence[Copy], stages: Sequence[int]) -> list[_Fetched]:
        """One of each stage, or none of any; ``copies``: all of one round."""
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

    def _fetch_best(self, copies: Sequence[Copy], *, is_exact: bool) -> _Fetched:
        """The newest one that can be used; ``is_exact``: a newer one that is here already does not do instead.

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

    def _fetch_copy(self, copy: Copy, *, is_exact: bool) -> _Fetched:
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
            if here is not None and (round_in(here.name) or 0) >= copy.round:
                self._say(f"{here}: is as new as the copy of round {copy.round}; it stays")
                shutil.rmtree(incoming)
                return _Fetched(None, here, stages)
            if place.exists():
                raise StateFileError(f"{place}: is in the way, and is no whole checkpoint; move it away first")
            which = f"{manifest.run}" if copy.stage is None else f"{manifest.run}, stage {copy.stage}"
            self._say(f"round {copy.round} of {which}, by peer {manifest.peer}, from {self._remote.shown(copy.path)}")
            self._fetch_all(copy, listing, incoming, own=manifest.peer == self._identity.peer_id)
            self._check(incoming, manifest)
        except StateFileError:
            shutil.rmtree(incoming, ignore_errors=True)
            raise
        return _Fetched(incoming, place, stages)

    def _list(self, copy: Copy, incoming: Path) -> tuple[Listing, Manifest]:
        """Bring what lists the files, which is all that says of which run the copy is."""
        assert copy.last is not None
        sizes = self._remote.sizes(copy.path)
        # Always again: it is small, and another history may have taken its place since.
        self._fetch(copy, copy.last, incoming, min(sizes.get(copy.last, 0), MAX_ENVELOPE_BYTES))
        source = FolderSource(incoming)
        listing = read_listing(source)
        for name, (size_bytes, _) in listing.files.items():
            if sizes.get(name) != size_bytes and name != listing.private:
                found = "missing" if name not in sizes else f"{sizes[name]} bytes"
                raise refuse(self._remote.shown(f"{copy.path}/{name}"), "size", f"{size_bytes} bytes", found)
        if listing.is_sealed:
            sealed = LAST_FILES[0] + SUFFIX
            if sealed not in listing.files:
                raise refuse(self._remote.shown(copy.path), "files", f"also {sealed}", "none")
            self._fetch_checked(copy, sealed, listing.files[sealed], incoming)
        manifest = read_manifest(opened(source, self._identity))
        if manifest.round != copy.round:
            raise refuse(self._remote.shown(copy.path), "round", str(copy.round), f"{manifest.round} in its manifest")
        stage = manifest.stage.number if manifest.stage is not None else None
        if stage != copy.stage:
            raise refuse(self._remote.shown(copy.path), "stage", str(copy.stage), f"{stage} in its manifest")
        return listing, manifest

    def _place(self, manifest: Manifest) -> Path:
        run = f"{manifest.run}-{manifest.run_hash[:8]}"
        peer = self._to / run / self._identity.peer_id
        folder = peer if manifest.stage is None else stage_folder(peer, manifest.stage.number)
        return folder / CHECKPOINTS / f"round-{manifest.round:08}"

    def _whole_here(self, places: Iterable[Path]) -> Path | None:
        """The first whole checkpoint of those on this machine."""
        for place in places:
            with suppress(StateFileError):
                read_checkpoint(opened(FolderSource(place), self._identity))
                return place
        return None

    def _fetch_all(self, copy: Copy, listing: Listing, incoming: Path, *, own: bool) -> None:
        there = self._remote.sizes(copy.path)
        for name in listing.to_copy()[:-1]:
            if name != listing.private or (own and name in there):
                self._fetch_checked(copy, name, listing.files[name], incoming)

    def _fetch_checked(self, copy: Copy, name: str, entry: FileEntry, incoming: Path) -> None:
        """Unless it is here already. Raises ``StateFileError`` where it is not what was listed."""
        path = incoming / name
        if path.exists() and entry_of(path) == entry:
            return
        resumed = path.with_name(f"{name}.part").exists()
        self._fetch(copy, name, incoming, entry[0])
        if entry_of(path) != entry and resumed:  # its beginning may have been of another checkpoint
            path.unlink()
            self._fetch(copy, name, incoming, entry[0])
        found = entry_of(path)
        if found != entry:
            raise refuse(self._remote.shown(f"{copy.path}/{name}"), "bytes and SHA-256", str(entry), str(found))

    def _fetch(self, copy: Copy, name: str, incoming: Path, size_bytes: int) -> None:
        """Bring a file, or the rest of it."""
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

    def _read(self, copy: Copy, name: str, start: int, stop: int) -> bytes:
        """A block, tried again after growing pauses. Raises the last ``RemoteStorageError``."""
        if start >= stop:  # some stores take it for an error to be asked for nothing
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
        """Everything, as before every use: signature, digests, tensors."""
        checked = read_checkpoint(opened(FolderSource(incoming), self._identity), bytes.fromhex(manifest.run_hash))
        if checked.manifest != manifest:
            raise refuse(str(incoming), "manifest", "the one that was checked before", "another")

    def _install(self, incoming: Path, place: Path) -> None:
        """In one step; whoever is killed before it goes on with the same command."""
        place.parent.mkdir(parents=True, exist_ok=True)
        durable.sync_folder(incoming)
        incoming.rename(place)
        durable.sync_folder(place.parent)
