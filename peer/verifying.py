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
from shoal.swarm.errors import RunFileError, StateFileError, WireError
from shoal.swarm.identity import Identity
from shoal.swarm.messages import Verdict
from shoal.swarm.run_file import parse_run_file
from shoal.swarm.verdicts import check_verdict, genesis


@dataclass(frozen=True)
class Verified:
    """A whole checkpoint. ``first_round``: where the verdicts in it begin; ``vouched_by``: the round whose plan, signed
    by the coordinator, names the very state; None where only the peer's signature does."""

    folder: Path
    manifest: Manifest
    size_bytes: int
    first_round: int
    vouched_by: int | None


@dataclass(frozen=True)
class Refused:
    """A checkpoint that is not what it has to be."""

    folder: Path
    reason: str


def find_checkpoints(folder: Path) -> list[Path]:
    """The checkpoint in this folder, or all below it. Raises ``StateFileError`` when there is none."""
    if any((folder / name).exists() for name in (MANIFEST, ENVELOPE)):
        return [folder]
    found = sorted({path for path in folder.glob(f"**/{CHECKPOINTS}/*round-*") if not path.name.startswith(".")})
    found = found or sorted(path for path in folder.glob("*round-*") if not path.name.startswith("."))
    if not found:
        raise StateFileError(f"{folder}: no checkpoint here; give its folder, a peer's, or a run's (~/.shoal/runs/…)")
    return found


def verify_checkpoints(folders: Iterable[Path], identity: Identity | None = None) -> list[Verified | Refused]:
    """Everything that can be checked without the network, of each; ``identity`` opens sealed ones. Those of one run
    vouch for each other's states."""
    whole: list[tuple[Path, Manifest, tuple[Verdict, ...]]] = []
    results: dict[Path, Verified | Refused] = {}
    for folder in folders:
        try:
            whole.append((folder, *_check(folder, identity)))
        except StateFileError as error:
            results[folder] = Refused(folder, str(error))
    for folder, manifest, own in whole:
        chains = [chain for _, other, chain in whole if _same_run(manifest, other)]
        try:
            voucher = _voucher(folder, manifest, chains)
        except StateFileError as error:
            results[folder] = Refused(folder, str(error))
            continue
        size_bytes = sum(size for size, _ in manifest.files.values())
        results[folder] = Verified(folder, manifest, size_bytes, own[0].round, voucher)
    return [results[folder] for folder in sorted(results)]


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
    verdicts = unpack_verdicts(checkpoint.verdicts, source.place(VERDICTS_FILE))
    _check_chain(verdicts, manifest, source.place(VERDICTS_FILE))
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


def _check_chain(verdicts: Sequence[Verdict], manifest: Manifest, place: str) -> None:
    """Each verdict's hash, signature and link to the one before. The chain may begin in the midst of the run."""
    if not verdicts:
        raise refuse(place, "its content", "verdicts", "none")
    before = genesis(bytes.fromhex(manifest.run_hash)) if verdicts[0].round == 0 else verdicts[0].previous_chain
    for number, verdict in enumerate(verdicts, verdicts[0].round):
        if verdict.round != number or verdict.previous_chain != before:
            raise refuse(place, f"round {number}", "a verdict that goes on from the one before", "another")
        try:
            check_verdict(verdict, bytes.fromhex(manifest.coordinator_key))
        except WireError as error:
            raise StateFileError(f"{place}: {error}") from error
        before = verdict.chain


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


def _same_run(one: Manifest, other: Manifest) -> bool:
    return (one.run_hash, one.coordinator_key) == (other.run_hash, other.coordinator_key)


def verify_table(results: Iterable[Verified | Refused]) -> Table:
    """A line for each. "chain": the rounds whose verdicts are in it; "vouched by": who says that the run had this."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in ("", "run", "round", "anchor", "tokens", "size", "signed by", "chain", "vouched by"):
        is_number = title in ("round", "anchor", "tokens", "size")
        table.add_column(title, justify="right" if is_number else "left", no_wrap=True, min_width=1)
    for one in results:
        if isinstance(one, Refused):
            number = one.folder.name.rpartition("round-")[2].lstrip("0") or "0"
            table.add_row("✗", "", printable(number[:8]), style="red")
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
            f"{one.first_round}-{manifest.round}",
            f"plan of {one.vouched_by}" if one.vouched_by is not None else "its peer",
        )
    return table
