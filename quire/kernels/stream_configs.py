"""Which products of few rows stream their weights, and in what sizes, as plain data.

The kernel is in `stream_matmul.py`. No size changes a bit of the result. The numbers were found by
timing whole decode steps on an H200, because a product's time depends on its neighbours: they start
while it ends, and share a multiprocessor with it if their memory fits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from quire.kernels.chip import Chip
from quire.kernels.matmul_configs import SMALL, WIDE

__all__ = ["MOST_ROWS", "StreamConfig", "boxes_of", "pick_stream"]

MOST_ROWS = 256

_TILE = 64  # weight rows of the matrix instruction
_FEW_ROWS = 32  # of x
_LEAST_NARROW = 1024  # weight rows, for more than a few rows of x
_ROW_UNIT, _LEAST_ROWS = 8, 32  # weight rows a program owns: a multiple, and no fewer
# Up to a few rows of x, a product with more outputs than inputs leaves some multiprocessors idle.
# It is usually a projection to heads, and attention starts its few programs there while it ends.
_LEFT_ALONE, _LEFT_ALONE_ROWS = 28, 4
_BARRIERS = 1 << 10  # bytes, and no more


@dataclass(frozen=True, slots=True)
class StreamConfig:
    rows: int  # of w that a program owns, a divisor of all rows
    block_m: int  # rows of x in a tile
    block_k: int
    num_stages: int  # tiles of the weight on their way
    num_ahead: int  # of these, how many are asked for before the inputs are there
    tile: int = _TILE  # weight rows of a stage: 64, 128 or 256, no fewer than `rows`


# For more than a few rows of x. The copy engine takes longer for padding than for real rows, so
# larger batches must nearly fill their tile. With a gate the library needs a second kernel.
_WIDE_ROWS = (  # (rows of x from, to, only with a gate, portions)
    (33, 64, False, StreamConfig(128, 64, 128, 4, 2, 128)),
    (96, 128, True, StreamConfig(256, 128, 64, 4, 2, 256)),
    (248, 256, True, StreamConfig(128, 256, 64, 4, 2, 128)),
)
_OF_64_ROWS = StreamConfig(_TILE, 64, 128, 6, 3)
_OF_128_ROWS, _OF_128_FROM = StreamConfig(_TILE, 128, 64, 8, 4), 121


@cache
def pick_stream(m: int, n: int, k: int, gated: bool, chip: Chip) -> StreamConfig | None:
    """The config for m rows of x, at most `MOST_ROWS`, and a weight of n rows and k columns.

    None: another kernel is faster, or this one cannot."""
    if k % 128:
        return None
    if m <= _FEW_ROWS:
        config = _for_few(m, n, k, chip.units)
    elif n >= WIDE:
        config = _for_wide(m, n, k, gated, chip.units)
    else:
        config = _for_narrow(m, n, k, chip.units)
    return None if config is None else _with_room(config, k, chip.shared)


def _with_room(config: StreamConfig, k: int, shared: int) -> StreamConfig | None:
    """With as many of its stages as fit; None: not even two do, of sums that have two."""
    of_stage = 2 * (config.tile + config.block_m) * config.block_k
    stages = min(config.num_stages, (shared - _BARRIERS) // of_stage)
    if stages < min(2, k // config.block_k):
        return None
    return replace(config, num_stages=stages, num_ahead=min(config.num_ahead, stages))


def _for_few(m: int, n: int, k: int, units: int) -> StreamConfig | None:
    rows = _own_rows(m, n, k, units)
    if rows is None:
        return None
    block_m = 8 if m <= 8 else 16 if m <= 16 else 32
    block_k, num_stages, num_ahead = _stages(block_m, n, k)
    num_stages = min(num_stages, k // block_k)
    return StreamConfig(rows, block_m, block_k, num_stages, min(num_ahead, num_stages))


def _for_wide(m: int, n: int, k: int, gated: bool, units: int) -> StreamConfig | None:
    found = (c for low, high, gate, c in _WIDE_ROWS if low <= m <= high and gated >= gate)
    config = next(found, None)
    return config if config is not None and _fits(config, n, k, units) else None


def _for_narrow(m: int, n: int, k: int, units: int) -> StreamConfig | None:
    """Small weights stream in 64 x 64 tiles. Others stream if their tiles take one round and
    padding is little; as long as one tile holds x, their rows are dealt out evenly."""
    if n < _LEAST_NARROW or k < 1024:
        return None
    if n * k <= SMALL:
        return _OF_64_ROWS if n % _TILE == 0 else None
    share = n / (_TILE * units)  # of the chip that tiles take
    if m <= _OF_64_ROWS.block_m and share <= 1 and k < 3 * n:  # longer sums: the library is quick
        rows = _own_rows(m, n, k, units)
        return None if rows is None else replace(_OF_64_ROWS, rows=rows)
    is_full = _OF_128_FROM <= m <= _OF_128_ROWS.block_m
    return _OF_128_ROWS if is_full and n % _TILE == 0 and n > k and 0.7 <= share <= 1 else None


def _fits(config: StreamConfig, n: int, k: int, units: int) -> bool:
    """Whether this config leaves at most a fifth of the chip idle for a wide weight."""
    if n < WIDE or n % config.tile or k < config.num_stages * config.block_k:
        return False
    tiles = n // config.tile
    return tiles >= 0.8 * units * -(-tiles // units)


def _stages(block_m: int, n: int, k: int) -> tuple[int, int, int]:
    """(columns of a stage, stages, stages requested before the wait).

    Requesting more before the wait would slow down the kernel before. A projection to heads takes
    smaller stages, which leaves room on its multiprocessors for attention."""
    is_to_heads = k < n <= 3 * k
    if is_to_heads or k % 256:
        return 128, 7, 4
    return (256, 5, 3) if block_m <= 16 else (256, 4, 2)


def _own_rows(m: int, n: int, k: int, units: int) -> int | None:
    """Weight rows of a program, so that nearly every multiprocessor gets one; None: no number fits.

    With fewer programs some multiprocessors idle. Which ones is left to chance, and some choices
    seem to share a path to memory: the same product then takes 42 or 59 us.
    """
    left = _LEFT_ALONE if m <= _LEFT_ALONE_ROWS and n > k else 0
    places = max(1, units - left)
    fewest = min(_TILE, max(_LEAST_ROWS, -(-n // (places * _ROW_UNIT)) * _ROW_UNIT))
    return next((rows for rows in range(fewest, _TILE + 1, _ROW_UNIT) if n % rows == 0), None)


def boxes_of(rows: int) -> tuple[int, int]:
    """Heights of the one or two boxes that copy `rows` rows, powers of two; 0: no second box.

    A box may reach past the rows. Nothing is read there, yet the copy engine takes longer for it
    than for real rows.

    >>> boxes_of(32), boxes_of(40), boxes_of(48), boxes_of(56)
    ((32, 0), (32, 8), (32, 16), (64, 0))
    """
    first = 1 << (rows.bit_length() - 1)
    rest = 0 if rows == first else 1 << (rows - first - 1).bit_length()
    return (2 * first, 0) if rest == first else (first, rest)
