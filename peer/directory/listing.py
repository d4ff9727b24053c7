"""Runs that directories list: their cards are fetched, checked and dated, and one is found by its name."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from shoal.peer.directory.card import MAX_CARD_BYTES, SignedCard, parse_card
from shoal.peer.directory.directory_file import MAX_DIRECTORY_BYTES, READ_S, Entry, parse_directory
from shoal.peer.directory.places import Place, all_of, read_place
from shoal.swarm.errors import DirectoryError
from shoal.swarm.protocol.invite import NAMED_RUN

STALE_S = 3600.0
"""Age from which a card is stale: a host that can writes it anew every ten minutes."""

_AHEAD_S = 600.0
"""Most that the clocks of two machines differ; a card from later than that is not believed."""

_DIRECTORY_S = 20.0
"""Most seconds for a directory with all its cards."""

_LEAST_DIGITS = 8

Mark = Literal["", "stale", "forged", "unreadable"]


@dataclass(frozen=True)
class ListedRun:
    """A run in a directory, with its card if that is genuine. ``problem``: what is wrong, empty for nothing."""

    run: str
    directory: str
    card_at: str
    card: SignedCard | None = None
    mark: Mark = ""
    problem: str = ""


@dataclass(frozen=True)
class Listing:
    """Runs of some directories, and ``failures`` to read a directory, each with its name."""

    runs: tuple[ListedRun, ...] = ()
    failures: tuple[str, ...] = ()


def list_runs(directories: Sequence[Place], unix_s: float | None = None) -> Listing:
    """Read directories and the cards that they list, all at once, for up to about half a minute.

    A place may also be a single card, whose key nobody vouches for. ``unix_s``: now."""
    now_s = time.time() if unix_s is None else unix_s
    found = all_of(
        [partial(_list_one, one, now_s) for one in directories],
        _DIRECTORY_S + READ_S,
        f"no answer within {_DIRECTORY_S + READ_S:.0f} s",
    )
    runs: list[ListedRun] = []
    failures: list[str] = []
    for place, one in zip(directories, found, strict=True):
        if isinstance(one, DirectoryError):
            failures.append(f"{place.shown}: {str(one).removeprefix(f'{place.shown}: ')}")
        else:
            runs += one
    return Listing(tuple(runs), tuple(failures))


def _list_one(directory: Place, now_s: float) -> list[ListedRun]:
    """List a directory's runs. Raises ``DirectoryError``."""
    late = f"{directory.shown}: no answer within {READ_S:.0f} s"
    (found,) = all_of([partial(read_place, directory, MAX_DIRECTORY_BYTES, READ_S)], READ_S, late)
    if isinstance(found, DirectoryError):
        raise found
    if _is_card(found.data):
        card = parse_card(found.data)
        entry = Entry(run=card.run, key=card.key, card=directory.shown or ".")
        return [_judged(entry, directory, directory, card, now_s)]
    entries = parse_directory(found.data, directory.shown).runs
    places = [directory.beside(one.card, found) for one in entries]
    cards = all_of([partial(_read_card, one) for one in places], _DIRECTORY_S, f"no answer within {_DIRECTORY_S:.0f} s")
    judged = zip(entries, places, cards, strict=True)
    return [_judged(entry, directory, place, card, now_s) for entry, place, card in judged]


def _is_card(data: bytes) -> bool:
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        return False
    return isinstance(content, dict) and "signature" in content


def _read_card(place: Place) -> SignedCard:
    return parse_card(read_place(place, MAX_CARD_BYTES, READ_S).data)


def _judged(entry: Entry, directory: Place, place: Place, card: SignedCard | DirectoryError, now_s: float) -> ListedRun:
    """Judge a card: only a genuine one is shown to anybody."""
    listed = partial(ListedRun, entry.run, directory.shown, place.shown)
    if isinstance(card, DirectoryError):
        return listed(mark="unreadable", problem=str(card).removeprefix(f"{place.shown}: "))
    try:
        card.check(entry.key)
        if card.run != entry.run:
            raise DirectoryError(f"it is of the run {card.run}")
    except DirectoryError as error:
        return listed(mark="forged", problem=str(error))
    age_s = now_s - card.written_s
    if age_s < -_AHEAD_S:
        return listed(mark="forged", problem="it is dated in the future: compare this machine's clock")
    if age_s > STALE_S and card.state == "running":
        return listed(card, "stale", f"nobody has renewed it for {_age(age_s)}: its host may be gone")
    return listed(card)


def _age(seconds: float) -> str:
    return f"{seconds / 86_400:.0f} days" if seconds > 172_800 else f"{seconds / 3600:.0f} hours"


# One run, by its name ---------------------------------------------------------------------------------------------


def find_run(listing: Listing, name: str) -> ListedRun:
    """Find the one run with that name, or ``NAME@`` and the first digits of its hash.

    Raises ``DirectoryError`` where there is none, or several, which it lists."""
    match = NAMED_RUN.fullmatch(name)
    assert match is not None
    wanted, digits = match[1], match[2] or ""
    named = [one for one in listing.runs if one.run == wanted]
    cards = {
        (one.card.key, one.card.run_hash): one
        for one in sorted(named, key=lambda one: one.card.written_s if one.card else 0.0)  # the newest card wins
        if one.card is not None and one.card.run_hash.startswith(digits)
    }
    if len(cards) == 1:
        (found,) = cards.values()
        return found
    if cards:
        choices = "; ".join(_choice(one) for one in cards.values())
        raise DirectoryError(f"{len(cards)} runs have the name {wanted}; say which one: {choices}")
    reasons = [f"{one.card_at}: {one.mark}: {one.problem}" for one in named if one.card is None]
    reasons += listing.failures
    others = ", ".join(dict.fromkeys(one.run for one in listing.runs if one.card is not None))
    why = f" ({'; '.join(reasons)})" if reasons else ""
    raise DirectoryError(
        f"no directory lists a run {name!r}{why}; " + (f"they list {others}" if others else "see `shoal runs`")
    )


def _choice(one: ListedRun) -> str:
    assert one.card is not None
    title = f" ({one.card.title})" if one.card.title else ""
    return f"{one.run}@{one.card.run_hash[:_LEAST_DIGITS]}{title}, signed by {one.card.key[:16]}…, in {one.directory}"
