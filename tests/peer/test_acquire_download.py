import asyncio
from collections.abc import Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.fakes.memory_network import MemoryNetwork, UplinkNetwork
from tests.fakes.outer_steps import TensorMean
from tests.fakes.virtual_clock import now_s, run_virtual

from shoal.peer.state_transfer.acquire import CatchUp, CurrentDownload, LocalCandidates, acquire_state
from shoal.peer.state_transfer.chunk_format import RAW
from shoal.peer.state_transfer.donor import StateDonor
from shoal.peer.state_transfer.partial_state import PartialState, WantedState, state_on_disk
from shoal.peer.training.anchor import AnchorState
from shoal.swarm.errors import LinkError, RunEnded

SHAPE = (1, 2**20)
"""The state has four chunks of 1 MiB."""

SLOW_BPS = 4.2e6
"""A chunk takes two seconds, the state four: two come at a time."""


def make_state(version: int) -> AnchorState:
    return AnchorState.of(torch.full(SHAPE, float(version)), version)


def stepped(state: AnchorState, version: int) -> AnchorState:
    """The state of a later version, in the same memory."""
    while state.version < version:
        mean = TensorMean(torch.ones(SHAPE[1]), 2**17)
        state = state.step(state.version + 1, mean.pieces(), lambda _, values, piece: values.add_(piece))
    return state


STATES = [make_state(version) for version in range(6)]


def wanted_of(state: AnchorState) -> WantedState:
    return WantedState(state.version, state.digest, SHAPE)


class World:
    """A run whose newest version is ``version``, one donor that holds it, and a member that joins."""

    def __init__(self, version: int, folder: Path, network: MemoryNetwork | None = None) -> None:
        self.network = network or MemoryNetwork()
        self.donor = StateDonor(self.network.endpoint("donor"), 20.0, folder=folder / "serving")
        self.state = STATES[version].copy()
        self.view = SimpleNamespace(anchor_version=-1, state_digest=None, phase="training")
        self.client: Any = self
        self.held: list[int] = []
        self.told = 0
        self.caught_up: list[int] = []
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.folder = folder / "incoming"
        self.download = CurrentDownload(self.network.endpoint("me"), lambda: ["donor"], 12.0, self.folder, self.report)
        self.move_on(version)

    def move_on(self, version: int) -> None:
        self.state = stepped(self.state, version)
        self.donor.offer(self.state)
        self.view = SimpleNamespace(anchor_version=version, state_digest=self.state.digest, phase="training")

    async def wait_for(self, predicate: Any, timeout_s: float) -> Any:
        await asyncio.sleep(timeout_s)
        return self.view

    def hold_state(self, state: AnchorState) -> None:
        self.held.append(state.version)

    def drop_state(self) -> None:
        self.held.append(-1)

    async def send_heartbeat(self) -> None:
        pass

    async def report_kept(self, kept: Any) -> None:
        self.told += 1

    def report(self, event: str, **fields: Any) -> None:
        self.events.append((event, fields))

    async def catch_up(self, state: AnchorState) -> AnchorState:
        self.caught_up.append(state.version)
        return stepped(state, self.view.anchor_version)

    @property
    def fetched(self) -> list[int]:
        return [fields["anchor_version"] for event, fields in self.events if event == "state_fetched"]

    async def agree(self, candidate: AnchorState | None = None, catch_up: CatchUp | None = None) -> AnchorState:
        own = LocalCandidates(None, None, lambda state, _: state, is_first=False)
        own.earlier = candidate
        found = await acquire_state(self, own, SHAPE, self.download, catch_up)
        assert (found.version, found.digest) == (self.view.anchor_version, self.view.state_digest)
        assert torch.equal(found.values, torch.full(SHAPE, float(found.version)))
        assert self.held[-1] == found.version
        assert not list(self.folder.glob("*")), "no file is left of a state that is held"
        return found


def run(main: Coroutine[Any, Any, None]) -> None:
    run_virtual(main)


async def moving_on(world: World, catch_up: CatchUp | None) -> None:
    """Join while a new version comes every second."""
    joining = asyncio.ensure_future(world.agree(None, catch_up))
    for version in range(2, 6):
        await asyncio.sleep(1.0)
        if joining.done():
            break
        world.move_on(version)
    await joining


def begin(folder: Path, state: AnchorState, *chunks: int) -> None:
    """Leave what a killed process leaves."""
    partial = PartialState(wanted_of(state), folder)
    partial.learn_digests(state.chunk_digests)
    partial.unwritten.extend(chunks)
    for chunk in chunks:
        data = memoryview(state.values[:, chunk * 2**18 : (chunk + 1) * 2**18].numpy().tobytes())
        assert partial.put(chunk, data)
        partial.write_next()
    partial.close()


def test_a_candidate_that_is_the_run_s_is_taken(tmp_path: Path) -> None:
    async def main() -> None:
        world = World(2, tmp_path)
        mine = STATES[2].copy()
        assert await world.agree(mine) is mine
        assert world.fetched == []

    run(main())


def test_another_candidate_of_that_version_is_not(tmp_path: Path) -> None:
    async def main() -> None:
        world = World(2, tmp_path)
        await world.agree(AnchorState.of(torch.zeros(SHAPE), 2))
        assert world.fetched == [2]

    run(main())


def test_what_was_seen_first_is_fetched_to_its_end_and_caught_up(tmp_path: Path) -> None:
    async def main() -> None:
        world = World(1, tmp_path, UplinkNetwork(SLOW_BPS))
        await moving_on(world, world.catch_up)
        assert world.fetched == [1]
        assert world.caught_up == [1]

    run(main())


def test_a_joiner_finishes_although_rounds_are_faster_than_its_download_and_never_stop(tmp_path: Path) -> None:
    async def main() -> None:
        world = World(1, tmp_path, UplinkNetwork(SLOW_BPS))

        async def slow_catch_up(state: AnchorState) -> AnchorState:
            newest = world.view.anchor_version
            world.caught_up.append(state.version)
            await asyncio.sleep(0.1 * (newest - state.version))  # while which the run goes on
            return stepped(state, newest)

        joining = asyncio.ensure_future(world.agree(None, slow_catch_up))
        while not joining.done():
            assert now_s() < 60.0, "it never ends"
            await asyncio.sleep(0.5)
            world.move_on(world.view.anchor_version + 1)
        await joining
        assert world.fetched == [1], "one version, to its end"
        assert len(world.caught_up) > 1, "and the rounds since"
        sent = [step.chunk for step in world.network.log if step.blob.kind == "state"]
        assert sorted(sent) == [0, 1, 2, 3]

    run(main())


def test_without_rounds_to_catch_up_by_only_the_newest_will_do(tmp_path: Path) -> None:
    async def main() -> None:
        world = World(1, tmp_path, UplinkNetwork(SLOW_BPS))
        await moving_on(world, None)
        assert world.fetched[0] == 1
        assert world.fetched[-1] == world.view.anchor_version

    run(main())


def test_rounds_that_lead_astray_are_no_way_to_the_run_s_state(tmp_path: Path) -> None:
    async def astray(state: AnchorState) -> AnchorState:
        return AnchorState.of(state.values + 1e-3, 2)

    async def main() -> None:
        world = World(1, tmp_path, UplinkNetwork(SLOW_BPS))
        joining = asyncio.ensure_future(world.agree(None, astray))
        await asyncio.sleep(1.0)
        world.move_on(2)
        await joining
        assert world.fetched == [1, 2]

    run(main())


def test_the_file_of_an_older_version_counts_with_rounds_to_catch_up_by(tmp_path: Path) -> None:
    begin(tmp_path / "incoming", STATES[2], 0, 3)

    async def main() -> None:
        world = World(2, tmp_path)
        world.network.endpoints["donor"].blobs[RAW.blob(2)].begin_reading(b"another joiner")  # type: ignore[attr-defined]
        world.move_on(3)
        await world.agree(None, world.catch_up)
        assert (world.fetched, world.caught_up) == ([2], [2])
        assert world.events[-1][1]["resumed"] == 2
        assert world.events[-1][1]["donors"] == {"donor": 2}

    run(main())


@pytest.mark.parametrize("has_rounds", [False, True])
def test_the_file_of_a_version_that_nobody_serves_goes(tmp_path: Path, has_rounds: bool) -> None:
    begin(tmp_path / "incoming", STATES[1], 0, 3)

    async def main() -> None:
        world = World(4, tmp_path)
        await world.agree(None, world.catch_up if has_rounds else None)
        assert (world.fetched, world.caught_up) == ([4], [])

    run(main())


def test_the_newest_is_waited_for_with_what_has_come_of_it(tmp_path: Path) -> None:
    async def main() -> None:
        world = World(1, tmp_path, UplinkNetwork(SLOW_BPS))
        joining = asyncio.ensure_future(world.agree())
        await asyncio.sleep(2.5)
        world.network.kill("donor")
        await asyncio.sleep(60.0)
        assert state_on_disk(world.folder) == wanted_of(STATES[1])
        assert world.told, "the others hear what this member could go back to"
        world.donor = StateDonor(world.network.endpoint("donor"), 5.0)
        world.move_on(1)
        came_s = now_s()
        await joining
        assert now_s() - came_s < 20.0
        sent = [step.chunk for step in world.network.log if step.blob.kind == "state"]
        assert (sent.count(0), sent.count(1)) == (1, 1), "what had come is not sent again"

    run(main())


def test_the_same_trouble_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")

    async def main() -> None:
        world = World(0, tmp_path)
        state, tries = STATES[0].copy(), 0

        async def fetch() -> AnchorState:
            nonlocal tries
            tries += 1
            await asyncio.sleep(1.0)
            if tries < 20:
                raise LinkError("nobody has brought it")
            return state

        world.download._start = SimpleNamespace(fetch=fetch)  # type: ignore[assignment]
        assert await world.agree() is state
        assert caplog.text.count("nobody has brought it") == 1
        assert world.fetched == [], "version 0 comes from elsewhere"

    run(main())


def test_a_donor_that_had_another_state_is_asked_again_when_there_is_nobody_else(tmp_path: Path) -> None:
    async def main() -> None:
        world = World(1, tmp_path)
        world.donor.offer(AnchorState.of(torch.full(SHAPE, 7.0), 1))
        joining = asyncio.ensure_future(world.agree())
        await asyncio.sleep(60.0)
        refusals = [fields["donor"] for event, fields in world.events if event == "donor_refused"]
        assert 2 <= len(refusals) <= 4, "named, and not asked all the time"
        world.donor.offer(STATES[1].copy())
        await joining

    run(main())


def test_a_state_that_nobody_holds_is_not_waited_for_after_the_run(tmp_path: Path) -> None:
    async def main() -> None:
        world = World(1, tmp_path)
        world.view = SimpleNamespace(anchor_version=1, state_digest=None, phase="training")
        joining = asyncio.ensure_future(world.agree())
        await asyncio.sleep(60.0)
        assert not joining.done()
        world.view = SimpleNamespace(anchor_version=1, state_digest=None, phase="ended")
        with pytest.raises(RunEnded):
            await joining

    run(main())
