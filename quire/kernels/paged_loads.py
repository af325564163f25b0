"""What the paged kernels read of a tile of keys: page ids, floats or words of codes, scales.

`paged_tile.py` says when each is read and what is made of it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.coded_tile import load_scales, load_words
from quire.kernels.draft_paths import place_of
from quire.kernels.head_parts import part_pad


@triton.jit
def in_reach(n, oldest, last, WINDOW: tl.constexpr):
    """True where position n may be read.

    Pages behind the window were given back, and their table entries are stale."""
    reach = n < last
    if WINDOW > 0:
        reach &= n >= oldest
    return reach


@triton.jit
def load_tile(
    keys, values, cells, n, oldest, last,
    HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr, PAGE_SIZE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr, WINDOW: tl.constexpr, MASKED: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """(k, v) of positions n, in cells [BLOCK_N]: floats [BLOCK_N, HEAD_PAD], or words of codes."""
    page, row = cells[0], row_of(cells, n, PAGE_SIZE)
    if BITS > 0:
        live = n >= 0
        if MASKED:
            live = in_reach(n, oldest, last, WINDOW)
        PART: tl.constexpr = part_pad(HEAD_PAD, BITS)
        k = load_words(keys, page, row, live, HEAD_DIM, PART, PAGE_STRIDE, BITS)
        v = load_words(values, page, row, live, HEAD_DIM, PART, PAGE_STRIDE, BITS)
    else:
        dims = tl.arange(0, HEAD_PAD)
        offset = page.to(tl.int64) * PAGE_STRIDE + row * HEAD_DIM
        place = offset[:, None] + dims[None, :]
        if MASKED:
            # Slots out of reach hold anything, NaN too, and 0 * NaN would leak into acc.
            live = in_reach(n, oldest, last, WINDOW)[:, None] & (dims < HEAD_DIM)[None, :]
            k = tl.load(keys + place, mask=live, other=0.0)
            v = tl.load(values + place, mask=live, other=0.0)
        elif HEAD_DIM == HEAD_PAD:
            k = tl.load(keys + place)
            v = tl.load(values + place)
        else:
            k = tl.load(keys + place, mask=(dims < HEAD_DIM)[None, :], other=0.0)
            v = tl.load(values + place, mask=(dims < HEAD_DIM)[None, :], other=0.0)
    return k, v


@triton.jit
def load_cells(pages, n, oldest, last, PAGE_SIZE: tl.constexpr, WINDOW: tl.constexpr):
    """(the pages of the keys at positions n, or 0; where there are paths, also their rows in them).

    `pages` is from `draft_paths.walked`."""
    reach = in_reach(n, oldest, last, WINDOW)
    place = place_of(pages, n, reach)
    column = place.to(tl.uint32) // PAGE_SIZE  # one shift, where signs would take four steps
    page = tl.load(pages[0] + column, mask=reach, other=0)
    return (page,) if len(pages) == 1 else (page, place % PAGE_SIZE)


@triton.jit
def row_of(cells, n, PAGE_SIZE: tl.constexpr):
    """Where the keys at positions n lie in their pages."""
    return n % PAGE_SIZE if len(cells) == 1 else cells[1]


@triton.jit
def scales_ahead(
    keys, values, pages, cells, n, oldest, last,
    HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, PAGE_STRIDE: tl.constexpr,
    WINDOW: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """((scales of keys, of values) at positions n, in cells [BLOCK_N]; cells of the next tile).

    Floats have none. Scales are too narrow to be copied ahead as tiles are, so who walks asks for
    them one tile ahead, and for their cells two."""
    k, v = 0.0, 0.0
    if BITS > 0:
        live, row = in_reach(n, oldest, last, WINDOW), row_of(cells, n, PAGE_SIZE)
        page = cells[0]
        k = load_scales(keys, page, row, live, HEAD_DIM, PAGE_SIZE, PAGE_STRIDE, BITS)
        v = load_scales(values, page, row, live, HEAD_DIM, PAGE_SIZE, PAGE_STRIDE, BITS)
    return (k, v), load_cells(pages, n + n.shape[0], oldest, last, PAGE_SIZE, WINDOW)
