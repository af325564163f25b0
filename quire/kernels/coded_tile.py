"""Pages of codes as the paged kernels see them: where a code and its scale lie, and their values.

The rows of one kv head lie together in a page, `page_size` of them, then their scales, a bf16 each:
codes of neighbouring tokens are read in one piece and start at a multiple of 16 bytes. Codes are
small numbers that every 16-bit float holds exactly, so the matrix units multiply the codes
themselves; scales multiply logits and weights afterwards (`paged_tile.py`). `coded_kv_write.py`
writes such pages; `attn/cache_codes.py` defines the codes.

Codes are read as words of 16 bits, as wide as the floats that they become: a word then lies in the
very register that its floats go to. Part i of a row are the i-th codes of its words, a factor of a
product of its own (`head_parts.py`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.code_pairs import float_pairs

SCALE_BYTES = 2  # as `kv/forms.py` counts them
_SCALE_BYTES = tl.constexpr(SCALE_BYTES)


def head_bytes(page_size: int, head_dim: int, bits: int) -> int:
    """Of one kv head's rows and scales in a page."""
    return page_size * (head_dim * bits // 8 + SCALE_BYTES)


@triton.jit
def load_words(
    pages, page, row, live,
    HEAD_DIM: tl.constexpr, PART_PAD: tl.constexpr, PAGE_STRIDE: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """[rows, PART_PAD] words of rows in pages; zeros where they are not live.

    `pages` points to this kv head in page 0. Its elements are int8, or bytes: of fp8, or of two
    codes of four bits. Words of int8 have a sign, others have none."""
    WORDS: tl.constexpr = HEAD_DIM * BITS // 16
    UNSIGNED: tl.constexpr = pages.dtype.element_ty == tl.uint8
    words = pages.to(tl.pointer_type(tl.uint16 if UNSIGNED else tl.int16))
    cells = tl.arange(0, PART_PAD)
    place = words + (page.to(tl.int64) * (PAGE_STRIDE // 2) + row * WORDS)[:, None] + cells[None, :]
    return tl.load(place, mask=live[:, None] & (cells < WORDS)[None, :], other=0)


@triton.jit
def load_scales(
    pages, page, row, live,
    HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, PAGE_STRIDE: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """[rows] bf16 of rows in pages; zeros where they are not live."""
    beside = page.to(tl.int64) * PAGE_STRIDE + PAGE_SIZE * (HEAD_DIM * BITS // 8)
    place = (pages + beside + row * _SCALE_BYTES).to(tl.pointer_type(tl.bfloat16))
    return tl.load(place, mask=live, other=0.0)


@triton.jit
def factors(tile, dtype: tl.constexpr, BITS: tl.constexpr):
    """The parts of a tile of words as floats, exactly; floats are their own only part."""
    if BITS == 0:
        made = tl.tuple([tile])
    elif dtype == tl.float32:
        pairs = float_pairs(tile, tl.bfloat16, BITS)
        made = tl.tuple([])
        for i in tl.static_range(len(pairs)):
            made = made + (pairs[i].to(tl.float32),)  # noqa: RUF005
    else:
        made = float_pairs(tile, dtype, BITS)
    return made
