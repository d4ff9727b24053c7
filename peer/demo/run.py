"""shoal demo: a coordinator and peers as processes on this machine train a model by the steps of a scenario."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.text import Text

from shoal.peer.cli.page_copy import copy_page
from shoal.peer.demo.board import Board
from shoal.peer.demo.processes import Child, fresh_folder
from shoal.peer.demo.report import conclude, make_report
from shoal.peer.demo.run_log import Death, PeerLog, RunLog
from shoal.peer.demo.scenario import Scenario, Step
from shoal.peer.recipes import load_recipe
from shoal.peer.recipes.gpt import GptRecipe
from shoal.swarm.client.observer import get_status
from shoal.swarm.errors import LinkError, RunEnded, StateFileError
from shoal.swarm.protocol.invite import Invite
from shoal.swarm.protocol.run_file import RunSection, parse_run_file
from shoal.swarm.system import run_loop

_START_S = 240.0
"""A busy machine takes long to import, build and pin; a host that has ended is noticed at once."""
_POLL_S = 0.25
_AFTERWARDS_S = 90.0
_ASK_EVERY_S = 1.0


class DemoFailed(Exception):
    """A process of the demo, ``child``, did not do its part."""

    def __init__(self, words: str, child: Child) -> None:
        super().__init__(words)
        self.child = child


class Runner:
    """A coordinator and its peers, each with a folder in ``folder``; ``log`` tells what happened."""

    def __init__(self, folder: Path, scenario: Scenario, ends: RunSection, console: Console, web: str) -> None:
        """``ends``: after how many seconds, at the latest, and maybe rounds; ``web``: where to show the run's page,
        empty for nowhere."""
        assert ends.max_s is not None
        self.log = RunLog(ends, time.time())
        self._folder = folder
        self._scenario = scenario
        self._run_s = ends.max_s
        self._console = console
        self._board = Board(console, self.log)
        self._hosts: list[Child] = []
        """The coordinator, once it was started."""
        self._peers: dict[str, Child] = {}
        self._invite = ""
        self._web = web
        self._asked_s = 0.0
        self._said = ""

    def run(self) -> list[str]:
        """Run until every peer has ended by itself, or has had the time for it; end all processes. Returns what went
        wrong meanwhile, a sentence each. Raises ``DemoFailed`` when a process ended that should not."""
        self._console.print(Text.assemble("Everything goes to ", (str(self._folder), "cyan")))
        (self._folder / "run.toml").write_text(self._scenario.toml)
        steps = list(self._scenario.steps)
        try:
            with self._board.live:
                self._start_host()
                deadline = self.log.started + self._run_s + _AFTERWARDS_S
                while time.time() < deadline:
                    self._look()
                    while steps and self._take(steps[0]):
                        del steps[0]
                    if not any(child.is_running for child in self._peers.values()):
                        break
                    time.sleep(_POLL_S)
                self._look()
            late = [child.name for child in self._peers.values() if child.is_running]
        finally:
            self._end()
        troubles = [f"{', '.join(late)} did not end with the run and had to be stopped"] if late else []
        missed = [f"the run was over before {steps[0].goal}: give it more --minutes"] if steps else []
        return [*troubles, *missed]

    def _end(self) -> None:
        # Peers first: they say goodbye to the coordinator.
        for group in (list(self._peers.values()), self._hosts):
            for child in group:
                child.ask_to_end()
            for child in group:
                child.end()
        self._take_events()

    def _start_host(self) -> None:
        self._board.say("the coordinator starts")
        folder = self._folder / "host"
        arguments = ["host", str(self._folder / "run.toml"), "--bind", "127.0.0.1:0", "--no-keep-model"]
        arguments += ["--web", self._web] if self._web else []
        self._hosts = [Child("host", folder, arguments)]
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            self._look()
            self._invite = self._hosts[0].invite()
            if self._invite:
                self.log.started = time.time()
                if page := self._hosts[0].page():
                    self._console.print(Text.assemble("Page    ", (page, "cyan")))
                return
            time.sleep(_POLL_S)
        raise DemoFailed(f"the coordinator gave no invite within {_START_S:.0f} s", self._hosts[0])

    def _take(self, step: Step) -> bool:
        """Take the step if it is due."""
        done, total = self.log.done
        target = step.choose(self.log) if done >= step.after * total else None
        if target is None:
            return False
        name = target.peer
        match step.act:
            case "start":
                late = step.after > 0
                self.log.peers[name] = PeerLog(self.log.now if late else None, "came late" if late else "")
                arguments = ["join", self._invite, "--name", name, "--bind", "127.0.0.1", "--threads", "1"]
                arguments += ["--device", "cpu", *self._scenario.join_options]
                self._peers[name] = Child(name, self._folder / name, arguments)
                self._board.say(f"{name} starts{' late' if late else ''}")
            case "kill":
                self._peers[name].kill()
                death = Death(name, time.time(), target.stage, target.replicas)
                self.log.kill(death)
                self._board.say(f"{name} (process {self._peers[name].process.pid}) is killed by SIGKILL{death.about}")
            case "restart":
                self._peers[name].start_again()
                self.log.restart(name)
                self._board.say(f"{name} starts again, with the same command")
        return True

    def _look(self) -> None:
        """Take in what was logged, and notice who died. Raises ``DemoFailed``."""
        self._take_events()
        self.log.outlook = "" if self.log.is_recovered else self._ask()
        self._board.refresh()
        for child in [*self._peers.values(), *self._hosts]:
            code = child.process.poll()
            # The coordinator serves until it is told to stop; a peer that started again may come too late.
            fine = () if child in self._hosts else (0, RunEnded.exit_code)
            if code is not None and not child.killed and code not in fine:
                raise DemoFailed(f"{child.name} ended with exit code {code}", child)

    def _take_events(self) -> None:
        self.log.now = time.time()
        for name, child in self._peers.items():
            for event in child.take_events():
                self.log.peers[name].feed(event)
        for event in (event for host in self._hosts for event in host.take_events()):
            told = self.log.feed_host(event)
            if told is not None:
                self._board.show(told)

    def _ask(self) -> str:
        """Ask the coordinator for what the run waits; show it on the board when it is new."""
        if time.monotonic() - self._asked_s < _ASK_EVERY_S:
            return self.log.outlook
        self._asked_s = time.monotonic()
        try:
            outlook = run_loop(get_status(Invite.parse(self._invite))).outlook
        except LinkError:
            return ""
        new = re.sub(r"\d+", "", outlook)  # not again when only seconds have passed
        if new and new != self._said:
            self._board.say(f"shoal status: {outlook}")
        self._said = new
        return outlook


def run_demo(scenario: Scenario, out: Path, json_path: Path | None, console: Console, web: str = "") -> int:
    """Run the whole demo in a new folder in ``out``, and write its figures to ``json_path``; ``web``: where to show the
    run's page, of which a copy stays. Returns the exit code: 0 when a model was trained and all peers agree on it.
    Raises ``StorageError``."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C: the processes are ended, too
    run = parse_run_file(scenario.toml)
    recipe = load_recipe(run)
    assert isinstance(recipe, GptRecipe)
    folder = fresh_folder(out)
    runner = Runner(folder, scenario, run.run, console, web)
    try:
        troubles = runner.run()
        if web:
            page = copy_page(str(folder / "host" / "state" / run.run.name), str(folder / "page"))
            console.print(Text.assemble("Page    ", (page, "cyan")))
        torch.set_num_threads(1)  # several would wait for each other where others use the cores, too
        console.print("Measuring the model on text that it has not seen", style="dim")
        report, model = make_report(folder, run, recipe, runner.log)
    except (DemoFailed, StateFileError) as failure:
        console.print(Text(f"The demo failed: {failure}", "bold red"))
        if isinstance(failure, DemoFailed):
            console.print(failure.child.last_words())
        return 1
    return conclude(report, model, troubles, folder, json_path, console)
