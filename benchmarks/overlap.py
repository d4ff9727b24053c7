"""The same run with and without ``averaging.overlap``, at equal tokens, on links so slow that the exchange takes as
long as the local work: seconds from the first round to the last verdict, and held-out loss.

Every peer and the coordinator is a process in a network namespace of its own, with a shaped link (``shaped_links.py``).
A step is padded to ``--step-ms``, as if a GPU took so long for it: peers that share this machine's cores would
otherwise measure these. The ideal with overlap is the local work alone.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from common import console, parser, publish
from shaped_links import NoShapedLinks, Site, check_machine, enter, shaped_links

BATCH = 8
CONTEXT = 64
HOST_MBIT = 100.0
LIMIT_S = 1800.0

RUN = """
algorithm = "diloco"
[run]
name = "overlap"
seed = 1
tokens = {tokens}
[recipe]
name = "gpt"
settings = {{ layers = 2, width = 64, heads = 2, context = {context} }}
[averaging]
codec = "int8"
overlap = {overlap}
[inner]
lr = 4e-3
batch_samples = {batch}
[schedule]
kind = "cosine"
warmup_tokens = {warmup}
[round]
tokens = {round_tokens}
max_s = 600
patience_s = 6
"""


def run_toml(overlap: bool, options: Any) -> str:
    step_tokens = options.peers * BATCH * CONTEXT
    return RUN.format(
        tokens=options.steps * step_tokens,
        context=CONTEXT,
        overlap=str(overlap).lower(),
        batch=BATCH,
        warmup=options.steps // 10 * step_tokens,
        round_tokens=options.inner_steps * step_tokens,
    )


def run_host(pipe: Connection, site: Site, folder: Path) -> None:
    """In a process of its own: sends the invite, then every verdict. Imports come after ``enter``."""
    enter(site.namespace)
    from shoal.peer.cli.host import Hosting, HostOptions, host
    from shoal.peer.event_schema import Event

    def on_start(hosting: Hosting) -> None:
        pipe.send(str(hosting.invite))

    def on_event(event: Event) -> None:
        if event["event"] in ("verdict", "went_back"):
            pipe.send((event["committed"], event["tokens_total"], event["elapsed_s"]))

    options = HostOptions(folder / "host-identity", folder / "host", bind=(site.address, 0))
    asyncio.run(host([folder / "run.toml"], options, on_start, on_event))


def run_peer(site: Site, invite: str, folder: Path, step_s: float) -> None:
    """In a process of its own. Imports come after ``enter``: their threads belong into the namespace too."""
    enter(site.namespace)
    torch.set_num_threads(1)
    from shoal.peer.member.replica import TrainingSetup
    from shoal.peer.options import SessionOptions
    from shoal.peer.recipes import load_recipe
    from shoal.peer.session import Session
    from shoal.peer.training.data import DataAbout
    from shoal.peer.training.inner_optimizer import make_inner

    options = SessionOptions(identity=folder / "identity", state=folder / "state", bind=(site.address, 0))
    with Session.connect(invite, options) as session:
        recipe = load_recipe(session.run_file)
        model = recipe.build_model(session.run_file.run.seed)
        about = DataAbout(recipe.corpus_digest, recipe.corpus_about, recipe.tokens_per_sample)
        session.start(TrainingSetup(model, make_inner(model, session.run_file.inner), about, recipe.config()))
        for batch in session.batches(recipe.training_data()):
            started = time.monotonic()
            loss = recipe.loss(model, batch)
            loss.backward()  # type: ignore[no-untyped-call]
            time.sleep(max(0.0, started + step_s - time.monotonic()))
            session.step(loss)


def train(overlap: bool, options: Any, folder: Path) -> dict[str, Any]:
    """A row of the table. Raises ``RuntimeError`` when a process fails or the run does not end."""
    folder.mkdir()
    (folder / "run.toml").write_text(run_toml(overlap, options))
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    rates = (HOST_MBIT,) + (options.rate,) * options.peers
    with shaped_links(rates, options.delay) as sites:
        host = context.Process(target=run_host, args=(theirs, sites[0], folder), daemon=True)
        host.start()
        theirs.close()
        peers: list[Any] = []
        try:
            invite = ours.recv()
            for number, site in enumerate(sites[1:]):
                where = folder / f"peer-{number}"
                where.mkdir()
                peers.append(
                    context.Process(target=run_peer, args=(site, invite, where, options.step_ms / 1e3), daemon=True)
                )
                peers[-1].start()
            _await_end(peers)
        finally:
            for process in [*peers, host]:
                process.kill()
                process.join()
    return _row(overlap, _verdicts(ours), options, folder)


def _await_end(peers: Sequence[Any]) -> None:
    limit_s = time.monotonic() + LIMIT_S
    for process in peers:
        process.join(max(0.0, limit_s - time.monotonic()))
        if process.exitcode != 0:
            raise RuntimeError(f"a peer ended with {process.exitcode} (None: not within {LIMIT_S:.0f} s)")


def _verdicts(pipe: Connection) -> list[tuple[bool, int, float]]:
    found = []
    try:
        while pipe.poll():
            found.append(pipe.recv())
    except EOFError:
        pass
    return found


def _row(overlap: bool, verdicts: list[tuple[bool, int, float]], options: Any, folder: Path) -> dict[str, Any]:
    from shoal.peer.exports.model_file import read_model
    from shoal.peer.offline.export import export_model
    from shoal.peer.recipes import load_recipe
    from shoal.swarm.protocol.run_file import load_run_file

    committed = [(tokens, elapsed_s) for is_committed, tokens, elapsed_s in verdicts if is_committed]
    # From the first verdict on: before it, processes start at their own pace.
    (first_tokens, first_s), (tokens, last_s) = committed[0], committed[-1]
    step_tokens = options.peers * BATCH * CONTEXT
    export_model(folder / "peer-0" / "state", folder / "model.safetensors")
    model = read_model(folder / "model.safetensors")
    recipe = load_recipe(load_run_file(folder / "run.toml")[1])
    return {
        "overlap": str(overlap).lower(),
        "M parameters": sum(parameter.numel() for parameter in model.parameters()) / 1e6,
        "tokens": tokens,
        "rounds": len(committed),
        "aborted": len(verdicts) - len(committed),
        "ms a step": 1e3 * (last_s - first_s) / ((tokens - first_tokens) / step_tokens),
        "ms a step, local work": options.step_ms,
        "s a round": (last_s - first_s) / (len(committed) - 1),
        "held-out loss": recipe.held_out_loss(model, "cpu"),
    }


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--peers", type=int, default=4)
    arguments.add_argument("--steps", type=int, default=2400, help="of every peer")
    arguments.add_argument("--inner-steps", type=int, default=60, help="between two rounds (H)")
    arguments.add_argument("--step-ms", type=float, default=50.0, help="what a step takes at least")
    arguments.add_argument("--rate", type=float, default=2.0, help="of a peer's link, Mbit/s, up and down")
    arguments.add_argument("--delay", type=float, default=25.0, help="one way, ms")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the namespaces go
    try:
        check_machine()
        with tempfile.TemporaryDirectory() as folder:
            rows = []
            for overlap in (False, True):
                console.print(f"overlap = {str(overlap).lower()}: {options.steps} steps of {options.peers} peers")
                rows.append(train(overlap, options, Path(folder) / str(overlap)))
    except NoShapedLinks as error:
        print(f"benchmarks/overlap.py: {error}", file=sys.stderr)
        sys.exit(2)
    none, overlapped = rows
    ratios = {
        "overlap_time_vs_none": overlapped["ms a step"] / none["ms a step"],
        "overlap_loss_vs_none": overlapped["held-out loss"] / none["held-out loss"],
    }
    publish(f"{options.peers} peers behind links of {options.rate:g} Mbit/s", rows, ratios, options.json)


if __name__ == "__main__":
    main()
