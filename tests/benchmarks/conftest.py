from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _benchmarks_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are scripts beside each other, no package."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
