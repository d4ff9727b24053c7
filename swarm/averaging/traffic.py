"""Amount of data that each member sends to each other one in an exchange."""

from __future__ import annotations

from collections import Counter

from shoal.swarm.protocol.rounds import RoundPlan


class Traffic:
    """Data that members send while nothing fails, by index of the plan, in elements: as if contributions, partial sums
    and means were packed alike."""

    def __init__(self, plan: RoundPlan) -> None:
        self._plan = plan
        self._rows: dict[int, list[int]] = {}
        for index, member in enumerate(plan.members):
            self._rows.setdefault(member.row, []).append(index)
        # By the members that collect it, one in each row: of how much each owner makes the mean.
        columns: dict[tuple[int, ...], Counter[int]] = {}
        for part in plan.parts:
            collectors = plan.row_reducers(part) or (part.owner,)
            columns.setdefault(collectors, Counter())[part.owner] += part.stop - part.start
        # By row: how much each of its members collects there. By member: what it collects, as above.
        self._collected: dict[int, Counter[int]] = {row: Counter() for row in self._rows}
        self._columns: dict[int, list[tuple[tuple[int, ...], Counter[int]]]] = {}
        for collectors, owners in columns.items():
            for row, collector in enumerate(collectors):
                self._collected[row][collector] += owners.total()
                self._columns.setdefault(collector, []).append((collectors, owners))

    def shares(self, me: int) -> dict[int, float]:
        """Return the share of each other member in all that this member sends."""
        sent = self._sent(me)
        total = sent.total()
        return {member: size / total for member, size in sent.items()}

    def elements(self, me: int) -> int:
        """Return how much this member sends in all."""
        return self._sent(me).total()

    def _sent(self, me: int) -> Counter[int]:
        """Return what this member sends, by receiver."""
        row = self._plan.members[me].row
        sent = Counter(self._collected[row])
        for collectors, owners in self._columns.get(me, ()):
            for mate in self._rows[row]:
                sent[mate] += owners.total()
            for owner, owned in owners.items():
                for other in collectors if owner == me else (owner,):
                    sent[other] += owned
        del sent[me]
        return sent
