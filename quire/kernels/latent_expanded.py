"""Causal attention of prompt tokens over expanded keys and values, which lie contiguously.

A program takes a tile of one head's queries over a block of its context. Key tiles start at
multiples of BLOCK_N of the absolute position and are walked in order. The state between two blocks
is kept in fp32. So the bits depend neither on chunks nor on blocks. A key is the head's own part
and the rotated part that all heads share, multiplied one after the other; otherwise the arithmetic
is that of `paged_tile.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.launch import Launcher
from quire.kernels.paged_tile import LOG2_E, Launch, head_pad

TILE_COLUMNS = tl.constexpr(7)


@dataclass(frozen=True, slots=True)
class ExpandedKeys:
    """One block of several sequences."""

    kv: Tensor  # [keys, heads, nope + v_dim]
    shared: Tensor  # [keys, rope]: rotated, everybody's
    tiles: Tensor  # [tiles, 7] as in `attn/latent_rounds.py`


@dataclass(frozen=True, slots=True)
class States:
    """Softmax states between blocks, fp32."""

    acc: Tensor  # [tokens, heads, v_dim]
    sums: Tensor  # [tokens, heads, 2]: row max, row sum


def empty_states(out: Tensor) -> States:
    """Uninitialised states for [tokens, heads, v_dim] results."""
    acc = torch.empty(out.shape, dtype=torch.float32, device=out.device)
    return States(acc, acc.new_empty(*out.shape[:2], 2))


def expanded_launch(dtype: torch.dtype) -> tuple[Launch, int]:
    """How the kernel is compiled, and how many keys make a tile."""
    if dtype == torch.float32:  # no matrix units in IEEE fp32: for tests, not for speed
        return Launch(16, 4, 1), 16
    return Launch(128, 8, 2), 64


@triton.jit
def _load(start, dims, is_row, DIM: tl.constexpr, MASKED: tl.constexpr, PAD: tl.constexpr):
    """Rows [start] of DIM numbers, [M, PAD]."""
    if MASKED or DIM != PAD:
        x = tl.load(start + dims[None, :], mask=is_row & (dims < DIM)[None, :], other=0.0)
    else:
        x = tl.load(start + dims[None, :])
    return x


@triton.jit
def _attend_expanded(
    q, q_rope, top, total, acc, kv, shared, base, first, last, positions, scale,
    kv_stride, shared_stride,
    NOPE: tl.constexpr, NOPE_PAD: tl.constexpr, ROPE: tl.constexpr, ROPE_PAD: tl.constexpr,
    V: tl.constexpr, V_PAD: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Extend a state by the keys of [first, last), which lie from row `base` on."""
    nope, rope, v_dims = tl.arange(0, NOPE_PAD), tl.arange(0, ROPE_PAD), tl.arange(0, V_PAD)
    ones = tl.full([BLOCK_N, 16], 1.0, tl.float32).to(q.dtype)
    for start in range(first, last, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        is_key = (n < last)[:, None]
        row = (base + n).to(tl.int64)[:, None]
        k = _load(kv + row * kv_stride, nope, is_key, NOPE, MASKED, NOPE_PAD)
        k_rope = _load(shared + row * shared_stride, rope, is_key, ROPE, MASKED, ROPE_PAD)
        v = _load(kv + row * kv_stride + NOPE, v_dims, is_key, V, MASKED, V_PAD)
        logits = tl.dot(q, tl.trans(k), input_precision="ieee")
        logits = tl.dot(q_rope, tl.trans(k_rope), logits, input_precision="ieee")
        if MASKED:
            logits = tl.where(n[None, :] <= positions[:, None], logits, float("-inf"))
        new_top = tl.maximum(top, tl.max(logits, 1))
        # A row that has seen no key yet keeps top = -inf; 0 in its place avoids inf - inf.
        ref = tl.where(new_top == float("-inf"), 0.0, new_top)
        decay = tl.exp2((top - ref) * scale)
        p = tl.exp2(tl.fma(logits, scale, (ref * -scale)[:, None])).to(q.dtype)
        total = tl.dot(p, ones, total * decay[:, None], input_precision="ieee")
        acc = tl.dot(p, v, acc * decay[:, None], input_precision="ieee")
        top = new_top
    return top, total, acc


@triton.jit
def _load_state(
    acc_state, sums_state, place, v_dims, is_row, BLOCK_M: tl.constexpr, V: tl.constexpr,
    V_PAD: tl.constexpr, HAS_STATES: tl.constexpr,
):  # fmt: skip
    """The state that the previous block left; the empty state in rows where `is_row` is false."""
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M, 16], tl.float32)  # sixteen equal columns, as in `paged_tile.py`
    acc = tl.zeros([BLOCK_M, V_PAD], tl.float32)
    if HAS_STATES:
        top = tl.load(sums_state + place * 2, mask=is_row, other=float("-inf"))
        total += tl.load(sums_state + place * 2 + 1, mask=is_row, other=0.0)[:, None]
        keep = is_row[:, None] & (v_dims < V)[None, :]
        acc = tl.load(acc_state + place[:, None] * V + v_dims[None, :], mask=keep, other=0.0)
    return top, total, acc


@triton.jit(do_not_specialize_on_alignment=["tiles"])
def _expanded_kernel(
    q, kv, shared, tiles, out, acc_state, sums_state, scale, q_stride, shared_stride,
    HEADS: tl.constexpr, NOPE: tl.constexpr, NOPE_PAD: tl.constexpr,
    ROPE: tl.constexpr, ROPE_PAD: tl.constexpr, V: tl.constexpr, V_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_STATES: tl.constexpr,
):  # fmt: skip
    head, tile = tl.program_id(0), tiles + tl.program_id(1) * TILE_COLUMNS
    token, tokens, position = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    low, high, is_last = tl.load(tile + 4), tl.load(tile + 5), tl.load(tile + 6)
    base = tl.load(tile + 3) - low  # the row a key at position 0 would have
    r = tl.arange(0, BLOCK_M)
    is_row = r < tokens
    row = (token + r).to(tl.int64)
    q_start = q + row[:, None] * q_stride + head * (NOPE + ROPE)
    query = _load(q_start, tl.arange(0, NOPE_PAD), is_row[:, None], NOPE, True, NOPE_PAD)
    q_rope = _load(q_start + NOPE, tl.arange(0, ROPE_PAD), is_row[:, None], ROPE, True, ROPE_PAD)
    place = row * HEADS + head
    v_dims = tl.arange(0, V_PAD)
    top, total, acc = _load_state(
        acc_state, sums_state, place, v_dims, is_row & (low > 0), BLOCK_M, V, V_PAD, HAS_STATES
    )
    kv_head = kv + head * (NOPE + V)
    # |low ... every row sees all keys ... edge ... the causal edge runs through here ... high|
    edge = tl.maximum(low, tl.minimum(position + 1, high) // BLOCK_N * BLOCK_N)
    top, total, acc = _attend_expanded(
        query, q_rope, top, total, acc, kv_head, shared, base, low, edge, position + r, scale,
        HEADS * (NOPE + V), shared_stride, NOPE, NOPE_PAD, ROPE, ROPE_PAD, V, V_PAD, BLOCK_N, False,
    )  # fmt: skip
    top, total, acc = _attend_expanded(
        query, q_rope, top, total, acc, kv_head, shared, base, edge, high, position + r, scale,
        HEADS * (NOPE + V), shared_stride, NOPE, NOPE_PAD, ROPE, ROPE_PAD, V, V_PAD, BLOCK_N, True,
    )  # fmt: skip
    sums = tl.max(total, 1)  # the columns are equal, so max picks, not reduces
    goal = place[:, None] * V + v_dims[None, :]
    keep = is_row[:, None] & (v_dims < V)[None, :]
    if is_last != 0:
        tl.store(out + goal, (acc / sums[:, None]).to(out.dtype.element_ty), mask=keep)
    elif HAS_STATES:
        tl.store(sums_state + place * 2, top, mask=is_row)
        tl.store(sums_state + place * 2 + 1, sums, mask=is_row)
        tl.store(acc_state + goal, acc, mask=keep)


_launch = Launcher(_expanded_kernel)


def expanded_attention(
    q: Tensor, keys: ExpandedKeys, states: States | None, scale: float, out: Tensor
) -> None:
    """One round: the tiles' [tokens, heads, nope + rope] queries over a block of their keys.

    Tiles at their last block write [tokens, heads, v_dim] results, the others their state."""
    _, heads, width = q.shape
    rope, v_dim = keys.shared.shape[1], out.shape[2]
    nope = width - rope
    assert keys.kv.is_contiguous() and keys.kv.shape[1:] == (heads, nope + v_dim)
    assert q.stride(1) == width and q.stride(2) == keys.shared.stride(1) == 1
    assert out.is_contiguous() and q.dtype == keys.kv.dtype
    launch, block_n = expanded_launch(q.dtype)
    acc, sums = (out, out) if states is None else (states.acc, states.sums)  # unread without
    strides = (q.stride(0), keys.shared.stride(0))
    pointers = (q.data_ptr(), keys.kv.data_ptr(), keys.shared.data_ptr(), out.data_ptr())
    _launch(
        (heads, len(keys.tiles), 1),
        (q, keys.kv, keys.shared, keys.tiles, out, acc, sums, scale * LOG2_E, *strides),
        {
            "HEADS": heads,
            "NOPE": nope,
            "NOPE_PAD": head_pad(nope),
            "ROPE": rope,
            "ROPE_PAD": head_pad(rope),
            "V": v_dim,
            "V_PAD": head_pad(v_dim),
            "BLOCK_M": launch.block_m,
            "BLOCK_N": block_n,
            "HAS_STATES": states is not None,
            "num_warps": launch.num_warps,
            "num_stages": launch.num_stages,
        },
        (q.dtype, strides, tuple(pointer % 16 == 0 for pointer in pointers)),
    )
