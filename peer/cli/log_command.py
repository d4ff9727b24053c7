"""What ``shoal log`` does: check the chain while it is shown, and fail loudly where it is broken."""

from __future__ import annotations

import json

from rich.console import Console
from rich.text import Text

from shoal.peer.cli.log_sources import Log
from shoal.peer.cli.log_view import log_foot, log_head, log_table, round_details, verdict_json
from shoal.peer.history.chain import ChainCheck
from shoal.swarm.errors import StateFileError, UserError
from shoal.swarm.protocol.messages import Verdict


def show_log(log: Log, console: Console, last: int = 0, round_number: int | None = None, *, json_lines: bool) -> None:
    """Print the last so many rounds (0: all), or one in detail. All are checked, whatever is shown.

    Raises ``StateFileError`` for a broken chain, once what comes before is printed, and ``UserError`` for a round
    that is not there.
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
    """The verdicts that hold, and why no more do."""
    check = ChainCheck(log.run_hash, log.coordinator_key, scope=log.scope, whole=log.whole)
    checked: list[Verdict] = []
    try:
        for verdict in log.verdicts:
            check.take(verdict)
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
