"""Output of ``shoal verify``: a table of the checkpoints, and what its words mean."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import filesize
from rich.table import Table

from shoal.peer.checkpoints.manifest import Manifest
from shoal.peer.history.fork_watch import ForkProof
from shoal.peer.history.history_file import HISTORY_FILE
from shoal.peer.offline.verify import Refused, Verified
from shoal.peer.terminal.events import count_text, printable


def verify_table(results: Iterable[Verified | Refused]) -> Table:
    """Make the table. "chain": which part of the chain was checked; "vouched by": who confirms that the run had this
    state. On a narrow terminal only names are cut."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    results = list(results)
    has_stages = any(isinstance(one, Verified) and _stages_text(one.manifest) for one in results)
    stages = ("stage",) if has_stages else ()
    for title in ("", "run", "round", *stages, "anchor", "tokens", "size", "signed by", "chain", "vouched by"):
        is_number = title in ("round", "anchor", "tokens", "size")
        is_name = title in ("run", "signed by")  # single words: too long a one is not wrapped, but cut
        table.add_column(title, justify="right" if is_number else "left", no_wrap=not is_name, overflow="ellipsis")
    for one in results:
        if isinstance(one, Refused):
            _, is_named, number = one.place.name.rpartition("round-")
            number = (number.lstrip("0") or "0") if is_named else ""  # else somebody else has named it
            table.add_row("✗", *(("history",) if one.is_history else ("", printable(number[:8]))), style="red")
            continue
        manifest = one.manifest
        table.add_row(
            "[green]✓[/]",
            printable(manifest.run),
            str(manifest.round),
            *((_stages_text(manifest),) if has_stages else ()),
            str(manifest.anchor_version),
            count_text(manifest.tokens),
            filesize.decimal(one.size_bytes),
            manifest.peer,
            "whole" if one.first_round == 0 else f"from {one.first_round}",
            f"plan of {one.vouched_by}" if one.vouched_by is not None else "its peer",
        )
    return table


def _stages_text(manifest: Manifest) -> str:
    if manifest.parts is not None:
        return f"all {len(manifest.parts)}"
    return f"{manifest.stage.number} of {manifest.stage.stages}" if manifest.stage is not None else ""


def verify_notes(results: Iterable[Verified | Refused]) -> str:
    """Explain the table's words."""
    notes = [
        "Checked: sizes and SHA-256 of all files, layout, state digests, signatures, chains of verdicts.",
        "Vouched by: a later round's plan, which the coordinator signed, or this checkpoint's peer alone.",
        f"Whole chain: every verdict since the run's first round, with {HISTORY_FILE} beside the checkpoints.",
    ]
    if any(isinstance(one, Verified) and one.manifest.parts for one in results):
        notes.append("All N: put together from the stages; of each its own digest and verdicts were checked.")
    if any(isinstance(one, Verified) and one.first_round for one in results):
        notes.append(
            f"From N: only those that the checkpoint holds, as no {HISTORY_FILE} lies there (copies have none)."
        )
    return "\n".join(notes)


def fork_text(proof: ForkProof) -> str:
    """Say what a checked proof of a fork proves, and how its reader sees whose coordinator it is."""
    lines = [
        f"The coordinator of run {printable(proof.origin.run)} has signed two verdicts of round {proof.first.round}"
        + (f" of stage {proof.origin.scope - 1}:" if proof.origin.scope else ":")
    ]
    for one in (proof.first, proof.second):
        outcome = "committed" if one.committed else "aborted"
        lines.append(f"  chain {one.chain.hex()[:16]}  {outcome}, anchor version {one.anchor_version}")
    lines.append(f"Run hash {proof.origin.run_hash.hex()}")
    lines.append(f"Key {proof.origin.coordinator.curve_key.hex()}, which the run's invites have as key=")
    return "\n".join(lines)


def summary(results: Sequence[Verified | Refused]) -> str:
    """Say how many checkpoints failed."""
    wrong = [one for one in results if isinstance(one, Refused)]
    histories = sum(one.is_history for one in wrong)
    checkpoints = len(results) - histories
    told = f"{len(wrong) - histories} of {checkpoints} checkpoints are not what they have to be"
    return told + (f", and {histories} of the histories beside them" if histories else "")
