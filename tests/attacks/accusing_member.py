"""``shoal``, but it says of certain members in every round that it got nothing from them, and of their contributions
that they did not come: ``accusing_member.py PEER,PEER join INVITE …``."""

import sys
from collections.abc import Set

from shoal.peer.cli.main import main
from shoal.swarm.averaging.allreduce import ExchangeResult
from shoal.swarm.averaging.results import ResultStore
from shoal.swarm.protocol.messages import PeerToCoordinatorRoundReport
from shoal.swarm.protocol.types import Delivery


def accuse(accused: Set[str]) -> None:
    real = ExchangeResult.report

    def report(
        self: ExchangeResult, store: ResultStore, deliveries: tuple[Delivery, ...]
    ) -> PeerToCoordinatorRoundReport:
        members = store.plan.members
        lies = tuple(index for index, member in enumerate(members) if member.peer in accused)
        return real(self, store, deliveries).model_copy(update={"failed": lies, "undelivered": lies, "dropped": lies})

    ExchangeResult.report = report  # type: ignore[method-assign]


if __name__ == "__main__":
    _, accused, *arguments = sys.argv
    accuse(set(accused.split(",")))
    sys.argv = ["shoal", *arguments]
    main()
