"""Way back behind a mean that evidence has proved wrong beyond the bound: which one, how far, and in which words.

Not every proven lie undoes rounds: one within the bound moved the anchor no further than its maker's own contribution
could have. A liar with a friend that shows the evidence late could otherwise undo as many rounds as they like, so only
new rounds are undone, and only to a state that is not much older."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set

from shoal.swarm.coordinator.events import MeanDisproved
from shoal.swarm.coordinator.membership import Member
from shoal.swarm.coordinator.rollback import History, PossibleRollback
from shoal.swarm.coordinator.trust import counting

FRESH_ROUNDS = 8
"""Newest committed rounds that a wrong mean undoes: makers keep what proves it for two, and showing it takes a while.
"""

MOST_UNDONE = 32
"""Most rounds before the wrong one that are undone with it, where nobody keeps a newer state: what they lose has to be
worth less than what they repair. It is the half-life of credit."""


def version_of(history: History, round_number: int, within: int = FRESH_ROUNDS) -> int | None:
    """Return the version on which a round was planned whose mean may be undone.

    None if it is not one of the newest ``within`` rounds, or undone already."""
    newest = list(enumerate(history.rounds))[-within:]
    return next((version for version, one in newest if one.round == round_number), None)


def is_pending(disproved: MeanDisproved, history: History) -> bool:
    """Whether the run may still go back behind this mean, if members keep a state: a few rounds later nobody will say
    so any more, and who comes with an old state does not undo what was done since."""
    return version_of(history, disproved.round, 2 * FRESH_ROUNDS) is not None


def believed_versions(history: History, members: Mapping[str, Member]) -> set[int]:
    """Return the versions that are kept with the vouched digest.

    ``members``: the live trainers. As newcomers may claim to keep what nobody has, those with credit are believed."""
    states = {state for peer in counting(members, members) for state in members[peer].states}
    return {version for version, digest in states if history.vouches_for(version, digest)}


def rollback_behind(
    disproved: MeanDisproved, history: History, members: Mapping[str, Member], others: Iterable[Set[int]] = ()
) -> PossibleRollback | None:
    """Return the rollback to the newest state before the wrong mean that is kept; None where nobody keeps any.

    ``members``: the live trainers; ``others``: versions that the other stages keep. A stage that does not keep the
    version could only go further back, to one that this stage may not keep any more, and so on until none is left."""
    first, last = disproved.version - MOST_UNDONE, disproved.version
    kept = believed_versions(history, members).intersection(range(first, last + 1), *others)
    if not kept:
        return None
    version = max(kept)
    state = (version, history.rounds[version].digest)
    keepers = tuple(peer for peer, one in members.items() if state in one.states)
    return PossibleRollback(version=version, keepers=keepers, awaited=(), in_s=0.0)


def say_rollback_behind(
    disproved: MeanDisproved, back: PossibleRollback, history: History, members: Mapping[str, Member]
) -> str:
    """Return the verdict's reason."""
    made, maker = history.rounds[back.version], members.get(disproved.maker)
    name = maker.entry.name if maker is not None else disproved.maker
    return (
        f"a mean that {name} made in round {disproved.round} is wrong, by {disproved.excess:.3g} times what its own "
        f"work could move (evidence {disproved.evidence.hex()[:16]}): back to version {back.version} "
        f"({made.digest.hex()[:8]}), which the verdict of round {made.round} vouches for"
    )
