"""From the fused qkv product to attention's inputs in one pass over it.

Optionally normalises each query and key head (Qwen3), rotates the first `rot_dim` dimensions of
queries and keys, writes queries densely and keys and values straight into their pages. A program
takes a few heads of one token, be they of q, k or v, so even one decode fills some SMs.
Rotation is half-split: dimension d pairs with d + rot_dim / 2. Rounds once, after the rotation;
cos and sin are rounded to the model's dtype first, as Hugging Face does. Norms round as those in
`rms_norm.py`: twice with weights of the model's dtype, once with weights in fp32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.early import early_options, let_next_start, wait_for_last
from quire.kernels.launch import Launcher, alignments, ceil_div, pad_to_power

HEADS_PER_PROGRAM = 16


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotation tables; `cos` and `sin` are [max_positions, rot_dim / 2] fp32."""

    cos: Tensor
    sin: Tensor

    @property
    def rot_dim(self) -> int:
        return 2 * self.cos.shape[1]


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """Per-head RMS norm of queries and keys; weights are [head_dim] of one dtype."""

    q_weight: Tensor
    k_weight: Tensor
    eps: float


@triton.jit
def _weights(q_weight, k_weight, dims, keep, is_q):
    """[heads, dims] norm weights: those of q or of k, by head."""
    wq = tl.load(q_weight + dims, mask=keep, other=0.0)[None, :]
    wk = tl.load(k_weight + dims, mask=keep, other=0.0)[None, :]
    return tl.where(is_q, wq, wk)


@triton.jit
def _normed(x, scale, weight):
    normed = x.to(tl.float32) * scale
    if weight.dtype == x.dtype:
        normed = normed.to(x.dtype).to(tl.float32)
    return (normed * weight.to(tl.float32)).to(x.dtype)


@triton.jit
def transformed(
    row, head, position, cos, sin, q_weight, k_weight, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr,
    HALF_PAD: tl.constexpr, REST_PAD: tl.constexpr, HAS_ROPE: tl.constexpr,
    HAS_NORM: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """(low, high, tail) of some heads of one token's qkv, normed and rotated; waits before reading.

    A head is [HALF | HALF | rest], [BLOCK_H, HALF_PAD] twice and [BLOCK_H, REST_PAD]."""
    is_q = (head < HEADS)[:, None]
    is_qk = (head < HEADS + KV_HEADS)[:, None]
    is_head = (head < HEADS + 2 * KV_HEADS)[:, None]
    half = tl.arange(0, HALF_PAD)
    is_half = half < HALF
    rest = 2 * HALF + tl.arange(0, REST_PAD)
    is_rest = rest < HEAD_DIM
    if HAS_ROPE:
        cosine = tl.load(cos + position * HALF + half, mask=is_half, other=0.0)
        sine = tl.load(sin + position * HALF + half, mask=is_half, other=0.0)
    if HAS_NORM:
        weights = (
            _weights(q_weight, k_weight, half, is_half, is_q),
            _weights(q_weight, k_weight, HALF + half, is_half, is_q),
            _weights(q_weight, k_weight, rest, is_rest, is_q),
        )
    wait_for_last(EARLY)  # nothing that the chain writes was read so far
    source = row + head[:, None] * HEAD_DIM  # [BLOCK_H, 1]
    low = tl.load(source + half[None, :], mask=is_head & is_half[None, :], other=0.0)
    high = tl.load(source + HALF + half[None, :], mask=is_head & is_half[None, :], other=0.0)
    tail = tl.load(source + rest[None, :], mask=is_head & is_rest[None, :], other=0.0)
    low_out, high_out = low, high
    if HAS_NORM:
        a, b, c = low.to(tl.float32), high.to(tl.float32), tail.to(tl.float32)
        squares = tl.sum(a * a, 1) + tl.sum(b * b, 1) + tl.sum(c * c, 1)
        scale = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        low_out = _normed(low, scale, weights[0])
        high_out = _normed(high, scale, weights[1])
        tail = tl.where(is_qk, _normed(tail, scale, weights[2]), tail)
    if HAS_ROPE:
        cosine = cosine.to(low.dtype).to(tl.float32)[None, :]
        sine = sine.to(low.dtype).to(tl.float32)[None, :]
        a, b = low_out.to(tl.float32), high_out.to(tl.float32)
        low_out = (a * cosine - b * sine).to(low.dtype)
        high_out = (b * cosine + a * sine).to(low.dtype)
    low_out = tl.where(is_qk, low_out, low)
    high_out = tl.where(is_qk, high_out, high)
    return low_out, high_out, tail


@triton.jit
def _scatter(y, head, dims, keep, q_row, keys, values, page_row, HEADS, KV_HEADS, HEAD_DIM):
    """Each row of y goes where its head belongs: queries, a key page or a value page."""
    is_head = keep[None, :] & (head < HEADS + 2 * KV_HEADS)[:, None]
    is_q = (head < HEADS)[:, None]
    is_v = (head >= HEADS + KV_HEADS)[:, None]
    tl.store(q_row + head[:, None] * HEAD_DIM + dims[None, :], y, mask=is_head & is_q)
    place = page_row[:, None] * HEAD_DIM + dims[None, :]
    tl.store(keys + place, y, mask=is_head & ~is_q & ~is_v)
    tl.store(values + place, y, mask=is_head & is_v)


@triton.jit
def _rope_kv_write_kernel(
    qkv,
    q_out,
    keys,
    values,
    cos,
    sin,
    positions,
    slots,
    q_weight,
    k_weight,
    eps,
    qkv_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,  # a head is [HALF | HALF | REST]; the halves rotate into each other
    HALF_PAD: tl.constexpr,
    REST_PAD: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HAS_ROPE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    EARLY: tl.constexpr,
):
    let_next_start(EARLY)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)  # q heads, then k, then v
    slot = tl.load(slots + token).to(tl.int64)
    position = tl.load(positions + token).to(tl.int64)
    kv_head = tl.where(head < HEADS + KV_HEADS, head - HEADS, head - HEADS - KV_HEADS)
    page_row = (slot // PAGE_SIZE * KV_HEADS + kv_head) * PAGE_SIZE + slot % PAGE_SIZE
    q_row = q_out + token * (HEADS * HEAD_DIM)

    half = tl.arange(0, HALF_PAD)
    is_half = half < HALF
    rest = 2 * HALF + tl.arange(0, REST_PAD)
    is_rest = rest < HEAD_DIM
    low_out, high_out, tail = transformed(
        qkv + token * qkv_stride, head, position, cos, sin, q_weight, k_weight, eps,
        HEADS, KV_HEADS, HEAD_DIM, HALF, HALF_PAD, REST_PAD, HAS_ROPE, HAS_NORM, EARLY,
    )  # fmt: skip
    _scatter(low_out, head, half, is_half, q_row, keys, values, page_row, HEADS, KV_HEADS, HEAD_DIM)
    _scatter(
        high_out, head, HALF + half, is_half, q_row, keys, values, page_row,
        HEADS, KV_HEADS, HEAD_DIM,
    )  # fmt: skip
    if 2 * HALF < HEAD_DIM:
        _scatter(
            tail, head, rest, is_rest, q_row, keys, values, page_row, HEADS, KV_HEADS, HEAD_DIM
        )


_launch = Launcher(_rope_kv_write_kernel)


@cache
def _constants(
    heads: int, cache_shape: torch.Size, rot_dim: int, has_rope: bool, has_norm: bool
) -> Mapping[str, object]:
    _, kv_heads, page_size, head_dim = cache_shape
    return {
        "HEADS": heads,
        "KV_HEADS": kv_heads,
        "HEAD_DIM": head_dim,
        "HALF": rot_dim // 2,
        "HALF_PAD": pad_to_power(rot_dim // 2),
        "REST_PAD": pad_to_power(max(1, head_dim - rot_dim)),
        "PAGE_SIZE": page_size,
        "HAS_ROPE": has_rope,
        "HAS_NORM": has_norm,
        "BLOCK_H": HEADS_PER_PROGRAM,
        **early_options(),
        "num_warps": 4,
    }


def rope_kv_write(
    qkv: Tensor,  # [tokens, (heads + 2 * kv_heads) * dim]
    keys: Tensor,  # [pages, kv_heads, page_size, dim], written
    values: Tensor,
    positions: Tensor,  # [tokens]
    slots: Tensor,  # [tokens]
    rope: Rope | None,
    norm: HeadNorm | None = None,
) -> Tensor:
    """Rotated queries, [tokens, heads, dim]; keys and values go to `slots` of the pages.

    All but qkv is read before the wait (`early.py`): none of it may come from the launch before.
    """
    _, kv_heads, _, head_dim = keys.shape
    heads = qkv.shape[1] // head_dim - 2 * kv_heads
    rot_dim = head_dim if rope is None else rope.rot_dim
    assert qkv.stride(1) == 1 and keys.is_contiguous() and values.is_contiguous()
    assert 0 < rot_dim <= head_dim and rot_dim % 2 == 0, f"{rot_dim=} {head_dim=}"
    q = torch.empty((qkv.shape[0], heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    if qkv.shape[0] == 0:
        return q
    cos, sin = (qkv, qkv) if rope is None else (rope.cos, rope.sin)  # unread without rotation
    _launch(
        (qkv.shape[0], ceil_div(heads + 2 * kv_heads, HEADS_PER_PROGRAM), 1),
        (
            qkv, q, keys, values, cos, sin, positions, slots,
            qkv if norm is None else norm.q_weight,  # unread without norm
            qkv if norm is None else norm.k_weight,
            0.0 if norm is None else norm.eps,
            qkv.stride(0),
        ),
        _constants(heads, keys.shape, rot_dim, rope is not None, norm is not None),
        (
            qkv.dtype, keys.dtype, cos.dtype, positions.dtype, slots.dtype, qkv.stride(0),
            None if norm is None else norm.q_weight.dtype,
            alignments(qkv, keys, values, positions, slots, cos, sin),
            None if norm is None else alignments(norm.q_weight, norm.k_weight),
        ),
    )  # fmt: skip
    return q
