"""Sample order for data in blocks: blocks are permuted, then samples within a window of blocks.

A permutation of single samples would make a member read a block of 4 MiB for each of its samples. Here any contiguous
range of sample numbers, as a lease is, lies in few blocks, and every epoch still visits every sample once. What peers
must agree on is integer arithmetic alone."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from shoal.peer.training.data import SampleOrder

_Int64s = npt.NDArray[np.int64]

WINDOW_BLOCKS = 8
"""Blocks whose samples are mixed. More mix better, but a member then reads more of what others train on: of leases that
are smaller than a window, several members read the same blocks."""

_RANDOM_BLOCKS = 4
"""Blocks that random samples are drawn from, as each block has to be read as a whole."""


class BlockOrder:
    """Order over samples that are numbered block by block.

    Sample number ``s`` belongs to epoch ``s // length``. Each epoch permutes the blocks anew by the run's seed, cuts
    them into windows of ``WINDOW_BLOCKS`` and permutes the samples of each window (``SampleOrder``)."""

    def __init__(self, samples: _Int64s, seed: int, first: int = 0) -> None:
        """``samples``: of each block, each at least 1; ``seed``, ``first``: as of ``SampleOrder``."""
        self._samples = samples
        self._starts = np.concatenate([[0], np.cumsum(samples)])
        self.length = int(self._starts[-1])
        self._seed = seed
        self._first = first
        # The newest ones, as plain attributes: workers of data loaders get a copy of this object.
        self._planned: tuple[int, tuple[_Int64s, _Int64s, _Int64s]] | None = None
        self._mixed: tuple[tuple[int, int], SampleOrder] | None = None

    def indices(self, start: int, stop: int) -> _Int64s:
        """Return the data indices of the sample numbers [start, stop), (stop - start,) int64.

        Raises ``ValueError`` unless ``0 <= start <= stop``."""
        if not 0 <= start <= stop:
            raise ValueError(f"sample range: expected 0 <= start <= stop, not {start} to {stop}")
        out = np.empty(stop - start, dtype=np.int64)
        at = start
        while at < stop:
            epoch, offset = divmod(self._first + at, self.length)
            blocks, ends, windows = self._plan_epoch(epoch)
            window = int(np.searchsorted(windows, offset, side="right")) - 1
            in_window = offset - int(windows[window])
            size = int(windows[window + 1] - windows[window])
            count = min(stop - at, size - in_window)
            mixed = self._window(epoch, window, size).indices(in_window, in_window + count)
            positions = mixed + windows[window]
            slots = np.searchsorted(ends, positions, side="right")
            within = positions - (ends[slots] - self._samples[blocks[slots]])
            out[at - start : at - start + count] = self._starts[blocks[slots]] + within
            at += count
        return out

    def random(self, rng: np.random.Generator, count: int) -> _Int64s:
        """Draw data indices from few blocks, (count,) int64; larger blocks are likelier."""
        drawn = np.searchsorted(self._starts, rng.integers(0, self.length, _RANDOM_BLOCKS), side="right") - 1
        chosen = drawn[np.arange(count) % _RANDOM_BLOCKS]
        return self._starts[chosen] + rng.integers(0, self._samples[chosen])

    def _window(self, epoch: int, window: int, size: int) -> SampleOrder:
        if self._mixed is None or self._mixed[0] != (epoch, window):
            self._mixed = (epoch, window), SampleOrder(size, self._seed_of("window", epoch, window))
        return self._mixed[1]

    def _plan_epoch(self, epoch: int) -> tuple[_Int64s, _Int64s, _Int64s]:
        """Blocks in the epoch's order, where each one's samples end, and where each window begins, and the end."""
        if self._planned is not None and self._planned[0] == epoch:
            return self._planned[1]
        blocks = SampleOrder(len(self._samples), self._seed_of("blocks", epoch)).indices(0, len(self._samples))
        ends = np.cumsum(self._samples[blocks])
        windows = np.concatenate([[0], ends[WINDOW_BLOCKS - 1 :: WINDOW_BLOCKS]])
        if windows[-1] != self.length:
            windows = np.append(windows, self.length)
        self._planned = epoch, (blocks, ends, windows)
        return self._planned[1]

    def _seed_of(self, what: str, *numbers: int) -> int:
        text = f"shoal block order {what} {self._seed} {' '.join(map(str, numbers))}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
