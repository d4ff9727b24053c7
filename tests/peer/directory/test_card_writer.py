"""Publication of a card: how often, at the end, and what a store that fails or hangs does to it."""

import asyncio
import logging
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.virtual_clock import now_s, run_virtual

from shoal.peer.checkpoints.remote.store import DaemonThreads
from shoal.peer.directory import card_writer
from shoal.peer.directory.card_writer import PlaceWriter, card_place, write_card
from shoal.peer.directory.places import Place
from shoal.swarm.errors import RemoteStorageError, UserError


class Inline(DaemonThreads):
    """Executor that works at once, or never."""

    hangs = False

    def submit(self, work: Any, /, *args: Any, **options: Any) -> Future[Any]:
        future: Future[Any] = Future()
        if not self.hangs:
            try:
                future.set_result(work(*args, **options))
            except RemoteStorageError as error:
                future.set_exception(error)
        return future


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, bytes]]:
    monkeypatch.setattr(card_writer, "DaemonThreads", Inline)
    monkeypatch.setattr(Inline, "hangs", False)
    return []


def writer_of(written: list[tuple[float, bytes]], fails: list[bool] | None = None) -> PlaceWriter[bytes]:
    async def make(stopped: bool) -> bytes:
        return b"stopped" if stopped else b"running"

    def write(place: Place, data: bytes) -> None:
        if fails and fails.pop(0):
            raise RemoteStorageError("no such bucket")
        written.append((now_s(), data))

    return PlaceWriter(Place("card.json"), make, write)


def test_a_card_is_written_after_changes_and_now_and_then(written: list[tuple[float, bytes]]) -> None:
    async def story() -> None:
        writer = writer_of(written)
        task = asyncio.create_task(writer.keep())
        await asyncio.sleep(1)
        for _ in range(5):
            writer.changed()
        await asyncio.sleep(1300)
        task.cancel()
        await writer.close()

    run_virtual(story())
    assert written == [(0, b"running"), (15, b"running"), (615, b"running"), (1215, b"running"), (1301, b"stopped")]


def test_failures_are_told_once_and_tried_again(
    written: list[tuple[float, bytes]], caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        writer = writer_of(written, [True, True, False])
        task = asyncio.create_task(writer.keep())
        await asyncio.sleep(1300)
        task.cancel()

    with caplog.at_level(logging.WARNING):
        run_virtual(story())
    assert [one for one, _ in written] == [1200]
    assert [("no such bucket" in one, "again" in one) for one in caplog.messages] == [(True, True), (False, True)]


def test_a_store_that_hangs_holds_up_the_end_for_a_moment_only(
    written: list[tuple[float, bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Inline, "hangs", True)

    async def story() -> float:
        writer = writer_of(written)
        task = asyncio.create_task(writer.keep())
        await asyncio.sleep(100)
        task.cancel()
        await writer.close()
        return now_s()

    assert run_virtual(story()) == 110
    assert written == []


def test_where_a_card_lies(tmp_path: Path) -> None:
    assert card_place("s3://bucket/cards/", "reef").where == "s3://bucket/cards/reef.json"
    assert card_place("/srv/www/best.json", "reef").where == "/srv/www/best.json"
    for where in ("https://example.org/cards", "simplecache::s3://x"):
        with pytest.raises(UserError, match="--publish"):
            card_place(where, "reef")


def test_cards_are_written_to_folders_and_stores(tmp_path: Path) -> None:
    import fsspec

    for _ in range(2):
        write_card(Place(str(tmp_path / "www" / "reef.json")), b"card")
    assert [one.name for one in (tmp_path / "www").iterdir()] == ["reef.json"]
    write_card(Place("memory://cards/reef.json"), b"card")
    assert fsspec.filesystem("memory").cat_file("/cards/reef.json") == b"card"
    (tmp_path / "file").touch()
    with pytest.raises(RemoteStorageError, match="cannot be written"):
        write_card(Place(str(tmp_path / "file" / "reef.json")), b"card")


def test_a_card_that_cannot_be_made_is_said_and_made_again_later(
    written: list[tuple[float, bytes]], caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        fails = [True, False]

        async def make(stopped: bool) -> bytes:
            if fails.pop(0):
                raise ValueError("no room for that")
            return b"card"

        writer = PlaceWriter(Place("card.json"), make, lambda place, data: written.append((now_s(), data)))
        task = asyncio.create_task(writer.keep())
        await asyncio.sleep(700)
        task.cancel()

    with caplog.at_level(logging.WARNING):
        run_virtual(story())
    assert written == [(600, b"card")]
    assert "no room for that" in caplog.messages[0]
