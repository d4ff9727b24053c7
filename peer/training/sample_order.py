"""The order in which a run visits its samples: an endless sequence, permuted anew in every epoch.

Peers lease ranges of this sequence, so every machine has to compute the same order, at any position, without
holding a permutation in memory. Hence a keyed permutation of its own, and no library's random generator.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from shoal.swarm.protocol.run_file import RunFile

MAX_LENGTH = 2**62

_ROUNDS = 8
_UintArray = npt.NDArray[np.uint64]


class SampleOrder:
    """Sample number ``s`` of the run is index ``permutation(seed, s // length)(s % length)`` of the data.

    Every epoch of ``length`` numbers visits every index once. The permutation is a Feistel network on the
    smallest power of two that holds ``length``, walked along its cycle until it lands inside (Black &
    Rogaway 2002, "Ciphers with Arbitrary Finite Domains"): fewer than two evaluations an index on average,
    O(1) memory. It has to look random, not to withstand anybody.
    """

    def __init__(self, length: int, seed: int, first: int = 0) -> None:
        """``length``: samples in the data, 1 to 2**62. ``seed``: the run's, 0 to 2**64 - 1. ``first``: which number of
        the sequence the run calls 0.

        Raises ``ValueError`` outside these ranges.
        """
        if not 1 <= length <= MAX_LENGTH:
            raise ValueError(f"length: expected 1 to 2**62 samples, not {length}")
        if not 0 <= seed < 2**64:
            raise ValueError(f"seed: expected 0 to 2**64 - 1, not {seed}")
        self.length = length
        self._seed = seed
        self._first = first
        bits = (length - 1).bit_length()
        self._low_bits = np.uint64(bits // 2)
        self._low_mask = np.uint64((1 << (bits // 2)) - 1)
        self._high_mask = np.uint64((1 << (bits - bits // 2)) - 1)

    def indices(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """The data indices of the sample numbers ``start`` to ``stop - 1``: ``(stop - start,) int64``.

        Splitting a range and joining the results gives the same array. Raises ``ValueError`` unless
        ``0 <= start <= stop``.
        """
        if not 0 <= start <= stop:
            raise ValueError(f"sample range: expected 0 <= start <= stop, not {start} to {stop}")
        if self.length == 1:
            return np.zeros(stop - start, dtype=np.int64)
        out = np.empty(stop - start, dtype=np.int64)
        position = start
        while position < stop:
            epoch, offset = divmod(self._first + position, self.length)
            count = min(stop - position, self.length - offset)
            numbers = np.arange(offset, offset + count, dtype=np.uint64)
            out[position - start : position - start + count] = self._permute(numbers, self._round_keys(epoch))
            position += count
        return out

    def _round_keys(self, epoch: int) -> _UintArray:
        """``(_ROUNDS,) uint64`` for one epoch: a hash, so that neighbouring epochs share nothing."""
        text = f"shoal sample order {self._seed} {epoch}".encode()
        digest = hashlib.blake2b(text, digest_size=8 * _ROUNDS).digest()
        return np.frombuffer(digest, dtype="<u8").astype(np.uint64)

    def _permute(self, numbers: _UintArray, keys: _UintArray) -> _UintArray:
        """The permutation of ``range(length)``, elementwise. ``numbers``: ``(n,)``, each below ``length``."""
        out = self._feistel(numbers, keys)
        outside = np.flatnonzero(out >= np.uint64(self.length))
        while outside.size:
            # Walking on from an outside value ends inside, as the cycle leads back to where it started.
            walked = self._feistel(out[outside], keys)
            out[outside] = walked
            outside = outside[walked >= np.uint64(self.length)]
        return out

    def _feistel(self, numbers: _UintArray, keys: _UintArray) -> _UintArray:
        """The permutation of the power of two. ``numbers``: ``(n,)``.

        The halves take turns instead of changing places, which also works when they differ in size. Each is
        changed by a function of the other one alone, so every round can be undone: a bijection for any keys.
        """
        low = numbers & self._low_mask
        high = numbers >> self._low_bits
        for round_number in range(0, _ROUNDS, 2):
            high ^= _scramble(low, keys[round_number]) & self._high_mask
            low ^= _scramble(high, keys[round_number + 1]) & self._low_mask
        return (high << self._low_bits) | low


def run_order(run: RunFile, length: int, tokens_per_sample: int) -> SampleOrder:
    """The run's order over data of ``length`` samples; where it starts from a checkpoint, it goes on from there."""
    return SampleOrder(length, run.run.seed, run.start.tokens // tokens_per_sample if run.start else 0)


def _scramble(values: _UintArray, key: np.uint64) -> _UintArray:
    """The upper 32 bits of splitmix64's finalizer (Steele et al. 2014) of ``values + key``: ``(n,)``."""
    mixed = values + key
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    return mixed >> np.uint64(32)
