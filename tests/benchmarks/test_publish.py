import json
from pathlib import Path

import pytest


def test_sizes_are_read_and_written() -> None:
    from common import comma, elements_of, size_of

    assert comma(elements_of)("1M, 2.5M,500k,70000,") == [10**6, 2_500_000, 500_000, 70_000]
    for text in ("1M", "2.5M", "0.5M", "50M"):
        assert size_of(elements_of(text)) == text
    for wrong in ("", "M", "x", "0", "-1M", "1.5", "0.0000001M"):
        with pytest.raises(ValueError, match=r"float|expected"):
            elements_of(wrong)


def test_what_was_not_measured_is_null(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from common import publish

    rows = [{"what": "ours", "s": 0.25}, {"what": "theirs", "s": None, "note": "did not answer"}]
    publish("a title", rows, {"ratio": None, "other": 0.5}, tmp_path / "deep" / "out.json")
    written = json.loads((tmp_path / "deep" / "out.json").read_text())
    assert set(written) == {"machine", "rows", "ratios"}
    assert written["rows"] == rows
    assert written["ratios"] == {"ratio": None, "other": 0.5}
    shown = capsys.readouterr().out
    assert "ratio = not measured" in shown
    assert "did not answer" in shown
