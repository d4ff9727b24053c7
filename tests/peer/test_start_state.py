"""The start of a run, served by one peer to all others, whatever stages they hold."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from tests.fakes.memory_network import MemoryNetwork, Step, changed
from tests.fakes.virtual_clock import now_s, run_virtual
from tests.peer.starts import random_state, run_start, run_toml, same_bits, started, write_checkpoint

from shoal.peer.state_transfer import start
from shoal.peer.state_transfer.acquire import CurrentDownload
from shoal.peer.state_transfer.partial_state import WantedState
from shoal.peer.state_transfer.start import RunStart, StartFiles, StartState
from shoal.peer.training.anchor import AnchorState
from shoal.swarm.errors import Busy, LinkError, ModelMismatch
from shoal.swarm.protocol.run_file import RunFile, parse_run_file
from shoal.swarm.protocol.types import TensorSpec
from shoal.swarm.transport.bulk.source import CountedSource

LAYOUT = tuple(
    TensorSpec(name=name, shape=shape)
    for name, shape in [
        ("embed", (600, 512)),
        ("none", (0, 3)),
        ("scale", ()),
        ("b.10", (7,)),
        ("b.9", (300, 1000)),
        ("head", (5, 5)),
    ]
)
FIRST, LAST = LAYOUT[:3], LAYOUT[3:]
WHOLE = random_state(sum(spec.elements for spec in LAYOUT))
CUT = sum(spec.elements for spec in FIRST)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    toml = run_toml("finished").replace('"gpt"', '"own"')
    return write_checkpoint(tmp_path_factory.mktemp("finished"), parse_run_file(toml), toml, LAYOUT, WHOLE)


class World:
    """``have``: peers with the files; ``others``: peers without them, which are asked, too."""

    def __init__(self, place: Path, have: Sequence[str] = ("a",), others: Sequence[str] = ()) -> None:
        self.network = MemoryNetwork()
        self.place = place
        self.run: RunFile = started(run_toml("next").replace('"gpt"', '"own"'), place)
        self.peers: list[str] = []
        for peer in (*have, *others):
            self.add(peer, has_files=peer in have)
        self.me = self.of("me", None)

    def of(self, peer: str, files: StartFiles | None) -> RunStart:
        assert self.run.start is not None
        endpoint = self.network.endpoint(peer)
        return RunStart(self.run.start, 2, files, endpoint, lambda: [one for one in self.peers if one != peer], 3.0)

    def add(self, peer: str, *, has_files: bool = True) -> RunStart:
        assert self.run.start is not None
        files = StartFiles.find(self.place, self.run.start, None) if has_files else None
        start = self.of(peer, files)
        if has_files:
            start.offer()
        self.peers.append(peer)
        return start

    @property
    def senders(self) -> set[str]:
        return {step.holder for step in self.network.log}


async def fetched(state: StartState) -> AnchorState:
    """Fetch as a joining peer does."""
    while True:
        try:
            return await state.fetch()
        except LinkError:
            await asyncio.sleep(0.2)


def check(state: AnchorState, expected: torch.Tensor) -> None:
    assert state.version == 0
    assert same_bits(state.values, expected)


def test_the_whole_and_each_stage_come_from_one_peer(place: Path) -> None:
    async def main() -> None:
        world = World(place)
        check(await fetched(world.me.state_of(LAYOUT)), WHOLE.values)
        check(await fetched(world.me.state_of(FIRST)), WHOLE.values[:, :CUT])
        state = await fetched(world.me.state_of(LAST))
        check(state, WHOLE.values[:, CUT:])
        assert world.run.start is not None
        assert state.digest == world.run.start.state_digest(LAST)
        assert state.chunk_digests == AnchorState.of(state.values, 0).chunk_digests

    run_virtual(main(), 300.0)


def test_it_is_what_those_with_the_files_read(place: Path) -> None:
    async def main() -> None:
        world = World(place)
        mine = world.add("b").state_of(LAST).read()
        theirs = await fetched(world.me.state_of(LAST))
        assert (mine.digest, mine.chunk_digests) == (theirs.digest, theirs.chunk_digests)

    run_virtual(main(), 300.0)


def test_several_who_have_it_share_the_work(place: Path) -> None:
    async def main() -> None:
        world = World(place, have=("a", "b"), others=("c", "d"))
        check(await fetched(world.me.state_of(LAYOUT)), WHOLE.values)
        assert world.senders == {"a", "b"}
        chunks = [(step.blob.number, step.chunk) for step in world.network.log]
        assert len(chunks) == len(set(chunks)), "nothing comes twice"

    run_virtual(main(), 300.0)


def test_forged_values_are_not_taken(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        world = World(place, have=("liar", "b"))
        world.network.faults.append(changed("start", "liar", lambda data: bytes([data[0] ^ 1]) + data[1:]))
        check(await fetched(world.me.state_of(LAYOUT)), WHOLE.values)
        assert "liar sent another tensor" in caplog.text

    run_virtual(main(), 300.0)


def test_a_liar_alone_gets_nobody_to_start(place: Path) -> None:
    async def main() -> None:
        world = World(place, have=("liar",))
        world.network.faults.append(changed("start", "liar", lambda data: data[:-1]))
        state = world.me.state_of(FIRST)
        for _ in range(5):
            with pytest.raises(LinkError, match="liar sent"):
                await state.fetch()
        world.add("b")
        check(await fetched(state), WHOLE.values[:, :CUT])

    run_virtual(main(), 300.0)


def test_it_waits_for_somebody_who_has_it(place: Path) -> None:
    async def main() -> None:
        world = World(place, have=(), others=("a", "b"))
        state = world.me.state_of(FIRST)
        with pytest.raises(LinkError, match="a peer that has it must join"):
            await state.fetch()
        waiting = asyncio.ensure_future(fetched(state))
        await asyncio.sleep(60)
        assert not waiting.done()
        world.add("c")
        came_s = now_s()
        check(await waiting, WHOLE.values[:, :CUT])
        assert now_s() - came_s < 20

    run_virtual(main(), 300.0)


def test_what_has_come_is_not_fetched_again(place: Path) -> None:
    async def main() -> None:
        world = World(place)

        async def dying(step: Step, payload: bytes) -> bytes:
            if len(world.network.log) == 4:
                world.network.kill("a")
            return payload

        world.network.faults.append(dying)
        state = world.me.state_of(LAYOUT)
        with pytest.raises(LinkError):
            await state.fetch()
        world.network.faults.clear()
        world.add("b")
        check(await fetched(state), WHOLE.values)
        complete = {step.blob.number for step in world.network.log if step.holder == "a"}
        again = {step.blob.number for step in world.network.log if step.holder == "b"}
        assert len(complete & again) <= 1, "only the tensor that was under way"

    run_virtual(main(), 300.0)


def test_a_damaged_file_is_somebody_elses_turn(place: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    copy = tmp_path / place.name
    copy.mkdir()
    for file in place.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())

    async def main() -> None:
        world = World(copy)
        for file in copy.glob("anchor-*"):
            file.write_bytes(file.read_bytes()[:-1])
        world.place = place
        world.add("b")
        check(await fetched(world.me.state_of(LAYOUT)), WHOLE.values)
        assert world.senders == {"b"}
        assert "this peer cannot serve what the run starts from: tensor" in caplog.text

    run_virtual(main(), 300.0)


def test_few_tensors_are_in_memory_for_others(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "MAX_TENSORS_SERVED", 1)

    async def main() -> None:
        world = World(place)
        blobs = world.network.endpoints["a"].blobs
        one, other = (blobs[world.me.blob(name)] for name in ("embed", "b.9"))
        assert isinstance(one, CountedSource)
        assert isinstance(other, CountedSource)
        one.begin_reading(b"x")
        one.begin_reading(b"y")
        with pytest.raises(Busy):
            other.begin_reading(b"y")
        one.end_reading(b"x")
        one.end_reading(b"y")
        other.begin_reading(b"y")
        other.end_reading(b"y")
        states = [asyncio.ensure_future(fetched(world.of(peer, None).state_of(LAYOUT))) for peer in "xyz"]
        for state in await asyncio.gather(*states):
            check(state, WHOLE.values)

    run_virtual(main(), 300.0)


def test_a_model_that_the_checkpoint_is_not_of(place: Path) -> None:
    async def main() -> None:
        world = World(place)
        other = LAYOUT[0].model_copy(update={"shape": (600, 256)})
        with pytest.raises(ModelMismatch, match=r"embed is \[600, 256\] here, and \[600, 512\] in the checkpoint"):
            world.me.state_of([other])

    run_virtual(main(), 300.0)


def test_version_0_is_downloaded_from_there(place: Path) -> None:
    async def main() -> None:
        world = World(place)
        state = world.me.state_of(FIRST)
        download = CurrentDownload(world.network.endpoint("me"), list, 3.0, None, lambda event, **_: None, start=state)
        check(await download.fetch(WantedState(0, state.digest, (3, CUT))), WHOLE.values[:, :CUT])

    run_virtual(main(), 300.0)


def test_without_files_nothing_is_read_here(place: Path) -> None:
    run = started(run_toml("next").replace('"gpt"', '"own"'), place)
    assert not run_start(run, None).state_of(FIRST).is_here
    assert run_start(run, place).state_of(FIRST).is_here
