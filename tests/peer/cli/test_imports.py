"""What the command line imports before it has something to compute: neither torch nor numba."""

import subprocess
import sys

import pytest

HEAVY = ("torch", "numba")
PROGRAM = f"""
import atexit, runpy, sys
atexit.register(lambda: print("HEAVY", *(name for name in {HEAVY!r} if name in sys.modules), file=sys.stderr))
sys.argv[0] = "shoal"
"""


def run_python(program: str, *arguments: str) -> tuple[int, str, list[str]]:
    """Exit code, all that was said, and which of the heavy modules were imported."""
    done = subprocess.run([sys.executable, "-c", PROGRAM + program, *arguments], capture_output=True, text=True)
    said, _, heavy = done.stderr.rpartition("HEAVY")
    return done.returncode, done.stdout + said, heavy.split()


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--help"], 0, "Train one model together"),
        (["host", "--help"], 0, "Host a run"),
        (["join", "--help"], 0, "Join a run"),
        (["demo", "--minutes", "never"], 2, "--minutes"),
        (["join"], 2, "invite"),
        (["join", "shoal://nowhere"], 11, "InviteError"),
        (["join", "no invite at all", "--device", "cpu"], 11, "InviteError"),
        (["status", "shoal://nowhere"], 11, "InviteError"),
        (["log", "shoal://nowhere"], 11, "InviteError"),
        (["export", "--run", "shoal://nowhere"], 11, "InviteError"),
        (["host", "missing.toml"], 10, "missing.toml"),
        (["log", "missing"], 17, "no history"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_help_and_errors_need_no_torch(arguments: list[str], code: int, words: str) -> None:
    found, said, heavy = run_python("from shoal.peer.cli.main import main; main()", *arguments)
    assert words in said
    assert found == code
    assert heavy == []


@pytest.mark.parametrize(
    "module",
    [
        "shoal.peer.cli.host",
        "shoal.peer.cli.log",
        "shoal.peer.cli.supervisor",
        "shoal.peer.terminal.reporter",
        "shoal.peer.terminal.views",
        "shoal.swarm.client.observer",
        "shoal.swarm.coordinator.service",
    ],
)
def test_hosting_and_looking_need_no_torch(module: str) -> None:
    assert run_python(f"import {module}") == (0, "", [])
