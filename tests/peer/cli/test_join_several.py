"""`shoal join` over several runs: what comes after a run that its host has made longer, and after a pause."""

import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from shoal.peer.cli import join, joining
from shoal.peer.cli.join import Ending
from shoal.peer.cli.main import app
from shoal.peer.guest.spot import SpotNotices
from shoal.peer.options import TERMINATED, SessionOptions
from shoal.swarm.errors import RunAmended
from shoal.swarm.protocol.invite import Invite
from shoal.swarm.protocol.types import Address


def invite(run: str, number: int = 1) -> Invite:
    address = Address(host="192.0.2.1", control_port=7000 + number)
    return Invite((address,), run, bytes(31) + b"k", bytes(31) + bytes([number]), b"")


REEF, KELP = invite("reef"), invite("kelp", 2)
LONGER = RunAmended("the host has made the run longer: run.rounds = 20", (("run.rounds", "20"),))


class Machine:
    """A machine on which runs end as they are told to; ``joined``: which it joined, with which options."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.joined: list[tuple[str, SessionOptions]] = []
        self.endings: list[Ending | Exception] = []
        self.again: list[str] = []
        self._folder = folder

        def run_member(text: str, options: SessionOptions, *_: Any) -> Ending:
            self.joined.append((text, options))
            ending = self.endings.pop(0)
            if isinstance(ending, Exception):
                raise ending
            return ending

        def execv(program: str, arguments: list[str]) -> None:
            self.again = arguments[3:]
            raise SystemExit(0)

        monkeypatch.setattr(join, "run_member", run_member)
        monkeypatch.setattr(os, "execv", execv)
        monkeypatch.setenv("SHOAL_INVITE", "")
        self._monkeypatch = monkeypatch

    def join(self, *arguments: str) -> int:
        options = ["--identity", str(self._folder / "identity"), "--state", str(self._folder / "runs")]
        self._monkeypatch.setattr("sys.argv", ["shoal", "join", *arguments, *options])
        result = CliRunner().invoke(app, ["join", *arguments, *options])
        if isinstance(result.exception, RunAmended):
            return result.exception.exit_code
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return result.exit_code


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def test_the_next_run_is_joined_when_nobody_agrees_to_a_longer_one(machine: Machine) -> None:
    machine.endings = [LONGER, Ending.RUN_ENDED]
    assert machine.join(str(REEF), "--then", str(KELP)) == 0
    assert [text for text, _ in machine.joined] == [str(REEF), str(KELP)]


def test_whose_machine_is_taken_back_joins_nothing_more_and_asks_to_be_started_again(machine: Machine) -> None:
    machine.endings = [Ending.TERMINATED]
    assert machine.join(str(REEF), "--then", str(KELP)) == TERMINATED
    assert [text for text, _ in machine.joined] == [str(REEF)]


def test_ctrl_c_asks_for_nothing(machine: Machine) -> None:
    machine.endings = [Ending.STOPPED]
    assert machine.join(str(REEF), "--then", str(KELP)) == 0
    assert [text for text, _ in machine.joined] == [str(REEF)]


def test_a_machine_that_is_about_to_be_taken_back_does_not_join(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SpotNotices, "look", lambda _: "preempted")
    assert machine.join(str(REEF), "--spot", "gcp") == TERMINATED
    assert machine.joined == []


def test_without_a_next_run_it_ends_and_says_why(machine: Machine) -> None:
    machine.endings = [LONGER]
    assert machine.join(str(REEF)) == RunAmended.exit_code


def test_whose_owner_agrees_goes_on_in_the_run(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.peer.cli.consent._somebody_is_there", lambda _: True)
    monkeypatch.setattr("rich.console.Console.input", lambda *_, **__: "yes")
    machine.endings = [LONGER, Ending.RUN_ENDED]
    assert machine.join(str(REEF)) == 0
    assert [(text, options.agreed_ends) for text, options in machine.joined] == [
        (str(REEF), ()),
        (str(REEF), LONGER.ends),
    ]


def test_after_a_pause_a_name_is_still_the_run_that_was_joined(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "named_invite", lambda text, _: REEF if text == "reef" else None)
    machine.endings = [Ending.PAUSED]
    machine.join("reef", "--then", str(KELP))
    monkeypatch.setattr(joining, "named_invite", lambda text, _: KELP)  # another run has the name now
    machine.endings = [Ending.PAUSED]
    machine.join(
        *machine.again[1 : machine.again.index("--identity")], *machine.again[machine.again.index("--state") + 2 :]
    )
    assert [text for text, _ in machine.joined] == [str(REEF)] * 2
    assert machine.again.count("--resume-as") == 1
    machine.endings = [Ending.RUN_ENDED, Ending.PAUSED]
    machine.join(
        *machine.again[1 : machine.again.index("--identity")], *machine.again[machine.again.index("--state") + 2 :]
    )
    assert machine.again[-2:] == ["--resume-at", "1"], "an invite needs no name"
