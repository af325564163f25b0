"""Token masks: write -inf for every token whose bit is not set, in the rows that have a mask.

The mask is [masks, ceil(vocab / 32)] int32, least significant bit first; mask i belongs to row
`rows[i]` of the logits. Rows without a mask are not read.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # tokens of one program; a multiple of 32


@triton.jit
def _token_mask_kernel(
    logits, rows, bits, row_stride, bits_stride, vocab_size, BLOCK: tl.constexpr
):
    mask_id = tl.program_id(0).to(tl.int64)
    tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = tokens < vocab_size
    words = tl.load(bits + mask_id * bits_stride + tokens // 32, mask=inside, other=-1)
    is_banned = ((words >> (tokens % 32)) & 1) == 0
    row = tl.load(rows + mask_id).to(tl.int64)
    at = logits + row * row_stride + tokens
    tl.store(at, tl.full([BLOCK], float("-inf"), tl.float32), mask=inside & is_banned)


def ban_unset(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """logits [S, V] any float, changed in place; rows [M] int64; bits [M, ceil(V / 32)] int32."""
    vocab_size = logits.shape[1]
    assert logits.stride(1) == 1 and bits.stride(1) == 1, "rows must be runs of memory"
    assert bits.shape == (len(rows), -(-vocab_size // 32)), f"got {tuple(bits.shape)} words"
    if not len(rows):
        return
    grid = (len(rows), triton.cdiv(vocab_size, BLOCK))
    _token_mask_kernel[grid](
        logits, rows, bits, logits.stride(0), bits.stride(0), vocab_size, BLOCK=BLOCK
    )
