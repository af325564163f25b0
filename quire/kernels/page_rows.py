"""Pages of a pool to rows and back: a page lies in as many pieces as it has layers and parts.

One program copies a part of a piece. Torch's own indexing works out the place of every number anew.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.launch import Launcher, alignments, ceil_div, pad_to_power

MOST = 2048  # numbers of a program


@triton.jit(do_not_specialize_on_alignment=["pages"])
def _page_rows_kernel(
    pool,
    rows,
    pages,
    TO_ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    NUMBERS: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    PLACE_STRIDE: tl.constexpr,
    PART_STRIDE: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, piece = tl.program_id(0), tl.program_id(1)
    n = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    keep = n < NUMBERS
    page = tl.load(pages + row)  # int64, as all that follows
    place, part = (piece // PARTS).to(tl.int64), (piece % PARTS).to(tl.int64)
    here = pool + page * PAGE_STRIDE + place * PLACE_STRIDE + part * PART_STRIDE + n
    there = rows + row.to(tl.int64) * ROW_STRIDE + piece * NUMBERS + n
    if TO_ROWS:
        tl.store(there, tl.load(here, mask=keep), mask=keep)
    else:
        tl.store(here, tl.load(there, mask=keep), mask=keep)


_launch = Launcher(_page_rows_kernel)


def copy_page_rows(pool: Tensor, pages: Tensor, rows: Tensor, to_rows: bool) -> None:
    """Between `pages`, int64, of [pages, places, parts, numbers] and [rows, places * parts *
    numbers] of the same whole numbers; one row for each page, and no page twice."""
    _, places, parts, numbers = pool.shape
    assert pool.stride(3) == rows.stride(1) == 1 and pool.dtype == rows.dtype
    assert rows.shape == (len(pages), places * parts * numbers), f"{rows.shape=} {pool.shape=}"
    if not len(pages):
        return
    block = min(MOST, pad_to_power(numbers))
    _launch(
        (len(pages), places * parts, ceil_div(numbers, block)),
        (pool, rows, pages),
        {
            "TO_ROWS": to_rows,
            "PARTS": parts,
            "NUMBERS": numbers,
            "PAGE_STRIDE": pool.stride(0),
            "PLACE_STRIDE": pool.stride(1),
            "PART_STRIDE": pool.stride(2),
            "ROW_STRIDE": rows.stride(0),
            "BLOCK": block,
            "num_warps": 4,
        },
        (pool.dtype, alignments(pool, rows)),
    )
