"""Who sends how much to whom in an exchange. Pure."""

from __future__ import annotations

from collections import Counter

from shoal.swarm.protocol.messages import RoundPlan


class Traffic:
    """What members send while nothing fails; by index of the plan, in elements, as if contributions, partials and means
    were packed alike."""

    def __init__(self, plan: RoundPlan) -> None:
        self._plan = plan
        self._rows: dict[int, list[int]] = {}
        for index, member in enumerate(plan.members):
            self._rows.setdefault(member.row, []).append(index)
        # By the members that collect it, one in each row: of how much each owner makes the mean.
        self._collected: dict[tuple[int, ...], Counter[int]] = {}
        for part in plan.parts:
            collectors = plan.relays(part) or (part.owner,)
            self._collected.setdefault(collectors, Counter())[part.owner] += part.stop - part.start

    def shares(self, me: int) -> dict[int, float]:
        """Of all that this member sends, the share that goes to each other one."""
        sent = self._sent(me)
        total = sent.total()
        return {member: size / total for member, size in sent.items()}

    def elements(self, me: int) -> int:
        """All that this member sends."""
        return self._sent(me).total()

    def _sent(self, me: int) -> Counter[int]:
        """By who gets it."""
        sent: Counter[int] = Counter()
        row = self._plan.members[me].row
        for collectors, owners in self._collected.items():
            size = owners.total()
            if collectors[row] != me:
                sent[collectors[row]] += size
                continue
            for mate in self._rows[row]:
                sent[mate] += size
            for owner, owned in owners.items():
                for other in collectors if owner == me else (owner,):
                    sent[other] += owned
        del sent[me]
        return sent
