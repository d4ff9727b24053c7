"""``shoal demo``: a coordinator and peers as processes on this machine train a model; some are killed."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.text import Text

from shoal.peer.demo.figures import conclude
from shoal.peer.demo.processes import DemoFailed, DemoSwarm, fresh_folder
from shoal.peer.demo.run_files import demo_run_toml, pipeline_rounds, pipeline_run_toml
from shoal.peer.demo.scenarios import SPARE_PEERS, AveragingDemo, PipelineDemo
from shoal.peer.recipes import load_recipe
from shoal.peer.recipes.gpt import GptRecipe
from shoal.swarm.errors import UserError
from shoal.swarm.protocol.run_file import parse_run_file

_PEERS, _PIPELINE_PEERS = 4, 5


@dataclass(frozen=True)
class DemoOptions:
    """``preset``: ``diloco`` (also for None) or ``sparseloco``, with their published codecs and outer optimizers;
    ``pipeline``: a model in stages instead; ``peers``: None for as many as that takes; ``json``: where to write the
    figures; ``out``: each demo makes a folder in it."""

    peers: int | None = None
    minutes: float = 3.0
    preset: str | None = None
    pipeline: bool = False
    json: Path | None = None
    out: Path = Path("shoal-demo")


def run_demo(options: DemoOptions, console: Console) -> int:
    """The whole demo; returns the exit code, 0 when a model was trained and all peers agree on it. Raises
    ``UserError`` for options that make no sense."""
    course, toml = _course_of(options)
    run = parse_run_file(toml)
    recipe = load_recipe(run)
    assert isinstance(recipe, GptRecipe)
    try:
        with _signals_interrupt(), DemoSwarm(fresh_folder(options.out), toml, run.run, console) as swarm:
            leftover = swarm.run(course)
        swarm.take_last_events()
        torch.set_num_threads(1)  # several would wait for each other where others use the cores, too
        console.print("Measuring the model on text that it has not seen", style="dim")
        ending = course.end(swarm, recipe, run.run.seed)
    except DemoFailed as failure:
        console.print(Text(f"The demo failed: {failure.args[0]}", "bold red"))
        console.print(failure.args[1].last_words())
        return 1
    if leftover:
        trouble = f"{', '.join(leftover)} did not end with the run and had to be stopped"
        ending = replace(ending, troubles=(*ending.troubles, trouble))
    return conclude(ending, swarm.folder, options.json, console)


def _course_of(options: DemoOptions) -> tuple[AveragingDemo | PipelineDemo, str]:
    """The scenario of the demo, and its run file."""
    if not options.pipeline:
        peers = _PEERS if options.peers is None else options.peers
        if peers < 2:
            raise UserError("--peers: expected 2 or more: one of them is killed")
        return AveragingDemo(peers), demo_run_toml(options.preset or "diloco", peers, options.minutes)
    if options.preset is not None:
        raise UserError("--pipeline: a model in stages is trained by virtual_batch; leave out --preset")
    peers = _PIPELINE_PEERS if options.peers is None else options.peers
    if peers < _PIPELINE_PEERS:
        raise UserError(
            f"--peers: expected {_PIPELINE_PEERS} or more with --pipeline: three stages, and {SPARE_PEERS} to lose"
        )
    if options.minutes < 1.0:
        raise UserError("--minutes: expected 1 or more with --pipeline: two peers are killed, and there are few rounds")
    stages = peers - SPARE_PEERS
    rounds = pipeline_rounds(options.minutes)
    return PipelineDemo(peers, stages, rounds), pipeline_run_toml(stages, rounds)


@contextlib.contextmanager
def _signals_interrupt() -> Iterator[None]:
    """SIGTERM ends the demo like Ctrl-C, so that its processes are ended too."""
    earlier = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, earlier)
