"""``shoal``, but it kills itself at a named step: ``doomed_member.py STEP TIMES ARMED join INVITE …``.

It sends itself a SIGKILL, or the signal that is named in the file ``ARMED``, as it comes to the step for the
``TIMES``-th time in a round that begins to come to it when that file is there. If the file has ``rank N``, the SIGKILL
is for that rank of its island.
"""

import asyncio
import os
import re
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
from slow_member import slow_down

from shoal.peer.checkpoints.state_files import PlainStateFiles
from shoal.peer.checkpoints.store import CheckpointStore, round_of
from shoal.peer.checkpoints.writer import CheckpointWriter
from shoal.peer.cli.main import main
from shoal.peer.history import round_records
from shoal.peer.member.replica import TrainingReplica
from shoal.peer.session import Session
from shoal.peer.state_transfer.donor import StateSource
from shoal.peer.state_transfer.partial_state import IncomingFile, PartialState
from shoal.swarm.averaging.allreduce import AllReduce
from shoal.swarm.averaging.contribution import ContributionSource
from shoal.swarm.averaging.reduction import ChunkCollector, ReducedChunk, Reduction
from shoal.swarm.averaging.secure_exchange import MaskedSource, SecureExchange
from shoal.swarm.client.coordinator_client import CoordinatorClient
from shoal.swarm.protocol.messages import (
    PeerToCoordinatorRoundReady,
    PeerToCoordinatorRoundReport,
    PeerToCoordinatorSecureStep,
)


class Doom:
    """The death of this process; ``comes_to(n)`` is called where the step is reached in round n."""

    def __init__(self, times: int, armed: Path) -> None:
        self._times = times
        self._armed = armed
        self._round = -1
        self._left = 0

    def comes_to(self, round_number: int) -> None:
        if round_number != self._round:
            self._round = round_number
            self._left = self._times if self._armed.exists() else 0
        if self._left:
            self._left -= 1
            if not self._left:
                strike(self._armed.read_text() or "SIGKILL")


def strike(order: str) -> None:
    name, _, rank = order.partition(" ")
    if name != "rank":
        os.kill(os.getpid(), signal.Signals[name])
        return
    for child in psutil.Process().children():
        if child.cmdline()[2:3] == ["shoal.peer.island.training"] and child.cmdline()[4] == rank:
            child.kill()


def training(doom: Doom) -> None:
    """Kill itself when a batch's gradients are there and the step is about to be made."""
    real = Session.step

    def step(self: Any, loss: Any) -> None:
        doom.comes_to(self._replica.round)
        real(self, loss)

    Session.step = step  # type: ignore[method-assign]


def serving(doom: Doom) -> None:
    """Kill itself when a chunk that the plan counts on is requested; earlier ones are on their way or have arrived."""
    real, begin = ContributionSource.chunk, AllReduce.run
    planned: set[int] = set()

    async def run(self: Any) -> Any:
        planned.add(self._plan.round)
        return await begin(self)

    async def chunk(self: Any, index: int) -> memoryview:
        number = self._store.plan.round
        while number not in planned and not self._closed:  # noqa: ASYNC110 - a flag
            await asyncio.sleep(0.01)
        doom.comes_to(number)
        return await real(self, index)

    ContributionSource.chunk = chunk  # type: ignore[method-assign]
    AllReduce.run = run  # type: ignore[method-assign]


def reducing(doom: Doom) -> None:
    """Kill itself as an owner, when a chunk is complete and about to be reduced."""
    real = Reduction._make

    async def make(self: Any, collector: ChunkCollector, index: int) -> ReducedChunk:
        await collector.wait_complete(index)
        doom.comes_to(self.context.store.plan.round)
        return await real(self, collector, index)

    Reduction._make = make  # type: ignore[method-assign]


def exchanged(doom: Doom) -> None:
    """Kill itself when all results are here and the report is about to be made."""
    real = AllReduce.run

    async def run(self: Any) -> Any:
        exchange = await real(self)
        doom.comes_to(self._plan.round)
        return exchange

    AllReduce.run = run  # type: ignore[method-assign]


def answered(doom: Doom, kind: type) -> None:
    real = CoordinatorClient.ask

    async def ask(self: Any, message: Any, reply: Any) -> Any:
        answer = await real(self, message, reply)
        if isinstance(message, kind):
            doom.comes_to(message.round)  # type: ignore[attr-defined]
        return answer

    CoordinatorClient.ask = ask  # type: ignore[method-assign]


def ready(doom: Doom) -> None:
    """Kill itself when the coordinator knows that its contribution is ready."""
    answered(doom, PeerToCoordinatorRoundReady)


def reported(doom: Doom) -> None:
    """Kill itself when the coordinator has its report."""
    answered(doom, PeerToCoordinatorRoundReport)


# Of a secure round:


def _posted(doom: Doom, field: str) -> None:
    real = CoordinatorClient.ask

    async def ask(self: Any, message: Any, reply: Any) -> Any:
        answer = await real(self, message, reply)
        if isinstance(message, PeerToCoordinatorSecureStep) and getattr(message, field):
            doom.comes_to(message.round)
        return answer

    CoordinatorClient.ask = ask  # type: ignore[method-assign]


def keyed(doom: Doom) -> None:
    """Kill itself when the coordinator has its keys."""
    _posted(doom, "keys")


def dealt(doom: Doom) -> None:
    """Kill itself when the coordinator has its shares."""
    _posted(doom, "sealed")


def signed(doom: Doom) -> None:
    """Kill itself when the coordinator has its signature of the sets."""
    _posted(doom, "consent")


def revealed(doom: Doom) -> None:
    """Kill itself when the coordinator has its shares that open sums."""
    _posted(doom, "revealed")


def masked(doom: Doom) -> None:
    """Kill itself when a masked chunk is requested; earlier ones are on their way or have arrived."""
    real, begin = MaskedSource.chunk, SecureExchange.run
    rounds: dict[int, int] = {}

    async def run(self: Any) -> Any:
        rounds[id(self._source)] = self._plan.round
        return await begin(self)

    async def chunk(self: Any, index: int) -> memoryview:
        data = await real(self, index)
        doom.comes_to(rounds[id(self)])
        return data

    MaskedSource.chunk = chunk  # type: ignore[method-assign]
    SecureExchange.run = run  # type: ignore[method-assign]


def _owning(doom: Doom, step: str, *, before: bool) -> None:
    real = getattr(SecureExchange, step)

    async def around(self: Any, *rest: Any) -> Any:
        if before:
            doom.comes_to(self._plan.round)
        made = await real(self, *rest)
        doom.comes_to(self._plan.round)
        return made

    setattr(SecureExchange, step, around)


def summed(doom: Doom) -> None:
    """Kill itself as an owner, when it has summed what arrived and not said so yet."""
    _owning(doom, "_collect", before=False)


def opening(doom: Doom) -> None:
    """Kill itself as an owner, when shares that open its sum may be there."""
    _owning(doom, "_opened", before=True)


def applying(doom: Doom) -> None:
    """Kill itself when the verdict is known and the outer step is about to be made."""
    real = TrainingReplica._step

    async def step(self: Any, exchange: Any, state: Any, outcome: Any) -> Any:
        doom.comes_to(outcome.verdict.round)
        return await real(self, exchange, state, outcome)

    TrainingReplica._step = step  # type: ignore[method-assign]


def sharing(doom: Doom) -> None:
    """Kill itself as a donor, when a chunk of a state is requested."""
    real = StateSource.chunk

    async def chunk(self: Any, index: int) -> memoryview:
        doom.comes_to(self._offered.state.version)
        return await real(self, index)

    StateSource.chunk = chunk  # type: ignore[method-assign]


def fetching(doom: Doom) -> None:
    """Kill itself as a joiner, when a chunk of a state is about to be written to its file."""
    real = IncomingFile.write

    def write(self: Any, partial: PartialState, index: int) -> None:
        doom.comes_to(partial.wanted.version)
        real(self, partial, index)

    IncomingFile.write = write  # type: ignore[method-assign]


# While a checkpoint is written, in its own thread: round and file stand in the path.


def _on_file(doom: Doom, *, before: bool) -> None:
    def number_of(one: Any) -> int:
        return int(one._folder.name.split("-")[1])

    def around(kind: type, begin: str, end: str) -> None:
        real_begin, real_end = getattr(kind, begin), getattr(kind, end)

        def begun(self: Any, *rest: Any) -> Any:
            if before:
                doom.comes_to(number_of(self))
            return ended(self, *rest) if begin == end else real_begin(self, *rest)

        def ended(self: Any, *rest: Any) -> Any:
            entry = real_end(self, *rest)
            if not before:
                doom.comes_to(number_of(self))
            return entry

        setattr(kind, end, ended)
        setattr(kind, begin, begun)

    around(CheckpointWriter, "_write_file", "_write_file")
    around(PlainStateFiles, "_begin", "_finish")


def saving(doom: Doom) -> None:
    """Kill itself before it writes a file of a checkpoint; the last one is the manifest."""
    _on_file(doom, before=True)


def saved(doom: Doom) -> None:
    """Kill itself after it wrote a file of a checkpoint; after the last one only the folder's name is missing."""
    _on_file(doom, before=False)


def named(doom: Doom) -> None:
    """Kill itself when a checkpoint has its name and older ones may be removed."""
    real = CheckpointStore._publish

    def publish(self: Any, hidden: Path, place: Path) -> None:
        real(self, hidden, place)
        doom.comes_to(round_of(place))

    CheckpointStore._publish = publish  # type: ignore[method-assign]


def retiring(doom: Doom) -> None:
    """Kill itself when an old checkpoint has lost its name and not yet its files."""
    real = shutil.rmtree

    def remove(path: Any, *rest: Any, **more: Any) -> None:
        if ".old-" in str(path):
            doom.comes_to(int(Path(path).name.split("-")[2]))
        real(path, *rest, **more)

    shutil.rmtree = remove  # type: ignore[assignment]


def _record_of(arguments: tuple[Any, ...]) -> int:
    """Round of the record that these arguments name: the last number of eight digits among them."""
    return int(re.findall(r"[0-9]{8}", " ".join(str(one) for one in arguments if isinstance(one, Path)))[-1])


def _recording(doom: Doom, step: str, *, before: bool) -> None:
    real = getattr(round_records, step)

    def around(*arguments: Any) -> Any:
        if before:
            doom.comes_to(_record_of(arguments))
        result = real(*arguments)
        if not before:
            doom.comes_to(_record_of(arguments))
        return result

    setattr(round_records, step, around)


def recording(doom: Doom) -> None:
    """Kill itself when a round's record is about to be written."""
    _recording(doom, "_write", before=True)


def recorded(doom: Doom) -> None:
    """Kill itself when a record is written and does not have its name yet."""
    _recording(doom, "replace", before=True)


def published(doom: Doom) -> None:
    """Kill itself when a record has its name."""
    _recording(doom, "replace", before=False)


def half_recorded(doom: Doom) -> None:
    """Kill itself when the head of a record and one byte of its first chunk are written."""
    real_write, real_all = round_records._write, round_records._write_all
    number = 0

    def write(path: Path, *rest: Any) -> None:
        nonlocal number
        number = _record_of((path,))
        real_write(path, *rest)

    def write_all(descriptor: int, pieces: list[memoryview]) -> None:
        if len(pieces) == 4:  # the head
            real_all(descriptor, pieces)
        else:
            os.write(descriptor, pieces[0][:1])
            doom.comes_to(number)
            real_all(descriptor, [pieces[0][1:], *pieces[1:]])

    round_records._write, round_records._write_all = write, write_all


def removing(doom: Doom) -> None:
    """Kill itself when a record that nobody needs any more is about to be removed."""
    real = round_records.RoundRecords.remove

    def remove(self: Any, numbers: Any) -> None:
        if numbers:
            doom.comes_to(max(numbers))
        real(self, numbers)

    round_records.RoundRecords.remove = remove  # type: ignore[method-assign]


_AVERAGING = (training, ready, serving, reducing, exchanged, reported, applying)
_SECURE = (keyed, dealt, masked, summed, signed, revealed, opening)
_STATES = (sharing, fetching, saving, saved, named, retiring)
_RECORDS = (recording, half_recorded, recorded, published, removing)
STEPS = {step.__name__: step for step in (*_AVERAGING, *_SECURE, *_STATES, *_RECORDS)}

if __name__ == "__main__":
    _, step, times, armed, *arguments = sys.argv
    slow_down(0.02)
    STEPS[step](Doom(int(times), Path(armed)))
    sys.argv = ["shoal", *arguments]
    main()
