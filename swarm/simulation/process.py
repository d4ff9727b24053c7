"""A simulated machine's processes, one for each time in which it is there, and the sums of who was there."""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from shoal.swarm.protocol.identity import CurveKeys, Identity
from shoal.swarm.protocol.types import Address, RosterEntry
from shoal.swarm.simulation.costs import START_S
from shoal.swarm.simulation.event_queue import EventQueue
from shoal.swarm.simulation.traces import Machine, Session

RETRY_S = 30.0
"""A machine that finds no place asks again about so often."""

PHASES = ("compute", "data", "packing", "exchange", "waiting", "applying", "checkpoint")


class Attendance:
    """Sums of which machines are there. ``possible_tokens``: that they would have trained on in that time alone."""

    def __init__(self, clock: EventQueue) -> None:
        self.most = 0
        self.possible_tokens = self.price = self.member_s = 0.0
        self._clock = clock
        self._alive = 0
        self._since_s = 0.0

    def count(self, process: MachineProcess, change: int) -> None:
        """Note that a machine has come (1) or gone (-1)."""
        now_s = self._clock.now_s
        self.member_s += self._alive * (now_s - self._since_s)
        self._since_s = now_s
        self._alive += change
        self.most = max(self.most, self._alive)
        if change > 0:
            process.since_s = now_s
            return
        seconds = now_s - process.since_s
        process.there_s += seconds
        self.possible_tokens += seconds * process.speed_tps
        self.price += seconds / 3600 * process.machine.price_per_hour


class MachineProcess(ABC):
    """One machine of a trace, through all its sessions, each with a process of its own that joins the run."""

    def __init__(
        self,
        clock: EventQueue,
        attendance: Attendance,
        machine: Machine,
        speed_tps: float,
        number: int,
        seed: int,
        relays: tuple[Address, ...],
        farewell_s: float,
    ) -> None:
        """``speed_tps``: of its training; ``relays``: of the run; ``farewell_s``: the longest that a machine which says
        goodbye stays for the end of a round."""
        self.machine = machine
        self.speed_tps = speed_tps
        self.up_bytes = self.down_bytes = self.relayed_bytes = 0.0
        self.there_s = self.since_s = 0.0
        """Time in all sessions, and start of the present one."""
        self.spent_s = dict.fromkeys(PHASES, 0.0)
        draw = random.Random(f"{seed} member {number}")
        self.identity = Identity(Ed25519PrivateKey.from_private_bytes(draw.randbytes(32)))
        self.peer = self.identity.peer_id
        self.draw = draw
        self.life = 0
        """Number of the present process; what an earlier one has scheduled does nothing."""
        self.alive = self.joined = self.is_leaving = False
        self._clock, self._attendance = clock, attendance
        self._relays, self._farewell_s = relays, farewell_s
        self._sessions: Iterator[Session] = machine.times(draw)
        self._session: Session | None = None
        self._keys = CurveKeys(bytes(32), b"")

    # What a kind of member does -----------------------------------------------------------------------------

    @abstractmethod
    def reset(self) -> None:
        """Forget what the process before had in memory."""

    @abstractmethod
    def enter_run(self) -> bool:
        """Join; False if the run has no place now."""

    @abstractmethod
    def is_in_round(self) -> bool:
        """Whether a round is about to end in which this machine takes part."""

    @abstractmethod
    def leave_run(self, *, says_goodbye: bool) -> None:
        """The process ends. ``says_goodbye``: the coordinator is told."""

    # Sessions -----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Wait for the first session."""
        self._next_session()

    def end(self) -> None:
        """The simulation is over."""
        if self.alive:
            self._attendance.count(self, -1)
        self.life += 1

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        """Call in a while, if this process still runs then."""
        life = self.life

        def due() -> None:
            if self.life == life:
                call()

        self._clock.after(seconds, due)

    def go(self) -> None:
        """End the process."""
        assert self._session is not None
        self.leave_run(says_goodbye=self._session.says_goodbye)
        self.life += 1
        self.alive = self.joined = False
        self._attendance.count(self, -1)
        self._next_session()

    def join_again(self) -> None:
        """Begin anew, as the coordinator has removed this member."""
        self.joined = False
        self.life += 1
        self._await_stop()
        self.later(self.draw.uniform(0.0, 1.0), self._join)

    def _next_session(self) -> None:
        self._session = next(self._sessions, None)
        if self._session is not None:
            self._clock.at(self._session.start_s, self._start)

    def _await_stop(self) -> None:
        assert self._session is not None
        if math.isfinite(self._session.stop_s):
            self.later(self._session.stop_s - self._clock.now_s, self._stop)

    def _start(self) -> None:
        self.life += 1
        self.alive, self.joined, self.is_leaving = True, False, False
        self.reset()
        self._keys = CurveKeys(self.draw.randbytes(32), b"")
        self._attendance.count(self, 1)
        self._await_stop()
        self.later(START_S, self._join)

    def _stop(self) -> None:
        """The session ends: a machine that says so finishes a round that is about to end."""
        assert self._session is not None
        if self._session.says_goodbye and self.joined and self.is_in_round() and not self.is_leaving:
            self.is_leaving = True
            self.later(self._farewell_s, self.go)
            return
        self.go()

    def _join(self) -> None:
        if not self.enter_run():
            self.later(self.draw.uniform(0.5, 1.5) * RETRY_S, self._join)

    @property
    def entry(self) -> RosterEntry:
        return RosterEntry(
            peer=self.peer,
            certificate=self.identity.certify(self._keys),
            name=self.machine.name[:64],
            role="trainer",
            addresses=(Address(host="192.0.2.1", control_port=7070, data_port=7071), *self._relays),
            reachable=self.machine.reachable,
        )
