"""Independent ledger of offers: what is owed to a member is what no mean has included yet."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from shoal.swarm.protocol.rounds import RoundPlan, Verdict

ATOL = 2e-3
"""Of sums over some fifty samples of values around one, in float32: a lost or doubled one would be off by 1 or more."""


@dataclass
class Applied:
    """A committed round: its mean, ``(n,) float32``, and who is in it, chunk by chunk."""

    verdict: Verdict
    plan: RoundPlan
    mean: Tensor
    included: list[list[int]]

    def bounds(self, chunk: int) -> slice:
        size = self.plan.chunk_elements
        return slice(chunk * size, min((chunk + 1) * size, self.mean.numel()))

    def has(self, peer: str) -> Tensor:
        """``(n,) bool``: where this member is in the mean."""
        members = [member.peer for member in self.plan.members]
        where = torch.zeros(self.mean.numel(), dtype=torch.bool)
        if peer in members:
            index = members.index(peer)
            for chunk, included in enumerate(self.included):
                where[self.bounds(chunk)] = index in included
        return where


@dataclass
class GivenUp:
    """A member that went out of date: ``before`` was owed to it without the work it gave up, ``kept`` is what it goes
    on with; both ``(n,) float64``."""

    round: int
    peer: str
    before: Tensor
    kept: Tensor


@dataclass
class Ledger:
    """``offers``: by round and peer, all that was owed to it when it offered; values times weight, ``(n,) float64``."""

    offers: dict[tuple[int, str], Tensor] = field(default_factory=dict)
    rounds: dict[int, Applied] = field(default_factory=dict)
    given_up: list[GivenUp] = field(default_factory=list)

    def commit(self, applied: Applied) -> None:
        """Record a committed round; all members' accounts of it have to agree."""
        first = self.rounds.setdefault(applied.verdict.round, applied)
        assert first.verdict == applied.verdict
        assert first.included == applied.included
        assert torch.equal(first.mean, applied.mean), "everybody applies the same bytes"

    def check_means(self) -> None:
        """Check that the applied means are exactly what their members were owed."""
        for applied in self.rounds.values():
            weights = [member.weight_tokens for member in applied.plan.members]
            peers = [member.peer for member in applied.plan.members]
            number = applied.verdict.round
            for chunk, included in enumerate(applied.included):
                where = applied.bounds(chunk)
                brought = torch.zeros(where.stop - where.start, dtype=torch.float64)
                for index in included:
                    brought += self.offers[number, peers[index]][where]
                weight = sum(weights[index] for index in included)
                near(applied.mean[where].double() * weight, brought, f"round {number}, chunk {chunk}")

    def check_given_up(self) -> None:
        """Check that a member that fell behind may lose what it carried, and never offers it twice."""
        for one in self.given_up:
            applied = self.rounds.get(one.round)
            if applied is not None:
                twice = one.kept[applied.has(one.peer)]
                assert not bool(twice.any()), f"{one.peer} keeps what round {one.round} has applied"
            assert bool(((one.kept - one.before).abs() < ATOL).logical_or(one.kept == 0).all())


def near(found: Tensor, expected: Tensor, what: str) -> None:
    difference = float((found - expected).abs().max()) if found.numel() else 0.0
    assert difference < ATOL, f"{what}: off by {difference:.4f}"
