"""A simulated member: it asks the coordinator what a real one asks, and lets time pass instead of working.

It trains on leased samples in steps of ``inner.batch_samples`` at its machine's speed, closes its work at the last step
that fits before the announced moment, packs it, takes part in the exchange, applies the mean, and goes on. What it
knows of the run are the views that reach it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from shoal.swarm.errors import LinkError
from shoal.swarm.protocol.identity import CurveKeys, Identity
from shoal.swarm.protocol.messages import (
    PeerToCoordinatorHeartbeat,
    PeerToCoordinatorRequestLease,
    PeerToCoordinatorRoundReady,
    PeerToCoordinatorRoundReport,
)
from shoal.swarm.protocol.rounds import RoundPlan
from shoal.swarm.protocol.types import Address, Headway, Phase, RosterEntry
from shoal.swarm.sample_ranges import Ranges, count, merge, subtract, to_wire
from shoal.swarm.simulation.costs import START_S
from shoal.swarm.simulation.traces import Machine, Session

if TYPE_CHECKING:
    from shoal.swarm.simulation.run import SimulatedRun

_RETRY_S = 30.0
"""A machine that finds no place asks again about so often."""

_NOT_PREPARED, _PREPARED = Headway(), Headway(prepared=1.0)

PHASES = ("compute", "data", "packing", "exchange", "waiting", "applying", "checkpoint")


@dataclass(frozen=True)
class News:
    """News of a view for a member. ``planned``: by peer, the index in the plan; ``committed``: of the last round."""

    round: int
    phase: Phase
    closes_s: float
    anchor_version: int
    plan: RoundPlan | None
    planned: dict[str, int]
    committed: bool

    @property
    def moment(self) -> tuple[int, str]:
        return self.round, self.phase


class LightMember:
    """One machine of a trace, through all its sessions."""

    def __init__(self, run: SimulatedRun, number: int, machine: Machine, seed: int) -> None:
        self.machine = machine
        self.speed_tps = machine.speed(run.elements)
        self.up_bytes = self.down_bytes = self.relayed_bytes = 0.0
        self.there_s = self.since_s = 0.0
        """Time in all sessions, and start of the present one."""
        self.spent_s = dict.fromkeys(PHASES, 0.0)
        draw = random.Random(f"{seed} member {number}")
        self.identity = Identity(Ed25519PrivateKey.from_private_bytes(draw.randbytes(32)))
        self.peer = self.identity.peer_id
        self._run = run
        self._draw = draw
        self._sessions: Iterator[Session] = machine.times(draw)
        self._session: Session | None = None
        self.life = 0
        """Number of the present process; what an earlier one has scheduled does nothing."""
        self.alive = self.joined = False
        self.version: int | None = None
        self.kept_version: int | None = None
        """Version of the state that the machine has on its disk between sessions."""
        self.round = 0
        self.activity = "joining"
        self.chunks_moved = 0
        self.roster_version = -1
        self.verdict_round = -1
        self._news: News | None = None
        self._held: Ranges = []
        """Leased samples, in the order in which they are trained on."""
        self._offered: Ranges = []
        self._done_before = 0
        self._busy_from_s: float | None = None
        self._closes: int = 0
        self._waits_since_s: float | None = None
        self._holds_results = False
        self._exchanging = False
        self._is_leaving = False
        self._step_samples = run.run.inner.batch_samples
        self._step_s = self._step_samples * run.tokens_per_sample / self.speed_tps

    # Sessions -----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Wait for the first session."""
        self._next_session()

    def _next_session(self) -> None:
        self._session = next(self._sessions, None)
        if self._session is not None:
            self._run.clock.at(self._session.start_s, self._start)

    def _later(self, seconds: float, call: Callable[[], None]) -> None:
        """Call in a while, if this process still runs then."""
        life = self.life

        def due() -> None:
            if self.life == life:
                call()

        self._run.clock.after(seconds, due)

    def _start(self) -> None:
        assert self._session is not None
        self.life += 1
        self.alive, self.joined = True, False
        self.version, self.activity, self._news = None, "joining", None
        self._held, self._offered, self._done_before, self._busy_from_s = [], [], 0, None
        self._exchanging = self._holds_results = self._is_leaving = False
        self.chunks_moved, self.roster_version, self.verdict_round = 0, -1, -1
        self._started_s = self._run.clock.now_s
        self._keys = CurveKeys(self._draw.randbytes(32), b"")
        self._run.count_alive(self, 1)
        if math.isfinite(self._session.stop_s):
            self._later(self._session.stop_s - self._run.clock.now_s, self._stop)
        self._later(START_S, self._join)

    def _stop(self) -> None:
        """The session ends: a machine that says so finishes a round that is about to end."""
        assert self._session is not None
        is_in_round = self._news is not None and self._news.phase in ("closing", "averaging") and self.joined
        if self._session.says_goodbye and is_in_round and not self._is_leaving:
            self._is_leaving = True
            self._later(self._run.deadlines.report_s, self._go)
            return
        self._go()

    def _go(self) -> None:
        assert self._session is not None
        if self._session.says_goodbye and self.joined:
            self._run.leave(self)
        elif self._exchanging:
            self._run.died_in_exchange(self)
        self.life += 1
        self.kept_version = self.version if self.version is not None else self.kept_version
        self.alive = self.joined = False
        self._run.count_alive(self, -1)
        self._next_session()

    def end(self) -> None:
        """The simulation is over."""
        if self.alive:
            self._run.count_alive(self, -1)
        self.life += 1

    # Joining ------------------------------------------------------------------------------------------------

    @property
    def entry(self) -> RosterEntry:
        return RosterEntry(
            peer=self.peer,
            certificate=self.identity.certify(self._keys),
            name=self.machine.name[:64],
            role="trainer",
            addresses=(Address(host="192.0.2.1", control_port=7070, data_port=7071), *self._run.relays),
            reachable=self.machine.reachable,
        )

    def _join(self) -> None:
        if not self._run.join(self):
            self._later(self._draw.uniform(0.5, 1.5) * _RETRY_S, self._join)
            return
        self.joined = True
        self._news = self._run.news()
        self.round = self._news.round
        self._beat()
        self._obtain_state()

    def _obtain_state(self) -> None:
        """Fetch the run's state, or the rounds that the state on the disk lacks."""
        self.activity, self.version = "fetching state", None
        self._held, self._offered, self._done_before, self._busy_from_s = [], [], 0, None
        self._exchanging = False
        wanted = self._run.scope.anchor_version
        if wanted == 0 or self.kept_version == wanted:
            self._hold(wanted)
            return
        if self._run.is_without_state():
            self._later(self._run.deadlines.heartbeat_s, self._obtain_state)
            return
        size = self._run.state_bytes
        if self.kept_version is not None and self.kept_version < wanted:
            size = min(size, (wanted - self.kept_version) * self._run.result_bytes)
        seconds = self._run.fetch_s(self, size)
        self.down_bytes += size
        self._run.served(size)
        self.kept_version = wanted

        def fetched() -> None:
            if self._run.scope.anchor_version == wanted:
                self._hold(wanted)
            else:  # rounds were committed meanwhile
                self._obtain_state()

        self._later(seconds, fetched)

    def _hold(self, version: int) -> None:
        self.version = self.kept_version = version
        self.round = self._run.scope.round.number
        self.activity = "training"
        self._beat_now()
        self._waits_since_s = self._run.clock.now_s
        self._later(2 * self.machine.latency_s, self._ask_lease)

    # Heartbeats ---------------------------------------------------------------------------------------------

    def _beat(self) -> None:
        self._beat_now(times=self._run.beats_at_once)
        self._later(self._run.beat_s, self._beat)

    def _beat_now(self, times: float = 1.0) -> None:
        if not self.joined:
            return
        if self._exchanging:
            self.chunks_moved += 1
        news = self._run.heartbeat(self, times)
        if news is None:  # the coordinator had removed it: it joins again, and its work is others'
            self.joined = False
            self.life += 1
            self.version = None
            if self._session is not None and math.isfinite(self._session.stop_s):
                self._later(self._session.stop_s - self._run.clock.now_s, self._stop)
            self._later(self._draw.uniform(0.0, 1.0), self._join)
        elif self._news is None or news.moment != self._news.moment:
            self._later(2 * self.machine.latency_s, lambda: self.hear(news))

    def heartbeat(self) -> PeerToCoordinatorHeartbeat:
        done, step_s = self.tokens_done, self._step_s
        version = self.version
        return PeerToCoordinatorHeartbeat(
            round=self.round,
            activity=self.activity,
            anchor_version=version,
            state_digest=None if version is None else self._run.digest(version),
            tokens_done=done,
            tokens_per_s=self.speed_tps if version is not None else 0.0,
            step_s=step_s if version is not None else 0.0,
            loss=None,
            chunks_moved=self.chunks_moved,
            bytes_sent=int(self.up_bytes),
            bytes_received=int(self.down_bytes),
            bandwidth_bps=min(self.machine.up_bps, self.machine.down_bps),
            roster_version=max(0, self.roster_version),
            headway=_NOT_PREPARED if version is None else _PREPARED,
        )

    # Work ---------------------------------------------------------------------------------------------------

    @property
    def samples_done(self) -> int:
        """Samples trained on and not offered yet."""
        if self._busy_from_s is None:
            return self._done_before
        steps = math.floor((self._run.clock.now_s - self._busy_from_s) / self._step_s + 1e-9)
        return min(self._done_before + steps * self._step_samples, count(self._held))

    @property
    def tokens_done(self) -> int:
        return self.samples_done * self._run.tokens_per_sample

    def _ask_lease(self) -> None:
        """Ask for samples for a while, as a training loop does that has none left."""
        run = self._run
        if not self.joined or self.version is None:
            return
        news = self._news
        if news is not None and self._must_close(news):
            self._close()
            return
        per_lease = self.speed_tps * run.lease_s / run.tokens_per_sample / self._step_samples
        samples = max(1, round(per_lease)) * self._step_samples
        ask = PeerToCoordinatorRequestLease(round=self.round, samples=samples, tokens_done=self.tokens_done)
        ranges = run.lease(self, ask)
        if not ranges:
            self.activity = "waiting"
            self._later(0.5 * run.beats_at_once, self._ask_lease)
            return
        self.activity = "training"
        self._later(2 * self.machine.latency_s, lambda: self._work(ranges))

    def _work(self, ranges: Ranges) -> None:
        self._held += ranges
        self._spend_waiting()
        self._busy_from_s = self._run.clock.now_s
        self._plan_stop()

    def _plan_stop(self) -> None:
        """Schedule the end of the present work: at the end of the lease, or at the last step before the closing."""
        assert self._busy_from_s is not None
        left = count(self._held) - self._done_before
        ends_s = self._busy_from_s + math.ceil(left / self._step_samples) * self._step_s
        self._closes += 1
        mine = self._closes
        news, stop_s = self._news, ends_s
        if news is not None and news.round == self.round and news.phase == "closing":
            now_s = self._run.clock.now_s
            begun = math.ceil((now_s - self._busy_from_s) / self._step_s - 1e-9)
            fits = math.floor((news.closes_s - self._busy_from_s) / self._step_s + 1e-9)
            stop_s = min(ends_s, self._busy_from_s + max(begun, fits) * self._step_s)

        def stop() -> None:
            if self._closes == mine:
                self._stop_work()

        self._later(stop_s - self._run.clock.now_s, stop)

    def _stop_work(self) -> None:
        """A lease is done, or the round is due."""
        self._done_before = self.samples_done
        assert self._busy_from_s is not None
        self.spent_s["compute"] += self._run.clock.now_s - self._busy_from_s
        self._busy_from_s = None
        self._waits_since_s = self._run.clock.now_s
        news = self._news
        if news is not None and self._must_close(news):
            self._close()
        elif self._done_before < count(self._held):
            self._work([])
        else:
            self._ask_lease()

    def _must_close(self, news: News) -> bool:
        if self._offered and self._run.run.averaging.overlap and news.round < self.round:
            return False
        if news.round != self.round or news.phase == "averaging":
            return True
        return news.phase == "closing" and self._run.clock.now_s + self._step_s > news.closes_s

    def _spend_waiting(self) -> None:
        if self._waits_since_s is not None:
            self.spent_s["waiting"] += self._run.clock.now_s - self._waits_since_s
        self._waits_since_s = None

    # Rounds -------------------------------------------------------------------------------------------------

    def hear(self, news: News) -> None:
        """Take in a view."""
        before = self._news
        if not self.joined or (before is not None and news.round < before.round):
            return
        self._news = news
        if self.version is None:
            return
        if news.anchor_version < self.version:  # the run went back behind this state
            self.kept_version = None
            self._obtain_state()
            return
        if before is not None and news.round > before.round:
            self._conclude(news)
        elif news.phase == "closing" and self._busy_from_s is not None:
            self._plan_stop()
        elif news.phase == "averaging":
            self._exchange(news)
        elif news.phase == "training" and self._offered and before is not None and before.phase == "closing":
            self._take_back()  # the round was reopened: samples of its batch had been lost

    def _close(self) -> None:
        """Offer the work to the round."""
        run, news = self._run, self._news
        assert news is not None
        if news.round != self.round or news.phase != "closing":
            if not run.run.averaging.overlap and news.phase == "averaging":
                return  # too late for this round: the work counts in the next one
            self.round = news.round
            self._later(0.5, self._ask_lease)
            return
        done = self.samples_done
        if not done or self._offered:
            return
        self._offered, left = _first(self._held, done), subtract(merge(self._held), merge(_first(self._held, done)))
        self._held, self._done_before = left, 0
        self.activity = "ready"
        pack_s = run.pack_s
        self.spent_s["packing"] += pack_s
        self._later(pack_s + self.machine.latency_s, self._ready)

    def _ready(self) -> None:
        if not self.joined or self.version is None or not self._offered:
            return
        self._waits_since_s = self._run.clock.now_s
        number = self.round
        ready = PeerToCoordinatorRoundReady(
            round=number,
            anchor_version=self.version,
            state_digest=self._run.digest(self.version),
            weight_tokens=count(self._offered) * self._run.tokens_per_sample,
            ranges=to_wire(self._offered),
            loss=1.0,
            norms=self._run.norms,
        )
        try:
            news = self._run.ready(self, ready)
        except LinkError:
            self._obtain_state()
            return
        if self._run.run.averaging.overlap:
            self.round = number + 1
            self._later(0.0, self._ask_lease)
        if news.moment != (number, "closing"):
            self._later(self.machine.latency_s, lambda: self.hear(news))

    def _exchange(self, news: News) -> None:
        run = self._run
        index = news.planned.get(self.peer)
        if index is None or not self._offered or self._exchanging:
            return
        self._spend_waiting()
        self._exchanging, self.activity = True, "averaging"
        self._exchange_from_s = run.clock.now_s
        number, plan = news.round, news.plan
        assert plan is not None

        def look() -> None:
            if not self._exchanging or run.scope.round.number != number:
                return
            left_s = run.exchange_ends_s(index) - run.clock.now_s
            if left_s > 1e-9:
                self._later(left_s, look)
                return
            self._exchanging = False
            self._holds_results = True
            self.count_traffic(index)
            self.spent_s["exchange"] += run.clock.now_s - self._exchange_from_s
            self._waits_since_s = run.clock.now_s
            self._later(self.machine.latency_s, lambda: self._report(run.report_of(index)))

        self._later(max(0.0, run.exchange_ends_s(index) - run.clock.now_s), look)

    def count_traffic(self, index: int) -> None:
        sent, received, relayed = self._run.moved(index)
        self.up_bytes += sent
        self.down_bytes += received
        self.relayed_bytes += relayed

    def _report(self, report: PeerToCoordinatorRoundReport) -> None:
        if not self.joined:
            return
        news = self._run.report(self, report)
        if self._news is not None and news.moment != self._news.moment:
            self._later(self.machine.latency_s, lambda: self.hear(news))

    def _conclude(self, news: News) -> None:
        """The verdict is here: apply a committed mean, or keep the work."""
        run = self._run
        self._spend_waiting()
        if self._exchanging:
            self.spent_s["exchange"] += run.clock.now_s - self._exchange_from_s
        was_held, self._exchanging, self._holds_results = self._holds_results, False, False
        assert self.version is not None
        if not news.committed and news.anchor_version == self.version:
            self._take_back()
            return
        missed = news.anchor_version - self.version
        seconds = run.apply_s * max(1, missed)
        self.spent_s["applying"] += seconds
        if not was_held or missed > 1:
            size = max(missed, 1) * run.result_bytes
            self.down_bytes += size
            run.served(size)
            seconds += 8 * size / self.machine.down_bps
        self.activity = "applying"
        self._later(seconds, lambda: self._apply(news))

    def _apply(self, news: News) -> None:
        run = self._run
        if self._news is not None and self._news.round > news.round:
            return  # a newer verdict is being applied
        if run.scope.anchor_version != news.anchor_version:
            self._obtain_state()
            return
        self.version = self.kept_version = news.anchor_version
        if self._offered and run.scope.leases.holds(self.peer, self._offered):  # it is not in the mean
            self._held = [*self._offered, *self._held]
            self._done_before += count(self._offered)
        self._offered = []
        self.round = news.round
        self._beat_now()
        if self._busy_from_s is None:
            self._waits_since_s = run.clock.now_s
            self._later(0.0, self._go_on)

    def _take_back(self) -> None:
        """The round was aborted: its work is offered to the next one."""
        assert self._news is not None
        self.round = self._news.round
        if self._offered:
            self._held = [*self._offered, *self._held]
            self._done_before += count(self._offered)
            self._offered = []
        if self._busy_from_s is None:
            self._waits_since_s = self._run.clock.now_s
            self._later(0.0, self._go_on)

    def _go_on(self) -> None:
        if self._is_leaving:
            self._go()
        elif self._busy_from_s is not None or self.version is None:
            return
        elif self._done_before < count(self._held):
            self._work([])
        else:
            self._ask_lease()


def _first(ranges: Ranges, samples: int) -> Ranges:
    """Return the first samples of ranges, in their order."""
    found: Ranges = []
    for start, stop in ranges:
        take = min(stop - start, samples)
        if take:
            found.append((start, start + take))
            samples -= take
    return merge(found)
