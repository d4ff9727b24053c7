"""``shoal verify``: offline checks of checkpoints: files, signatures, verdicts, and what vouches for each state."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.peer.checkpoints.checkpoint import CheckedCheckpoint, check_checkpoint, unpack_verdicts
from shoal.peer.checkpoints.encryption import open_source
from shoal.peer.checkpoints.manifest import MANIFEST, VERDICTS_FILE, Manifest
from shoal.peer.checkpoints.source import CheckpointSource, FolderSource, refusal
from shoal.peer.checkpoints.store import CHECKPOINTS, checkpoints_in, say_nothing_found
from shoal.peer.history.chain import check_chain
from shoal.peer.history.history_file import HISTORY_FILE, unpack_history
from shoal.peer.member.memberships import scope_of
from shoal.peer.regular_file import read_regular
from shoal.swarm.errors import RunFileError, SealedForOthers, StateFileError
from shoal.swarm.protocol.identity import Identity
from shoal.swarm.protocol.rounds import Verdict
from shoal.swarm.protocol.run_file import parse_run_file
from shoal.swarm.protocol.verdict_chain import are_all_stages

ChainOwner = tuple[str, str, int]
"""Owner of a chain: run hash, key of the coordinator that signs, and scope: the run's, or a stage's."""


@dataclass(frozen=True)
class Verified:
    """A checkpoint that passed every check.

    ``first_round``: all verdicts from this round up to its own were checked; 0 where they or the history beside it have
    the whole chain. ``vouched_by``: the round whose plan, signed by the coordinator, names the state; None where only
    the peer's signature does. Of a model joined from stages, both are of the stage of which least is known."""

    folder: Path
    manifest: Manifest
    size_bytes: int
    first_round: int
    vouched_by: int | None


@dataclass(frozen=True)
class Refused:
    """A checkpoint or a history that failed a check, or that is sealed for others and could not be checked."""

    place: Path
    reason: str
    is_for_others: bool = False

    @property
    def is_history(self) -> bool:
        return self.place.name == HISTORY_FILE


@dataclass(frozen=True)
class _Part:
    """A part of a checkpoint with a verdict chain of its own: the run's state, or a stage's.

    ``verdicts``: a checked chain that ends with the checkpoint's round."""

    owner: ChainOwner
    state_digest: str
    verdicts: tuple[Verdict, ...]


@dataclass(frozen=True)
class _Read:
    """An undamaged checkpoint; ``parts``: one, or those of the stages that the model was joined from."""

    folder: Path
    manifest: Manifest
    parts: tuple[_Part, ...]

    @property
    def history(self) -> Path | None:
        """File of the history that the checkpoint belongs to; None for a checkpoint that was set aside."""
        folder = self.folder.absolute()
        is_current = folder.parent.name == CHECKPOINTS and folder.name.startswith("round-")
        return folder.parent.with_name(HISTORY_FILE) if is_current else None


@dataclass(frozen=True)
class _History:
    """A complete, checked chain of verdicts from the run's first round on."""

    path: Path
    owner: ChainOwner
    verdicts: tuple[Verdict, ...]


def find_checkpoints(folder: Path) -> list[Path]:
    """The checkpoint in this folder, or all below it. Raises ``StateFileError`` where there is none."""
    found = checkpoints_in(folder)
    if found == [folder]:
        return found
    # By name, too: a damaged checkpoint may lack its manifest.
    named = {path for path in folder.glob("**/*round-*/") if not path.name.startswith(".")}
    if not found and not named:
        raise StateFileError(say_nothing_found(folder))
    return sorted(named.union(found))


def verify_checkpoints(folders: Iterable[Path], identity: Identity | None = None) -> list[Verified | Refused]:
    """Check everything that can be checked offline, of each checkpoint and of the histories beside them.

    ``identity`` opens sealed ones. Checkpoints of one run vouch for each other's states."""
    whole: list[_Read] = []
    results: dict[Path, Verified | Refused] = {}
    for folder in folders:
        try:
            whole.append(_check(folder, identity))
        except StateFileError as error:
            results[folder] = Refused(folder, str(error), isinstance(error, SealedForOthers))
    histories: dict[Path, _History] = {}
    for path in sorted({one.history for one in whole if one.history and one.history.exists()}):
        try:
            histories[path] = _read_history(path)
        except StateFileError as error:
            results[path] = Refused(path, str(error))
    told = [(part.owner, part.verdicts) for one in whole for part in one.parts]
    told += [(one.owner, one.verdicts) for one in histories.values()]
    for one in whole:
        history = histories.get(one.history) if one.history else None
        try:
            first = _first_round(one, history) if history else max(part.verdicts[0].round for part in one.parts)
            voucher = _voucher_of_all(one, told)
        except StateFileError as error:
            results[one.folder] = Refused(one.folder, str(error))
            continue
        size_bytes = sum(size for size, _ in one.manifest.files.values())
        results[one.folder] = Verified(one.folder, one.manifest, size_bytes, first, voucher)
    return [results[place] for place in sorted(results)]


def _read_history(path: Path) -> _History:
    """Read and check a history. An incomplete last record is no damage: a peer may be writing it. Raises
    ``StateFileError``."""
    try:
        kept = unpack_history(read_regular(path), str(path))
    except OSError as error:
        raise StateFileError(f"{path}: cannot be read: {error}") from error
    if kept.damage is not None and not kept.damage.is_end:
        raise StateFileError(
            f"{path}: damaged at offset {kept.damage.offset}, after {len(kept.verdicts)} rounds: {kept.damage.reason}"
        )
    key = kept.origin.coordinator.identity_key
    _check_chain(kept.verdicts, kept.origin.run_hash, key, str(path), scope=kept.origin.scope)
    return _History(path, (kept.origin.run_hash.hex(), key.hex(), kept.origin.scope), kept.verdicts)


def _first_round(one: _Read, history: _History) -> int:
    """The round from which on the chain is known up to this checkpoint.

    The history may be some rounds behind, as it is not flushed before checkpoints are written. Raises
    ``StateFileError`` where it has another verdict for one of the checkpoint's rounds."""
    (part,) = one.parts if len(one.parts) == 1 else (None,)
    if part is None or history.owner != part.owner:
        raise refusal(str(history.path), "its head", "the run and the coordinator of the checkpoint", "others")
    known, first = history.verdicts, part.verdicts[0]
    chains = {first.round - 1: first.previous_chain} | {verdict.round: verdict.chain for verdict in part.verdicts}
    for number, chain in chains.items():
        if 0 <= number < len(known) and known[number].chain != chain:
            expected = f"the verdict that {history.path} has"
            raise refusal(str(one.folder / VERDICTS_FILE), f"round {number}", expected, "that of another history")
    return 0 if first.round <= len(known) else first.round


def _check(folder: Path, identity: Identity | None) -> _Read:
    source = open_source(FolderSource(folder), identity)
    checkpoint = check_checkpoint(source)
    manifest, place = checkpoint.manifest, source.place(MANIFEST)
    try:
        run = parse_run_file(manifest.run_toml)
    except RunFileError as error:
        raise refusal(place, "run_toml", "a run file", str(error)) from error
    if run.hash.hex() != manifest.run_hash:
        # The hash includes defaults, which may differ in another release.
        raise refusal(
            place, "run_hash", f"{run.hash.hex()}, the hash of its run_toml in this release", manifest.run_hash
        )
    in_stages = manifest.stage is not None or manifest.parts is not None
    if in_stages != (run.pipeline is not None):
        expected = "which stage it is of, or all" if run.pipeline is not None else "nothing"
        raise refusal(place, "stage and parts", f"{expected}, as the run file has it", "this")
    parts = tuple(
        _Part(owner, digest, _verdicts(source, checkpoint, number, owner[2]))
        for number, (owner, digest) in enumerate(zip(_owners(manifest), _digests(manifest), strict=True))
    )
    last = _last_verdict(manifest, parts, place)
    for field, said, true in (
        ("round", manifest.round, last.round),
        ("chain", manifest.chain, (last.chain if manifest.parts is None else last.together or b"").hex()),
        ("anchor_version", manifest.anchor_version, last.anchor_version),
        ("tokens", manifest.tokens, last.tokens_total),
    ):
        if said != true:
            raise refusal(place, field, f"{true}, as its last verdict says", str(said))
    return _Read(folder, manifest, parts)


def _digests(manifest: Manifest) -> list[str]:
    """The digest of each part's state, which has been checked."""
    return [manifest.state_digest] if manifest.parts is None else [part.state_digest for part in manifest.parts]


def _verdicts(source: CheckpointSource, checkpoint: CheckedCheckpoint, number: int, scope: int) -> tuple[Verdict, ...]:
    """The verdicts of a part, which have to be a chain. Raises ``StateFileError``."""
    manifest, place = checkpoint.manifest, source.place(checkpoint.manifest.verdicts_files[number])
    verdicts = unpack_verdicts(checkpoint.verdicts[number], place)
    if not verdicts:
        raise refusal(place, "its content", "verdicts", "none")
    run, key = bytes.fromhex(manifest.run_hash), bytes.fromhex(manifest.coordinator_key)
    _check_chain(verdicts, run, key, place, scope=scope, whole=verdicts[0].round == 0)
    return verdicts


def _last_verdict(manifest: Manifest, parts: Sequence[_Part], place: str) -> Verdict:
    """The verdict of the checkpoint's round; of a model joined from stages the first stage's.

    Raises ``StateFileError`` unless the coordinator's signatures tie the stages' verdicts together."""
    lasts = [part.verdicts[-1] for part in parts]
    for number, (part, last) in enumerate(zip(manifest.parts or (), lasts, strict=False)):
        if part.chain != last.chain.hex():
            raise refusal(place, f"parts.{number}.chain", f"{last.chain.hex()}, as its last verdict says", part.chain)
    if manifest.parts is not None and not are_all_stages(lasts):
        raise refusal(place, "parts", "all stages of one round in their order, as their verdicts say", "others")
    return lasts[0]


def _check_chain(
    verdicts: Sequence[Verdict], run_hash: bytes, key: bytes, place: str, *, scope: int = 0, whole: bool = True
) -> None:
    try:
        check_chain(verdicts, run_hash, key, scope=scope, whole=whole)
    except StateFileError as error:
        raise StateFileError(f"{place}: {error}") from error


def _voucher_of_all(one: _Read, told: Sequence[tuple[ChainOwner, Sequence[Verdict]]]) -> int | None:
    """The latest round that vouches for a part, if each part has one. Raises ``StateFileError`` where one names another
    state."""
    found = []
    for part in one.parts:
        chains = [chain for owner, chain in told if owner == part.owner]
        found.append(_voucher(str(one.folder / MANIFEST), part, chains))
    vouchers = [voucher for voucher in found if voucher is not None]
    return max(vouchers) if len(vouchers) == len(found) else None


def _voucher(place: str, part: _Part, chains: Iterable[Sequence[Verdict]]) -> int | None:
    """The round after the checkpoint's whose plan names its state. Raises ``StateFileError`` where it names another."""
    last = part.verdicts[-1]
    for chain in chains:
        at = next((at for at, one in enumerate(chain) if one.chain == last.chain), len(chain))
        for verdict in chain[at + 1 :]:
            if verdict.plan is not None and verdict.plan.anchor_version == last.anchor_version:
                digest = verdict.plan.state_digest.hex()
                if digest != part.state_digest:
                    expected = f"{digest}, as the plan of round {verdict.round} says"
                    raise refusal(place, "state_digest", expected, part.state_digest)
                return verdict.round
            if verdict.anchor_version != last.anchor_version:
                break  # rolled back: later rounds made another state of this version
    return None


def _owners(manifest: Manifest) -> tuple[ChainOwner, ...]:
    """Owners of the parts' chains: the run or the stage, or each stage that the model was joined from."""
    if manifest.parts is not None:
        scopes = [scope_of(number) for number in range(len(manifest.parts))]
    else:
        scopes = [0 if manifest.stage is None else scope_of(manifest.stage.number)]
    return tuple((manifest.run_hash, manifest.coordinator_key, scope) for scope in scopes)
