"""The race of a draw on the GPU: how far a token lies behind the best, and when it starts.

Device functions only, shared by the passes of `sample.py`; `sample/gumbel.py` explains the race and
makes the same integers on the CPU.
"""

from __future__ import annotations

import triton
import triton.language as tl

LARGEST = tl.constexpr(3.4028234663852886e38)
_MASS_ONE = tl.constexpr(float(2**40))  # fixed point: 2**18 tokens of mass 1 still fit 63 bits

# The same numbers as in sample/gumbel.py.
_GAMMA = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_A = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_B = tl.constexpr(0x94D049BB133111EB)
_TOKEN_A = tl.constexpr(0x7FEB352D)
_TOKEN_B = tl.constexpr(0x846CA68B)
_FINAL = tl.constexpr(0x2C1B3C6D)
_SCALE = tl.constexpr(2.0**-31 * (1.0 - 2.0**-24))
_SHIFT = tl.constexpr(2.0**-33)


@triton.jit
def _mix64(z):
    z = (z ^ (z >> 30)) * _MIX_A
    z = (z ^ (z >> 27)) * _MIX_B
    return z ^ (z >> 31)


@triton.jit
def log_times(seed, position, ids):
    """log E of the race for each token id; seed and position are int64 scalars."""
    z = _mix64(seed.to(tl.uint64, bitcast=True) + _GAMMA)
    z = _mix64(z + position.to(tl.uint64, bitcast=True) * _GAMMA)
    low = (z & 0xFFFFFFFF).to(tl.uint32)
    high = (z >> 32).to(tl.uint32) | 1
    h = ids.to(tl.uint32, bitcast=True)
    h = (h ^ (h >> 16)) * _TOKEN_A
    h = (h ^ (h >> 15)) * _TOKEN_B
    h = h ^ (h >> 16)
    h = (h ^ low) * high
    h = (h ^ (h >> 15)) * _FINAL
    v = (h >> 1).to(tl.int32).to(tl.float32) * _SCALE + _SHIFT
    # -log(1 - v); the logarithm alone would lose the small v, which are the winners.
    series = v * (1.0 + v * (0.5 + v * (1.0 / 3 + v * (0.25 + v * 0.2))))
    return tl.log(tl.where(v < 0.03125, series, -tl.log(1.0 - v)))


@triton.jit
def load_logits(logits, ids, mask):
    """f32; NaN and masked tokens are -inf, +inf is the largest float."""
    x = tl.load(logits + ids, mask=mask, other=-float("inf")).to(tl.float32)
    return tl.minimum(tl.where(x == x, x, -float("inf")), LARGEST)


@triton.jit
def distances(best, x, temperature):
    """>= 0, and infinity for banned tokens, also when they are all there is."""
    # abs: logits of -0 would give a distance of -0, whose bits sort last.
    return tl.abs(tl.maximum(best, -LARGEST) - x) / temperature


@triton.jit
def fixed_mass(distance):
    return (tl.exp(-distance) * _MASS_ONE).to(tl.int64)
