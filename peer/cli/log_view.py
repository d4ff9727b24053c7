"""What ``shoal log`` shows: the history as a table, one round in detail, or a JSON object a round. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shoal.peer.terminal.events import bytes_text, count_text, loss_text, printable
from shoal.peer.terminal.views import jsonable
from shoal.swarm.protocol.identity import peer_id
from shoal.swarm.protocol.messages import RoundPlan, Verdict

WIDE = 120
"""Columns of a terminal from which on everything has a column of its own."""

_NAMED = 4


def log_head(run: str, run_hash: bytes, coordinator_key: bytes) -> RenderableType:
    head = Table.grid(padding=(0, 2))
    head.add_column(style="dim", no_wrap=True)
    head.add_column()
    head.add_row("run", Text.assemble((printable(run), "bold cyan"), (f"  {run_hash.hex()[:16]}", "dim")))
    head.add_row("signed by", Text(peer_id(coordinator_key)))
    return head


def log_table(verdicts: Sequence[Verdict], width: int) -> Table:
    """Checked verdicts, oldest first."""
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
    """What was checked, shown or not; at least one verdict."""
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
        Text(bytes_text(verdict.sent_bytes)),
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
        return "?"  # a clock may say anything
    return moment.strftime("%Y-%m-%d %H:%M:%S" if wide else "%m-%d %H:%M")


def _shares(plan: RoundPlan | None, wide: bool) -> str:
    """The largest first; how many members there are, when not all are named; where it is narrow the largest alone."""
    if plan is None:
        return "–"
    members = sorted(plan.members, key=lambda one: (-one.weight_tokens, one.peer))
    total = sum(one.weight_tokens for one in members)
    shares = [f"{100 * one.weight_tokens / total:.0f}%" for one in members]
    if not wide:
        return f"{len(members)} ≤{shares[0]}"
    named = ", ".join(f"{one.peer[:6]} {share}" for one, share in zip(members[:_NAMED], shares, strict=False))
    return named if len(members) <= _NAMED else f"{len(members)}: {named}, …"


# One round --------------------------------------------------------------------------------------------------


def round_details(verdict: Verdict) -> RenderableType:
    """Who contributed what, who owned which part, and all digests, of a checked verdict."""
    head = Table.grid(padding=(0, 2))
    head.add_column(style="dim", no_wrap=True)
    head.add_column(overflow="fold")
    tokens = f"{count_text(verdict.tokens)}, {count_text(verdict.tokens_total)} in all"
    head.add_row("round", Text.assemble((str(verdict.round), "bold"), "  ", _outcome(verdict, 0)))
    head.add_row("ended", f"{_when(verdict.ended_s, wide=True)} UTC")
    head.add_row("anchor", f"version {verdict.anchor_version}")
    head.add_row("tokens", tokens)
    head.add_row("loss", loss_text(verdict.loss))
    head.add_row("sent", bytes_text(verdict.sent_bytes))
    head.add_row("before", Text(verdict.previous_chain.hex(), style="dim"))
    head.add_row("chain", Text.assemble(verdict.chain.hex(), ("  ✓ signed", "green")))
    plan = verdict.plan
    if plan is None:
        return Group(head, Text("\nnobody had anything to contribute", style="yellow"))
    head.add_row("from", Text.assemble(f"version {plan.anchor_version}, state ", plan.state_digest.hex()))
    return Group(head, Text(), _members(plan), _parts(plan, verdict.digests))


def _members(plan: RoundPlan) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), collapse_padding=True, pad_edge=False)
    for name in ("member", "tokens", "share", "row", "parts", "elements"):
        table.add_column(name, justify="left" if name == "member" else "right", no_wrap=True)
    total = sum(one.weight_tokens for one in plan.members)
    owned = Counter(part.owner for part in plan.parts)
    elements: Counter[int] = Counter()
    for part in plan.parts:
        elements[part.owner] += part.stop - part.start
    for index, one in enumerate(plan.members):
        share = f"{100 * one.weight_tokens / total:.1f}%"
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
    """All of it, digests as hexadecimal, of a checked verdict."""
    return {**jsonable(verdict.model_dump()), "signature_ok": True}
