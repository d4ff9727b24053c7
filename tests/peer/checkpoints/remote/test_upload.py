"""Upload of checkpoints to a URL: in order, resumed after every failure and death, with retention."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.fakes.virtual_clock import now_s, run_virtual
from tests.peer.checkpoints.making import contents
from tests.peer.checkpoints.remote.places import Killed, Place, run_for

from shoal.peer.checkpoints.remote.store import RemoteStore, without_password
from shoal.peer.checkpoints.remote.upload import FINISH_S, LEDGER, next_copy, superfluous_in_step
from shoal.peer.checkpoints.retention import Retention
from shoal.swarm.errors import RemoteStorageError
from shoal.swarm.protocol.identity import Identity

FILES = ["anchor-00001-of-00001.safetensors", "outer-00001-of-00001.safetensors", "verdicts.msgpack", "manifest.json"]


def sent(place: Place) -> list[str]:
    return [name for what, name in place.files.calls if what == "sent"]


@pytest.mark.parametrize(
    ("here", "begun", "done", "every", "expected"),
    [
        ([], [], [], 1, None),
        ([3], [], [], 5, 3),
        ([1, 2, 3], [], [], 1, 3),
        ([1, 2, 3], [1, 2], [1], 1, 2),
        ([1, 2, 3], [2, 3], [], 1, 2),
        ([2, 3], [1], [], 1, 3),
        ([2, 3], [3], [3], 1, None),
        ([2, 4], [1], [1], 4, None),
        ([2, 5], [1], [1], 4, 5),
        ([2], [7], [7], 4, 2),
    ],
)
def test_what_is_copied_next(
    here: list[int], begun: list[int], done: list[int], every: int, expected: int | None
) -> None:
    assert next_copy(here, begun, done, every) == expected


@pytest.mark.parametrize(
    ("here", "done", "every", "expected"),
    [
        ([14, 15, 16], [], 1, 16),
        ([15, 16, 17], [13], 1, 16),
        ([15, 16, 17], [16], 1, 17),
        ([17, 18, 19], [16], 4, None),
        ([18, 19, 20], [16], 4, 20),
        ([19, 21, 22], [16], 4, 22),
        ([22, 23, 24], [22], 4, 24),
        ([48, 49, 50], [40], 10, 50),
        ([198, 199, 200], [100], 100, 200),
        ([199, 200, 201], [137], 100, 200),
        ([235, 236, 237], [200], 100, None),
        ([0], [], 1, 0),
        ([3], [9], 1, 3),
    ],
)
def test_those_that_copy_in_step_choose_alike(here: list[int], done: list[int], every: int, expected: int) -> None:
    assert next_copy(here, done, done, every, in_step=True) == expected


def test_copies_at_leaving_do_not_displace_those_that_other_stages_have() -> None:
    retention = Retention(2)
    assert superfluous_in_step([0, 8, 16, 17, 22, 25], retention, 8) == [0, 17]
    assert superfluous_in_step([0, 8, 16, 17, 22, 25], retention, 1) == [0, 8, 16, 17]
    assert superfluous_in_step([8, 16, 24], retention, 8) == [8]


def test_the_newest_goes_there_its_manifest_last_and_nothing_of_the_peers_own(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.copy_all(place.write(1, 2))
    assert sent(place) == FILES
    assert place.files.names() == sorted(f"{place.base}/round-00000002/{name}" for name in FILES)
    local = tmp_path / "checkpoints" / "round-00000002"
    for name in FILES:
        assert place.files.inner.cat_file(f"/copies/{place.base}/round-00000002/{name}") == (local / name).read_bytes()


def test_sealed_ones_go_with_what_is_the_peers_own(tmp_path: Path) -> None:
    place = Place(tmp_path, readers=[])
    place.copy_all(place.write(1))
    names = [name.rpartition("/")[2] for name in place.files.names()]
    assert "peer.safetensors.sealed" in names
    assert sent(place)[-1] == "sealed.json"
    assert all(name.endswith(".sealed") for name in sent(place)[:-1])


def test_what_comes_later_is_copied_too_and_nothing_twice(tmp_path: Path) -> None:
    place = Place(tmp_path)
    store = place.write(1)
    copies = place.copies(store)

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(copies.run())
            await asyncio.sleep(100)
            store.write(contents(2))
            await asyncio.sleep(100)
            copies.finish()

    run_virtual(main())
    assert sent(place) == FILES + FILES
    assert place.whole() == [1, 2]
    place.copy_all()
    assert sent(place) == FILES + FILES


def test_only_every_so_many_rounds_but_the_last_one_at_the_end(tmp_path: Path) -> None:
    place = Place(tmp_path)
    store = place.write(1)
    place.copy_all(store, every=3)
    for number in (2, 3, 4, 5):
        store.write(contents(number))
        place.copy_all(store, every=3)
    assert place.whole() == [1, 4]

    async def main() -> None:
        copies = place.copies(store, every=3)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(copies.run())
            await asyncio.sleep(100)
            assert place.whole() == [1, 4]
            copies.finish()

    run_virtual(main())
    assert place.whole() == [1, 4, 5]


@pytest.mark.parametrize("what", ["put", "sent"])
@pytest.mark.parametrize("name", FILES)
def test_killed_at_every_step_it_goes_on_where_it_was(tmp_path: Path, what: str, name: str) -> None:
    place = Place(tmp_path)
    store = place.write(1)

    def die(step: str, path: str) -> None:
        if (step, path.rpartition("/")[2]) == (what, name):
            raise Killed

    place.files.fails = die
    with pytest.raises(Killed):
        place.copy_all(store)
    place.files.fails = lambda step, path: None
    before = sent(place)
    noted = [one for one in before if (what, one) != ("sent", name)]  # the last word was not written down
    store.write(contents(2))
    place.copy_all()
    assert sent(place)[len(before) :] == [one for one in FILES if one not in noted] + FILES, "the older one first"
    assert place.whole() == [1, 2]
    for number in (1, 2):
        folder = tmp_path / "checkpoints" / f"round-{number:08}"
        for one in FILES:
            there = place.files.inner.cat_file(f"/copies/{place.base}/{folder.name}/{one}")
            assert there == (folder / one).read_bytes()


def test_a_file_that_lies_there_by_chance_does_not_count(tmp_path: Path) -> None:
    place = Place(tmp_path)
    store = place.write(1)
    size = (tmp_path / "checkpoints" / "round-00000001" / FILES[0]).stat().st_size
    place.files.inner.pipe_file(f"/copies/{place.base}/round-00000001/{FILES[0]}", bytes(size))
    place.copy_all(store)
    assert sent(place) == FILES


def test_what_was_lost_or_cut_there_is_sent_again(tmp_path: Path) -> None:
    place = Place(tmp_path)
    store = place.write(1)

    def die(step: str, path: str) -> None:
        if (step, path.rpartition("/")[2]) == ("put", "manifest.json"):
            raise Killed

    place.files.fails = die
    with pytest.raises(Killed):
        place.copy_all(store)
    place.files.fails = lambda step, path: None
    folder = f"/copies/{place.base}/round-00000001"
    place.files.inner.rm(f"{folder}/{FILES[0]}")
    place.files.inner.pipe_file(f"{folder}/{FILES[1]}", b"half")
    before = len(sent(place))
    place.copy_all()
    assert sent(place)[before:] == [FILES[0], FILES[1], FILES[3]]


def test_without_its_ledger_or_with_a_damaged_one_all_is_sent_again(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.copy_all(place.write(1))
    for damage in (Path.unlink, lambda path: path.write_bytes(b"{]")):
        before = len(sent(place))
        damage(tmp_path / LEDGER)
        place.copy_all()
        assert sent(place)[before:] == FILES


@pytest.mark.parametrize("name", FILES)
def test_failures_are_tried_again_with_growing_pauses_and_told_once(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    place = Place(tmp_path)
    failures = 0

    def fail(step: str, path: str) -> None:
        nonlocal failures
        if step == "put" and path.endswith(name) and failures < 8:
            failures += 1
            raise ConnectionResetError("the cable")

    place.files.fails = fail
    took_s = run_for(place.copies(place.write(1)), lambda: sent(place)[-1:] == FILES[-1:])
    pauses_s = 5 + 10 + 20 + 40 + 80 + 160 + 320 + 600
    assert pauses_s <= took_s < pauses_s + 2
    told = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert len([line for line in told if "the cable" in line]) == 1
    assert len([line for line in told if "succeed again" in line]) == 1


def test_at_the_end_a_copy_is_finished_or_given_up_in_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    place = Place(tmp_path)
    store = place.write(1)

    def fail(step: str, path: str) -> None:
        raise PermissionError("no")

    place.files.fails = fail

    async def main() -> float:
        copies = place.copies(store)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(copies.run())
            await asyncio.sleep(3000)
            copies.finish()
        return now_s() - 3000

    assert run_virtual(main()) == pytest.approx(FINISH_S, abs=1)
    assert "is unfinished" in caplog.text
    assert place.whole() == []


def test_a_finish_that_comes_late_is_no_error(tmp_path: Path) -> None:
    place = Place(tmp_path)

    async def main() -> None:
        copies = place.copies()
        copies.finish()
        await copies.run()
        copies.finish()

    run_virtual(main())


def test_copies_are_kept_as_checkpoints_are(tmp_path: Path) -> None:
    place = Place(tmp_path)
    store = place.store()
    for number in range(5):
        store.write(contents(number))
        place.copy_all(store, keep=2)
    assert place.whole() == [3, 4]
    assert {name.split("/")[2] for name in place.files.names()} == {"round-00000003", "round-00000004"}
    removed = [name for what, name in place.files.calls if what == "remove"]
    assert removed[0::2] == ["manifest.json"] * 3, "half of a copy never looks like a whole one"


def test_halves_of_what_is_gone_here_are_removed_and_nothing_else(tmp_path: Path) -> None:
    place = Place(tmp_path)
    files = place.files.inner
    for path in ("round-00000000/anchor", "notes/round", "round-x/anchor"):
        files.pipe_file(f"/copies/{place.base}/{path}", b"x")
    other = Place(tmp_path / "other", files=place.files, identity=Identity.generate())
    files.pipe_file(f"/copies/{other.base}/round-00000000/anchor", b"x")
    place.copy_all(place.write(1))
    left = {name for name in place.files.names() if "round-00000001" not in name}
    assert left == {f"{place.base}/notes/round", f"{place.base}/round-x/anchor", f"{other.base}/round-00000000/anchor"}


@pytest.mark.parametrize("damage", [lambda path: path.write_bytes(b"x"), Path.unlink])
def test_a_damaged_checkpoint_is_not_copied_and_the_next_one_is(
    tmp_path: Path, damage: Callable[[Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    place = Place(tmp_path)
    store = place.write(1)
    damage(tmp_path / "checkpoints" / "round-00000001" / FILES[1])
    place.copy_all(store)
    assert place.whole() == []
    assert "round 1 is not copied" in caplog.text
    store.write(contents(2))
    place.copy_all(store)
    assert place.whole() == [2]


def test_a_url_that_cannot_be_used_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object, **__: object) -> object:
        raise ImportError("no module named s3fs")

    with pytest.raises(RemoteStorageError, match="expected a URL"):
        RemoteStore.open("/some/folder")
    with pytest.raises(RemoteStorageError, match="nosuch"):
        RemoteStore.open("nosuch://somewhere")
    monkeypatch.setattr("fsspec.core.url_to_fs", none)
    with pytest.raises(RemoteStorageError, match="pip install s3fs") as refused:
        RemoteStore.open("s3://bucket/folder")
    assert refused.value.exit_code == 41


def test_passwords_are_not_shown() -> None:
    assert without_password("ftp://me:secret@host/x") == "ftp://…@host/x"
    assert without_password("s3://bucket/x@y") == "s3://bucket/x@y"
