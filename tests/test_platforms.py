"""Shoal without what only POSIX has: all modules can be imported, and a run commits its rounds."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.integration
def test_all_modules_and_a_run_without_what_windows_lacks(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT / ".src"), "OMP_NUM_THREADS": "1", "SHOAL_HOME": str(tmp_path)}
    command = [sys.executable, str(ROOT / "tests" / "other_system.py"), "--run"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150, check=False)
    assert done.stdout.endswith("as it should be\n"), done.stdout[-2000:] + done.stderr[-4000:]


def test_the_home_folder_is_where_the_environment_says(tmp_path: Path) -> None:
    code = "from shoal.peer.options import SHOAL_HOME, SessionOptions as S; print(SHOAL_HOME, S().state, S().identity)"
    environment = os.environ | {"PYTHONPATH": str(ROOT / ".src"), "SHOAL_HOME": str(tmp_path / "home")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    home = tmp_path / "home"
    assert done.stdout.split() == [str(home), str(home / "runs"), str(home / "identity")]
