import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.fakes.memory_network import Fault, MemoryNetwork, Step, UplinkNetwork, at, changed, dripping, stalled
from tests.fakes.outer_steps import TensorMean
from tests.fakes.virtual_clock import now_s, run_virtual

from shoal.peer.state_transfer.chunk_format import LOSSLESS
from shoal.peer.state_transfer.donor import StateDonor
from shoal.peer.state_transfer.download import MAX_RUN_BYTES, StateDownload
from shoal.peer.state_transfer.partial_state import IncomingFile, PartialState, WantedState
from shoal.peer.training.anchor import AnchorState
from shoal.swarm.errors import LinkError, StorageError

SIZE = 10 * 2**20
"""Elements of the one row: the state has forty chunks of 1 MiB."""

CHUNKS = 40
MAX_CHUNKS_A_RUN = MAX_RUN_BYTES // 2**20
PROGRESS_S = 3.0
MBIT = 1e6


def make_state(version: int = 3, seed: int = 0) -> AnchorState:
    generator = torch.Generator().manual_seed(seed)
    return AnchorState.of(torch.randn(1, SIZE, generator=generator), version)


STATE = make_state()
OTHER = make_state(seed=9)


def wanted_of(state: AnchorState) -> WantedState:
    return WantedState(state.version, state.digest, (1, SIZE))


class Joiner:
    """``me`` on a network, and its donors."""

    def __init__(self, network: MemoryNetwork, donors: dict[str, AnchorState | None]) -> None:
        self.network = network
        self.me = network.endpoint("me")
        self.donors = {donor: StateDonor(network.endpoint(donor), 5.0) for donor in donors}
        for donor, state in donors.items():
            if state is not None:
                self.donors[donor].offer(state)
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.partial = PartialState(wanted_of(STATE))
        self.download: StateDownload | None = None
        self.ask: Callable[[], Sequence[str]] = list

    async def fetch(self, donors: Callable[[], Sequence[str]] | None = None) -> AnchorState:
        self.ask = donors or (lambda: list(self.donors))
        if self.download is None or self.download.partial is not self.partial:
            self.download = StateDownload(self.me, self.partial, lambda: self.ask(), PROGRESS_S, self.report)
        await self.download.run()
        return self.partial.whole()

    def report(self, event: str, **fields: Any) -> None:
        self.events.append((event, fields))

    @property
    def refused(self) -> list[str]:
        return [fields["donor"] for event, fields in self.events if event == "donor_refused"]

    def sent(self) -> Counter[str]:
        """Chunks of the state, by donor."""
        return Counter(step.holder for step in self.network.log if step.blob.kind == "state")


def fetched(network: MemoryNetwork, donors: dict[str, AnchorState | None]) -> Joiner:
    """Fetch the state and check it."""
    joiners = []

    async def main() -> None:
        joiners.append(Joiner(network, donors))
        found = await joiners[0].fetch()
        assert (found.version, found.digest) == (STATE.version, STATE.digest)
        assert torch.equal(found.values, STATE.values)

    run_virtual(main())
    return joiners[0]


def test_one_donor_is_enough() -> None:
    joiner = fetched(MemoryNetwork(), {"a": STATE})
    assert joiner.sent() == {"a": CHUNKS}, "and nothing comes twice"


@pytest.mark.parametrize("lies", [False, True])
def test_a_lossless_form_gives_the_same_state(lies: bool) -> None:
    async def main() -> None:
        network = MemoryNetwork()
        if lies:
            network.faults.append(changed("state_lossless", "a", lambda data: data[:100] + data[:100] + data[200:]))
        joiner = Joiner(network, {"a": None, "b": None})
        for donor in "ab":
            StateDonor(network.endpoints[donor], 5.0, LOSSLESS).offer(STATE)
        await StateDownload(joiner.me, joiner.partial, lambda: ["a", "b"], PROGRESS_S, joiner.report, LOSSLESS).run()
        assert torch.equal(joiner.partial.whole().values, STATE.values)
        assert joiner.refused == (["a"] if lies else [])
        assert network.moved_bytes["b", "me"] < 0.9 * STATE.values.nbytes

    run_virtual(main())


def test_several_donors_share_the_work() -> None:
    network = UplinkNetwork(100 * MBIT)
    alone = fetched(UplinkNetwork(100 * MBIT), {"a": STATE})
    joiner = fetched(network, dict.fromkeys("abcd", STATE))
    assert all(8 <= chunks <= 14 for chunks in joiner.sent().values()), joiner.sent()
    assert joiner.sent().total() <= CHUNKS + 8, "few are asked for twice, at the end"
    assert alone.sent().total() == CHUNKS


def test_four_donors_are_faster_than_one() -> None:
    async def main(donors: str) -> float:
        joiner = Joiner(UplinkNetwork(100 * MBIT), dict.fromkeys(donors, STATE))
        await joiner.fetch()
        return now_s()

    assert run_virtual(main("abcd")) < 0.4 * run_virtual(main("a"))  # of the virtual clock


def test_a_slow_donor_gets_less_and_does_not_hold_up_the_end() -> None:
    async def main() -> Joiner:
        network = UplinkNetwork(100 * MBIT)
        network.uplinks_bps["slow"] = 1 * MBIT  # eight seconds a chunk
        joiner = Joiner(network, {"slow": STATE, "fast": STATE})
        await joiner.fetch()
        assert now_s() < 8.0, "nobody waited for its first chunk"
        return joiner

    joiner = run_virtual(main())
    assert joiner.sent()["fast"] == CHUNKS
    assert joiner.refused == []


def test_little_is_under_way_from_one_donor() -> None:
    network, asked = MemoryNetwork(), set[int]()
    most = 0

    async def count(step: Step, payload: bytes) -> bytes:
        nonlocal most
        if step.blob.kind == "state":
            asked.add(step.chunk)
            most = max(most, len(asked & joiner.partial.missing))
            await asyncio.sleep(0.01)
        return payload

    async def main() -> None:
        nonlocal joiner
        joiner = Joiner(network, {"a": STATE})
        await joiner.fetch()

    joiner: Joiner
    network.faults.append(count)
    run_virtual(main())
    assert 0 < most <= 2 * MAX_CHUNKS_A_RUN


# Donors that fail ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "is_wrong"),
    [
        (stalled("state", "a", 5), False),
        (stalled("state_digests", "a", 0), False),
        (changed("state", "a", lambda data: data[:-1] + bytes([data[-1] ^ 1])), True),
        (changed("state", "a", lambda data: data + b"x"), True),
        (changed("state", "a", lambda data: data[1:]), True),
        (changed("state", "a", lambda data: b""), True),
        (changed("state_digests", "a", lambda data: data[:-1] + bytes([data[-1] ^ 1])), True),
    ],
    ids=["stalls", "no list", "flips a bit", "too long", "too short", "empty", "another list"],
)
def test_another_donor_helps_out(fault: Fault, is_wrong: bool) -> None:
    network = MemoryNetwork()
    network.faults.append(fault)
    joiner = fetched(network, {"a": STATE, "b": STATE})
    assert joiner.refused == (["a"] if is_wrong else [])


def test_a_liar_is_named_and_not_asked_again() -> None:
    network = MemoryNetwork()
    network.faults.append(changed("state", "liar", lambda data: bytes(len(data))))

    async def main() -> None:
        joiner = Joiner(network, {"liar": STATE, "dead": STATE})
        network.kill("dead")
        with pytest.raises(LinkError, match=r"liar sent a wrong chunk|dead"):
            await joiner.fetch()
        sent = joiner.sent()["liar"]
        assert 0 < sent <= 2 * MAX_CHUNKS_A_RUN
        assert joiner.refused == ["liar"]
        assert joiner.events[0][1]["anchor_version"] == 3
        with pytest.raises(LinkError):
            await joiner.fetch()
        assert joiner.sent()["liar"] == sent, "nor in another try for this state"

    run_virtual(main())


def test_another_state_of_that_version_is_noticed_before_any_of_it_comes() -> None:
    joiner = fetched(MemoryNetwork(latency_s=(0.001, 0.001)), {"other": OTHER, "right": STATE})
    assert joiner.refused == ["other"]
    assert joiner.sent()["other"] == 0


def test_right_list_of_the_one_and_wrong_chunks_of_the_other() -> None:
    network = UplinkNetwork(100 * MBIT)
    network.faults.append(stalled("state_digests", "other", 0))  # so it is asked for chunks when the list is known
    joiner = fetched(network, {"other": OTHER, "right": STATE})
    assert joiner.sent()["right"] == CHUNKS


def test_a_donor_that_dies_and_errors_of_any_kind_are_survived() -> None:
    network = MemoryNetwork()
    network.faults.append(at("state", "a", 1, lambda: network.kill("a")))

    async def refuse(step: Step, payload: bytes) -> bytes:
        if step.holder == "b":
            raise StorageError("chosen by the donor")
        return payload

    network.faults.append(refuse)
    joiner = fetched(network, {"a": STATE, "b": STATE, "c": STATE})
    assert joiner.sent()["c"] >= CHUNKS - 2


@pytest.mark.parametrize("seed", range(5))
def test_all_but_one_fail(seed: int) -> None:
    network = MemoryNetwork(seed)
    network.faults += [
        stalled("state", "stalls", 3 * seed),
        changed("state", "lies", lambda data: data[::-1]),
        at("state", "dies", 4 * seed, lambda: network.kill("dies")),
        dripping("state", "drips", 0.9),
    ]
    donors: dict[str, AnchorState | None] = dict.fromkeys(("stalls", "lies", "dies", "drips", "well"), STATE)
    joiner = fetched(network, donors | {"nothing": None, "other": OTHER})
    assert set(joiner.refused) <= {"lies", "other"}


def test_those_that_have_nothing_are_not_waited_for() -> None:
    """Waiting would cost seconds each, and by then the others hold a newer state."""

    async def main() -> float:
        network = MemoryNetwork()
        joiner = Joiner(network, {**dict.fromkeys("abcde", None), "f": STATE})
        network.kill("a")
        await joiner.fetch()
        return now_s()

    assert run_virtual(main()) < 2.0  # of the virtual clock


def test_nobody_has_it() -> None:
    with pytest.raises(LinkError, match="no member of the run offers"):
        fetched(MemoryNetwork(), {})
    with pytest.raises(LinkError, match="another state"):
        fetched(MemoryNetwork(), {"a": OTHER})
    with pytest.raises(LinkError, match="a: no state_digests of 3"):
        fetched(MemoryNetwork(), {"a": None})


def test_what_has_come_is_not_asked_for_again() -> None:
    network = MemoryNetwork()
    network.faults.append(at("state", "a", 20, lambda: network.kill("a")))

    async def main() -> None:
        joiner = Joiner(network, {"a": STATE, "b": STATE})
        with pytest.raises(LinkError):
            await joiner.fetch(lambda: ["a"])
        before = len(joiner.partial.missing)
        assert before <= CHUNKS - 15
        await joiner.fetch()
        assert joiner.sent()["b"] == before

    run_virtual(main())


def test_newcomers_are_asked_too() -> None:
    async def main() -> None:
        network = UplinkNetwork(10 * MBIT)  # 33 seconds from one
        joiner = Joiner(network, {"a": STATE, "b": STATE})
        await joiner.fetch(lambda: ["a", "b"] if now_s() > 5 else ["a"])
        assert joiner.sent()["b"] > CHUNKS // 4

    run_virtual(main())


# Donors in a round --------------------------------------------------------------------------------------------


def test_the_time_of_a_donor_s_round_is_no_silence() -> None:
    async def main() -> None:
        network = UplinkNetwork(100 * MBIT)
        joiner = Joiner(network, {"a": STATE})
        async with asyncio.TaskGroup() as tasks:
            fetching = tasks.create_task(joiner.fetch())
            await asyncio.sleep(1.0)
            before = joiner.sent()["a"]
            assert 0 < before < CHUNKS
            joiner.donors["a"].pause(True)
            await asyncio.sleep(20 * PROGRESS_S)
            assert joiner.sent()["a"] <= before + 2 * MAX_CHUNKS_A_RUN
            assert not fetching.done()
            joiner.donors["a"].pause(False)
            ended_s = now_s()
            await fetching
            assert now_s() < ended_s + 5.0

    run_virtual(main())


def test_a_donor_that_dies_in_its_round_is_silent() -> None:
    async def main() -> None:
        network = UplinkNetwork(100 * MBIT)
        joiner = Joiner(network, {"a": STATE})
        fetching = asyncio.ensure_future(joiner.fetch())
        await asyncio.sleep(1.0)
        joiner.donors["a"].pause(True)
        await asyncio.sleep(5 * PROGRESS_S)
        assert not fetching.done()
        network.silent |= {("a", "me"), ("me", "a")}  # nobody says that it is gone
        died_s = now_s()
        with pytest.raises(LinkError, match="a"):
            await fetching
        assert PROGRESS_S < now_s() - died_s < 3 * PROGRESS_S

    run_virtual(main())


def test_while_one_donor_averages_the_other_serves() -> None:
    async def main() -> None:
        joiner = Joiner(UplinkNetwork(100 * MBIT), {"a": STATE, "b": STATE})
        joiner.donors["a"].pause(True)
        await joiner.fetch()
        assert joiner.sent() == {"b": CHUNKS}

    run_virtual(main())


# Other versions, and the file ---------------------------------------------------------------------------------


def test_the_run_moves_on_meanwhile(tmp_path: Path) -> None:
    async def main() -> None:
        state = STATE.copy()
        joiner = Joiner(UplinkNetwork(20 * MBIT), {"a": state})
        joiner.donors["a"].folder = tmp_path
        async with asyncio.TaskGroup() as tasks:
            fetching = tasks.create_task(joiner.fetch())
            for version in range(4, 12):
                await asyncio.sleep(0.8)
                mean = TensorMean(torch.ones(SIZE), 10**6)
                state = state.step(version, mean.pieces(), lambda _, values, piece: values.add_(piece))
                joiner.donors["a"].offer(state)
            assert not fetching.done()
            assert joiner.donors["a"].versions == (3, 11)
            assert torch.equal((await fetching).values, STATE.values)
        assert joiner.sent() == {"a": CHUNKS}

    run_virtual(main())


def test_a_killed_joiner_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed(Exception):
        pass

    real, writes = IncomingFile.write, 0

    def write(self: IncomingFile, partial: PartialState, index: int) -> None:
        nonlocal writes
        writes += 1
        if writes == 12:
            raise Killed
        real(self, partial, index)

    async def first() -> None:
        joiner = Joiner(UplinkNetwork(100 * MBIT), {"a": STATE, "b": STATE})
        joiner.partial = PartialState(wanted_of(STATE), tmp_path)
        await joiner.fetch()

    async def second() -> None:
        joiner = Joiner(MemoryNetwork(), {"a": STATE})
        joiner.partial = PartialState.resume(wanted_of(STATE), tmp_path)
        assert joiner.partial.resumed == 11
        assert torch.equal((await joiner.fetch()).values, STATE.values)
        assert joiner.sent() == {"a": CHUNKS - 11}

    monkeypatch.setattr(IncomingFile, "write", write)
    with pytest.raises(Killed):
        run_virtual(first())
    monkeypatch.setattr(IncomingFile, "write", real)
    run_virtual(second())


def test_a_full_disk_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(self: IncomingFile, partial: PartialState, index: int) -> None:
        raise OSError(28, "No space left on device")

    async def main() -> None:
        joiner = Joiner(MemoryNetwork(), {"a": STATE})
        joiner.partial = PartialState(wanted_of(STATE), tmp_path)
        assert (await joiner.fetch()).digest == STATE.digest

    monkeypatch.setattr(IncomingFile, "write", full)
    run_virtual(main())
    assert "cannot be kept on disk" in caplog.text
    assert list(tmp_path.iterdir()) == []
