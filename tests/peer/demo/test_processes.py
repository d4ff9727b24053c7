from pathlib import Path

import pytest

from shoal.peer.demo.processes import EventFile, fresh_folder
from shoal.swarm.errors import StorageError


def test_a_line_without_its_end_waits(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    file = EventFile(path)
    assert file.new() == []
    path.write_bytes(b'{"event": "a"}\n{"event"')
    assert file.new() == [{"event": "a"}]
    assert file.new() == []
    with path.open("ab") as more:
        more.write(b': "b"}\n')
    assert file.new() == [{"event": "b"}]


def test_folders_are_new_each_time(tmp_path: Path) -> None:
    assert fresh_folder(tmp_path / "out") != fresh_folder(tmp_path / "out")
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError):
        fresh_folder(tmp_path / "file")
