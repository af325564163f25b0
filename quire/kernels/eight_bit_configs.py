"""Which sizes products of eight bits by eight take on Hopper, as plain data.

The kernels are in `stream_eight_bit.py` and `many_eight_bit.py`. No size changes a bit of the
result.
"""

from __future__ import annotations

from functools import cache

from quire.kernels.chip import Chip
from quire.kernels.eight_bit_weight import CHAIN
from quire.kernels.stream_configs import StreamConfig

__all__ = [
    "MOST_EIGHT_BIT_ROWS",
    "MOST_GATED_ROWS",
    "NARROW_TILE",
    "WIDE_TILE",
    "many_tiles",
    "own_rows",
    "pick_eight_bit_stream",
    "pick_many",
]

MOST_EIGHT_BIT_ROWS = 128
MOST_GATED_ROWS = 224  # of more, the library makes gate and up, and the gate is a launch of its own
NARROW_TILE, WIDE_TILE = 128, 256  # weight rows

_TILE = 64  # weight rows of the matrix instruction
_ROW_UNIT, _LEAST_ROWS = 8, 32  # weight rows a program owns: a multiple, and no fewer
_WIDE = 16384  # weight rows from which programs with whole tiles fill the chip
_LEAST_STAGES = 2
_BESIDE = 27 << 10  # bytes of shared memory that stages leave
_MANY_ROWS, _MANY_STAGES = 128, 4  # of x and of a tile of `many_eight_bit.py`


@cache
def pick_eight_bit_stream(m: int, n: int, k: int, chip: Chip) -> StreamConfig | None:
    """The config for m rows of x and a weight of n rows and k columns; None: this kernel cannot,
    or another one is faster."""
    if m > MOST_EIGHT_BIT_ROWS or k < _LEAST_STAGES * CHAIN or k % CHAIN:
        return None
    block_m = next(size for size in (8, 16, 32, 64, 128) if m <= size)
    is_wide = n >= _WIDE and block_m >= 64 and n % (2 * _TILE) == 0
    tile = 2 * _TILE if is_wide else _TILE
    rows = tile if is_wide else own_rows(n, chip.units)
    return None if rows is None else _staged(rows, block_m, tile, k, chip.shared - _BESIDE)


def many_tiles(has_groups: bool, chip: Chip) -> tuple[int, ...]:
    """Weight rows of a tile of `many_eight_bit.py` that fit, the narrow one first. Scales of groups
    take registers too."""
    tiles = (NARROW_TILE,) if has_groups else (NARROW_TILE, WIDE_TILE)
    room = (chip.shared - _BESIDE) // (_MANY_STAGES * CHAIN) - _MANY_ROWS
    return tuple(tile for tile in tiles if tile <= room)


def pick_many(m: int, n: int, widest: int, units: int) -> int | None:
    """Weight rows of a tile of `many_eight_bit.py`, up to `widest`, beside 128 rows of x; None:
    tiles of 64 by 128 are quicker. `units`: multiprocessors."""
    if widest == WIDE_TILE and -(-m // 128) * -(-n // WIDE_TILE) >= units // 2:
        return WIDE_TILE
    # A second round of tiles of 64 by 128 takes as long as the first.
    return NARROW_TILE if -(-m // 64) * -(-n // 128) > units else None


def _staged(rows: int, block_m: int, tile: int, k: int, room: int) -> StreamConfig | None:
    """With as long stages as leave four or more of them in as many bytes."""
    most = 4 if block_m <= 16 else 2
    bands = next(count for count in (4, 2, 1) if count <= most and k % (count * CHAIN) == 0)
    while True:
        stages = min(8, room // ((tile + block_m) * bands * CHAIN), k // (bands * CHAIN))
        if stages >= 4 or bands == 1:
            break
        bands //= 2
    if stages < _LEAST_STAGES:
        return None
    return StreamConfig(rows, block_m, bands * CHAIN, stages, max(1, stages // 2), tile)


def own_rows(n: int, units: int) -> int | None:
    """Weight rows of a program, so that nearly every multiprocessor gets one; None: no number
    fits."""
    fewest = min(_TILE, max(_LEAST_ROWS, -(-n // (units * _ROW_UNIT)) * _ROW_UNIT))
    return next((rows for rows in range(fewest, _TILE + 1, _ROW_UNIT) if n % rows == 0), None)
