"""Documents of the page: the run's facts, its status, its rounds. Values in, JSON values out.

Everybody may read it, so it has no invite and no address of a volunteer: those in sentences are masked."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable
from operator import itemgetter
from typing import Any

from shoal.swarm.protocol.addresses import parse_ip
from shoal.swarm.protocol.json_values import jsonable, status_json
from shoal.swarm.protocol.messages import CoordinatorToPeerStatus
from shoal.swarm.protocol.rounds import Verdict
from shoal.swarm.protocol.run_file import RunFile
from shoal.swarm.protocol.timing import RoundTiming
from shoal.swarm.protocol.types import WORK_PHASES

COLUMNS = (
    *("round", "state", "ended_s", "tokens", "tokens_total", "loss", "members"),
    *("sent_bytes", "parts", "void", "version", "reason"),
    *("work_s", "gather_s", "exchange_s", "phases", "cost", "energy_j", "waited_for", "waited_s", "why"),
)
"""Columns of ``RoundHistory``. ``state``: committed, aborted or undone; ``version``: of the anchor after the round;
the last ones: where the round's time went, the members' mean seconds by phase in the order of ``WORK_PHASES``, what it
cost, and for whom the others waited, null where that is not known any more."""

_MAX_REASON = 200
_WRITTEN = frozenset({"name", "kind", "activity", "left", "trouble", "wall"})
"""What a member has written, or others about it."""
_ADDRESS = re.compile(
    r"""(?ix) (?P<hidden> shoal://[^\s'"<>]+
    | (?<![\w.-]) (?:[a-z0-9-]{1,63}\.){1,10} [a-z]{2,24} :\d{2,5} (?!\d)  # a name with a port
    )
    | (?<!\w) \[? (?P<ipv6> (?:[0-9a-f]{0,4}:){2,7} [0-9a-f]{0,4} (?:\.\d{1,3}){0,3} ) (?:%[\w-]+)? \]? (?::\d+)? (?!\w)
    | (?<!\d) (?<!\d\.) (?P<ipv4> (?:\d{1,3}\.){3} \d{1,3} ) (?::\d+)? (?!\.?\d)
    """
)
"""Anywhere in a word, as in ``http://10.0.0.1:80/``. What only looks like an IP address is left."""


def without_addresses(text: str) -> str:
    """Mask addresses and invites in words that a member, or the host, has written about a member."""
    return _ADDRESS.sub(_masked, text) if ":" in text or "." in text else text


def _masked(match: re.Match[str]) -> str:
    ip = match["ipv6"] or match["ipv4"]
    hidden = not ip or any(parse_ip(one) is not None for one in (ip, ip.removesuffix(":"), ip.rpartition(":")[0]))
    return "(address)" if hidden else match[0]


def facts(run: RunFile) -> dict[str, Any]:
    """What the run trains and how, from its run file: nothing in it is a secret."""
    goals = {"tokens": run.run.tokens, "rounds": run.run.rounds, "max_s": run.run.max_s}
    return {
        "name": run.run.name,
        "hash": run.hash.hex(),
        "goals": {name: value for name, value in goals.items() if value is not None},
        "recipe": run.recipe.name,
        "settings": jsonable(run.recipe.settings),
        "data": run.data.source,
        "algorithm": run.algorithm,
        "codec": run.averaging.codec,
        "round": {"tokens": run.round.tokens, "max_s": run.round.max_s, "patience_s": run.round.patience_s},
        "elements": run.pins.elements if run.pins is not None else None,
        "admission": run.access.admission,
        "pipeline": run.pipeline is not None,
        "card": run.card.model_dump(),
    }


def run_card(run: RunFile, status: dict[str, Any]) -> dict[str, Any]:
    """A run among others, in short. ``status``: its public status, empty while that is not known."""
    shown = ("phase", "round", "rounds_committed", "tokens_committed", "loss", "elapsed_s", "waits_for", "warning")
    here = [member for member in status.get("members", ()) if member["alive"]]
    return {
        **{
            name: value for name, value in facts(run).items() if name in ("name", "hash", "goals", "recipe", "elements")
        },
        **{name: getattr(run.card, name) for name in ("title", "purpose", "licence")},
        **{name: status.get(name) for name in shown},
        "members": len(here),
        "tokens_per_s": sum(member["tokens_per_s"] for member in here),
    }


def public_status(status: CoordinatorToPeerStatus) -> dict[str, Any]:
    """The status as ``shoal status --json`` has it, without addresses, and with what the run waits for."""
    plain = status_json(status)
    for member in plain["members"]:
        for holder in (member, member["device"]):
            for name in _WRITTEN & holder.keys():
                holder[name] = without_addresses(holder[name])
    for relay in plain["relays"]:
        if relay["peer"] is not None:
            relay["host"], relay["port"] = "", 0
    for holder in (plain, *plain["stages"]):
        holder["outlook"] = without_addresses(holder["outlook"])
    if plain["timing"] is not None and plain["timing"]["path"] is not None:
        plain["timing"]["path"]["text"] = without_addresses(plain["timing"]["path"]["text"])
    evaluation = plain["evaluation"]
    evaluation["newest"] = []  # signatures, which browsers do not check
    for holder in [*evaluation["texts"], *evaluation["figures"]]:
        for one in [*holder.get("texts", ()), *holder.get("sources", ())]:
            one.update({name: without_addresses(one[name]) for name in ("prompt", "text", "name") if name in one})
    plain["stopping"] = without_addresses(plain["stopping"])
    plain["warning"] = without_addresses(plain["warning"])
    plain["journal"] = without_addresses(plain["journal"])
    plain["waits_for"] = without_addresses(waits_for(status))
    return plain


def waits_for(status: CoordinatorToPeerStatus) -> str:
    """Say in a sentence what the run waits for; empty while it waits for nothing."""
    here = [member for member in status.members if member.alive]
    if status.phase == "ended":
        return "The run has ended."
    if status.journal:
        return f"Verdicts wait for the coordinator's journal, members train on: {status.journal}"
    if status.outlook:
        return status.outlook
    for number, stage in enumerate(status.stages):
        if stage.outlook:
            return f"Stage {number}: {stage.outlook}"
    if not here:
        return "Nobody is here: the run goes on as soon as somebody joins."
    walled = [member for member in here if member.wall]
    if walled and len(walled) == len(here):
        return walled[0].wall
    if not any(member.synced for member in here):
        return f"{_people(len(here))} here, and {'gets' if len(here) == 1 else 'get'} the state of the model."
    if status.phase == "waiting":
        return "The next round begins when enough members hold the state of the model."
    return ""


def _people(number: int) -> str:
    return "One member is" if number == 1 else f"{number} members are"


class RoundHistory:
    """All rounds of a run in columns, oldest first. Rounds that a later one has undone are marked so."""

    def __init__(self) -> None:
        self.rows: list[list[Any]] = []
        self.undone = 0

    @property
    def next_round(self) -> int:
        """The first round that is not here yet."""
        return self.rows[-1][0] + 1 if self.rows else 0

    def take(self, verdicts: Iterable[Verdict], timings: Iterable[RoundTiming] = ()) -> None:
        """Append verdicts, with the timings of some of them; those of rounds that are here already are left out."""
        timed = {timing.round: timing for timing in timings}
        for verdict in verdicts:
            if verdict.round < self.next_round:
                continue
            before = self.rows[-1][COLUMNS.index("version")] if self.rows else 0
            if verdict.anchor_version < before:
                self._undo(verdict.anchor_version)
            self.rows.append([*_row(verdict), *_timed(timed.get(verdict.round))])

    def _undo(self, version: int) -> None:
        """Mark the committed rounds that made versions above this one."""
        state, made = COLUMNS.index("state"), COLUMNS.index("version")
        for row in reversed(self.rows):
            if row[state] == "committed":
                if row[made] <= version:
                    return
                row[state] = "undone"
                self.undone += 1

    def since(self, first: int, limit: int) -> dict[str, list[Any]]:
        """At most ``limit`` rows from round ``first`` on, by column."""
        start = bisect_left(self.rows, first, key=itemgetter(0))
        kept = self.rows[start : start + limit]
        return {name: [row[number] for row in kept] for number, name in enumerate(COLUMNS)}


def _row(verdict: Verdict) -> list[Any]:
    return [
        verdict.round,
        "committed" if verdict.committed else "aborted",
        round(verdict.ended_s, 3),
        verdict.tokens,
        verdict.tokens_total,
        verdict.loss,
        len(verdict.plan.members) if verdict.plan is not None else 0,
        verdict.sent_bytes,
        len(verdict.digests),
        sum(digest is None for digest in verdict.digests),
        verdict.anchor_version,
        without_addresses(verdict.reason)[:_MAX_REASON],
    ]


def _timed(timing: RoundTiming | None) -> list[Any]:
    if timing is None:
        return [None] * 9
    mean = None if timing.mean is None else [round(timing.mean.of(phase), 2) for phase in WORK_PHASES]
    seconds = [round(one, 3) for one in (timing.work_s, timing.gather_s, timing.exchange_s)]
    known = [*seconds, mean, timing.cost, timing.energy_j]
    path = timing.path
    if path is None:
        return [*known, None, None, ""]
    return [*known, path.peer, round(path.extra_s, 3), without_addresses(path.text)[:_MAX_REASON]]


def round_detail(verdict: Verdict) -> dict[str, Any]:
    """Who took part in a round, with what weight, and which settings an amendment has changed for it."""
    members = verdict.plan.members if verdict.plan is not None else ()
    return {
        "round": verdict.round,
        "chain": verdict.chain.hex(),
        "members": [{"peer": one.peer, "tokens": one.weight_tokens, "weight": one.weight} for one in members],
        "amended": dict(verdict.amended),
    }
