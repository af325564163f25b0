"""From the projections of latent attention to its inputs: rotate, and write into the pages.

Queries are rotated where they are, in the last dimensions of each head; a token's latent and its
one rotated key go side by side into its slot. Rotation is half-split and rounds once; cos and sin
are rounded to the model's dtype first, as in `rope_kv_write.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.launch import Launcher
from quire.kernels.rope_kv_write import Rope

HEADS_PER_PROGRAM = 16


@triton.jit
def _latent_write_kernel(
    q, latent, key, pages, cos, sin, positions, slots, q_stride, latent_stride, key_stride,
    HEADS: tl.constexpr, HEAD_WIDTH: tl.constexpr, RANK: tl.constexpr, RANK_PAD: tl.constexpr,
    HALF: tl.constexpr, HALF_PAD: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]  # the last one is the key
    half = tl.arange(0, HALF_PAD)[None, :]
    is_q = (head < HEADS) & (half < HALF)
    is_key = (head == HEADS) & (half < HALF)
    slot = pages + tl.load(slots + token).to(tl.int64) * (RANK + 2 * HALF)
    position = tl.load(positions + token).to(tl.int64)
    q_start = q + token * q_stride + head * HEAD_WIDTH + (HEAD_WIDTH - 2 * HALF) + half
    key_start = key + token * key_stride + half + head * 0
    low = tl.load(q_start, mask=is_q, other=0.0)
    low = tl.where(is_key, tl.load(key_start, mask=is_key, other=0.0), low)
    high = tl.load(q_start + HALF, mask=is_q, other=0.0)
    high = tl.where(is_key, tl.load(key_start + HALF, mask=is_key, other=0.0), high)
    cosine = tl.load(cos + position * HALF + half, mask=half < HALF, other=0.0)
    sine = tl.load(sin + position * HALF + half, mask=half < HALF, other=0.0)
    cosine = cosine.to(low.dtype).to(tl.float32)
    sine = sine.to(low.dtype).to(tl.float32)
    a, b = low.to(tl.float32), high.to(tl.float32)
    low_out = (a * cosine - b * sine).to(low.dtype)
    high_out = (b * cosine + a * sine).to(low.dtype)
    tl.store(q_start, low_out, mask=is_q)
    tl.store(q_start + HALF, high_out, mask=is_q)
    slot_start = slot + RANK + half + head * 0
    tl.store(slot_start, low_out, mask=is_key)
    tl.store(slot_start + HALF, high_out, mask=is_key)
    if tl.program_id(1) == 0:
        dims = tl.arange(0, RANK_PAD)
        row = tl.load(latent + token * latent_stride + dims, mask=dims < RANK, other=0.0)
        tl.store(slot + dims, row, mask=dims < RANK)


_launch = Launcher(_latent_write_kernel)


def latent_write(
    q: Tensor,  # [tokens, heads, nope + rope], rotated in place
    latent: Tensor,  # [tokens, rank]
    key: Tensor,  # [tokens, rope]
    pages: Tensor,  # [pages, 1, page_size, rank + rope], written
    positions: Tensor,  # [tokens]
    slots: Tensor,  # [tokens]
    rope: Rope,
) -> None:
    """Rotate queries and keys by their positions, and store latents and keys at `slots`."""
    num_tokens, heads, width = q.shape
    rank, rot_dim = latent.shape[1], key.shape[1]
    assert rope.rot_dim == rot_dim and pages.shape[3] == rank + rot_dim, f"{pages.shape=}"
    assert q.stride(1) == width and q.stride(2) == latent.stride(1) == key.stride(1) == 1
    assert pages.is_contiguous()
    if num_tokens == 0:
        return
    strides = (q.stride(0), latent.stride(0), key.stride(0))
    _launch(
        (num_tokens, triton.cdiv(heads + 1, HEADS_PER_PROGRAM), 1),
        (q, latent, key, pages, rope.cos, rope.sin, positions, slots, *strides),
        {
            "HEADS": heads,
            "HEAD_WIDTH": width,
            "RANK": rank,
            "RANK_PAD": triton.next_power_of_2(rank),
            "HALF": rot_dim // 2,
            "HALF_PAD": triton.next_power_of_2(rot_dim // 2),
            "BLOCK_H": HEADS_PER_PROGRAM,
            "num_warps": 4,
        },
        (
            q.dtype, rope.cos.dtype, positions.dtype, slots.dtype, strides,
            q.data_ptr() % 16, latent.data_ptr() % 16, key.data_ptr() % 16, pages.data_ptr() % 16,
            positions.data_ptr() % 16 == 0, slots.data_ptr() % 16 == 0,
        ),
    )  # fmt: skip
