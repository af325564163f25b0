"""Which packed weights stream on Hopper, and in what sizes, as plain data.

The kernels are in `stream_packed.py` and `stream_turns.py`. No size changes a bit of the result.
The numbers were found by timing products of an 8B model on an H200. There is one way to store a
weight for all sizes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch

from quire.kernels.chip import Chip
from quire.kernels.launch import ceil_div, pad_to_power
from quire.kernels.slabs import SlabForm

__all__ = [
    "BESIDE",
    "FIELD",
    "StreamPackedConfig",
    "can_stream",
    "own_rows",
    "shared_bytes",
    "stream_packed_ways",
]

FIELD = 64  # inputs of a field; a row of a slab is as many bytes of two fields
_SLAB = 2 * FIELD
_TILE = 64  # weight rows of the matrix instruction
_LEAST_ROWS, _ROW_UNIT = 32, 8  # weight rows a program owns: no fewer, and a multiple
_FEWEST_ROWS, _FEW_ROWS, _MANY_ROWS = 16, 32, 128  # of x
BESIDE = 11 << 10  # bytes of shared memory that a program leaves
# (slabs of a stage, stages) of a sum in turns, the fastest first. Stages are even, so that each
# group has stages of its own.
_TURNS = ((4, 6), (4, 4), (2, 6), (2, 4), (1, 4), (1, 2))


@dataclass(frozen=True, slots=True)
class StreamPackedConfig:
    rows: int  # of w that a program owns, a divisor of all rows
    tile: int  # rows of a stage: a power of two, no fewer than `rows`
    block_m: int  # rows of x in a tile
    slabs: int  # of a stage
    num_stages: int
    num_ahead: int  # of these, how many are asked for before the inputs are there
    in_turns: bool = False  # two warpgroups take turns at the sum


def can_stream(form: SlabForm, shape: tuple[int, int], dtype: torch.dtype, chip: Chip) -> bool:
    """Whether the kernel takes a form: codes of four bits whose scales are 16 inputs apart or more,
    with nothing beside them but zeros in the same words."""
    if form.kind == "e2m1":
        is_code = form.scales == "power" and dtype == torch.bfloat16
    else:
        floats = ("f16", "bf16") if dtype == torch.bfloat16 else ("f16",)
        is_code = form.kind == "int" and form.scales in floats
    fits = form.group in (16, 32, 64) or (form.group > 0 and form.group % _SLAB == 0)
    is_plain = form.offsets == "" and form.super_size == 0 and form.zeros in ("", "u16")
    is_laid = form.lanes and form.bits == 4 and form.width == FIELD
    n, k = shape
    is_whole = k % _SLAB == 0 and k >= 2 * _SLAB and own_rows(n, 1) is not None
    if not (is_laid and is_whole and is_code and fits and is_plain):
        return False
    of_word = 1 if form.zeros else 4 if form.scales == "power" else 2  # numbers
    return _fits(_TILE, ceil_div(ceil_div(k, form.group), of_word), chip)


@cache
def stream_packed_ways(
    m: int, shape: tuple[int, int], num_words: int, chip: Chip
) -> tuple[StreamPackedConfig, ...]:
    """For m rows of x: one for each kernel that can, the faster first. `num_words`: of scales in a
    row."""
    rows = own_rows(shape[0], chip.units)
    assert rows is not None, f"got {shape[0]} rows, which no portion divides"
    together = _together(m, rows, shape, num_words, chip)
    turns = _in_turns(m, rows, shape, num_words, chip)
    return (together,) if turns is None else (turns, together)


def shared_bytes(config: StreamPackedConfig, num_words: int) -> int:
    """Of a program, but for barriers. Words of scales are kept as a power of two of rows."""
    of_stage = config.slabs * (config.tile * FIELD + 2 * _SLAB * config.block_m)
    of_sum = 4 * _TILE * config.block_m if config.in_turns else 0
    return config.num_stages * of_stage + 4 * config.tile * pad_to_power(num_words) + of_sum


def _fits(tile: int, num_words: int, chip: Chip) -> bool:
    """Whether some stages fit beside the words, for any rows of x."""
    smallest = StreamPackedConfig(tile, tile, _MANY_ROWS, 1, 2, 1)
    return shared_bytes(smallest, num_words) <= chip.shared - BESIDE


def _in_turns(
    m: int, rows: int, shape: tuple[int, int], num_words: int, chip: Chip
) -> StreamPackedConfig | None:
    """None: more rows of x than were measured, or of the weight than one program for each
    multiprocessor takes, so that those with more than one have two groups anyway."""
    n, k = shape
    if m > _FEW_ROWS or n // rows > chip.units:
        return None
    tile, block_m = max(_LEAST_ROWS, pad_to_power(rows)), max(8, pad_to_power(m))
    for slabs, stages in _TURNS:
        config = StreamPackedConfig(rows, tile, block_m, slabs, stages, 1, in_turns=True)
        is_whole = k % (slabs * _SLAB) == 0 and k // (slabs * _SLAB) >= stages
        if is_whole and shared_bytes(config, num_words) <= chip.shared - BESIDE:
            return config
    return None


def _together(
    m: int, rows: int, shape: tuple[int, int], num_words: int, chip: Chip
) -> StreamPackedConfig:
    n, k = shape
    is_wide = n >= 3 * _TILE * chip.units
    block_m = _MANY_ROWS if m > _MANY_ROWS else max(8, pad_to_power(min(m, 64)))
    if m > _FEW_ROWS and is_wide and n % (2 * _TILE) == 0 and _fits(2 * _TILE, num_words, chip):
        rows = 2 * _TILE
    elif n % _TILE == 0 and (m > 64 or (m <= _FEWEST_ROWS and rows <= _LEAST_ROWS)):
        rows = _TILE  # half a tile takes nearly as long as a whole one
    tile = max(_LEAST_ROWS, pad_to_power(rows))
    most = 4
    if m > _MANY_ROWS:  # where programs wait for others, two should fit a multiprocessor
        most = 2 if n // rows * ceil_div(m, block_m) <= chip.units else 1
    num_slabs = next(s for s in (4, 2, 1) if k % (s * _SLAB) == 0 and k >= 2 * s * _SLAB)
    num_slabs = min(most, num_slabs)
    stages = 2 if is_wide or m > _FEW_ROWS else 3
    stages = min(stages, k // (num_slabs * _SLAB))
    # Asking for more before the wait slows down the kernel before.
    config = StreamPackedConfig(rows, tile, block_m, num_slabs, stages, 1)
    while config.slabs > 1 and shared_bytes(config, num_words) > chip.shared - BESIDE:
        config = replace(config, slabs=config.slabs // 2)
    return config


def own_rows(n: int, num_units: int) -> int | None:
    """Weight rows of a program, so that nearly every multiprocessor gets one; None: no number
    divides all rows."""
    share = ceil_div(n, num_units)
    fewest = min(_TILE, max(_LEAST_ROWS, ceil_div(share, _ROW_UNIT) * _ROW_UNIT))
    higher = [rows for rows in range(fewest, _TILE + 1, _ROW_UNIT) if n % rows == 0]
    lower = [rows for rows in range(fewest, 7, -_ROW_UNIT) if n % rows == 0]
    return next(iter(higher + lower), None)
