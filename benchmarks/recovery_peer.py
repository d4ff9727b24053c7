"""A member with an own training loop on a model of any size that costs hardly any computing: one part of the machinery
that ``recovery.py`` measures. Writes its session's events, and the moments of its own, as JSON lines.

``recovery_peer.py train|die|visit INVITE ELEMENTS FOLDER``: ``train`` until it is killed; ``die`` by SIGKILL of its own
as soon as others fetch its contribution to a round; ``visit``: for each line on its standard input, join as somebody
new who follows only, get the run's state, and leave.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import torch
from cheap_loop import STEP_S, CheapModel, Journal, line_data
from torch import nn

from shoal.peer.checkpoints import checkpointer
from shoal.peer.checkpoints.retention import Retention
from shoal.peer.member.replica import TrainingSetup
from shoal.peer.options import SessionOptions
from shoal.peer.session import Session
from shoal.swarm.protocol.rounds import Verdict
from shoal.swarm.protocol.types import Blob, Role
from shoal.swarm.transport.bulk.link import ChunkSink
from shoal.swarm.transport.bulk.source import ChunkSource
from shoal.swarm.transport.node import Node

_MOVED_EVERY = 10


def note_first_byte(journal: Journal) -> None:
    """Note the moment when the first chunk of a state arrives."""
    fetch = Node.fetch

    def noted(
        self: Node, peer: str, blob: Blob, chunks: range, sink: ChunkSink, progress_s: float
    ) -> AsyncGenerator[int, None]:
        def place(chunk: int, size: int) -> memoryview:
            journal.note("state_chunk")
            Node.fetch = fetch  # type: ignore[method-assign]
            return sink(chunk, size)

        return fetch(self, peer, blob, chunks, place if blob.kind == "state" else sink, progress_s)

    Node.fetch = noted  # type: ignore[method-assign]


def note_stalls(journal: Journal) -> None:
    """Note how long each checkpoint holds the training thread up, and beside it one copy of the state that it is of."""
    begin, commit = checkpointer.Checkpointer.begin, checkpointer.Checkpointer.commit
    began_s = 0.0

    def begun(self: checkpointer.Checkpointer, number: int) -> None:
        nonlocal began_s
        before_s = time.perf_counter()
        begin(self, number)
        began_s = time.perf_counter() - before_s

    def noted(self: checkpointer.Checkpointer, state: Any, verdict: Verdict) -> None:
        before_s = time.perf_counter()
        commit(self, state, verdict)
        stall_s = began_s + time.perf_counter() - before_s
        copy = torch.empty_like(state.values).zero_()  # its pages are there before the clock starts
        before_s = time.perf_counter()
        copy.copy_(state.values)
        copy_s = time.perf_counter() - before_s
        journal.note("stall", round=verdict.round, stall_s=stall_s, copy_s=copy_s, copy_bytes=copy.nbytes)

    checkpointer.Checkpointer.begin = begun  # type: ignore[method-assign]
    checkpointer.Checkpointer.commit = noted  # type: ignore[method-assign]


def die_when_asked(journal: Journal) -> None:
    """SIGKILL when somebody fetches our contribution."""
    publish = Node.publish

    class Fatal:
        def __init__(self, chunks: int) -> None:
            self.chunks = chunks

        async def chunk(self, index: int) -> memoryview:
            journal.note("dying")
            os.kill(os.getpid(), signal.SIGKILL)
            raise AssertionError("nobody survives that")

    def fatal(self: Node, blob: Blob, source: ChunkSource) -> None:
        publish(self, blob, Fatal(source.chunks) if blob.kind == "contribution" else source)

    Node.publish = fatal  # type: ignore[method-assign]


def options_of(folder: Path, name: str, journal: Journal, role: Role, retention: Retention | None) -> SessionOptions:
    return SessionOptions(
        identity=folder / f"{name}.identity",
        state=folder / "state",
        name=name,
        bind=("127.0.0.1", 0),
        role=role,
        checkpoints=retention,
        on_event=journal.write,
    )


def train(invite: str, elements: int, folder: Path, journal: Journal, retention: Retention | None) -> None:
    """Until it is killed or the run ends. A joiner's values are others than the run's: it needs all of the state."""
    dataset, model = line_data(10_000), CheapModel(elements, elements)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    options = options_of(folder, "member", journal, "trainer", retention)
    with Session.join(invite, model=model, inner_optimizer=optimizer, options=options) as session:
        for steps, (inputs, targets) in enumerate(session.batches(dataset)):
            started_s = time.monotonic()
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            if steps % _MOVED_EVERY == 0:
                with torch.no_grad():
                    for values in model.ballast:
                        values.mul_(0.999)
            time.sleep(max(0.0, started_s + STEP_S - time.monotonic()))
            if steps == 0:
                journal.note("step")  # what follows may be the round's end
            session.step(loss)


def visit(invite: str, elements: int, folder: Path, journal: Journal) -> None:
    """Once for each line; the imports, and the model, are there before the first."""
    model = CheapModel(elements, elements)
    for number, _ in enumerate(sys.stdin):
        options = options_of(folder, f"visitor-{number}", journal, "follower", None)
        journal.note("visit_begins")
        with Session.connect(invite, options) as session:
            session.start(TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.01)))
        journal.note("visit_ends")


def main() -> None:
    task, invite, size, place = sys.argv[1:]
    folder, elements = Path(place), int(size)
    torch.set_num_threads(1)
    torch.manual_seed(os.getpid())
    with (folder / "events.jsonl").open("a") as file:
        journal = Journal(file)
        if task == "visit":
            visit(invite, elements, folder, journal)
            return
        note_first_byte(journal)
        note_stalls(journal)
        if task == "die":
            die_when_asked(journal)
        train(invite, elements, folder, journal, Retention() if task == "train" else None)


if __name__ == "__main__":
    main()
