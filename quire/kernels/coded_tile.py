"""Pages of codes as the paged kernels see them: where a code and its scale lie, and their values.

The rows of one kv head lie together in a page, `page_size` of them, then their scales, a bf16 each:
codes of neighbouring tokens are read in one piece and start at a multiple of 16 bytes. Codes are
small numbers that every 16-bit float holds exactly, so the matrix units multiply the codes
themselves; scales multiply logits and weights afterwards (`paged_tile.py`). `coded_kv_write.py`
writes such pages; `attn/cache_codes.py` defines the codes.
"""

from __future__ import annotations

import triton
import triton.language as tl

SCALE_BYTES = 2  # as `kv/forms.py` counts them
_SCALE_BYTES = tl.constexpr(SCALE_BYTES)
MIDDLE = tl.constexpr(7.5)  # of a code of four bits


def head_bytes(page_size: int, head_dim: int, bits: int) -> int:
    """Of one kv head's rows and scales in a page."""
    return page_size * (head_dim * bits // 8 + SCALE_BYTES)


@triton.jit
def load_codes(
    pages, at, row, live,
    HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr, PAGE_SIZE: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """(codes [rows, HEAD_PAD], scales [rows]) of rows that lie `at` so many bytes; else zeros.

    `pages` points to this kv head in page 0. Its elements are int8, or bytes: of fp8, or of two
    codes of four bits."""
    WIDTH: tl.constexpr = HEAD_DIM * BITS // 8
    PAD: tl.constexpr = HEAD_PAD * BITS // 8
    cells = tl.arange(0, PAD)
    place = pages + (at + row * WIDTH)[:, None] + cells[None, :]
    codes = tl.load(place, mask=live[:, None] & (cells < WIDTH)[None, :], other=0)
    if BITS == 8 and pages.dtype.element_ty == tl.uint8:
        codes = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    if BITS == 4:
        low = (codes & 15).to(tl.float32) - MIDDLE
        high = (codes >> 4).to(tl.float32) - MIDDLE
        both = tl.join(low, high).reshape([codes.shape[0], HEAD_PAD])
        codes = tl.where((tl.arange(0, HEAD_PAD) < HEAD_DIM)[None, :], both, 0.0)
    beside = pages + at + PAGE_SIZE * WIDTH + row * _SCALE_BYTES
    scales = tl.load(beside.to(tl.pointer_type(tl.bfloat16)), mask=live, other=0.0)
    return codes, scales.to(tl.float32)


@triton.jit
def in_order(tile, BITS: tl.constexpr):
    """A factor of a product that was made from codes, as if it had been loaded as it is.

    Triton looks back from a narrow product (16 rows: `mma.sync`) to the load of its factors. If
    that was of bytes, the numbers that one instruction sums are not neighbours, so that threads
    may read whole words: the sums are rounded otherwise than in a wide product (`wgmma`), and
    decode would not have the bits of prefill. It does not look behind assembly with effects."""
    if BITS > 0 and tile.dtype.primitive_bitwidth == 16:
        tile = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [tile], tile.dtype, False, 2)
    return tile
