"""Imports of the command line: commands that compute nothing themselves import neither torch nor numba.

Help and what is wrong with an invite or a run file are told at once, so they import nothing large at all."""

import subprocess
import sys
from pathlib import Path

import pytest
from tests.peer.layered_models import gpt
from tests.peer.starts import random_state, run_toml, write_checkpoint

from shoal.swarm.protocol.run_file import load_run_file, parse_run_file

HEAVY = ("torch", "numba")
LARGE = (*HEAVY, "numpy", "cryptography", "msgpack", "zmq", "shoal.swarm.protocol.types")
"""Not pydantic, which typer imports by itself."""
PROGRAM = f"""
import atexit, runpy, sys
atexit.register(lambda: print("LARGE", *(name for name in {LARGE!r} if name in sys.modules), file=sys.stderr))
sys.argv[0] = "shoal"
"""


def run_python(program: str, *arguments: str) -> tuple[int, str, list[str]]:
    """Run a program; return its exit code, its output, and which large modules it imported."""
    done = subprocess.run([sys.executable, "-c", PROGRAM + program, *arguments], capture_output=True, text=True)
    said, _, large = done.stderr.rpartition("LARGE")
    return done.returncode, done.stdout + said, large.split()


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--help"], 0, "Train one model together"),
        (["host", "--help"], 0, "Host a run"),
        (["join", "--help"], 0, "Join a run"),
        (["demo", "--minutes", "never"], 2, "--minutes"),
        (["join"], 2, "INVITE|NAME"),
        (["join", "shoal://nowhere"], 11, "InviteError"),
        (["join", "no invite at all", "--device", "cpu"], 11, "InviteError"),
        (["status", "shoal://nowhere"], 11, "InviteError"),
        (["log", "shoal://nowhere"], 11, "InviteError"),
        (["export", "--run", "shoal://nowhere"], 11, "InviteError"),
        (["page", "shoal://nowhere", "--out", "x"], 11, "InviteError"),
        (["top", f"shoal://nowhere:1/reef?key={'A' * 43}&run={'A' * 43}&t=cut"], 11, "t= is cut off"),
        (["host", "missing.toml"], 10, "missing.toml"),
        (["host", "missing.toml", "--metrics", "--web"], 10, "missing.toml"),
        (["simulate", "missing.toml"], 10, "missing.toml"),
        (["prepare", "missing.toml", "--out", "x"], 10, "missing.toml"),
        (["doctor", "missing.toml"], 10, "missing.toml"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_help_and_errors_need_nothing_large(arguments: list[str], code: int, words: str) -> None:
    found, said, large = run_python("from shoal.peer.cli.main import main; main()", *arguments)
    assert words in said
    assert found == code
    assert large == []


def test_a_folder_without_a_history_needs_no_torch() -> None:
    found, said, large = run_python("from shoal.peer.cli.main import main; main()", "log", "missing")
    assert "no history" in said
    assert found == 17
    assert not {*HEAVY} & {*large}


STOP_WHEN_HOSTING = """
import os, pathlib, signal, threading, time
def stop():
    while not list(pathlib.Path({state!r}).glob("*/invite.txt")):
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGTERM)
threading.Thread(target=stop, daemon=True).start()
from shoal.peer.cli.main import main; main()
"""


def test_a_host_that_starts_from_a_checkpoint_needs_no_torch(tmp_path: Path) -> None:
    """Processes of their own read the checkpoint, and build the model to pin it."""
    toml = run_toml("finished")
    layout = gpt().layers(1).layout
    elements = sum(spec.elements for spec in layout)
    write_checkpoint(tmp_path / "peer", parse_run_file(toml), toml, layout, random_state(elements))
    path, state = tmp_path / "next.toml", tmp_path / "state"
    path.write_text(run_toml("next"))
    arguments = ["host", str(path), "--from", str(tmp_path / "peer"), "--state", str(state), "--bind", "127.0.0.1:0"]
    found, said, large = run_python(STOP_WHEN_HOSTING.format(state=str(state)), *arguments)
    assert found == 0, said
    assert "of finished-" in said.partition("Start ")[2]
    _, hosted = load_run_file(state / "next" / "run.toml")
    assert hosted.start is not None
    assert hosted.start.run.startswith("finished-")
    assert hosted.pins is not None
    assert not {*HEAVY} & {*large}


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
    found, said, large = run_python(f"import {module}")
    assert (found, said) == (0, "")
    assert not {*HEAVY} & {*large}
