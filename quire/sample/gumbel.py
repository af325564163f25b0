"""Counter-based noise: a draw is a race whose start times depend on (seed, position, token) alone.

Gumbel-max in its exponential form: token i arrives at time E_i / p_i with E_i ~ Exp(1), and the
first to arrive is the draw. In logs, with distance_i = log(p_max / p_i), that is the smallest
distance_i + log E_i. E_i comes from an integer hash and no generator state, so a draw is the same
in any batch, row or run. This is the CPU side; `kernels/sample_race.py` makes the same integers on
the GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float32]
    Ints = NDArray[np.int64]
    Words = NDArray[np.uint32]

# The constants below are repeated in kernels/sample_race.py, which may not import from here;
# tests/kernel/test_sample_kernel.py fails when the two differ.
GAMMA = np.uint64(0x9E3779B97F4A7C15)
MIX_A, MIX_B = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
TOKEN_A, TOKEN_B = np.uint32(0x7FEB352D), np.uint32(0x846CA68B)
FINAL = np.uint32(0x2C1B3C6D)

# v = word * SCALE + SHIFT for 31-bit words: the smallest v is 2**-33, the largest 1 - 2**-24, both
# exact in f32. Winners have small v, where the float grid is finest: flat vocabularies do not tie.
SCALE = np.float32(2.0**-31 * (1.0 - 2.0**-24))
SHIFT = np.float32(2.0**-33)


def row_keys(seeds: Ints, positions: Ints) -> Words:
    """[S] seeds, [S] positions -> [S, 2] words that make a row's noise; the second is odd."""
    z = _mix64(seeds.astype(np.uint64) + GAMMA)
    z = _mix64(z + positions.astype(np.uint64) * GAMMA)
    low = (z & np.uint64(0xFFFFFFFF)).astype(np.uint32)
    high = (z >> np.uint64(32)).astype(np.uint32) | np.uint32(1)
    return np.stack((low, high), axis=1)


class TokenNoise:
    """Log start times of a vocabulary's tokens; holds the token hashes and one row of scratch.

    >>> noise = TokenNoise(vocab_size=5)
    >>> key = row_keys(np.array([7]), np.array([0]))[0]
    >>> bool((noise.log_times(key)[[1, 3]] == noise.log_times_at(key, np.array([1, 3]))).all())
    True
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._hashes = _hash_tokens(np.arange(vocab_size, dtype=np.uint32))
        # Rows are larger than malloc's mmap threshold: fresh buffers would page-fault each time.
        self._words = np.empty(vocab_size, np.uint32)
        self._times = np.empty(vocab_size, np.float32)

    def log_times(self, key: Words) -> Floats:
        """log E for every token [V]; valid until the next call."""
        return _log_times(self._hashes, key, self._words, self._times)

    def log_times_at(self, key: Words, tokens: Ints) -> Floats:
        """log E for the given tokens only; valid until the next call."""
        n = len(tokens)
        return _log_times(self._hashes[tokens], key, self._words[:n], self._times[:n])


def _log_times(hashes: Words, key: Words, words: Words, times: Floats) -> Floats:
    shifted = times.view(np.uint32)  # the output doubles as scratch until the floats are made
    np.bitwise_xor(hashes, key[0], out=words)
    np.multiply(words, key[1], out=words)
    np.right_shift(words, np.uint32(15), out=shifted)
    np.bitwise_xor(words, shifted, out=words)
    np.multiply(words, FINAL, out=words)
    np.right_shift(words, np.uint32(1), out=words)
    np.copyto(times, words.view(np.int32), casting="unsafe")
    np.multiply(times, -SCALE, out=times)
    np.subtract(times, SHIFT, out=times)  # -v
    np.log1p(times, out=times)
    np.negative(times, out=times)  # E = -log(1 - v)
    return np.log(times, out=times)


def _mix64(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * MIX_A
    z = (z ^ (z >> np.uint64(27))) * MIX_B
    return z ^ (z >> np.uint64(31))


def _hash_tokens(tokens: Words) -> Words:
    h = (tokens ^ (tokens >> np.uint32(16))) * TOKEN_A
    h = (h ^ (h >> np.uint32(15))) * TOKEN_B
    return h ^ (h >> np.uint32(16))
