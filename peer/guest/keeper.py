"""Keeper of a guest's terms in a peer's process: looks every second whether the machine is still lent to the run.

``gate`` decides; this reads the files and the machine, and tells the peer.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from shoal.peer.guest.control_files import end_presence, read_pause, show_presence
from shoal.peer.guest.gate import OwnerPause, OwnerWatch, Pause, pause_of
from shoal.peer.guest.machine import MachineObserver
from shoal.peer.guest.month import MonthlyTraffic
from shoal.peer.guest.terms import Power, Terms, TermsFile, TermsText
from shoal.swarm.errors import ShoalError, StorageError
from shoal.swarm.transport.limits.traffic_limits import TrafficLimits

log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
_OBSERVE_EVERY_S = 5.0
_LOWEST_PRIORITY = 19


class GuestKeeper:
    """Keeps one peer's terms; for one thread at a time. ``limits``: of its traffic, with the rates of the terms."""

    def __init__(self, run: str, folder: Path, state: Path, terms_path: Path, options: TermsText) -> None:
        """``folder``: the peer's in the run; ``state``: the one of all runs; ``options``: terms that were given on the
        command line. Raises ``TermsError`` and ``StorageError``."""
        self._run, self.folder = run, folder
        self._terms_path, self._options = terms_path, options
        self._read_at: tuple[int, int] | None = None
        self.terms = Terms()
        self.limits = TrafficLimits()
        self._take_terms()
        self._month = MonthlyTraffic(folder, state)
        self._observer = MachineObserver()
        self._owner = OwnerWatch()
        self._observe_from_s = 0.0
        self._asked: OwnerPause | None = None
        self._state = ""
        self._trouble = self._unseen = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._month.save()
        with suppress(OSError):
            end_presence(self.folder)

    def look(self) -> Pause | None:
        """Return why the machine is not lent to the run now, None if it is."""
        now_s = time.monotonic()
        try:
            self._take_terms()
            self._asked = read_pause(self.folder)
            self._trouble = ""
        except ShoalError as error:  # what applied before goes on
            if str(error) != self._trouble:
                self._trouble = str(error)
                log.warning("%s", error)
        local = datetime.now().astimezone()
        self._month.count(self.limits.total_bytes, f"{local:%Y-%m}", now_s)
        if self.terms.power is not Power.always and now_s >= self._observe_from_s:
            self._observe_from_s = now_s + _OBSERVE_EVERY_S
            self._observe(now_s)
        month = self._month
        moved_bytes = month.of_run_bytes if self.terms.monthly_of_run else month.of_machine_bytes
        return pause_of(self.terms, local, moved_bytes, self._owner, self._asked)

    def _observe(self, now_s: float) -> None:
        try:
            self._owner.observe(self._observer.observe(), now_s)
        except (psutil.Error, OSError, RuntimeError, ValueError) as error:  # what was seen before stands
            if str(error) != self._unseen:
                self._unseen = str(error)
                log.warning("whether the machine is on battery or in use cannot be seen: %s", error)

    def show(self, state: str) -> None:
        """Say what this peer does, for `shoal terms` and `shoal pause`."""
        if state == self._state:
            return
        self._state = state
        try:
            show_presence(self.folder, self._run, state)
        except OSError as error:
            log.warning("%s: `shoal pause` does not find this peer: %s", self.folder, error)

    def wait(self, on_pause: Callable[[Pause], None], on_resume: Callable[[], None]) -> None:
        """Wait until the machine is lent. ``on_pause``: called when it is not, and whenever the reason changes."""
        told: Pause | None = None
        while (pause := self.look()) is not None:
            self.show(f"paused {pause.words}: {pause.reason}")
            if pause != told:
                told = pause
                on_pause(pause)
            time.sleep(LOOK_EVERY_S)
        if told is not None:
            on_resume()
        self.show("running")

    def _take_terms(self) -> None:
        """Read the file of terms if it has changed, and set the rates."""
        try:
            found = os.stat(self._terms_path)
            at = (found.st_mtime_ns, found.st_size)
        except FileNotFoundError:
            at = (0, 0)
        except OSError as error:
            raise StorageError(f"{self._terms_path}: cannot be read: {error}") from error
        if at == self._read_at:
            return
        self._read_at = at
        self.terms = TermsFile.read(self._terms_path).terms_of(self._run, self._options)
        self.limits.upload.bps, self.limits.download.bps = self.terms.max_upload_bps, self.terms.max_download_bps
        if self.terms.nice:
            give_way()


class KeeperThread:
    """Looks at the terms beside the training, until its context ends. ``pause``: why it has stopped the peer."""

    def __init__(self, keeper: GuestKeeper, on_pause: Callable[[Pause], None]) -> None:
        """``on_pause``: called once, on this thread, when the machine is not lent any more."""
        self.pause: Pause | None = None
        self._keeper = keeper
        self._on_pause = on_pause
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shoal-guest", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(LOOK_EVERY_S):
            try:
                found = self._keeper.look()
            except Exception:  # nothing runs here on terms that nobody looks after
                if self.pause is None:
                    log.exception("the owner's terms cannot be looked after")
                found = Pause("its owner's terms cannot be looked after", "they can be again")
            if found is not None and self.pause is None:
                self.pause = found
                self._keeper.show(f"leaving the run, paused {found.words}: {found.reason}")
                self._on_pause(found)


def give_way() -> None:
    """Let all other programs go first, at the processors and the disk. Threads that are started later do as well."""
    me = psutil.Process()
    with suppress(psutil.Error, OSError):
        me.nice(getattr(psutil, "IDLE_PRIORITY_CLASS", _LOWEST_PRIORITY))
    with suppress(psutil.Error, OSError, AttributeError):
        me.ionice(psutil.IOPRIO_CLASS_IDLE)
