"""A simulated member: it asks the coordinator what a real one asks, and lets time pass instead of working.

It trains on leased samples in steps of ``inner.batch_samples`` at its machine's speed, closes its work at the last step
that fits before the announced moment, packs it, takes part in the exchange, applies the mean, and goes on. What it
knows of the run are the views that reach it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoal.swarm.errors import LinkError
from shoal.swarm.protocol.messages import (
    PeerToCoordinatorHeartbeat,
    PeerToCoordinatorRequestLease,
    PeerToCoordinatorRoundReady,
    PeerToCoordinatorRoundReport,
)
from shoal.swarm.protocol.rounds import RoundPlan
from shoal.swarm.protocol.types import Headway, Phase
from shoal.swarm.sample_ranges import Ranges, count, merge, subtract, to_wire
from shoal.swarm.simulation.process import MachineProcess
from shoal.swarm.simulation.traces import Machine

if TYPE_CHECKING:
    from shoal.swarm.simulation.run import SimulatedRun

_NOT_PREPARED, _PREPARED = Headway(), Headway(prepared=1.0)


@dataclass(frozen=True)
class News:
    """News of a view for a member. ``planned``: by peer, the index in the plan; ``committed``: of the last round;
    ``chain`` and ``plan_digest``: of the newest verdict and plan."""

    round: int
    phase: Phase
    closes_s: float
    anchor_version: int
    plan: RoundPlan | None
    planned: dict[str, int]
    committed: bool
    chain: bytes | None = None
    plan_digest: bytes | None = None

    @property
    def moment(self) -> tuple[int, str]:
        return self.round, self.phase


class LightMember(MachineProcess):
    """One machine of a trace that trains the whole model."""

    def __init__(self, run: SimulatedRun, number: int, machine: Machine, seed: int) -> None:
        speed_tps, farewell_s = machine.speed(run.elements), run.deadlines.report_s
        super().__init__(run.clock, run.attendance, machine, speed_tps, number, seed, run.relays, farewell_s)
        self._run = run
        self.version: int | None = None
        self.kept_version: int | None = None
        """Version of the state that the machine has on its disk between sessions."""
        self._step_samples = run.run.inner.batch_samples
        self._step_s = self._step_samples * run.tokens_per_sample / self.speed_tps
        self._closes = 0
        self.reset()

    def reset(self) -> None:
        """See ``MachineProcess``."""
        self.version = None
        self.round = 0
        self.activity = "joining"
        self.chunks_moved, self.roster_version = 0, -1
        self._news: News | None = None
        self._held: Ranges = []
        """Leased samples, in the order in which they are trained on."""
        self._offered: Ranges = []
        self._done_before = 0
        self._busy_from_s: float | None = None
        self._waits_since_s: float | None = None
        self._holds_results = self._exchanging = False

    def is_in_round(self) -> bool:
        """See ``MachineProcess``."""
        return self._news is not None and self._news.phase in ("closing", "averaging")

    def leave_run(self, *, says_goodbye: bool) -> None:
        """See ``MachineProcess``."""
        if says_goodbye and self.joined:
            self._run.leave(self)
        elif self._exchanging:
            self._run.died_in_exchange(self)
        self.kept_version = self.version if self.version is not None else self.kept_version

    # Joining ------------------------------------------------------------------------------------------------

    def enter_run(self) -> bool:
        """See ``MachineProcess``."""
        if not self._run.join(self):
            return False
        self.joined = True
        self._news = self._run.news()
        self.round = self._news.round
        self._beat()
        self._obtain_state()
        return True

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
            self.later(self._run.deadlines.heartbeat_s, self._obtain_state)
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

        self.later(seconds, fetched)

    def _hold(self, version: int) -> None:
        self.version = self.kept_version = version
        self.round = self._run.scope.round.number
        self.activity = "training"
        self._beat_now()
        self._waits_since_s = self._run.clock.now_s
        self.later(2 * self.machine.latency_s, self._ask_lease)

    # Heartbeats ---------------------------------------------------------------------------------------------

    def _beat(self) -> None:
        self._beat_now(times=self._run.beats_at_once)
        self.later(self._run.beat_s, self._beat)

    def _beat_now(self, times: float = 1.0) -> None:
        if not self.joined:
            return
        if self._exchanging:
            self.chunks_moved += 1
        news = self._run.heartbeat(self, times)
        if news is None:  # the coordinator had removed it: it joins again, and its work is others'
            self.version = None
            self.join_again()
        elif self._news is None or news.moment != self._news.moment:
            self.later(2 * self.machine.latency_s, lambda: self.hear(news))

    @property
    def named(self) -> tuple[bytes | None, bytes | None]:
        """Verdict and plan that its messages name as known."""
        return (None, None) if self._news is None else (self._news.chain, self._news.plan_digest)

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
            self.later(0.5 * run.beats_at_once, self._ask_lease)
            return
        self.activity = "training"
        self.later(2 * self.machine.latency_s, lambda: self._work(ranges))

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

        self.later(stop_s - self._run.clock.now_s, stop)

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
            self.later(0.5, self._ask_lease)
            return
        done = self.samples_done
        if not done or self._offered:
            return
        self._offered, left = _first(self._held, done), subtract(merge(self._held), merge(_first(self._held, done)))
        self._held, self._done_before = left, 0
        self.activity = "ready"
        pack_s = run.pack_s if self.machine.pack_s is None else self.machine.pack_s
        self.spent_s["packing"] += pack_s
        self.later(pack_s + self.machine.latency_s, self._ready)

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
            self.later(0.0, self._ask_lease)
        if news.moment != (number, "closing"):
            self.later(self.machine.latency_s, lambda: self.hear(news))

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
            left_s = run.exchange.ends_s - run.clock.now_s
            if left_s > 1e-9:
                self.later(left_s, look)
                return
            self._exchanging = False
            self._holds_results = True
            self.count_traffic(index)
            self.spent_s["exchange"] += run.clock.now_s - self._exchange_from_s
            self._waits_since_s = run.clock.now_s
            self.later(self.machine.latency_s, lambda: self._report(run.exchange.report(index)))

        self.later(max(0.0, run.exchange.ends_s - run.clock.now_s), look)

    def count_traffic(self, index: int) -> None:
        sent, received, relayed = self._run.exchange.moved(index)
        self.up_bytes += sent
        self.down_bytes += received
        self.relayed_bytes += relayed

    def _report(self, report: PeerToCoordinatorRoundReport) -> None:
        if not self.joined:
            return
        news = self._run.report(self, report)
        if self._news is not None and news.moment != self._news.moment:
            self.later(self.machine.latency_s, lambda: self.hear(news))

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
        apply_s = run.apply_s if self.machine.apply_s is None else self.machine.apply_s
        seconds = apply_s * max(1, missed)
        self.spent_s["applying"] += seconds
        if not was_held or missed > 1:
            size = max(missed, 1) * run.result_bytes
            self.down_bytes += size
            run.served(size)
            seconds += 8 * size / self.machine.down_bps
        self.activity = "applying"
        self.later(seconds, lambda: self._apply(news))

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
            self.later(0.0, self._go_on)

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
            self.later(0.0, self._go_on)

    def _go_on(self) -> None:
        if self.is_leaving:
            self.go()
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
