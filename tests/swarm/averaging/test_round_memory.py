"""What rounds need of memory: a decoded mean, what is encoded, and a window; whatever size their chunks have."""

import itertools

import pytest
import torch
from tests.fakes.codec_maps import get_codec_map
from tests.fakes.swarm import run_toml, swarm, together
from tests.fakes.virtual_clock import run_virtual

from shoal.swarm.averaging.buffer_pool import _SEGMENT_BYTES
from shoal.swarm.averaging.outcome import Committed
from shoal.swarm.averaging.reduction import _WINDOW
from shoal.swarm.coordinator import round_plan

ELEMENTS = 8_000_000
MEMBERS = 4
CHUNKS = [2**17, 2**15, 2**16, 2**17 - 2**14]


@pytest.mark.parametrize("codec", ["float32", "int8"])
def test_rounds_with_chunks_of_all_sizes_need_a_mean_its_encoded_forms_and_a_window(
    codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Links are seen to be slower and faster, so chunks are larger and smaller: memory is used again all the same."""
    sizes = itertools.cycle(CHUNKS)
    monkeypatch.setattr(round_plan, "chunk_elements", lambda *about: next(sizes))
    encoded_bytes = get_codec_map(codec).contribution(0, ELEMENTS).packed_bytes(ELEMENTS)
    own_bytes = 4 * ELEMENTS // MEMBERS
    window_bytes = (MEMBERS - 1) * min(_WINDOW * 4 * max(CHUNKS), encoded_bytes // MEMBERS)
    # The mean; the error on our part of it; our contribution, encoded; this round's results and the last one's.
    needed_bytes = 4 * ELEMENTS + own_bytes + 3 * encoded_bytes + window_bytes

    async def main() -> None:
        async with swarm(MEMBERS, run_toml(MEMBERS, codec), ELEMENTS) as run:
            for number in range(len(CHUNKS) + 1):
                brought = [torch.full((ELEMENTS,), 1.0 + number) for _ in run.members]
                outcomes = await together(*[run[index].play(brought[index], 1) for index in range(MEMBERS)])
                assert all(isinstance(one, Committed) and one.included for one in outcomes)
                del outcomes  # the means with them
                for member in run.members:
                    held_bytes = member.averager._buffers.held_bytes
                    assert held_bytes < 1.1 * needed_bytes + 2 * _SEGMENT_BYTES, number

    run_virtual(main())
