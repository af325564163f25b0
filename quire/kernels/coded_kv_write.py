"""From the fused qkv product to attention's inputs where the cache keeps codes of eight bits.

What `rope_kv_write.py` does for floats, with three more steps: keys are evened out
(`attn/balance.py`), each row of keys and values gets a scale from its largest number, and codes and
scale go to the page. Every step is exact or rounds as `attn/cache_codes.py` does, so the bytes are
those that file defines. Pages are laid out as `coded_tile.py` says. Codes of four bits are rotated
first, which torch does (`attn/coded_pages.py`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.coded_tile import SCALE_BYTES, head_bytes
from quire.kernels.early import early_options, let_next_start
from quire.kernels.launch import Launcher, alignments, ceil_div, pad_to_power
from quire.kernels.paged_inputs import Coded
from quire.kernels.rope_kv_write import HEADS_PER_PROGRAM, HeadNorm, Rope, transformed

_ROUNDS = tl.constexpr(12582912.0)  # 1.5 * 2**23: what is added to it is rounded, ties to even
_SCALE_BYTES = tl.constexpr(SCALE_BYTES)
_NO_NUMBER = tl.constexpr(0x7FC0)  # NaN as a bf16
_SCALES = tl.constexpr(32)  # tried for a row of E4M3, and last places of a bf16 between two
_STRIDE = tl.constexpr(4)
_LEAST_EXPONENT = tl.constexpr(32)  # of such a scale


@triton.jit
def _evened(x, offsets, factors, place, keep, is_q, is_k):
    """Queries times the factors of their kv head, keys less the offsets, over the factors."""
    factor = tl.load(factors + place, mask=keep, other=1.0)
    offset = tl.load(offsets + place, mask=keep, other=0.0)
    x = x.to(tl.float32)
    return tl.where(is_q, x * factor, tl.where(is_k, tl.div_rn(x - offset, factor), x))


@triton.jit
def _largest(x):
    """[rows] magnitudes; infinite where a number is none."""
    return tl.max(tl.where(x == x, tl.abs(x), float("inf")), 1)


@triton.jit
def _codes(x, scale, TOP: tl.constexpr):
    """Numbers over their row's scale, within the codes."""
    scale = scale[:, None]
    ratio = tl.where(scale > 0, tl.div_rn(x, tl.where(scale > 0, scale, 1.0)), 0.0)
    return tl.minimum(tl.maximum(ratio, -TOP), TOP)


@triton.jit
def _as_fp8(x):
    """The byte of the nearest E4M3 number of at most 448, ties to even."""
    size = tl.abs(x)
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    small = ((size * 512 + _ROUNDS) - _ROUNDS).to(tl.int32)  # below 2**-6: steps of 2**-9
    code = tl.where(size < 0.015625, small, normal)
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    return (code | sign).to(tl.uint8)


@triton.jit
def _put(x, scale, pages, place, keep, TOP: tl.constexpr):
    ratio = _codes(x, scale, TOP)
    if pages.dtype.element_ty == tl.int8:
        codes = ((ratio + _ROUNDS) - _ROUNDS).to(tl.int8)
    else:
        codes = _as_fp8(ratio)
    tl.store(pages + place, codes, mask=keep)


@triton.jit
def _scale_bits(top, given, TOP: tl.constexpr, HAS_SCALES: tl.constexpr):
    """[rows] scales as bits of a bf16, rounded up; NaN where a number of the row is none."""
    wanted = tl.div_rn(top, tl.full([top.shape[0]], TOP, tl.float32))
    if HAS_SCALES:
        wanted = given + tl.zeros([top.shape[0]], tl.float32)
    bits = (wanted.to(tl.int32, bitcast=True) + 0xFFFF) >> 16
    return tl.where(top < float("inf"), bits, _NO_NUMBER)


@triton.jit
def _cost(x, scale, unit):
    """[rows] squared errors of E4M3 codes by that scale, each in whole units."""
    size = tl.abs(x)
    scale = scale[:, None]
    ratio = tl.minimum(tl.div_rn(size, scale), 448.0)
    power = (ratio.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    large = tl.maximum(power * 1572864.0, 24576.0)  # 1.5 * 2**20: last places are E4M3's steps
    near = (ratio + large) - large
    off = tl.abs(near * scale - size) * unit[:, None]
    whole = ((off + _ROUNDS) - _ROUNDS).to(tl.int32)
    return tl.sum(whole * whole, 1)


@triton.jit
def _finest(low, high, tail, least, HAS_TAIL: tl.constexpr):
    """[rows] the scale whose codes are nearest, as `attn/cache_codes.py` searches it."""
    exponent = least >> 7
    can_search = (exponent >= _LEAST_EXPONENT) & (exponent < 255)
    safe = tl.where(can_search, least, 127 << 7)
    unit = ((259 - (safe >> 7)) << 23).to(tl.float32, bitcast=True)
    # Rows that are not searched may hold what is no number.
    low, high = tl.where(can_search[:, None], low, 0.0), tl.where(can_search[:, None], high, 0.0)
    tail = tl.where(can_search[:, None], tail, 0.0)
    found, lowest = safe, tl.full(safe.shape, 2147483647, tl.int32)
    for i in range(_SCALES):
        tried = safe + _STRIDE * i
        scale = (tried << 16).to(tl.float32, bitcast=True)
        cost = _cost(low, scale, unit) + _cost(high, scale, unit)
        if HAS_TAIL:
            cost += _cost(tail, scale, unit)
        found = tl.where(cost < lowest, tried, found)
        lowest = tl.minimum(cost, lowest)
    return tl.where(can_search, found, least)


@triton.jit
def _row_scales(
    low, high, tail, is_half, is_rest, given,
    TOP: tl.constexpr, HAS_SCALES: tl.constexpr, IS_FP8: tl.constexpr, HAS_TAIL: tl.constexpr,
):  # fmt: skip
    """[rows] bits of each row's scale. Masked cells become zeros: they are no row's largest."""
    low, high = tl.where(is_half, low, 0.0), tl.where(is_half, high, 0.0)
    tail = tl.where(is_rest, tail, 0.0)
    top = tl.maximum(tl.maximum(_largest(low), _largest(high)), _largest(tail))
    bits = _scale_bits(top, given, TOP, HAS_SCALES)
    if IS_FP8 and not HAS_SCALES:
        bits = _finest(low, high, tail, bits, HAS_TAIL)
    return bits


@triton.jit
def _keep(
    low, high, tail, bits, pages, place, beside, is_own, half, rest,
    TOP: tl.constexpr, HALF: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Rows that are of this part of the cache, with their scales."""
    scale = (bits << 16).to(tl.float32, bitcast=True)
    tl.store((pages + beside).to(tl.pointer_type(tl.int16)), bits.to(tl.int16), mask=is_own)
    own_half = is_own[:, None] & (half < HALF)
    _put(low, scale, pages, place + half, own_half, TOP)
    _put(high, scale, pages, place + HALF + half, own_half, TOP)
    if 2 * HALF < HEAD_DIM:
        _put(tail, scale, pages, place + rest, is_own[:, None] & (rest < HEAD_DIM), TOP)


@triton.jit
def _coded_kv_write_kernel(
    qkv, q_out, keys, values, cos, sin, positions, slots, q_weight, k_weight, offsets, factors,
    k_scale, v_scale, eps, qkv_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr,
    HALF_PAD: tl.constexpr, REST_PAD: tl.constexpr, PAGE_SIZE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr, PAGE_STRIDE: tl.constexpr, TOP: tl.constexpr,
    HAS_ROPE: tl.constexpr, HAS_NORM: tl.constexpr, BALANCED: tl.constexpr,
    HAS_SCALES: tl.constexpr, BLOCK_H: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    let_next_start(EARLY)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)  # q heads, then k, then v
    slot = tl.load(slots + token).to(tl.int64)
    position = tl.load(positions + token).to(tl.int64)
    low, high, tail = transformed(
        qkv + token * qkv_stride, head, position, cos, sin, q_weight, k_weight, eps,
        HEADS, KV_HEADS, HEAD_DIM, HALF, HALF_PAD, REST_PAD, HAS_ROPE, HAS_NORM, EARLY,
    )  # fmt: skip
    is_q = head < HEADS
    is_k = (head >= HEADS) & (head < HEADS + KV_HEADS)
    is_v = (head >= HEADS + KV_HEADS) & (head < HEADS + 2 * KV_HEADS)
    kv_head = tl.where(is_q, head // (HEADS // KV_HEADS), (head - HEADS) % KV_HEADS)
    half = tl.arange(0, HALF_PAD)[None, :]
    rest = 2 * HALF + tl.arange(0, REST_PAD)[None, :]
    is_half, is_rest = half < HALF, rest < HEAD_DIM
    dtype = low.dtype
    low, high, tail = low.to(tl.float32), high.to(tl.float32), tail.to(tl.float32)
    if BALANCED:
        at = kv_head[:, None] * HEAD_DIM
        low = _evened(low, offsets, factors, at + half, is_half, is_q[:, None], is_k[:, None])
        high = _evened(
            high, offsets, factors, at + HALF + half, is_half, is_q[:, None], is_k[:, None]
        )
        tail = _evened(tail, offsets, factors, at + rest, is_rest, is_q[:, None], is_k[:, None])
    q_row = q_out + token * (HEADS * HEAD_DIM) + head[:, None] * HEAD_DIM
    tl.store(q_row + half, low.to(dtype), mask=is_q[:, None] & is_half)
    tl.store(q_row + HALF + half, high.to(dtype), mask=is_q[:, None] & is_half)
    if 2 * HALF < HEAD_DIM:
        tl.store(q_row + rest, tail.to(dtype), mask=is_q[:, None] & is_rest)

    bits = _row_scales(
        low, high, tail, is_half, is_rest, tl.where(is_k, k_scale, v_scale), TOP, HAS_SCALES,
        keys.dtype.element_ty != tl.int8, 2 * HALF < HEAD_DIM,
    )  # fmt: skip
    row = slot // PAGE_SIZE * PAGE_STRIDE + kv_head * HEAD_STRIDE
    place = (row + slot % PAGE_SIZE * HEAD_DIM)[:, None]
    beside = row + PAGE_SIZE * HEAD_DIM + slot % PAGE_SIZE * _SCALE_BYTES
    _keep(low, high, tail, bits, keys, place, beside, is_k, half, rest, TOP, HALF, HEAD_DIM)
    _keep(low, high, tail, bits, values, place, beside, is_v, half, rest, TOP, HALF, HEAD_DIM)


_launch = Launcher(_coded_kv_write_kernel)


def _sizes(coded: Coded, heads: int, rot_dim: int, page_stride: int) -> dict[str, int]:
    kv_heads, page_size, head_dim = coded.heads
    return {
        "HEADS": heads,
        "KV_HEADS": kv_heads,
        "HEAD_DIM": head_dim,
        "HALF": rot_dim // 2,
        "HALF_PAD": pad_to_power(rot_dim // 2),
        "REST_PAD": pad_to_power(max(1, head_dim - rot_dim)),
        "PAGE_SIZE": page_size,
        "HEAD_STRIDE": head_bytes(page_size, head_dim, coded.bits),
        "PAGE_STRIDE": page_stride,
        "BLOCK_H": HEADS_PER_PROGRAM,
    }


def coded_kv_write(
    qkv: Tensor,  # [tokens, (heads + 2 * kv_heads) * dim]
    pages: tuple[
        Tensor, Tensor
    ],  # keys and values [pages, bytes], of int8, or of fp8 as uint8; written
    coded: Coded,
    places: tuple[Tensor, Tensor],  # [tokens] positions, slots
    rope: Rope | None,
    norm: HeadNorm | None = None,
    evens: tuple[Tensor, Tensor] | None = None,  # [kv_heads, dim] fp32 offsets, factors
    scales: tuple[float, float] | None = None,  # of all keys, of all values; None: each row's own
    top: float = 127.0,
) -> Tensor:
    """Rotated queries, [tokens, heads, dim]; codes of keys and values go to the slots."""
    keys, values = pages
    positions, slots = places
    kv_heads, _, head_dim = coded.heads
    heads = qkv.shape[1] // head_dim - 2 * kv_heads
    rot_dim = head_dim if rope is None else rope.rot_dim
    assert coded.bits == 8 and qkv.stride(1) == 1 and keys.stride() == values.stride()
    q = torch.empty((qkv.shape[0], heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    if qkv.shape[0] == 0:
        return q
    cos, sin = (qkv, qkv) if rope is None else (rope.cos, rope.sin)  # unread without rotation
    q_weight, k_weight = (qkv, qkv) if norm is None else (norm.q_weight, norm.k_weight)
    offsets, factors = evens or (qkv, qkv)
    k_scale, v_scale = scales or (0.0, 0.0)
    _launch(
        (qkv.shape[0], ceil_div(heads + 2 * kv_heads, HEADS_PER_PROGRAM), 1),
        (
            qkv, q, keys, values, cos, sin, positions, slots, q_weight, k_weight, offsets, factors,
            k_scale, v_scale, 0.0 if norm is None else norm.eps, qkv.stride(0),
        ),
        {
            **_sizes(coded, heads, rot_dim, keys.stride(0)),
            "TOP": top,
            "HAS_ROPE": rope is not None,
            "HAS_NORM": norm is not None,
            "BALANCED": evens is not None,
            "HAS_SCALES": scales is not None,
            **early_options(),
            "num_warps": 4,
        },
        (
            qkv.dtype, keys.dtype, positions.dtype, slots.dtype, q_weight.dtype, qkv.stride(0),
            alignments(qkv, keys, values, positions, slots, cos, sin, q_weight, k_weight),
            alignments(offsets, factors),
        ),
    )  # fmt: skip
    return q
