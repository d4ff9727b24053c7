"""Course of one exchange on the virtual clock: when it ends, who has died in it, and what its members report."""

from __future__ import annotations

import hashlib
import itertools
import math
import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from statistics import median

from shoal.compression.formats import FormatMap
from shoal.swarm.averaging.inclusions import FIRST_LOOKS, audits_a_round, chunks_brought
from shoal.swarm.deadlines import Deadlines
from shoal.swarm.protocol.messages import PeerToCoordinatorRoundReport
from shoal.swarm.protocol.rounds import RoundPlan
from shoal.swarm.protocol.types import Delivery
from shoal.swarm.simulation.links import MemberTraffic, PackedSizes, exchange_of, traffic_of
from shoal.swarm.simulation.traces import Machine

_MOST_DELIVERIES = 16


class ExchangeCourse:
    """Exchange of a plan among machines. ``ends_s``: when all its members have all results."""

    def __init__(
        self,
        plan: RoundPlan,
        machines: Sequence[Machine],
        formats: FormatMap,
        deadlines: Deadlines,
        relay_bps: float,
        *,
        now_s: float,
        begins_s: float,
        shares: Sequence[float] = (),
    ) -> None:
        """``now_s``: when it was planned; ``begins_s``: when its last member has the plan; ``shares``: of each member's
        link that this exchange gets, beside those of other stages; all of it by default."""
        self.plan = plan
        self._machines, self._deadlines, self._from_s = machines, deadlines, now_s
        self._rows: defaultdict[int, list[int]] = defaultdict(list)
        for index, member in enumerate(plan.members):
            self._rows[member.row].append(index)
        self._sizes, self.traffic = sizes_and_traffic(plan, machines, formats)
        parts = shares or (1.0,) * len(machines)
        self._exchange = exchange_of(
            self.traffic,
            [share * one.up_bps for one, share in zip(machines, parts, strict=True)],
            [share * one.down_bps for one, share in zip(machines, parts, strict=True)],
            elements=plan.parts[-1].stop,
            latency_s=median(one.latency_s for one in machines),
            patience_s=deadlines.contribution_s,
            relay_bps=relay_bps,
            chunk_bytes=plan.chunk_elements * self._sizes.result if not plan.columns else 0.0,
        )
        self.ends_s = begins_s + self._exchange.took_s
        self.dead: set[int] = set()
        self._digests = tuple(
            hashlib.sha256(b"part %d %d" % (plan.round, index)).digest() for index in range(len(plan.parts))
        )
        self._reduced: Counter[int] = Counter()
        for part in plan.parts:
            for one in plan.row_reducers(part) or (part.owner,):
                self._reduced[one] += part.stop - part.start

    @property
    def contribution_bytes(self) -> float:
        """Bytes of an element in a contribution."""
        return self._sizes.contribution

    @property
    def took_s(self) -> float:
        return self._exchange.took_s

    @property
    def relayed_bytes(self) -> float:
        return self._exchange.relayed_bytes

    @property
    def rows(self) -> int:
        return len(self._rows)

    def moved(self, index: int) -> tuple[float, float, float]:
        """Return the bytes that a member has sent, received, and sent over a relay."""
        one = self.traffic[index]
        return one.sent, one.received, one.relayed

    def died(self, index: int, now_s: float) -> bool:
        """A member is gone, which others notice, and do without: its parts are collected again by stand-ins.

        Returns whether that is news."""
        if index in self.dead:
            return False
        self.dead.add(index)
        one = self.traffic[index]
        share = max(0.0, min(1.0, (now_s - self._from_s) / max(self.took_s, 1e-9)))
        noticed_s = self._deadlines.result_s if one.owns else self._deadlines.contribution_s
        again_s = (1.0 - share) * self._exchange.busy_s[index] if one.owns else 0.0
        self.ends_s = max(self.ends_s, now_s + noticed_s + again_s)
        return True

    def report(self, index: int) -> PeerToCoordinatorRoundReport:
        """Return what a member of the plan reports: all parts, whom they lack, and what links have shown."""
        dropped = tuple(sorted(self.dead | self._exchange.left_out))
        deliveries: list[Delivery] = []
        owns = self.traffic[index].owns
        if owns:
            mates = self._rows[self.plan.members[index].row]
            at = self.plan.round % len(mates)
            for mate in itertools.islice(itertools.chain(mates[at:], mates[:at]), _MOST_DELIVERIES + 1):
                if mate != index and len(deliveries) < _MOST_DELIVERIES:
                    deliveries.append(Delivery(member=mate, bps=max(1.0, self._rate_to(mate, index))))
        return PeerToCoordinatorRoundReport(
            round=self.plan.round,
            digests=self._digests,
            dropped=dropped,
            undelivered=dropped if owns else (),
            failed=tuple(one for one in dropped if one in self.dead and self.traffic[one].owns),
            deliveries=tuple(deliveries),
            trouble="",
        )

    def _rate_to(self, sender: int, owner: int) -> float:
        """Return the rate at which an owner gets a member's contribution, whose link serves all owners at once."""
        sent = self.traffic[sender].sent
        share = self._reduced[owner] * self._sizes.contribution / sent if sent else 0.0
        return self._machines[sender].up_bps * min(1.0, share)


def sizes_and_traffic(
    plan: RoundPlan, machines: Sequence[Machine], formats: FormatMap
) -> tuple[PackedSizes, list[MemberTraffic]]:
    """Return what an element takes, and what each member of a plan moves."""
    rows = 1 + max(member.row for member in plan.members)
    sizes = PackedSizes.of(formats, plan.parts[-1].stop, -(-len(machines) // rows)).in_chunks(plan)
    return sizes, traffic_of(plan, sizes, [one.reachable for one in machines])


class AuditTraffic:
    """Bytes that members fetch after a round to check others' means, beside their work (``averaging/auditor.py``)."""

    def __init__(self, share: float, seed: int) -> None:
        """``share``: of the bytes of a round, as in the run file."""
        self._share = share
        self._draw = random.Random(f"{seed} audits")
        self._known: defaultdict[str, set[str]] = defaultdict(set)

    def of(self, course: ExchangeCourse) -> Iterator[tuple[str, str, float]]:
        """Yield auditor, maker and bytes of each audit of a committed round."""
        plan, chunk = course.plan, course.plan.chunk_elements
        chunks, rows, members = -(-plan.parts[-1].stop // chunk), course.rows, len(plan.members)
        wanted = audits_a_round(self._share, members, chunks, rows)
        if not wanted or members < 2:
            return
        owners = [plan.members[part.owner].peer for part in plan.parts]
        size = chunk * course.contribution_bytes * chunks_brought(members, rows)
        for auditor in (one.peer for one in plan.members):
            makers = [owner for owner in owners if owner != auditor]
            if not makers:
                continue
            checked = math.floor(wanted) + (self._draw.random() < wanted % 1.0)
            drawn = [self._draw.choice(makers) for _ in range(checked)]
            known = self._known[auditor]
            known.update(drawn)
            new = [owner for owner in makers if owner not in known]
            if new and self._draw.random() < FIRST_LOOKS * wanted:
                drawn.append(self._draw.choice(new))
                known.add(drawn[-1])
            yield from ((auditor, maker, size) for maker in drawn)
