import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from tests.fakes.memory_network import MemoryNetwork
from tests.fakes.virtual_clock import now_s, run_virtual, until

from shoal.swarm.client.bandwidth_probe import (
    AGAIN_S,
    FIRST_S,
    PROBE,
    PROBE_CHUNK_BYTES,
    PROBE_CHUNKS,
    PROBE_S,
    ProbeSource,
    keep_probing,
    probe,
    probe_between_rounds,
    witnesses,
)


class _Uplinks(MemoryNetwork):
    """``uplinks_bps`` by peer; every member offers a probe."""

    def __init__(self, **uplinks_bps: float) -> None:
        super().__init__()
        self.uplinks_bps = uplinks_bps
        for peer in ("me", *uplinks_bps):
            self.endpoint(peer).publish(PROBE, ProbeSource())

    def link(self, one: str, other: str) -> tuple[float, float]:
        return 0.02, self.uplinks_bps[one]

    def asked(self) -> list[str]:
        return list(dict.fromkeys(step.holder for step in self.log))


def test_two_members_are_asked_and_the_faster_counts() -> None:
    async def main() -> None:
        network = _Uplinks(slow=2e7, fast=5e7, third=1e9)
        bps = await probe(network.endpoints["me"], ["slow", "fast", "third"])
        assert bps == pytest.approx(5e7)
        assert network.asked() == ["slow", "fast"]
        assert len(network.log) == 2 * PROBE_CHUNKS

    run_virtual(main())


def test_a_slow_link_costs_a_second_and_not_the_whole_probe() -> None:
    async def main() -> None:
        network = _Uplinks(slow=2e6)
        assert await probe(network.endpoints["me"], ["slow"]) == pytest.approx(2e6)
        assert now_s() == PROBE_S
        assert len(network.log) < PROBE_CHUNKS

    run_virtual(main())


def test_who_does_not_answer_is_passed_over() -> None:
    async def main() -> None:
        network = _Uplinks(dead=1e9, silent=1e9, fast=5e7)
        network.kill("dead")
        network.silent.add(("silent", "me"))
        assert await probe(network.endpoints["me"], ["dead", "silent", "fast"]) == pytest.approx(5e7)
        assert await probe(network.endpoints["me"], ["dead", "dead", "silent", "silent", "fast"]) == 0.0
        assert await probe(network.endpoints["me"], []) == 0.0

    run_virtual(main(), horizon_s=20 * PROBE_S)


def test_a_probe_is_small_and_its_bytes_are_random() -> None:
    async def main() -> None:
        source = ProbeSource()
        chunks = [bytes(await source.chunk(index)) for index in range(source.chunks)]
        assert sum(map(len, chunks)) == 2**20
        assert len(chunks[0]) == PROBE_CHUNK_BYTES
        assert len(set(chunks[0])) == 256

    run_virtual(main())


def test_newcomers_do_not_all_ask_the_same() -> None:
    assert witnesses(["a", "c", "b"], "b") == ["c", "a"]
    assert witnesses(["a", "c", "b"], "c") == ["a", "b"]
    assert witnesses(["b"], "b") == []


# Beside rounds ------------------------------------------------------------------------------------------------


class _Phases:
    """A coordinator client of which only the round's phase is looked at."""

    def __init__(self, phase: str) -> None:
        self.phase = phase
        self.view = self

    async def wait_for(self, predicate: Callable[[Any], bool]) -> "_Phases":
        await until(lambda: predicate(self), 0.01)
        return self

    def wake(self) -> None:
        pass


def test_a_probe_waits_for_the_end_of_a_round() -> None:
    async def main() -> None:
        network, client = _Uplinks(fast=5e7), _Phases("averaging")
        probing = asyncio.create_task(probe_between_rounds(client, network.endpoints["me"], ["fast"]))  # type: ignore[arg-type]
        await asyncio.sleep(5.0)
        assert network.log == []
        client.phase = "training"
        assert await probing == pytest.approx(5e7)

    run_virtual(main())


def test_a_probe_gives_way_to_the_end_of_a_round() -> None:
    async def main() -> None:
        network, client = _Uplinks(slow=2e6), _Phases("training")
        probing = asyncio.create_task(probe_between_rounds(client, network.endpoints["me"], ["slow"]))  # type: ignore[arg-type]
        await until(lambda: len(network.log) == 2)
        client.phase = "averaging"
        assert await probing == 0.0
        assert now_s() < PROBE_S
        await asyncio.sleep(5.0)
        assert len(network.log) <= 3

    run_virtual(main())


def test_of_a_run_that_is_over_nothing_is_asked() -> None:
    async def main() -> None:
        network = _Uplinks(fast=5e7)
        assert await probe_between_rounds(_Phases("ended"), network.endpoints["me"], ["fast"]) == 0.0  # type: ignore[arg-type]
        assert network.log == []

    run_virtual(main())


def test_a_pipelines_links_are_probed_again_and_again() -> None:
    """Soon while nobody is there; then now and then. The highest of the last three counts."""

    async def main() -> None:
        network, client, found = _Uplinks(other=4e7), _Phases("training"), []
        others: list[str] = []
        probing = asyncio.create_task(
            keep_probing(client, network.endpoints["me"], lambda: others, found.append)  # type: ignore[arg-type]
        )
        await asyncio.sleep(5 * FIRST_S + 1.0)
        assert found == []
        others.append("other")
        await asyncio.sleep(FIRST_S)
        assert found == pytest.approx([4e7])
        for bps in (2e7, 1e7, 5e6):
            network.uplinks_bps["other"] = bps
            await asyncio.sleep(AGAIN_S + 1.0)
        assert found == pytest.approx([4e7, 4e7, 4e7, 2e7])
        client.phase = "ended"
        await asyncio.sleep(AGAIN_S + 1.0)
        assert probing.done()

    run_virtual(main())
