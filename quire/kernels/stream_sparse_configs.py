"""Which 2:4 weights stream on Hopper, and in what sizes, as plain data.

The kernels are in `stream_sparse.py` and `sparse_turns.py`. No size changes a bit of the result.
There is one way to store a weight for all sizes.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch

from quire.kernels.chip import Chip
from quire.kernels.launch import pad_to_power
from quire.kernels.stream_packed_configs import BESIDE, FIELD, StreamPackedConfig, own_rows

__all__ = ["can_stream_sparse", "sparse_bytes", "stream_sparse_ways"]

_SLAB = 2 * FIELD  # inputs
_ROW_BYTES = 2 * FIELD + 16  # of a slab: values and bits
_TILE = 64  # weight rows of the matrix instruction
_LEAST_ROWS = 32  # of the weight, in a tile
_FEW_ROWS, _MANY_ROWS = 32, 128  # of x
# (slabs of a stage, stages) of a sum in turns, the fastest first. Stages are even, so that each
# group has stages of its own.
_TURNS = ((4, 4), (2, 4), (1, 6), (1, 4), (1, 2))


def can_stream_sparse(shape: tuple[int, int], dtype: torch.dtype, chip: Chip) -> bool:
    """Whether the kernels take a weight, with values of the inputs' dtype."""
    n, k = shape
    if dtype not in (torch.bfloat16, torch.float16):
        return False
    is_whole = k % _SLAB == 0 and k >= 2 * _SLAB and own_rows(n, 1) is not None
    return is_whole and _fits(_TILE, chip)


@cache
def stream_sparse_ways(
    m: int, shape: tuple[int, int], chip: Chip
) -> tuple[StreamPackedConfig, ...]:
    """For m rows of x: one for each kernel that can, the faster first."""
    rows = own_rows(shape[0], chip.units)
    assert rows is not None, f"got {shape[0]} rows, which no portion divides"
    together = _together(m, rows, shape, chip)
    turns = _in_turns(m, rows, shape, chip)
    return (together,) if turns is None else (turns, together)


def sparse_bytes(config: StreamPackedConfig) -> int:
    """Shared memory of a program, but for barriers."""
    of_slab = config.tile * _ROW_BYTES + 2 * _SLAB * config.block_m
    of_sum = 4 * _TILE * config.block_m if config.in_turns else 0
    return config.num_stages * config.slabs * of_slab + of_sum


def _fits(tile: int, chip: Chip) -> bool:
    """Whether some stages fit, for any rows of x."""
    smallest = StreamPackedConfig(tile, tile, _MANY_ROWS, 1, 2, 1)
    return sparse_bytes(smallest) <= chip.shared - BESIDE


def _in_turns(m: int, rows: int, shape: tuple[int, int], chip: Chip) -> StreamPackedConfig | None:
    """None: more rows of x than two groups help with, or of the weight than one program for each
    multiprocessor takes."""
    n, k = shape
    if m > _FEW_ROWS or n // rows > chip.units:
        return None
    tile, block_m = max(_LEAST_ROWS, pad_to_power(rows)), max(8, pad_to_power(m))
    for slabs, stages in _TURNS:
        config = StreamPackedConfig(rows, tile, block_m, slabs, stages, 1, in_turns=True)
        is_whole = k % (slabs * _SLAB) == 0 and k // (slabs * _SLAB) >= stages
        if is_whole and sparse_bytes(config) <= chip.shared - BESIDE:
            return config
    return None


def _together(m: int, rows: int, shape: tuple[int, int], chip: Chip) -> StreamPackedConfig:
    n, k = shape
    is_wide = n >= 3 * _TILE * chip.units
    block_m = _MANY_ROWS if m > _MANY_ROWS else max(8, pad_to_power(min(m, 64)))
    if m > 16 and is_wide and n % (2 * _TILE) == 0 and _fits(2 * _TILE, chip):
        rows = 2 * _TILE
    elif n % _TILE == 0 and m > 64:
        rows = _TILE
    tile = max(_LEAST_ROWS, pad_to_power(rows))
    most = 4 if is_wide and m <= 16 else 2
    if m > _MANY_ROWS and n // rows * -(-m // block_m) > chip.units:
        most = 1  # so that two programs share a multiprocessor
    slabs = next(s for s in (4, 2, 1) if s <= most and k % (s * _SLAB) == 0 and k >= 2 * s * _SLAB)
    stages = min(2 if is_wide or m > _FEW_ROWS else 3, k // (slabs * _SLAB))
    config = StreamPackedConfig(rows, tile, block_m, slabs, stages, 1)
    if config.slabs > 1 and sparse_bytes(config) > chip.shared - BESIDE:
        config = replace(config, slabs=1)
    return config
