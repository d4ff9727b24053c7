"""``shoal``, but it accuses an honest owner after each round: ``forging_member.py KIND join …``.

``honest``: with evidence that shows the owner's mean to be right; ``forged``: with other contributions in it."""

import sys
from collections.abc import Mapping, Sequence

from shoal.peer.cli.main import main
from shoal.swarm.averaging import auditor
from shoal.swarm.averaging.results import ResultStore
from shoal.swarm.protocol.rounds import Verdict


def accuse(kind: str) -> None:
    real = auditor.make_evidence

    def never_equal(
        store: ResultStore, chunk: int, included: Sequence[int], packed: Mapping[int, memoryview]
    ) -> memoryview:
        return memoryview(b"something else")

    def make(
        verdict: Verdict, part: int, chunk: int, results: Sequence[memoryview], shown: Mapping[int, memoryview]
    ) -> bytes:
        shown = {member: memoryview(bytearray(data)) for member, data in shown.items()}
        if kind == "forged":
            shown[min(shown)][0] ^= 1
        return real(verdict, part, chunk, results, shown)

    auditor.reduce_again, auditor.make_evidence = never_equal, make


if __name__ == "__main__":
    _, kind, *arguments = sys.argv
    accuse(kind)
    sys.argv = ["shoal", *arguments]
    main()
