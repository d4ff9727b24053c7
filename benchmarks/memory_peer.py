"""A member with a training loop of its own whose memory is known to the byte: one part of what ``memory.py`` measures.

``memory_peer.py INVITE ELEMENTS FOLDER``. Writes its session's events and its own moments as JSON lines: the memory
before it had a model, the memory at rest in the middle of local work, and the stalls of the training thread.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from cheap_loop import STEP_S, CheapModel, Journal, line_data
from torch import nn
from usage import rss_bytes

from shoal.compression.codec_map import CodecMap
from shoal.compression.formats import named_format_map
from shoal.compression.kernels import loader
from shoal.peer.member.replica import TrainingReplica
from shoal.peer.options import SessionOptions
from shoal.peer.session import Session
from shoal.swarm.averaging.averager import Averager
from shoal.swarm.averaging.outcome import RoundOffer, RoundOutcome
from shoal.swarm.client.coordinator_client import CoordinatorClient
from shoal.swarm.protocol.messages import PeerToCoordinatorRoundReady
from shoal.swarm.protocol.rounds import RunView

LAYER = 2**20
"""Parameters of a tensor: models have many of some size, and what a step takes beside them is as small."""

_SAMPLES = 100_000


def note_stalls(journal: Journal) -> None:
    """Note when the training thread waits for a round, when this peer says that it is ready, and when it has the
    verdict."""

    def blocking(name: str) -> None:
        run: Callable[[TrainingReplica], Any] = getattr(TrainingReplica, name)

        def noted(self: TrainingReplica) -> Any:
            before_s = time.time()
            result = run(self)
            journal.note("blocked", by=name, since=before_s)
            return result

        setattr(TrainingReplica, name, noted)

    blocking("close_round")
    blocking("conclude_round")
    ask_view, conclude = CoordinatorClient.ask_view, Averager._conclude

    async def ready(self: CoordinatorClient, message: Any) -> Any:
        if isinstance(message, PeerToCoordinatorRoundReady):
            journal.note("ready", round=message.round)
        return await ask_view(self, message)

    async def verdict(self: Averager, view: RunView, offer: RoundOffer) -> RoundOutcome:
        journal.note("verdict_here")
        return await conclude(self, view, offer)

    CoordinatorClient.ask_view = ready  # type: ignore[method-assign]
    Averager._conclude = verdict  # type: ignore[method-assign]


def inner_optimizer(model: CheapModel, *, has_state: bool) -> torch.optim.Optimizer:
    """AdamW; ``has_state``: with its two values for each parameter from the start, of which most get no gradient."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if has_state:
        for layer in model.ballast:
            moments = {"exp_avg": torch.full_like(layer, 0.5), "exp_avg_sq": torch.full_like(layer, 0.25)}
            optimizer.state[layer] = {"step": torch.tensor(1.0), **moments}
    return optimizer


def move(layers: nn.ParameterList, *, by_gradient: bool) -> None:
    """Change all parameters, as a step would, or give them the gradients for it."""
    with torch.no_grad():
        for layer in layers:
            if by_gradient:
                layer.grad = layer * 0.01
            else:
                layer.mul_(0.999)


def train(session: Session, model: CheapModel, journal: Journal, *, by_gradient: bool, copies: bool) -> None:
    """Train until the run ends. ``copies``: time a copy of the parameters in each round, which takes their memory."""
    dataset = line_data(_SAMPLES)
    spare = [torch.zeros_like(layer) for layer in model.ballast] if copies else []
    last_round, step = -1, 0
    for inputs, targets in session.batches(dataset):
        started_s = time.monotonic()
        step = 0 if session.view.round != last_round else step + 1
        last_round = session.view.round
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        if step % 10 == 0:
            move(model.ballast, by_gradient=by_gradient)
        if spare and step == 5:
            before_s = time.perf_counter()
            for layer, copy in zip(model.ballast, spare, strict=True):
                copy.copy_(layer.detach())
            journal.note("copy", seconds=time.perf_counter() - before_s)
        time.sleep(max(0.0, started_s + STEP_S - time.monotonic()))
        if step > 5 and step % 10 != 0:  # gradients of `move` are gone again
            journal.note("rest", round=session.view.round, rss_bytes=rss_bytes(os.getpid()))
        session.step(loss)


def main() -> None:
    invite, size, place, *flags = sys.argv[1:]
    folder, elements = Path(place), int(size)
    torch.set_num_threads(1)
    torch.manual_seed(1)
    for thread in loader.compile_ahead(CodecMap(named_format_map("int8")).kernels):
        thread.join()
    with (folder / "events.jsonl").open("a") as file:
        journal = Journal(file)
        note_stalls(journal)
        journal.note("began", rss_bytes=rss_bytes(os.getpid()))
        options = SessionOptions(
            identity=folder / "identity", state=folder / "state", bind=("127.0.0.1", 0), on_event=journal.write
        )
        accumulates = "accumulates" in flags
        model = CheapModel(elements, LAYER)
        optimizer = None if accumulates else inner_optimizer(model, has_state=True)
        with Session.join(invite, model=model, inner_optimizer=optimizer, options=options) as session:
            train(session, model, journal, by_gradient=accumulates, copies="copies" in flags)


if __name__ == "__main__":
    main()
