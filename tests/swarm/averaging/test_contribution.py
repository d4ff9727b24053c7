"""A contribution is encoded once, before its plan; each chunk of it leads to the root that stands in the plan."""

import asyncio
import gc

import pytest
import torch
from tests.fakes.codec_maps import get_codec_map
from tests.fakes.exchanges import digests, make_sides, run_all
from tests.fakes.memory_network import MemoryNetwork, changed
from tests.fakes.virtual_clock import run_virtual
from tests.swarm.averaging.test_allreduce import ELEMENTS, make_plan

from shoal.compression.error_feedback import ErrorFeedback
from shoal.compression.range_reader import TensorReader
from shoal.swarm.averaging.buffer_pool import BufferPool
from shoal.swarm.averaging.contribution import ContributionSource, EncodedContribution, encode
from shoal.swarm.averaging.leaf_grid import LeafGrid
from shoal.swarm.averaging.results import ResultStore
from shoal.swarm.errors import BlobUnavailable, WireError

CODEC_MAP = get_codec_map("int8")
PLAN = make_plan([3, 4], chunk=8192)


async def begun(seed: int = 1) -> tuple[EncodedContribution, LeafGrid, ErrorFeedback, BufferPool]:
    feedback, grid, buffers = ErrorFeedback(ELEMENTS), LeafGrid(ELEMENTS, CODEC_MAP), BufferPool()
    feedback.begin(TensorReader(torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(seed))))
    return await encode(feedback, grid, buffers), grid, feedback, buffers


def test_the_root_is_that_of_the_values_whatever_the_chunks() -> None:
    async def main() -> None:
        contribution, grid, feedback, buffers = await begun()
        same, _, _, _ = await begun()
        other, _, _, _ = await begun(2)
        assert contribution.root == same.root != other.root
        for chunk in (4096, 8192, 6 * 4096):
            for start in range(0, ELEMENTS, chunk):
                stop = min(start + chunk, ELEMENTS)
                packed = grid.checked(contribution.root, start, stop, contribution.chunk(start, stop, buffers))
                codec = CODEC_MAP.by_leaf(4096).contribution(start, stop)
                assert torch.isfinite(codec.decode(packed, stop - start)).all()
        feedback.discard()

    asyncio.run(main())


def test_another_chunk_than_was_committed_to_is_refused() -> None:
    async def main() -> None:
        contribution, grid, _, buffers = await begun()
        other, _, _, _ = await begun(2)
        honest = contribution.chunk(0, 8192, buffers)
        with pytest.raises(WireError, match="committed"):
            grid.checked(other.root, 0, 8192, honest)
        with pytest.raises(WireError, match="committed"):
            grid.checked(contribution.root, 8192, 2 * 8192, honest)
        for at in (0, 8192, len(honest) - 1):
            changed = bytearray(honest)
            changed[at] ^= 1
            with pytest.raises(WireError, match="committed"):
                grid.checked(contribution.root, 0, 8192, memoryview(changed))
        with pytest.raises(WireError, match="parts of leaves"):
            grid.checked(contribution.root, 0, 100, honest)

    asyncio.run(main())


def test_a_member_that_sends_other_bytes_than_it_committed_to_is_left_out() -> None:
    async def main() -> None:
        network, plan = MemoryNetwork(), make_plan([1, 1, 1])
        sides = make_sides(network, plan, "int8")
        liar = plan.members[2].peer
        network.faults.append(changed("contribution", liar, lambda data: bytes([data[0] ^ 1]) + data[1:]))
        await run_all(sides)
        assert digests(sides[0]) == digests(sides[1]) == digests(sides[2])
        for part in sides[0].store.plan.parts:
            for chunk in sides[0].store.chunks_of(part):
                included = sides[0].store.header(chunk).included
                assert included == ([0, 1, 2] if part.owner == 2 else [0, 1])

    run_virtual(main())


def test_encoded_bytes_are_there_until_the_verdict_and_no_longer() -> None:
    async def main() -> None:
        contribution, _, feedback, buffers = await begun()
        source = ContributionSource(ResultStore(PLAN, CODEC_MAP))
        asked = asyncio.create_task(source.chunk(1))
        await asyncio.sleep(0)
        assert not asked.done(), "nothing is served before the plan"
        source.begin(contribution)
        first = bytes(await asked)
        assert bytes(await source.chunk(1)) == first
        await source.close()
        with pytest.raises(BlobUnavailable):
            await source.chunk(1)
        assert buffers.held_bytes - buffers.free_bytes > 0, "the residual cannot be settled without them"
        feedback.commit()
        del contribution, asked
        gc.collect()
        assert buffers.held_bytes - buffers.free_bytes == 0

    asyncio.run(main())
