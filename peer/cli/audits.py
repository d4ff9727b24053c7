"""``shoal log --audit``: who was expelled from a run for a wrong mean, which means made the run go back, and whether
the evidence proves it.

The records are signed by the host, but nobody has to believe it: the evidence in its folder is judged again, by the
code that owners reduce with. Whoever was expelled wrongly is shown right by the same file.
"""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shoal.peer.cli.access import checked_records, host_folder, when
from shoal.peer.cli.host import ORIGIN_FILE
from shoal.peer.history.history_file import unpack_history
from shoal.peer.regular_file import read_regular
from shoal.swarm.coordinator.events import models_in
from shoal.swarm.coordinator.local_journal import JournalFiles, evidence_path
from shoal.swarm.errors import StateFileError, UserError, WireError, WrongEvidence
from shoal.swarm.protocol.evidence import MAX_EVIDENCE_BYTES, evidence_id, unpack_evidence
from shoal.swarm.protocol.run_file import parse_run_file

if TYPE_CHECKING:
    from shoal.swarm.protocol.access_records import AccessRecord


def show_audits(source: str, keys: Path, console: Console, *, check: bool, as_json: bool) -> None:
    """Print the expulsions and wrong means of a run, oldest first.

    ``source`` and ``keys`` as of ``access.show_records``; ``check``: judge the evidence again, for which
    ``source`` has to be the host's folder, or its name.

    Raises ``WrongEvidence`` if some does not prove its record, and ``StateFileError`` for a broken chain of records,
    both after printing."""
    if check and source.startswith("shoal://"):
        raise UserError("--check reads the evidence in the host's folder: give the run's name or that folder")
    host_key, checked, broken = checked_records(source, keys)
    expelled = [one for one in checked if one.evidence is not None]
    found = EvidenceFolder(host_folder(source), host_key).judged(expelled) if check else [""] * len(expelled)
    if as_json:
        for one, word in zip(expelled, found, strict=True):
            print(json.dumps(_as_json(one) | ({"judgement": word} if check else {})))
    else:
        console.print(audit_table(expelled, found))
        for one in expelled:
            if one.kind == "mean disproved":
                off = f"{one.excess:.3g} times what the work of {one.peer} could move"
                console.print(f"round {one.round}: a mean was off by {off}: the run went back")
        wrong = sum(one.kind == "mean disproved" for one in expelled)
        said = f"{len(expelled) - wrong} expulsions{f', and {wrong} means beyond the bound' if wrong else ''}; "
        said += "all hashes, links and signatures are right."
        console.print(Text(said if expelled else "Nobody was expelled.", style="dim"))
    if broken:
        raise StateFileError(f"the chain of access records is broken: {broken}")
    if wrong := sum(word != "guilty" for word in found if check):
        raise WrongEvidence(
            f"{wrong} of {len(found)} records are not proven by the evidence here: restore it from a backup, or "
            "lift them with `shoal allow`"
        )


class EvidenceFolder:
    """Evidence in a host's folder, and what is needed to judge it."""

    def __init__(self, folder: Path, host_key: bytes) -> None:
        """Raises ``StateFileError`` and ``StorageError`` where the folder cannot be read."""
        self._folder, self._host_key = folder, host_key
        try:
            origin = unpack_history(read_regular(folder / ORIGIN_FILE), str(folder / ORIGIN_FILE)).origin
        except OSError as error:
            raise StateFileError(f"{folder / ORIGIN_FILE}: cannot be read: {error}") from error
        self._run = parse_run_file(origin.run_toml)
        with closing(JournalFiles(folder, live=True)) as files:
            self._models = models_in(files.read())

    def judged(self, expelled: list[AccessRecord]) -> list[str]:
        """Return for each record ``guilty``, or why its evidence does not prove it."""
        return [self._judge(one) for one in expelled]

    def _judge(self, record: AccessRecord) -> str:
        from shoal.swarm.averaging.chunk_judge import RunFacts, judge  # imports torch

        assert record.evidence is not None
        path = evidence_path(self._folder, record.evidence.hex())
        try:
            data = read_regular(path, MAX_EVIDENCE_BYTES)
        except FileNotFoundError:
            return "missing"
        except OSError as error:
            return f"cannot be read: {error}"
        if evidence_id(data) != record.evidence:
            return "damaged"
        try:
            stage = unpack_evidence(data).verdict.stage
        except WireError as error:
            return f"void: {error}"
        model = self._models.get(0 if stage is None else stage + 1)
        if model is None:
            return "void: the run has no such model"
        found = judge(data, RunFacts.of(self._run, self._host_key, model.layout, stage))
        if found.word == "guilty" and (found.maker, found.round) != (record.peer, record.round):
            return f"void: it is about {found.maker} in round {found.round}"
        if found.word == "guilty" and record.kind == "mean disproved" and found.excess <= 1.0:
            return "void: the mean is wrong within the bound"
        return found.word if found.word == "guilty" else f"{found.word}: {found.reason}"


def audit_table(expelled: list[AccessRecord], found: list[str]) -> Table:
    """Make the table of expulsions and wrong means, with what the evidence shows where it was judged."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), collapse_padding=True, pad_edge=False)
    for name in ("when (UTC)", "of", "round", "shown by", "evidence"):
        table.add_column(name, no_wrap=True)
    if any(found):
        table.add_column("shows", overflow="fold", min_width=6)
    for one, word in zip(expelled, found, strict=True):
        evidence = one.evidence.hex()[:12] if one.evidence else ""
        shows = [Text(word, style="green" if word == "guilty" else "red")] if any(found) else []
        table.add_row(when(one.at_s)[5:], one.peer, str(one.round), one.accuser, evidence, *shows)
    return table


def _as_json(one: AccessRecord) -> dict[str, object]:
    evidence = one.evidence.hex() if one.evidence else ""
    about = {"kind": one.kind, "excess": one.excess} if one.kind == "mean disproved" else {"kind": one.kind}
    return {
        "peer": one.peer,
        "at_s": one.at_s,
        "round": one.round,
        "accuser": one.accuser,
        "evidence": evidence,
        **about,
    }
