"""``shoal join`` over one run after the other: waits until the machine is lent, trains, and says where the model is.

Nothing here imports torch before a run is joined: a peer that waits for its owner's terms stays small."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import typer

from shoal.peer.cli.guest import keeper_of, wait_until_lent
from shoal.peer.cli.runs import is_named, named_invite
from shoal.peer.integrations.trackers import TrackedRun, Tracker, TrackerChoice
from shoal.peer.options import TERMINATED, SessionOptions
from shoal.peer.terminal.reporter import Reporter
from shoal.swarm.errors import RunAmended, RunEnded, UnknownRun
from shoal.swarm.protocol.invite import Invite

if TYPE_CHECKING:
    from rich.console import Console

    from shoal.peer.cli.join import Work
    from shoal.peer.event_schema import Event
    from shoal.peer.guest.keeper import GuestKeeper
    from shoal.peer.guest.spot import SpotNotices
    from shoal.peer.guest.terms import TermsText
    from shoal.peer.member.connection import RunConnection
    from shoal.peer.terminal.snapshot import Watched
    from shoal.swarm.web.server import PageServer

log = logging.getLogger(__name__)

RESUME_AT, RESUME_AS = "--resume-at", "--resume-as"
"""Options of a process that goes on for one that has paused."""


@dataclass(frozen=True)
class Compute:
    """Limits of training, for a ``Work``. ``host_bytes``, ``device_bytes``: most memory, None for all;
    ``threads``: 0 for all."""

    device: str = "auto"
    devices: str = ""
    tensor_parallel: int = 1
    host_bytes: int | None = None
    device_bytes: int | None = None
    threads: int = 0

    def work(self) -> Work:
        """Return the limits of training."""
        from shoal.peer.cli.join import Work
        from shoal.peer.training.device import MemoryLimits

        limits = MemoryLimits(self.host_bytes, self.device_bytes)
        return Work(self.device, self.devices, self.tensor_parallel, limits, self.threads or None)


@dataclass(frozen=True)
class Reports:
    """Views of a peer. ``log_json``: file of events; ``trackers``: of metrics; ``web``: where to serve a page,
    ``metrics``: where to serve metrics alone."""

    console: Console
    log_json: Path | None = None
    trackers: Sequence[TrackerChoice] = ()
    web: tuple[str, int] | None = None
    metrics: tuple[str, int] | None = None


@dataclass(frozen=True)
class Lending:
    """Terms of lending. ``terms``: that were given for this process; ``notices``: of a spot machine's provider;
    ``accept``: hash of a run or study that its owner agrees to without being asked."""

    terms: TermsText = field(default_factory=dict)
    notices: SpotNotices | None = None
    accept: str = ""


@dataclass(frozen=True)
class Copies:
    """Copies of checkpoints: ``to`` a URL, empty for none, ``every`` so many rounds."""

    to: str = ""
    every: int = 1


class _Paused(Exception):
    """The owner's terms have ended a membership, which goes on when they allow it."""


@dataclass(frozen=True)
class Joiner:
    """Joins runs, one after the other. ``options``: of each membership, without what a run's keeper adds."""

    options: SessionOptions
    compute: Compute
    copies: Copies
    lending: Lending
    reports: Reports
    directories: list[str] | None = None

    def join_all(self, runs: Sequence[str], resume_at: int = 0, resume_as: str = "") -> None:
        """Join ``runs``, invites or names, from number ``resume_at`` on, as the invite ``resume_as`` if there is one.

        Raises the errors of the last one."""
        for number, one in enumerate(runs[resume_at:], resume_at):
            # Who has paused goes on with the run that it was in, whatever has that name in the directories now.
            known = resume_as if number == resume_at else ""
            invite = Invite.parse(known) if known else named_invite(one, self.directories) or Invite.read(one)
            try:
                if not (self._join_study(invite) if invite.is_study else self._join_run(invite, self.lending.accept)):
                    return
            except (RunEnded, RunAmended) as error:
                if number + 1 == len(runs):
                    raise
                log.info("%s; joining the next one", error)
            except _Paused:
                begin_anew(number, str(invite) if is_named(one) else "")

    def _join_study(self, invite: Invite) -> bool:
        """Take part in the trials of a study until it ends; as ``_join_run``."""
        from shoal.peer.cli.consent import check_accepted
        from shoal.peer.trials.door import trials_to_join

        if self.lending.accept:
            check_accepted(self.lending.accept, invite.run_hash.hex())
        for trial in trials_to_join(invite):
            try:
                if not self._join_run(trial, trial.run_hash.hex() if self.lending.accept else ""):
                    return False
            except (RunEnded, UnknownRun) as error:
                log.info("%s; looking for the next trial", error)
        return True

    def _join_run(self, invite: Invite, accept: str) -> bool:
        """Take part in one run until it ends; returns whether to go on to the next one. Raises ``_Paused``, and
        ``RunAmended`` where the owner does not agree to what has become of the run."""
        options, notices = self.options, self.lending.notices
        farewells: list[str] = []
        while True:
            try:
                with (
                    Reporter(self.reports.console, self.reports.log_json) as reporter,
                    keeper_of(invite, options.identity, options.state, self.lending.terms) as keeper,
                ):
                    if not wait_until_lent(keeper, invite.run, reporter.on_event):
                        return False
                    if notices is not None and (notice := notices.look()):
                        log.warning("the provider takes this machine back (%s): this peer does not join", notice)
                        raise typer.Exit(TERMINATED)
                    return self._train(invite, accept, keeper, reporter, farewells)
            except RunAmended as amended:
                from shoal.peer.cli.consent import Consent

                Consent(self.reports.console).ask_again(amended, invite.run_hash, keeper.folder)
            finally:  # below the panel, which has ended now
                for words in farewells:
                    self.reports.console.print(words, markup=False, highlight=False, soft_wrap=True)
                farewells.clear()

    def _train(
        self, invite: Invite, accept: str, keeper: GuestKeeper, reporter: Reporter, farewells: list[str]
    ) -> bool:
        from shoal.peer.checkpoints.manifest import MANIFEST
        from shoal.peer.cli.consent import Consent, agreed_ends
        from shoal.peer.cli.join import Ending, run_member
        from shoal.peer.cli.restore import parse_copy_to
        from shoal.peer.terminal.views import farewell

        trackers: list[Tracker] = []
        joined: list[RunConnection] = []
        console = self.reports.console

        def on_event(event: Event) -> None:
            reporter.on_event(event)
            for tracker in trackers:
                tracker.on_event(event)

        def watch(connection: RunConnection, peer: Watched) -> None:
            reporter.watch(peer)
            joined.append(connection)
            about = TrackedRun.of(connection.run_file, connection.peer)
            trackers.extend(ending.enter_context(Tracker(choice, about)) for choice in self.reports.trackers)
            if self.reports.web is not None or self.reports.metrics is not None:
                _serve(self.reports, connection, peer, ending)

        options = replace(
            self.options,
            copy_to=parse_copy_to(self.copies.to, self.copies.every, self.options.checkpoints),
            agreed_ends=agreed_ends(keeper.folder, invite.run_hash),
            data=replace(self.options.data, traffic=keeper.limits),
            limits=keeper.limits,
            on_event=on_event,
        )
        with ExitStack() as ending:
            consent, notices = Consent(console, accept), self.lending.notices
            how = run_member(str(invite), options, self.compute.work(), consent, keeper, watch, notices)
        for connection in joined if how is not Ending.PAUSED else ():
            folder = options.folder(connection.run_file, connection.peer)
            has_model = any(folder.glob(f"**/{MANIFEST}"))
            # Ctrl-C may come while the model is served, after the run's end.
            is_over = how is Ending.RUN_ENDED or connection.members.run.client.view.phase == "ended"
            farewells.append(farewell(connection.run_file.run.name, folder, ended=is_over, has_model=has_model))
        if how is Ending.TERMINATED:
            raise typer.Exit(TERMINATED)
        if how is Ending.PAUSED:
            raise _Paused
        return how is Ending.RUN_ENDED


def _serve(reports: Reports, connection: RunConnection, peer: Watched, ending: ExitStack) -> None:
    """Serve a page for browsers, and metrics, as far as they are wanted, until ``ending``."""
    from shoal.peer.cli.host import metrics_server, page_server
    from shoal.peer.member.page_source import JoinedPage, network_loop

    source, loop = JoinedPage(connection, peer), network_loop(connection)

    def show(server: AbstractContextManager[PageServer], what: str) -> None:
        pages = ending.enter_context(server)
        ending.enter_context(pages.showing(source, loop))
        reports.console.print(f"{what:8}{pages.url}", highlight=False, soft_wrap=True)

    if reports.web is not None:
        show(page_server(reports.web), "Page")
    if reports.metrics is not None:
        show(metrics_server(reports.metrics), "Metrics")


def begin_anew(resume_at: int, resume_as: str) -> NoReturn:
    """Replace this process by one of the same command, which waits without the memory that training has taken.

    ``resume_at``: number of the run that it joins, of those that were given; ``resume_as``: its invite, for one that
    was given by name. Such an invite is public, so others on this machine may read it."""
    arguments = sys.argv[1:]
    for option in (RESUME_AT, RESUME_AS):
        if option in arguments:
            at = arguments.index(option)
            del arguments[at : at + 2]
    arguments += [RESUME_AT, str(resume_at), *([RESUME_AS, resume_as] if resume_as else [])]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-m", "shoal.peer", *arguments])
