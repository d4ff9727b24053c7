"""``shoal log``: check a run's history and show it as a table, one round in detail, or a JSON object a round.

The history comes from a running run, a host's folder, a member's folder, or a checkpoint. The chain is checked while it
is shown; where it is broken the command fails.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich import box, filesize
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from shoal.peer.checkpoints.encryption import ENVELOPE, open_source
from shoal.peer.checkpoints.manifest import MANIFEST, read_manifest
from shoal.peer.checkpoints.source import FolderSource
from shoal.peer.cli.host import ORIGIN_FILE, find_host_folder, hosted_verdicts
from shoal.peer.history.chain import ChainCheck
from shoal.peer.history.history_file import HISTORY_FILE, HistoryOrigin, UnpackedHistory, unpack_history
from shoal.peer.regular_file import read_regular
from shoal.peer.terminal.events import count_text, loss_text, printable
from shoal.peer.terminal.views import stopped_lines
from shoal.swarm.client.coordinator_client import CoordinatorClient
from shoal.swarm.client.observer import observe, observe_stages
from shoal.swarm.errors import StateFileError, UserError
from shoal.swarm.protocol.identity import Identity, peer_id
from shoal.swarm.protocol.invite import Invite, invite_text
from shoal.swarm.protocol.json_values import jsonable
from shoal.swarm.protocol.messages import (
    CoordinatorToPeerStatus,
    CoordinatorToPeerVerdicts,
    PeerToCoordinatorGetStatus,
    PeerToCoordinatorGetVerdicts,
)
from shoal.swarm.protocol.rounds import RoundPlan, Verdict
from shoal.swarm.protocol.run_file import parse_run_file
from shoal.swarm.protocol.statements import PlanStatement, name_of, plan_digest
from shoal.swarm.secure.signed_sets import fault_of, groups_of
from shoal.swarm.system import run_loop

_EXPECTED = (
    "give an invite, the name or folder of a run that this machine hosts (~/.shoal/host/RUN), a member's folder "
    f"(~/.shoal/runs/RUN-HASH), a checkpoint, or a {HISTORY_FILE}"
)


@dataclass(frozen=True)
class Log:
    """A run's verdicts as found, unchecked. ``whole``: whether they must begin with the first round; ``damage``: why
    the history breaks off, empty at a proper end; ``note``: a remark for the reader."""

    run: str
    run_hash: bytes
    coordinator_key: bytes
    verdicts: tuple[Verdict, ...]
    scope: int = 0
    whole: bool = True
    damage: str = ""
    note: str = ""


def open_log(source: str, identity: Identity | None = None) -> Log:
    """Read the history at ``source``; ``identity`` opens sealed checkpoints.

    Raises ``StateFileError`` where there is no history, ``StorageError``, or the errors of a join."""
    source = invite_text(source)
    if source.startswith("shoal://"):
        return run_loop(_from_run(Invite.parse(source)))
    path = Path(source)
    if path.is_file():
        return _of_file(path)
    if any((path / name).exists() for name in (MANIFEST, ENVELOPE)):
        return _of_checkpoint(path, identity)
    hosted = find_host_folder(source)
    if hosted is not None:
        return _of_host(hosted)
    found = sorted(path.glob(f"**/{HISTORY_FILE}"))
    if not found:
        raise StateFileError(f"{path}: no history of a run here; {_EXPECTED}")
    # Of several members the longest history; of a pipeline's stages the last one.
    return max((_of_file(one) for one in found), key=lambda log: (len(log.verdicts), log.scope))


async def _from_run(invite: Invite) -> Log:
    """Fetch the history from a running run; of a pipeline the last stage's, which has the loss.

    The note names members that had to leave, and why: verdicts do not say that."""
    async with observe(invite) as client:
        pipeline = client.view.pipeline
        async with observe_stages(client, len(pipeline.boundaries) - 1 if pipeline else 0) as stages:
            log = await _fetched([client, *stages][-1])
            status = await client.ask(PeerToCoordinatorGetStatus(), CoordinatorToPeerStatus)
            return replace(log, note="\n".join(stopped_lines(status.members)))


async def _fetched(client: CoordinatorClient) -> Log:
    verdicts: list[Verdict] = []
    while True:
        page = await client.ask(PeerToCoordinatorGetVerdicts(first=len(verdicts)), CoordinatorToPeerVerdicts)
        verdicts += page.verdicts
        if not page.more or not page.verdicts:
            run = client.run_file
            return Log(run.run.name, run.hash, client.coordinator.identity_key, tuple(verdicts), client.scope)


def _of_file(path: Path) -> Log:
    kept = _unpack(path)
    damage = note = ""
    if kept.damage is not None and kept.damage.is_end:
        note = f"{path}: {kept.damage.reason}: it is being written, or was cut off"
    elif kept.damage is not None:
        damage = f"{path}: damaged at offset {kept.damage.offset}, after {len(kept.verdicts)} rounds"
    return _log(kept.origin, kept.verdicts, damage, note)


def _of_host(folder: Path) -> Log:
    origin = _unpack(folder / ORIGIN_FILE).origin
    scope, verdicts = hosted_verdicts(folder, has_stages=parse_run_file(origin.run_toml).pipeline is not None)
    return _log(origin.model_copy(update={"scope": scope}), verdicts)


def _of_checkpoint(folder: Path, identity: Identity | None) -> Log:
    from shoal.peer.checkpoints.checkpoint import read_verdicts  # imports torch, which no other source needs
    from shoal.peer.member.memberships import scope_of

    source = open_source(FolderSource(folder), identity)
    manifest = read_manifest(source)
    # Of a whole model made of stages, the last stage's verdicts: they have the loss.
    number = len(manifest.verdicts_files) - 1
    verdicts = read_verdicts(source, manifest, number)
    stage = manifest.stage.number if manifest.stage is not None else None if manifest.parts is None else number
    whole = bool(verdicts) and verdicts[0].round == 0
    note = "" if whole else f"{folder}: holds only the end of the chain; its beginning is in the members' histories"
    key, scope = bytes.fromhex(manifest.coordinator_key), 0 if stage is None else scope_of(stage)
    return Log(manifest.run, bytes.fromhex(manifest.run_hash), key, verdicts, scope, whole=whole, note=note)


def _log(origin: HistoryOrigin, verdicts: tuple[Verdict, ...], damage: str = "", note: str = "") -> Log:
    key = origin.coordinator.identity_key
    return Log(origin.run, origin.run_hash, key, verdicts, origin.scope, damage=damage, note=note)


def _unpack(path: Path) -> UnpackedHistory:
    try:
        data = read_regular(path)
    except OSError as error:
        raise StateFileError(f"{path}: cannot be read: {error}; {_EXPECTED}") from error
    return unpack_history(data, str(path))


WIDE = 120
"""Terminal columns from which on the table shows all columns."""

_NAMED = 4


def log_head(run: str, run_hash: bytes, coordinator_key: bytes) -> RenderableType:
    head = Table.grid(padding=(0, 2))
    head.add_column(style="dim", no_wrap=True)
    head.add_column()
    head.add_row("run", Text.assemble((printable(run), "bold cyan"), (f"  {run_hash.hex()[:16]}", "dim")))
    head.add_row("signed by", Text(peer_id(coordinator_key)))
    return head


def log_table(verdicts: Sequence[Verdict], width: int) -> Table:
    """Make the table of checked verdicts, oldest first."""
    wide = width >= WIDE
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), collapse_padding=True, pad_edge=False)
    table.add_column("round", justify="right", no_wrap=True)
    table.add_column("when (UTC)", no_wrap=True)
    table.add_column("verdict", min_width=9)
    for name in ("anchor" if wide else "v", "tokens"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("members and their shares" if wide else "members", no_wrap=not wide)
    for name in ("void", "sent", "loss") if wide else ("sent", "loss"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("chain", no_wrap=True)
    for verdict in verdicts:
        table.add_row(*_row(verdict, wide))
    return table


def log_foot(checked: Sequence[Verdict], width: int) -> str:
    """Summarize the checked verdicts, of which there is at least one, whether shown or not."""
    which = f"Rounds {checked[0].round} to {checked[-1].round}: all hashes, links and signatures are right."
    return which if width >= WIDE else f"{which}\nv: anchor version; members: how many, and the largest share"


def _row(verdict: Verdict, wide: bool) -> list[RenderableType]:
    void = verdict.digests.count(None)
    cells: list[RenderableType] = [
        Text(str(verdict.round), style="bold"),
        Text(_when(verdict.ended_s, wide), style="dim"),
        _outcome(verdict, 0 if wide else void),
        Text(f"{verdict.anchor_version}"),
        Text(count_text(verdict.tokens) if verdict.committed else "–"),
        Text(_shares(verdict.plan, wide)),
    ]
    if wide:
        cells.append(Text(str(void), style="yellow") if void else Text("–", style="dim"))
    return [
        *cells,
        Text(filesize.decimal(verdict.sent_bytes)),
        Text(loss_text(verdict.loss)),
        Text.assemble(("✓ ", "green"), (verdict.chain.hex()[: 12 if wide else 6], "dim")),
    ]


def _outcome(verdict: Verdict, void: int) -> Text:
    if not verdict.committed:
        return Text.assemble(("aborted", "yellow"), (f": {printable(verdict.reason)}" if verdict.reason else "", ""))
    return Text.assemble(("committed", "green"), (f", {void} void" if void else "", "yellow"))


def _when(ended_s: float, wide: bool) -> str:
    try:
        moment = datetime.fromtimestamp(ended_s, UTC)
    except (OverflowError, ValueError, OSError):
        return "?"  # a wrong clock may give a time out of range
    return moment.strftime("%Y-%m-%d %H:%M:%S" if wide else "%m-%d %H:%M")


def _shares(plan: RoundPlan | None, wide: bool) -> str:
    """Members' shares, largest first, and how many are not named; on a narrow terminal the largest only."""
    if plan is None:
        return "–"
    members = sorted(plan.members, key=lambda one: (-one.weight, one.peer))
    total = sum(one.weight for one in members)
    shares = [f"{100 * one.weight / total:.0f}%" for one in members]
    if not wide:
        return f"{len(members)} ≤{shares[0]}"
    named = ", ".join(f"{one.peer[:6]} {share}" for one, share in zip(members[:_NAMED], shares, strict=False))
    return named if len(members) <= _NAMED else f"{len(members)}: {named}, …"


# One round --------------------------------------------------------------------------------------------------


def round_details(verdict: Verdict) -> RenderableType:
    """Show a checked verdict in detail: contributions, owners of the parts, digests."""
    head = Table.grid(padding=(0, 2))
    head.add_column(style="dim", no_wrap=True)
    head.add_column(overflow="fold")
    tokens = f"{count_text(verdict.tokens)}, {count_text(verdict.tokens_total)} in all"
    head.add_row("round", Text.assemble((str(verdict.round), "bold"), "  ", _outcome(verdict, 0)))
    head.add_row("ended", f"{_when(verdict.ended_s, wide=True)} UTC")
    head.add_row("anchor", f"version {verdict.anchor_version}")
    head.add_row("tokens", tokens)
    head.add_row("loss", loss_text(verdict.loss))
    head.add_row("sent", filesize.decimal(verdict.sent_bytes))
    for number, (key, value) in enumerate(verdict.amended):
        head.add_row("" if number else "amended", Text(printable(f"{key} = {value}"), style="yellow"))
    head.add_row("before", Text(verdict.previous_chain.hex(), style="dim"))
    head.add_row("chain", Text.assemble(verdict.chain.hex(), ("  ✓ signed", "green")))
    plan = verdict.plan
    if plan is None:
        return Group(head, Text("\nnobody had anything to contribute", style="yellow"))
    head.add_row("from", Text.assemble(f"version {plan.anchor_version}, state ", plan.state_digest.hex()))
    if plan.secure is not None:
        head.add_row("masked", _masked(verdict, plan))
    return Group(head, Text(), _members(plan), _parts(plan, verdict.digests))


def _masked(verdict: Verdict, plan: RoundPlan) -> Text:
    """Show whose masked contributions the means of a secure round are of, and whether these have signed for that."""
    signed = verdict.signed_sets
    if signed is None:
        return Text("nothing was opened", style="yellow")
    about = PlanStatement(name_of(verdict), plan_digest(plan))
    included, fault = {one for each in signed.sets for one in each}, fault_of(about, plan, signed)
    if fault:
        return Text(fault, style="red")
    groups = groups_of(about, plan, signed)
    text = f"the work of {len(included)} of {len(plan.members)} members, in {len(groups)} groups"
    return Text.assemble(text, (f"  ✓ {len(signed.consents)} signed", "green"))


def _members(plan: RoundPlan) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), collapse_padding=True, pad_edge=False)
    for name in ("member", "tokens", "share", "row", "parts", "elements"):
        table.add_column(name, justify="left" if name == "member" else "right", no_wrap=True)
    total = sum(one.weight for one in plan.members)
    owned = Counter(part.owner for part in plan.parts)
    elements: Counter[int] = Counter()
    for part in plan.parts:
        elements[part.owner] += part.stop - part.start
    for index, one in enumerate(plan.members):
        share = f"{100 * one.weight / total:.1f}%"
        table.add_row(one.peer, str(one.weight_tokens), share, str(one.row), str(owned[index]), str(elements[index]))
    return table


def _parts(plan: RoundPlan, digests: Sequence[bytes | None]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), collapse_padding=True, pad_edge=False)
    for name in ("part", "from", "to"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("owner", no_wrap=True)
    table.add_column("stand-ins")
    table.add_column("digest of the mean", overflow="fold")
    found = list(digests) or [None] * len(plan.parts)
    for index, (part, digest) in enumerate(zip(plan.parts, found, strict=False)):
        stand_ins = " ".join(plan.members[one].peer[:4] for one in part.stand_ins)
        mean = Text(digest.hex(), style="dim") if digest else Text("void" if digests else "–", style="yellow")
        owner = plan.members[part.owner].peer
        table.add_row(str(index), str(part.start), str(part.stop), owner, stand_ins, mean)
    return table


def verdict_json(verdict: Verdict) -> dict[str, Any]:
    """Convert a checked verdict to JSON, with digests as hexadecimal."""
    return {**jsonable(verdict.model_dump()), "signature_ok": True}


def show_log(log: Log, console: Console, last: int = 0, round_number: int | None = None, *, json_lines: bool) -> None:
    """Print the ``last`` rounds (0: all), or one round in detail; all are checked, whatever is shown.

    Raises ``StateFileError`` for a broken chain, after printing what comes before the break, and ``UserError`` for a
    round that the history does not have.
    """
    checked, broken = _check(log)
    shown = checked[-last:] if last else checked
    if round_number is not None:
        shown = [one for one in checked if one.round == round_number]
    if json_lines:
        for verdict in shown:
            console.out(json.dumps(verdict_json(verdict)), highlight=False)
        if broken is not None:
            error = {"error": str(broken), "round": checked[-1].round + 1 if checked else 0, "signature_ok": False}
            console.out(json.dumps(error), highlight=False)
    else:
        _print(log, shown, checked, console, in_detail=round_number is not None)
    if broken is not None:
        if not json_lines:
            console.print(Text(f"the chain is broken: {broken}", style="bold red"), soft_wrap=True)
        raise broken
    if round_number is not None and not shown:
        raise UserError(f"round {round_number} has no verdict here: there are those of {_range(checked)}")


def _check(log: Log) -> tuple[list[Verdict], StateFileError | None]:
    """Check the chain; returns the verdicts up to a break, and what is wrong there."""
    check = ChainCheck(log.run_hash, log.coordinator_key, scope=log.scope, whole=log.whole)
    checked: list[Verdict] = []
    try:
        for verdict in log.verdicts:
            check.add(verdict)
            checked.append(verdict)
    except StateFileError as error:
        return checked, error
    return checked, StateFileError(log.damage) if log.damage else None


def _print(log: Log, shown: list[Verdict], checked: list[Verdict], console: Console, *, in_detail: bool) -> None:
    console.print(log_head(log.run, log.run_hash, log.coordinator_key))
    if in_detail:
        for verdict in shown:
            console.print(round_details(verdict))
    elif shown:
        console.print(log_table(shown, console.width))
    else:
        console.print(Text("\nno round has ended yet", style="yellow"))
    if shown and not in_detail:
        console.print(Text(log_foot(checked, console.width), style="dim"))
    if log.note:
        console.print(Text(log.note, style="yellow"), soft_wrap=True)


def _range(checked: list[Verdict]) -> str:
    return f"rounds {checked[0].round} to {checked[-1].round}" if checked else "no round"
