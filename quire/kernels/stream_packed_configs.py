"""Which packed weights stream on Hopper, and in what sizes, as plain data.

The kernel is in `stream_packed.py`. No size changes a bit of the result. The numbers were found by
timing products of an 8B model on an H200. There is one way to store a weight for all sizes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quire.kernels.launch import ceil_div, pad_to_power
from quire.kernels.slabs import SlabForm

__all__ = ["FIELD", "StreamPackedConfig", "can_stream", "pick_stream_packed"]

FIELD = 64  # inputs of a field; a row of a slab is as many bytes of two fields
_SLAB = 2 * FIELD
_TILE = 64  # weight rows of the matrix instruction
_LEAST_ROWS, _ROW_UNIT = 32, 8  # weight rows a program owns: no fewer, and a multiple
_FEWEST_ROWS, _FEW_ROWS = 16, 32  # of x
_SHARED_BYTES = 200 << 10  # of a program; a Hopper chip has 227 KB


@dataclass(frozen=True, slots=True)
class StreamPackedConfig:
    rows: int  # of w that a program owns, a divisor of all rows
    tile: int  # rows of a stage: a power of two, no fewer than `rows`
    block_m: int  # rows of x in a tile
    slabs: int  # of a stage
    num_stages: int
    num_ahead: int  # of these, how many are asked for before the inputs are there


def can_stream(form: SlabForm, shape: tuple[int, int], dtype: torch.dtype) -> bool:
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
    is_whole = k % _SLAB == 0 and k >= 2 * _SLAB and _own_rows(n, 1) is not None
    return is_laid and is_whole and is_code and fits and is_plain


def pick_stream_packed(
    m: int, shape: tuple[int, int], num_words: int, num_units: int
) -> StreamPackedConfig:
    """For m rows of x. `num_words`: of scales in a row; `num_units`: multiprocessors."""
    n, k = shape
    rows = _own_rows(n, num_units)
    assert rows is not None, f"got {n} rows, which no portion divides"
    is_wide = n >= 3 * _TILE * num_units
    block_m = max(8, pad_to_power(min(m, 64)))
    if m > _FEW_ROWS and is_wide and n % (2 * _TILE) == 0:
        rows = 2 * _TILE
    elif n % _TILE == 0 and (m > 64 or (m <= _FEWEST_ROWS and rows <= _LEAST_ROWS)):
        rows = _TILE  # half a tile takes nearly as long as a whole one
    tile = pad_to_power(rows)
    num_slabs = next(s for s in (4, 2, 1) if k % (s * _SLAB) == 0 and k >= 2 * s * _SLAB)
    stages = 2 if is_wide or m > _FEW_ROWS else 3
    stages = min(stages, k // (num_slabs * _SLAB))
    of_slab = stages * (tile * FIELD + 2 * _SLAB * block_m)  # bytes
    while num_slabs > 1 and num_slabs * of_slab + 4 * tile * num_words > _SHARED_BYTES:
        num_slabs //= 2
    # Asking for more before the wait slows down the kernel before.
    return StreamPackedConfig(rows, tile, block_m, num_slabs, stages, 1)


def _own_rows(n: int, num_units: int) -> int | None:
    """Weight rows of a program, so that nearly every multiprocessor gets one; None: no number
    divides all rows."""
    share = ceil_div(n, num_units)
    fewest = min(_TILE, max(_LEAST_ROWS, ceil_div(share, _ROW_UNIT) * _ROW_UNIT))
    higher = [rows for rows in range(fewest, _TILE + 1, _ROW_UNIT) if n % rows == 0]
    lower = [rows for rows in range(fewest, 7, -_ROW_UNIT) if n % rows == 0]
    return next(iter(higher + lower), None)
