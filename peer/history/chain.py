"""Check of a run's verdict chain, verdict by verdict from the first one on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shoal.swarm.errors import StateFileError, WireError
from shoal.swarm.protocol.rounds import Verdict
from shoal.swarm.protocol.verdict_chain import check_verdict, genesis


@dataclass(frozen=True)
class ChainSummary:
    """Summary of a checked chain of verdicts.

    ``first``: the round of its first verdict; ``rounds``: the round after its last one; ``anchor_version`` and
    ``tokens_total``: as of the last verdict, which may have gone back."""

    first: int
    rounds: int
    committed: int
    aborted: int
    anchor_version: int
    tokens_total: int
    chain: bytes


class ChainCheck:
    """Check of verdicts of one scope, added one by one, oldest first.

    ``whole``: the chain starts with the run's first round; otherwise the first verdict is believed on its signature
    alone."""

    def __init__(self, run_hash: bytes, coordinator_key: bytes, *, scope: int = 0, whole: bool = True) -> None:
        self.chain = ChainSummary(0, 0, 0, 0, 0, 0, genesis(run_hash, scope))
        self._key = coordinator_key
        self._begins_anywhere = not whole
        self.epoch = 0
        """Of the coordinator that gave the newest verdict."""

    def add(self, verdict: Verdict) -> None:
        """Check one verdict and add it. Raises ``StateFileError`` naming the round; the chain is as before then."""
        before = self.chain
        starts_here = self._begins_anywhere and verdict.round > 0
        expected = verdict.round if starts_here else before.rounds
        if verdict.round != expected:
            raise StateFileError(f"the verdict of round {expected} is missing: round {verdict.round} follows instead")
        if verdict.previous_chain != before.chain and not starts_here:
            raise StateFileError(
                f"the verdict of round {verdict.round} does not go on from the one before: the chain is broken there"
            )
        try:
            check_verdict(verdict, self._key)
        except WireError as error:
            raise StateFileError(str(error)) from error
        if verdict.epoch < self.epoch:
            raise StateFileError(
                f"the verdict of round {verdict.round} is of a coordinator that led before that of the verdict before"
            )
        self.epoch = verdict.epoch
        self.chain = ChainSummary(
            first=verdict.round if starts_here else before.first,
            rounds=verdict.round + 1,
            committed=before.committed + verdict.committed,
            aborted=before.aborted + (not verdict.committed),
            anchor_version=verdict.anchor_version,
            tokens_total=verdict.tokens_total,
            chain=verdict.chain,
        )
        self._begins_anywhere = False


def check_chain(
    verdicts: Iterable[Verdict], run_hash: bytes, coordinator_key: bytes, *, scope: int = 0, whole: bool = True
) -> ChainSummary:
    """Check every hash, every signature (Ed25519, RFC 8032) and every link between the verdicts.

    Raises ``StateFileError`` naming the first round that is wrong."""
    check = ChainCheck(run_hash, coordinator_key, scope=scope, whole=whole)
    for verdict in verdicts:
        check.add(verdict)
    return check.chain
