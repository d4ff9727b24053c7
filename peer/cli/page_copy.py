"""``shoal page``: a copy of a run's page that needs no server, for any web server or to open from a disk.

Made from a host's folder, also of a run that ended long ago, or by asking a host that still runs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from shoal.peer.cli.host import RUN_FILE, find_host_folder, hosted_status, hosted_verdicts
from shoal.peer.directory.card_writer import write_files
from shoal.peer.directory.places import Place
from shoal.swarm.client.observer import observe
from shoal.swarm.errors import StateFileError, UserError
from shoal.swarm.protocol.invite import Invite, invite_text
from shoal.swarm.protocol.messages import (
    CoordinatorToPeerStatus,
    CoordinatorToPeerTimings,
    CoordinatorToPeerVerdicts,
    PeerToCoordinatorGetStatus,
    PeerToCoordinatorGetTimings,
    PeerToCoordinatorGetVerdicts,
)
from shoal.swarm.protocol.rounds import Verdict
from shoal.swarm.protocol.run_file import RunFile, load_run_file
from shoal.swarm.protocol.timing import MAX_TIMINGS, RoundTiming
from shoal.swarm.system import run_loop
from shoal.swarm.web.files import PageCopy


def copy_page(source: str, out: str) -> str:
    """Write the page's files to a folder, or to a URL of fsspec; returns where. ``source``: a host's folder or an
    invite. Raises ``UserError``, ``StateFileError``, ``StorageError`` and the errors of a join."""
    if Place(out).scheme in ("http", "https"):
        raise UserError(f"--out {out}: nothing can be written over http: name a folder of the web server")
    text = invite_text(source)
    seen = run_loop(_ask(Invite.parse(text))) if text.startswith("shoal://") else _read(text)
    copy = PageCopy()
    copy.take(seen.verdicts, seen.timings)
    write_files(Place(out), copy.files(seen.run, seen.status, time.time()))
    return f"{out.rstrip('/')}/index.html"


class _SeenRun(NamedTuple):
    """``timings``: of the last rounds, which a running host remembers."""

    run: RunFile
    status: CoordinatorToPeerStatus
    verdicts: Sequence[Verdict]
    timings: Sequence[RoundTiming] = ()


def _read(name: str) -> _SeenRun:
    """Read a run that this machine hosts, also while it does."""
    folder, run, status = kept_status(name)
    _, verdicts = hosted_verdicts(folder, has_stages=run.pipeline is not None)
    return _SeenRun(run, status, verdicts)


def kept_status(name: str) -> tuple[Path, RunFile, CoordinatorToPeerStatus]:
    """Read a run's folder, its file and its status, where this machine hosts it; the host may be using the folder.

    Raises ``StateFileError``, and as ``hosted_status``."""
    folder = find_host_folder(name)
    if folder is None:
        raise StateFileError(
            f"{name}: no run that this machine hosts; give an invite, its name, or its folder, ~/.shoal/host/RUN"
        )
    _, run = load_run_file(folder / RUN_FILE)
    status = hosted_status(folder, run)
    # The folder does not tell who is still there, and nobody waits for anything on a copy.
    members = tuple(
        one.model_copy(update={"alive": False, "activity": "", "tokens_per_s": 0.0}) for one in status.members
    )
    return folder, run, status.model_copy(update={"members": members, "outlook": ""})


async def _ask(invite: Invite) -> _SeenRun:
    async with observe(invite) as client:
        pipeline = client.view.pipeline
        stage = len(pipeline.boundaries) - 2 if pipeline else None  # the last one's rounds have the loss
        verdicts: list[Verdict] = []
        while True:
            ask = PeerToCoordinatorGetVerdicts(first=len(verdicts), stage=stage)
            page = await client.ask(ask, CoordinatorToPeerVerdicts)
            verdicts += page.verdicts
            if not page.more or not page.verdicts:
                break
        first = max(0, len(verdicts) - MAX_TIMINGS)
        timed = await client.ask(PeerToCoordinatorGetTimings(first=first), CoordinatorToPeerTimings)
        status = await client.ask(PeerToCoordinatorGetStatus(), CoordinatorToPeerStatus)
        return _SeenRun(client.run_now, status, verdicts, timed.rounds)
