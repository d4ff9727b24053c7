"""A contribution is encoded when it is asked for, not kept once handed out, and the same for whoever asks again."""

import asyncio
import gc

import torch
from tests.fakes.codec_maps import get_codec_map
from tests.fakes.grids import plan_of

from shoal.compression.codec_map import CodecMap
from shoal.compression.error_feedback import ErrorFeedback
from shoal.swarm.averaging.contribution import ContributionSource
from shoal.swarm.averaging.results import ResultStore

ELEMENTS = 8 * 64
CODEC_MAP: CodecMap = get_codec_map("int8", None, [("w", (ELEMENTS,))])
PLAN = plan_of([3, 4], [[0, 1]], ELEMENTS, chunk=64)


def begun() -> tuple[ContributionSource, ResultStore, ErrorFeedback]:
    feedback, store = ErrorFeedback(ELEMENTS), ResultStore(PLAN, CODEC_MAP)
    feedback.begin(torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(1)))
    source = ContributionSource(store)
    source.begin(feedback)
    return source, store, feedback


def test_who_asks_again_gets_the_same_bytes_and_the_same_is_pending() -> None:
    async def main() -> None:
        source, _, feedback = begun()
        first = [bytes(await source.chunk(index)) for index in range(8)]
        again = [bytes(await source.chunk(index)) for index in (5, 0, 5, 7)]
        assert again == [first[index] for index in (5, 0, 5, 7)]
        await source.close()
        feedback.commit()
        once, _, other = begun()
        for index in range(8):
            await once.chunk(index)
        await once.close()
        other.commit()
        assert torch.equal(feedback.residual, other.residual)

    asyncio.run(main())


def test_what_was_handed_out_is_not_kept() -> None:
    async def main() -> None:
        source, store, _ = begun()
        first = await source.chunk(0)
        held = [await source.chunk(index) for index in range(1, 8)]
        assert len({bytes(one) for one in [first, *held]}) == 8
        passing = store.buffers.passing
        used = passing.held_bytes - passing.free_bytes
        del first, held
        gc.collect()
        assert passing.held_bytes - passing.free_bytes == 0 < used

    asyncio.run(main())
