"""``shoal host`` that tells one member other verdicts than the rest: ``forking_host.py FIRST host RUN_FILE …``.

The victim is the third member. From round FIRST on it gets verdicts with another loss, well signed, one after the
other."""

import sys
from typing import Any

from shoal.peer.cli.main import main
from shoal.swarm.coordinator.service import ScopeHandlers
from shoal.swarm.protocol.messages import CoordinatorToPeerView
from shoal.swarm.protocol.rounds import Verdict
from shoal.swarm.protocol.verdict_chain import chain_hash, signed_bytes


def fork(first: int) -> None:
    real = ScopeHandlers.view
    told: dict[int, Verdict] = {}

    def other(handlers: Any, verdict: Verdict) -> Verdict:
        if verdict.round not in told:
            before = told.get(verdict.round - 1)
            changes = {"loss": 0.125, "previous_chain": before.chain if before else verdict.previous_chain}
            changed = verdict.model_copy(update=changes)
            chain = chain_hash(changed)
            signature = handlers.scope._sign(signed_bytes(chain))
            told[verdict.round] = changed.model_copy(update={"chain": chain, "signature": signature})
        return told[verdict.round]

    def view(handlers: Any, peer: str) -> CoordinatorToPeerView:
        whole = real(handlers, peer)
        verdict = handlers.scope.verdict
        members = list(handlers.scope.membership.members)
        if len(members) < 3 or members[2] != peer or verdict is None or verdict.round < first:
            return whole
        changed = other(handlers, verdict)
        update = {"verdict": changed, "verdict_on_plan": None, "verdict_chain": changed.chain}
        return CoordinatorToPeerView(view=whole.view.model_copy(update=update))

    ScopeHandlers.view = view  # type: ignore[method-assign]


if __name__ == "__main__":
    _, number, *arguments = sys.argv
    fork(int(number))
    sys.argv = ["shoal", *arguments]
    main()
