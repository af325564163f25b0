"""The device side of the batch-invariant matmul: one kernel for every tile shape, one epilogue.

`_sum` decides the bits: one chain of fp32 matrix-unit additions over increasing k. Everything else
moves data. `matmul.py` launches it and says why the result does not depend on the batch.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.early import wait_for_inputs
from quire.kernels.silu_mul import activated

__all__ = ["matmul_kernel"]


@triton.jit
def _sum(
    x, w, m_start, n_start, M, N, K, stride_xm, stride_wn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr, SWAP: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """fp32 sum over k: one chain of matrix-unit additions, k increasing."""
    if SWAP:
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)

    offs_m = m_start + tl.arange(0, BLOCK_M)
    # Rows past N read the last row again: never stored, and the loads need no mask.
    offs_n = tl.minimum(n_start + tl.arange(0, BLOCK_N), N - 1)
    offs_k = tl.arange(0, BLOCK_K)
    if TMA:
        x_rows, w_rows = x, w
    else:
        x_rows = x + offs_m.to(tl.int64)[:, None] * stride_xm + offs_k[None, :]
        w_rows = w + offs_n.to(tl.int64)[:, None] * stride_wn + offs_k[None, :]
    live = (offs_m < M)[:, None]

    # Without a path that skips the loop, ptxas keeps wide wgmma chains asynchronous.
    tl.assume(K > 0)
    for k in tl.range(0, K, BLOCK_K):
        if TMA:  # out of range reads as zero
            x_tile = x_rows.load([m_start, k])  # [BLOCK_M, BLOCK_K]
            w_tile = w_rows.load([n_start, k])  # [BLOCK_N, BLOCK_K]
        elif EVEN_K:
            x_tile = tl.load(x_rows + k, mask=live, other=0.0)
            w_tile = tl.load(w_rows + k)
        else:  # adding zero products leaves an accumulator's bits alone
            inside = (offs_k < K - k)[None, :]
            x_tile = tl.load(x_rows + k, mask=live & inside, other=0.0)
            w_tile = tl.load(w_rows + k, mask=inside, other=0.0)
        if SWAP:
            acc = tl.dot(w_tile, x_tile.T, acc, input_precision="ieee")
        else:
            acc = tl.dot(x_tile, w_tile.T, acc, input_precision="ieee")

    if SWAP:
        acc = acc.T
    return acc  # [BLOCK_M, BLOCK_N]


@triton.jit(do_not_specialize=["M"])
def matmul_kernel(
    x,  # [M, K] or its descriptor
    w,  # [N, K] or its descriptor
    bias,  # [N] or None
    y,  # [M, N], or [M, N / 2] when gated
    M, N, K, stride_xm, stride_wn, stride_ym,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, EVEN_K: tl.constexpr, SWAP: tl.constexpr, TMA: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATE: tl.constexpr,  # an activation: rows of w are gate, up, gate, up ..., y = act(gate) * up
    EARLY: tl.constexpr,
):  # fmt: skip
    # Programs walk down GROUP_M row tiles before moving to the next weight tile.
    tile = tl.program_id(0)
    group_size = GROUP_M * tl.cdiv(N, BLOCK_N)
    first_m = tile // group_size * GROUP_M
    group_m = tl.minimum(tl.cdiv(M, BLOCK_M) - first_m, GROUP_M)
    m_start = (first_m + tile % group_size % group_m) * BLOCK_M
    n_start = tile % group_size // group_m * BLOCK_N
    offs_m = m_start + tl.arange(0, BLOCK_M)

    wait_for_inputs(EARLY)
    total = _sum(
        x, w, m_start, n_start, M, N, K, stride_xm, stride_wn,
        BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, SWAP, TMA,
    )  # fmt: skip

    # The only epilogue: bias in fp32, one rounding, store.
    offs_n = n_start + tl.arange(0, BLOCK_N)
    if HAS_BIAS:
        total += tl.load(bias + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)[None, :]
    rounded = total.to(y.dtype.element_ty)
    if GATE != "":
        gate, up = rounded.reshape(BLOCK_M, BLOCK_N // 2, 2).split()
        rounded = (activated(gate, GATE) * up.to(tl.float32)).to(rounded.dtype)
        offs_n = n_start // 2 + tl.arange(0, BLOCK_N // 2)
        N = N // 2
    cells = y + offs_m.to(tl.int64)[:, None] * stride_ym + offs_n[None, :]
    tl.store(cells, rounded, mask=(offs_m < M)[:, None] & (offs_n < N)[None, :])
