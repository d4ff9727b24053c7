"""Directories with their cards: genuine, forged, stale and unreadable ones; a run found by its name."""

from pathlib import Path

import pytest
from tests.peer.directory.cards import NOW_S, make_card, run_file, signed_anew

from shoal.peer.directory.card import SignedCard
from shoal.peer.directory.directory_file import (
    Directory,
    Entry,
    add_card,
    load_directory,
    remove_run,
    usual_directories,
)
from shoal.peer.directory.listing import ListedRun, find_run, list_runs
from shoal.peer.directory.places import Place
from shoal.swarm.errors import DirectoryError
from shoal.swarm.protocol.identity import Identity
from shoal.swarm.protocol.invite import is_run_name


def put(folder: Path, card: SignedCard, name: str = "") -> Path:
    path = folder / f"{name or card.run}.json"
    path.write_bytes(card.file_bytes)
    return path


def listed(folder: Path, *cards: SignedCard, now_s: float = NOW_S) -> list[ListedRun]:
    """List cards that a directory in ``folder`` has under their own keys."""
    for number, card in enumerate(cards):
        put(folder, card, str(number))
    entries = tuple(Entry(run=card.run, key=card.key, card=f"{number}.json") for number, card in enumerate(cards))
    (folder / "runs.json").write_bytes(Directory(runs=entries).file_bytes)
    found = list_runs([Place(str(folder / "runs.json"))], now_s)
    assert found.failures == ()
    return list(found.runs)


def test_genuine_cards_are_listed_and_others_marked(tmp_path: Path) -> None:
    host, thief = Identity.generate(), Identity.generate()
    good, old = make_card(identity=host), make_card(run_file("old"), written_s=NOW_S - 7200)
    future = make_card(run_file("future"), written_s=NOW_S + 7200)
    entries = [
        Entry(run="reef", key=good.key, card="good.json"),
        Entry(run="reef", key=good.key, card="thief.json"),
        Entry(run="old", key=old.key, card="old.json"),
        Entry(run="future", key=future.key, card="future.json"),
        Entry(run="other", key=good.key, card="good.json"),
        Entry(run="gone", key=good.key, card="gone.json"),
    ]
    put(tmp_path, good, "good")
    put(tmp_path, signed_anew(good, thief, invite="", title="The real one"), "thief")
    put(tmp_path, old)
    put(tmp_path, future)
    (tmp_path / "runs.json").write_bytes(Directory(runs=tuple(entries)).file_bytes)
    found = list_runs([Place(str(tmp_path / "runs.json"))], NOW_S).runs
    assert [one.mark for one in found] == ["", "forged", "stale", "forged", "forged", "unreadable"]
    assert found[0].card == good
    assert found[2].card == old, "a stale card is shown"
    assert [one.card for one in (found[1], *found[3:])] == [None] * 4, "what is not genuine is not shown"


def test_a_directory_that_cannot_be_read_is_told_and_the_others_are_read(tmp_path: Path) -> None:
    put(tmp_path, make_card())
    (tmp_path / "damaged.json").write_text("[]")
    places = [Place(str(tmp_path / one)) for one in ("missing.json", "damaged.json", "reef.json")]
    found = list_runs(places, NOW_S)
    assert [one.run for one in found.runs] == ["reef"], "a card may be named itself"
    assert len(found.failures) == 2
    assert "missing.json" in found.failures[0]
    assert "not a directory" in found.failures[1]


def test_a_run_is_found_by_its_name(tmp_path: Path) -> None:
    one, same, other = make_card(), make_card(run_file(more='purpose = "x"')), make_card(run_file("atoll"))
    found = list_runs([Place(str(put(tmp_path, one)))], NOW_S)
    assert find_run(found, "reef").card == one
    runs = listed(tmp_path, one, same, other)
    many = found.__class__(tuple(runs))
    assert find_run(many, "atoll").card == other
    with pytest.raises(DirectoryError, match=f"2 runs have the name reef.*reef@{one.run_hash[:8]}") as refused:
        find_run(many, "reef")
    assert f"reef@{same.run_hash[:8]}" in str(refused.value)
    assert find_run(many, f"reef@{same.run_hash[:8]}").card == same
    with pytest.raises(DirectoryError, match="they list reef, atoll"):
        find_run(many, "lagoon")


def test_a_run_in_two_directories_is_one_run_with_its_newest_card(tmp_path: Path) -> None:
    host = Identity.generate()
    earlier, later = make_card(identity=host, written_s=NOW_S - 60), make_card(identity=host)
    places = [Place(str(put(tmp_path, one, name))) for one, name in ((later, "a"), (earlier, "b"))]
    assert find_run(list_runs(places, NOW_S), "reef").card == later


def test_a_forged_card_is_no_choice_but_is_told(tmp_path: Path) -> None:
    card = make_card()
    (forged,) = listed(tmp_path, card.model_copy(update={"members": 9}))
    with pytest.raises(DirectoryError, match="forged"):
        find_run(list_runs([Place(str(tmp_path / "runs.json"))]).__class__((forged,)), "reef")


@pytest.mark.parametrize(
    ("text", "is_name"),
    [
        ("reef", True),
        ("reef-2.b", True),
        ("reef@0123abcd", True),
        ("reef@012", False),
        ("shoal://a:1/reef?key=x", False),
        ("@invite.txt", False),
        ("./invite.txt", False),
        ("Reef", False),
        ("", False),
    ],
)
def test_names(text: str, is_name: bool) -> None:
    assert is_run_name(text) == is_name


def test_a_directory_is_kept(tmp_path: Path) -> None:
    path, host = tmp_path / "deep" / "runs.json", Identity.generate()
    card = make_card(identity=host)
    for _ in range(2):  # again: the same entry
        add_card(path, str(put(tmp_path, card)))
    add_card(path, str(put(tmp_path, make_card(run_file("atoll")))))
    assert [one.run for one in load_directory(path).runs] == ["reef", "atoll"]
    assert load_directory(path).runs[0] == Entry(run="reef", key=card.key, card="../reef.json")
    with pytest.raises(DirectoryError, match="another run of the name reef"):
        add_card(path, str(put(tmp_path, make_card())))
    with pytest.raises(DirectoryError, match="signature"):
        add_card(path, str(put(tmp_path, card.model_copy(update={"members": 9}))))
    remove_run(path, "reef")
    with pytest.raises(DirectoryError, match="it lists atoll"):
        remove_run(path, "reef")
    assert [one.run for one in load_directory(path).runs] == ["atoll"]


def test_the_directories_of_the_settings(tmp_path: Path) -> None:
    (own,) = usual_directories(tmp_path)
    assert list_runs([own]).failures == (), "the directory of the package can be read"
    settings = tmp_path / "settings.toml"
    settings.write_text('directories = ["https://example.org/runs.json", "mine.json"]\n[terms]\nnice = true\n')
    found = usual_directories(tmp_path)
    assert [one.where for one in found] == ["https://example.org/runs.json", str(tmp_path / "mine.json"), own.where]
    for text in ("directories = 7", "directories = [7]", "no toml"):
        settings.write_text(text)
        with pytest.raises(DirectoryError, match=r"settings\.toml"):
            usual_directories(tmp_path)
