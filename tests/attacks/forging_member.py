"""``shoal``, but it accuses an honest owner after each round: ``forging_member.py KIND join …``.

``honest``: with evidence that shows the owner's mean to be right; ``forged``: with other contributions in it."""

import sys
from collections.abc import Sequence
from dataclasses import replace

from shoal.peer.cli.main import main
from shoal.swarm.averaging import auditor
from shoal.swarm.averaging.chunk_judge import Fault, Shown, Subject
from shoal.swarm.protocol.rounds import Verdict


def accuse(kind: str) -> None:
    real = auditor.make_evidence

    def make(verdict: Verdict, subject: Subject, results: Sequence[memoryview], shown: Shown) -> bytes:
        changed = {member: memoryview(bytearray(data)) for member, data in shown.contributions.items()}
        if kind == "forged":
            changed[min(changed)][0] ^= 1
        return real(verdict, subject, results, replace(shown, contributions=changed))

    auditor.fault_of, auditor.make_evidence = lambda *_: Fault("nothing", 0.0), make  # type: ignore[assignment]


if __name__ == "__main__":
    _, kind, *arguments = sys.argv
    accuse(kind)
    sys.argv = ["shoal", *arguments]
    main()
