"""Where the splits of a context begin: a function of the position alone, on host and device.

The first `2 * octave` splits have `size` keys each. After that the length doubles whenever the
position does, so there are always `octave` splits between p and 2 p. The lanes of a long context
take long stretches anyway, and the number of states to merge grows only with its logarithm. With an
octave of 0 all splits have the same size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import triton
import triton.language as tl
from numpy.typing import NDArray

DOUBLINGS = 10  # at most: splits of 512 keys grow to half a million keys
_DOUBLINGS = tl.constexpr(DOUBLINGS)

_Ints = NDArray[np.signedinteger[Any]]


@dataclass(frozen=True, slots=True)
class Splits:
    """
    >>> splits = Splits(size=512, octave=16)
    >>> splits.start(31), splits.start(32), splits.start(33), splits.start(48)
    (15872, 16384, 17408, 32768)
    >>> [splits.count(end) for end in (0, 1, 512, 513, 16_385, 128_000)]
    [0, 1, 1, 2, 33, 80]
    """

    size: int
    octave: int

    def start(self, index: int) -> int:
        """First position of a split."""
        if not self.octave:
            return index * self.size
        k = min(max(index // self.octave - 1, 0), DOUBLINGS)
        return (index - self.octave * k) * self.size << k

    def count(self, end: int) -> int:
        """How many splits begin before a position."""
        return int(self.counts(np.asarray([end]))[0])

    def counts(self, ends: _Ints) -> _Ints:
        last = ends - 1  # -1: in split -1
        if not self.octave:
            return last // self.size + 1
        borders = 2 * self.octave * self.size << np.arange(DOUBLINGS)
        k = np.searchsorted(borders, last, side="right")
        return self.octave * k + (last // self.size >> k) + 1


@triton.jit
def split_start(index, SIZE: tl.constexpr, OCTAVE: tl.constexpr):
    """First position of a split."""
    k = 0
    if OCTAVE > 0:
        k = tl.minimum(tl.maximum(index // OCTAVE - 1, 0), _DOUBLINGS)
    return (index - OCTAVE * k) * SIZE << k


@triton.jit
def split_count(end, SIZE: tl.constexpr, OCTAVE: tl.constexpr):
    """How many splits begin before a position."""
    k = 0
    if OCTAVE > 0:
        for i in tl.static_range(_DOUBLINGS):
            k += (end > (2 * OCTAVE * SIZE << i)).to(tl.int32)
    return OCTAVE * k + (tl.cdiv(end, SIZE) + (1 << k) - 1 >> k)


@triton.jit
def lane_splits(
    lane, lanes, first_split, num_splits, end, SPLIT_SIZE: tl.constexpr, OCTAVE: tl.constexpr
):
    """(first, stop) of a lane's run among a tile's splits: about as many keys to each lane."""
    base = split_start(first_split, SPLIT_SIZE, OCTAVE)
    each = tl.cdiv(tl.cdiv(end - base, lanes), SPLIT_SIZE) * SPLIT_SIZE
    first = split_count(base + lane * each, SPLIT_SIZE, OCTAVE) - first_split
    stop = split_count(base + (lane + 1) * each, SPLIT_SIZE, OCTAVE) - first_split
    return first, tl.minimum(stop, num_splits)
