import pytest
import torch
from tests.fakes.memory_network import MemoryNetwork, changed
from tests.fakes.virtual_clock import run_virtual

from shoal.peer.state_transfer.bfloat16_anchor import fetch_rounded_anchor
from shoal.peer.state_transfer.chunk_format import BFLOAT16
from shoal.peer.state_transfer.donor import StateDonor
from shoal.peer.training.anchor import AnchorState
from shoal.swarm.errors import LinkError, WireError

SIZE = 2**19 + 5
"""Elements of an anchor: three chunks, the last one very short."""

STATE, OTHER = (
    AnchorState.of(torch.randn(2, SIZE, generator=torch.Generator().manual_seed(seed)), 3) for seed in (0, 1)
)


def fetched(network: MemoryNetwork, donors: dict[str, AnchorState | None]) -> torch.Tensor:
    async def main() -> torch.Tensor:
        for donor, state in donors.items():
            holder = StateDonor(network.endpoint(donor), 5.0)
            if state is not None:
                holder.offer(state)
        return await fetch_rounded_anchor(network.endpoint("me"), list(donors), 3, SIZE, 3.0)

    return run_virtual(main())


@pytest.mark.parametrize("donors", ["a", "ab", "abc"])
def test_the_anchor_comes_rounded_in_half_the_bytes(donors: str) -> None:
    network = MemoryNetwork()
    anchor = fetched(network, dict.fromkeys(donors, STATE))
    assert anchor.dtype == torch.float32
    assert torch.equal(anchor, STATE.anchor.bfloat16().float())
    moved = sum(network.moved_bytes[donor, "me"] for donor in donors)
    assert moved <= 2 * SIZE + 3 * 32 * len(donors) + 2**19, "at most the last whole chunk comes twice"


def test_two_donors_that_agree_are_believed() -> None:
    anchor = fetched(MemoryNetwork(), {"liar": OTHER, "a": STATE, "b": STATE, "nothing": None})
    assert torch.equal(anchor, STATE.anchor.bfloat16().float())


def test_a_wrong_chunk_is_noticed() -> None:
    network = MemoryNetwork()
    network.faults.append(changed("anchor_bfloat16", "a", lambda data: data[::-1]))
    assert torch.equal(fetched(network, {"a": STATE, "b": STATE}), STATE.anchor.bfloat16().float())


@pytest.mark.parametrize("second", [OTHER, None])
def test_one_of_two_is_not_believed(second: AnchorState | None) -> None:
    with pytest.raises(LinkError, match=r"too few members.*float32"):
        fetched(MemoryNetwork(), {"a": STATE, "b": second})


@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: data + data, lambda data: b""])
def test_a_list_of_another_length_is_no_list(change: object) -> None:
    network = MemoryNetwork()
    network.faults.append(changed("anchor_bfloat16_digests", "a", change))  # type: ignore[arg-type]
    with pytest.raises(LinkError, match="bytes as chunk"):
        fetched(network, {"a": STATE})


def test_values_are_rounded_to_nearest() -> None:
    values = torch.tensor([1.0, 1.0 + 2**-9, 1.0 + 3 * 2**-9, -0.0, torch.inf, 1e-45])
    packed = BFLOAT16.pack(values.numpy().data.cast("B"))
    found = torch.frombuffer(bytearray(BFLOAT16.unpack(packed, 24)), dtype=torch.float32)
    assert torch.equal(found, torch.tensor([1.0, 1.0, 1.0 + 2**-7, -0.0, torch.inf, 0.0]))
    with pytest.raises(WireError):
        BFLOAT16.unpack(packed[:-1], 24)
