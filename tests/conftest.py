"""Settings of every test process: one thread, and property tests that no slow machine can fail.

Which integration tests are slow is decided here, too: `make test` runs the others, `make test-all` those.
"""

import os
from pathlib import Path

import pytest
import torch
from hypothesis import settings

# Tests run side by side, and many start peers of their own: threads would only stand in each other's way.
torch.set_num_threads(1)

settings.register_profile("local", deadline=None, max_examples=50)
settings.register_profile("ci", settings.get_profile("local"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")

SLOW_FOLDERS = {"attacks", "chaos"}
"""Fault matrices and attacks; the defences are shown by unit tests as well."""

SMOKE_ATTACKS = {"test_joins", "test_pins"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow the real-process tests of those folders, and of a test with parameters all cases but the first."""
    seen = set[tuple[Path, str]]()
    for item in items:
        if item.get_closest_marker("integration") is None:
            continue
        case = item.path, getattr(item, "originalname", item.name)
        is_repetition = case in seen
        seen.add(case)
        if is_repetition or (item.path.stem not in SMOKE_ATTACKS and SLOW_FOLDERS & set(item.path.parts)):
            item.add_marker("slow")
