"""``shoal verify``: checkpoints checked offline: files, signatures, verdicts, and what vouches for each state."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from shoal.peer.checkpoints.checkpoint import read_checkpoint, unpack_verdicts
from shoal.peer.checkpoints.manifest import MANIFEST, VERDICTS_FILE, Manifest
from shoal.peer.checkpoints.sealed_folder import ENVELOPE, opened
from shoal.peer.checkpoints.source import FolderSource, refuse
from shoal.peer.checkpoints.store import CHECKPOINTS
from shoal.peer.events import bytes_text, count_text, printable
from shoal.peer.history import check_chain, unpack_history
from shoal.peer.history_file import HISTORY_FILE
from shoal.swarm.errors import RunFileError, SealedForOthers, StateFileError
from shoal.swarm.identity import Identity
from shoal.swarm.messages import Verdict
from shoal.swarm.run_file import parse_run_file


@dataclass(frozen=True)
class Verified:
    """A whole checkpoint. ``first_round``: from which on all verdicts up to its own were checked: 0, where they or the
    history beside it have the whole chain; ``vouched_by``: the round whose plan, signed by the coordinator, names the
    very state; None where only the peer's signature does."""

    folder: Path
    manifest: Manifest
    size_bytes: int
    first_round: int
    vouched_by: int | None


@dataclass(frozen=True)
class Refused:
    """A checkpoint, or a history, that is not what it has to be; or is sealed for others, so that nobody can tell."""

    place: Path
    reason: str
    is_for_others: bool = False

    @property
    def is_history(self) -> bool:
        return self.place.name == HISTORY_FILE


@dataclass(frozen=True)
class _Read:
    """A whole checkpoint with its own verdicts, which are a chain."""

    folder: Path
    manifest: Manifest
    verdicts: tuple[Verdict, ...]

    @property
    def history(self) -> Path | None:
        """Where its peer keeps the history that it is of. One that was set aside is of another."""
        folder = self.folder.absolute()
        is_current = folder.parent.name == CHECKPOINTS and folder.name.startswith("round-")
        return folder.parent.with_name(HISTORY_FILE) if is_current else None


@dataclass(frozen=True)
class _History:
    """A whole chain of verdicts from the run's first round on, checked; ``owner``: of which run and coordinator."""

    path: Path
    owner: tuple[str, str]
    verdicts: tuple[Verdict, ...]


def find_checkpoints(folder: Path) -> list[Path]:
    """The checkpoint in this folder, or all below it. Raises ``StateFileError`` when there is none."""
    if any((folder / name).exists() for name in (MANIFEST, ENVELOPE)):
        return [folder]
    # Copies lie right below a peer's folder, a peer's own in one for all checkpoints.
    found = sorted(path for path in folder.glob("**/*round-*/") if not path.name.startswith("."))
    if not found:
        raise StateFileError(f"{folder}: no checkpoint here; give its folder, a peer's, or a run's (~/.shoal/runs/…)")
    return found


def verify_checkpoints(folders: Iterable[Path], identity: Identity | None = None) -> list[Verified | Refused]:
    """Everything that can be checked without the network, of each, and of the histories that lie beside them as their
    peers keep them; ``identity`` opens sealed ones. Those of one run vouch for each other's states."""
    whole: list[_Read] = []
    results: dict[Path, Verified | Refused] = {}
    for folder in folders:
        try:
            whole.append(_Read(folder, *_check(folder, identity)))
        except StateFileError as error:
            results[folder] = Refused(folder, str(error), isinstance(error, SealedForOthers))
    histories: dict[Path, _History] = {}
    for path in sorted({one.history for one in whole if one.history and one.history.exists()}):
        try:
            histories[path] = _read_history(path)
        except StateFileError as error:
            results[path] = Refused(path, str(error))
    told = [(_owner(one.manifest), one.verdicts) for one in whole]
    told += [(one.owner, one.verdicts) for one in histories.values()]
    for one in whole:
        history = histories.get(one.history) if one.history else None
        try:
            first = _first_round(one, history) if history else one.verdicts[0].round
            chains = [chain for owner, chain in told if owner == _owner(one.manifest)]
            voucher = _voucher(one.folder, one.manifest, chains)
        except StateFileError as error:
            results[one.folder] = Refused(one.folder, str(error))
            continue
        size_bytes = sum(size for size, _ in one.manifest.files.values())
        results[one.folder] = Verified(one.folder, one.manifest, size_bytes, first, voucher)
    return [results[place] for place in sorted(results)]


def _read_history(path: Path) -> _History:
    """Raises ``StateFileError``. That a record at its end is not whole is no damage: it is just being written."""
    try:
        kept = unpack_history(path.read_bytes(), str(path))
    except OSError as error:
        raise StateFileError(f"{path}: cannot be read: {error}") from error
    if kept.damage is not None and not kept.damage.is_end:
        raise StateFileError(
            f"{path}: damaged at offset {kept.damage.offset}, after {len(kept.verdicts)} rounds: {kept.damage.reason}"
        )
    key = kept.origin.coordinator.identity_key
    _check_chain(kept.verdicts, kept.origin.run_hash, key, str(path), scope=kept.origin.scope)
    return _History(path, (kept.origin.run_hash.hex(), key.hex()), kept.verdicts)


def _first_round(one: _Read, history: _History) -> int:
    """From which round on the chain is known up to this checkpoint. Raises ``StateFileError`` when the history has
    another verdict for a round of it. It may be some rounds behind: it is not flushed before checkpoints are."""
    if history.owner != _owner(one.manifest):
        raise refuse(str(history.path), "its head", "the run and the coordinator of the checkpoint", "others")
    known, first = history.verdicts, one.verdicts[0]
    chains = {first.round - 1: first.previous_chain} | {verdict.round: verdict.chain for verdict in one.verdicts}
    for number, chain in chains.items():
        if 0 <= number < len(known) and known[number].chain != chain:
            expected = f"the verdict that {history.path} has"
            raise refuse(str(one.folder / VERDICTS_FILE), f"round {number}", expected, "that of another history")
    return 0 if first.round <= len(known) else first.round


def _check(folder: Path, identity: Identity | None) -> tuple[Manifest, tuple[Verdict, ...]]:
    source = opened(FolderSource(folder), identity)
    checkpoint = read_checkpoint(source)
    manifest, place = checkpoint.manifest, source.place(MANIFEST)
    try:
        run_hash = parse_run_file(manifest.run_toml).hash.hex()
    except RunFileError as error:
        raise refuse(place, "run_toml", "a run file", str(error)) from error
    if run_hash != manifest.run_hash:
        # Another release may have other defaults, which count in the hash.
        raise refuse(place, "run_hash", f"{run_hash}, the hash of its run_toml in this release", manifest.run_hash)
    verdicts = unpack_verdicts(checkpoint.verdicts[0], source.place(VERDICTS_FILE))
    if not verdicts:
        raise refuse(source.place(VERDICTS_FILE), "its content", "verdicts", "none")
    run, key = map(bytes.fromhex, _owner(manifest))
    _check_chain(verdicts, run, key, source.place(VERDICTS_FILE), whole=verdicts[0].round == 0)
    last = verdicts[-1]
    for field, said, true in (
        ("round", manifest.round, last.round),
        ("chain", manifest.chain, last.chain.hex()),
        ("anchor_version", manifest.anchor_version, last.anchor_version),
        ("tokens", manifest.tokens, last.tokens_total),
    ):
        if said != true:
            raise refuse(place, field, f"{true}, as its last verdict says", str(said))
    return manifest, verdicts


def _check_chain(
    verdicts: Sequence[Verdict], run_hash: bytes, key: bytes, place: str, *, scope: int = 0, whole: bool = True
) -> None:
    try:
        check_chain(verdicts, run_hash, key, scope=scope, whole=whole)
    except StateFileError as error:
        raise StateFileError(f"{place}: {error}") from error


def _voucher(folder: Path, manifest: Manifest, chains: Iterable[Sequence[Verdict]]) -> int | None:
    """The round after the checkpoint's whose plan names its state. Raises ``StateFileError`` when it names another."""
    for chain in chains:
        at = next((at for at, one in enumerate(chain) if one.chain.hex() == manifest.chain), len(chain))
        for verdict in chain[at + 1 :]:
            if verdict.plan is not None and verdict.plan.anchor_version == manifest.anchor_version:
                digest = verdict.plan.state_digest.hex()
                if digest != manifest.state_digest:
                    expected = f"{digest}, as the plan of round {verdict.round} says"
                    raise refuse(str(folder / MANIFEST), "state_digest", expected, manifest.state_digest)
                return verdict.round
            if verdict.anchor_version != manifest.anchor_version:
                break  # rolled back: what comes later is of another history of this version
    return None


def _owner(manifest: Manifest) -> tuple[str, str]:
    """Which run's it is, by its hash, and whose signatures count."""
    return manifest.run_hash, manifest.coordinator_key


def verify_table(results: Iterable[Verified | Refused]) -> Table:
    """A line for each. "chain": what of it was checked; "vouched by": who says that the run had this state."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in ("", "run", "round", "anchor", "tokens", "size", "signed by", "chain", "vouched by"):
        is_number = title in ("round", "anchor", "tokens", "size")
        table.add_column(title, justify="right" if is_number else "left", no_wrap=True, min_width=1)
    for one in results:
        if isinstance(one, Refused):
            number = one.place.name.rpartition("round-")[2].lstrip("0") or "0"
            table.add_row("✗", *(("history",) if one.is_history else ("", printable(number[:8]))), style="red")
            continue
        manifest = one.manifest
        table.add_row(
            "[green]✓[/]",
            printable(manifest.run),
            str(manifest.round),
            str(manifest.anchor_version),
            count_text(manifest.tokens),
            bytes_text(one.size_bytes),
            manifest.peer,
            "whole" if one.first_round == 0 else f"from {one.first_round}",
            f"plan of {one.vouched_by}" if one.vouched_by is not None else "its peer",
        )
    return table


def verify_notes(results: Iterable[Verified | Refused]) -> str:
    """What the table's words mean."""
    notes = [
        "Checked: sizes and SHA-256 of all files, layout, state digests, signatures, chains of verdicts.",
        "Vouched by: a later round's plan, which the coordinator signed, or this checkpoint's peer alone.",
        f"Whole chain: every verdict since the run's first round, with {HISTORY_FILE} beside the checkpoints.",
    ]
    if any(isinstance(one, Verified) and one.first_round for one in results):
        notes.append(
            f"From N: only those that the checkpoint holds, as no {HISTORY_FILE} lies there (copies have none)."
        )
    return "\n".join(notes)


def summary(results: Sequence[Verified | Refused]) -> str:
    """How many are wrong."""
    wrong = [one for one in results if isinstance(one, Refused)]
    histories = sum(one.is_history for one in wrong)
    checkpoints = len(results) - histories
    told = f"{len(wrong) - histories} of {checkpoints} checkpoints are not what they have to be"
    return told + (f", and {histories} of the histories beside them" if histories else "")
