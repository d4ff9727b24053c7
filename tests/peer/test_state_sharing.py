import asyncio

import pytest
import torch
from tests.fakes.memory_network import MemoryNetwork, Step, at, changed, stalled
from tests.fakes.virtual_clock import run_virtual

from shoal.peer.state import State, state_digest
from shoal.peer.state_sharing import DigestSource, StateSource, fetch_state, state_blob
from shoal.swarm.errors import LinkError, StorageError

SIZE = 300_000
"""Elements: the state below takes three chunks, the last one short."""


def make_state(version: int = 3, seed: int = 0, size: int = SIZE) -> State:
    generator = torch.Generator().manual_seed(seed)
    return State.make(torch.randn(size, generator=generator), torch.randn(1, size, generator=generator), version)


def fetched(network: MemoryNetwork, donors: dict[str, State | None], wanted: State) -> State:
    async def main() -> State:
        for donor, state in donors.items():
            endpoint = network.endpoint(donor)
            if state is not None:
                endpoint.publish(state_blob(state.version), StateSource(state))
        me = network.endpoint("me")
        return await fetch_state(me, list(donors), wanted.version, wanted.digest, (2, SIZE), 3.0)

    return run_virtual(main())


def test_a_state_is_fetched_chunk_by_chunk() -> None:
    network, state = MemoryNetwork(), make_state()
    found = fetched(network, {"a": state}, state)
    assert torch.equal(found.values, state.values)
    assert (found.version, found.digest) == (state.version, state.digest)
    assert [step.chunk for step in network.log] == [0, 1, 2]


def test_the_next_donor_helps_out() -> None:
    state = make_state()
    for broken in (
        stalled("state", "a", 1),
        changed("state", "a", lambda data: data[:-1] + bytes([data[-1] ^ 1])),
        changed("state", "a", lambda data: data + b"x"),
    ):
        network = MemoryNetwork()
        network.faults.append(broken)
        assert fetched(network, {"a": state, "b": state}, state).digest == state.digest
    assert fetched(MemoryNetwork(), {"a": None, "b": state}, state).digest == state.digest
    assert fetched(MemoryNetwork(), {"a": make_state(seed=9), "b": state}, state).digest == state.digest


def test_a_donor_that_dies_and_errors_of_any_kind_are_survived() -> None:
    network, state = MemoryNetwork(), make_state()
    network.faults.append(at("state", "a", 1, lambda: network.kill("a")))

    async def refuse(step: Step, payload: bytes) -> bytes:
        if step.holder == "b":
            raise StorageError("chosen by the donor")
        return payload

    network.faults.append(refuse)
    assert fetched(network, {"a": state, "b": state, "c": state}, state).digest == state.digest


def test_those_that_have_nothing_are_not_waited_for() -> None:
    """They would cost seconds each, and by then the others hold a newer state."""

    async def main() -> float:
        network, state = MemoryNetwork(), make_state()
        for donor in "abcdef":
            network.endpoint(donor)
        network.kill("a")
        network.endpoint("f").publish(state_blob(state.version), StateSource(state))
        start_s = asyncio.get_running_loop().time()
        await fetch_state(network.endpoint("me"), list("abcdef"), state.version, state.digest, (2, SIZE), 3.0)
        return asyncio.get_running_loop().time() - start_s

    assert run_virtual(main()) < 1.0  # of the virtual clock


def test_nobody_has_it() -> None:
    with pytest.raises(LinkError, match="nobody in the run"):
        fetched(MemoryNetwork(), {}, make_state())
    with pytest.raises(LinkError, match="another state"):
        fetched(MemoryNetwork(), {"a": make_state(seed=9)}, make_state())
    with pytest.raises(LinkError, match="a: no state of 3"):
        fetched(MemoryNetwork(), {"a": None}, make_state())


def test_what_is_offered_does_not_change_with_the_next_state() -> None:
    state = make_state()
    source = StateSource(state)
    assert source.chunks == 3
    parts = [bytes(asyncio.run(source.chunk(index))) for index in range(3)]
    assert b"".join(parts) == state.values.numpy().tobytes()
    assert [len(part) for part in parts] == [2**20, 2**20, 8 * SIZE - 2**21]


def test_the_list_of_digests_is_checked_by_the_state_s() -> None:
    state = make_state()
    source = DigestSource(state)
    assert source.chunks == 1
    assert state_digest(3, (2, SIZE), bytes(asyncio.run(source.chunk(0)))) == state.digest
