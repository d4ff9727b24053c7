"""What rounds need of memory: what is encoded, and a window; whatever size their chunks have."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from tests.fakes.codec_maps import get_codec_map
from tests.fakes.swarm import run_toml, swarm, together
from tests.fakes.virtual_clock import run_virtual

from shoal.swarm.averaging.buffer_pool import _SEGMENT_BYTES
from shoal.swarm.averaging.outcome import Committed
from shoal.swarm.averaging.reduction import _WINDOW
from shoal.swarm.averaging.results import RoundMean
from shoal.swarm.coordinator import round_plan

ELEMENTS = 4_000_000
MEMBERS = 4
CHUNKS = [2**17, 2**15, 2**16, 2**17 - 2**15]


@pytest.mark.parametrize("codec", ["float32", "int8"])
def test_rounds_with_chunks_of_all_sizes_need_encoded_forms_and_a_window(
    codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Links are seen to be slower and faster, so chunks are larger and smaller: memory is used again all the same."""
    sizes = itertools.cycle(CHUNKS)
    monkeypatch.setattr(round_plan, "chunk_elements", lambda *about: next(sizes))
    encoded_bytes = get_codec_map(codec).contribution(0, ELEMENTS).packed_bytes(ELEMENTS)
    own_bytes = 4 * ELEMENTS // MEMBERS
    window_bytes = (MEMBERS - 1) * min(_WINDOW * 4 * max(CHUNKS), encoded_bytes // MEMBERS)
    # What encoding the means of our part lost; our contribution, encoded; this round's results and the last one's.
    needed_bytes = own_bytes + 3 * encoded_bytes + window_bytes

    async def main() -> None:
        async with swarm(MEMBERS, run_toml(MEMBERS, codec), ELEMENTS) as run:
            for number in range(len(CHUNKS) + 1):
                brought = [torch.full((ELEMENTS,), 1.0 + number) for _ in run.members]
                outcomes = await together(*[run[index].play(brought[index], 1) for index in range(MEMBERS)])
                assert all(isinstance(one, Committed) and one.included for one in outcomes)
                del outcomes
                for member in run.members:
                    held_bytes = member.averager._buffers.held_bytes
                    # Both pools keep a quarter more than their peaks, and up to two segments that are not full.
                    assert held_bytes < 1.25 * needed_bytes + 2 * 2 * _SEGMENT_BYTES, number

    run_virtual(main())


def test_no_vector_is_made_in_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is as large as the model is there before: what rounds allocate is encoded, or a part, or bounded."""
    large: list[int] = []
    n = 2**22

    def watched(make: Any) -> Any:
        def made(*args: Any, **options: Any) -> Any:
            result = make(*args, **options)
            size = result.nbytes
            if size > n:  # a quarter of the vector
                large.append(size)
            return result

        return made

    async def main() -> None:
        async with swarm(MEMBERS, run_toml(MEMBERS, "int8"), n) as run:
            brought = [torch.full((n,), 1.0 + index) for index in range(MEMBERS)]
            for member in run.members:
                monkeypatch.setattr(member, "apply", lambda mean: None)
            monkeypatch.setattr(RoundMean, "whole", lambda mean: None)
            for name in ("empty", "zeros", "frombuffer", "empty_like", "zeros_like"):
                monkeypatch.setattr(torch, name, watched(getattr(torch, name)))
            for name in ("empty", "zeros"):
                monkeypatch.setattr(np, name, watched(getattr(np, name)))
            monkeypatch.setattr(torch.Tensor, "clone", watched(torch.Tensor.clone))
            outcomes = await together(*[run[index].play(brought[index], 1) for index in range(MEMBERS)])
            assert all(isinstance(one, Committed) and one.included for one in outcomes)
            assert isinstance(outcomes[0], Committed)
            assert sum(1 for _ in outcomes[0].mean.pieces()) == n // 2**20

    run_virtual(main())
    copies = [4 * n] * MEMBERS  # the fake members' own, of what they bring
    assert [size for size in large if size > _SEGMENT_BYTES + 64] == copies, "else segments of the pool alone"
