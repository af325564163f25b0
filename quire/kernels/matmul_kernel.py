"""The device side of the batch-invariant matmul: one kernel for every tile shape, one epilogue.

`_sum_range` is where bits are made: one chain of fp32 matrix-unit additions over a range of k. All
the rest moves data: which tile a program owns, who adds the ranges, when the kernel may start.
Launched by `matmul.py`, which also says why the result does not depend on the batch.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = ["matmul_kernel", "reduce_kernel"]


@triton.jit
def _prefetch_weights(
    w,
    n_start,
    k_begin,
    N,
    stride_wn,
    BLOCK_N: tl.constexpr,
    COLUMNS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Ask L2 for the first COLUMNS of this program's weight rows; one piece of a row per thread."""
    lane = tl.arange(0, LANES)
    pieces: tl.constexpr = LANES // BLOCK_N
    columns: tl.constexpr = COLUMNS // pieces
    row = tl.minimum(n_start + lane // pieces, N - 1)
    address = w + row.to(tl.int64) * stride_wn + k_begin + (lane % pieces) * columns
    num_bytes = tl.full([LANES], columns * (w.dtype.element_ty.primitive_bitwidth // 8), tl.int32)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [address, num_bytes],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _sum_range(
    x,
    w,
    m_start,
    n_start,
    k_begin,
    k_end,
    M,
    N,
    stride_xm,
    stride_wn,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    SWAP: tl.constexpr,
    TMA: tl.constexpr,
    WS: tl.constexpr,
):
    """fp32 sum over k in [k_begin, k_end): one chain of matrix-unit additions, k increasing."""
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

    if not WS:
        # Without a path that skips the loop, ptxas keeps wide wgmma chains asynchronous; the
        # warp-specialising pass of Triton 3.6 cannot take the hint.
        tl.assume(k_begin < k_end)
    for k in tl.range(k_begin, k_end, BLOCK_K, warp_specialize=WS):
        if TMA:  # out of range reads as zero
            x_tile = x_rows.load([m_start, k])  # [BLOCK_M, BLOCK_K]
            w_tile = w_rows.load([n_start, k])  # [BLOCK_N, BLOCK_K]
        elif EVEN_K:
            x_tile = tl.load(x_rows + k, mask=live, other=0.0)
            w_tile = tl.load(w_rows + k)
        else:  # adding zero products leaves an accumulator's bits alone
            inside = (offs_k < k_end - k)[None, :]
            x_tile = tl.load(x_rows + k, mask=live & inside, other=0.0)
            w_tile = tl.load(w_rows + k, mask=inside, other=0.0)
        if SWAP:
            acc = tl.dot(w_tile, x_tile.T, acc, input_precision="ieee")
        else:
            acc = tl.dot(x_tile, w_tile.T, acc, input_precision="ieee")

    if SWAP:
        acc = acc.T
    return acc  # [BLOCK_M, BLOCK_N]


@triton.jit
def _finish(total, bias, y, offs_m, offs_n, M, N, stride_ym, HAS_BIAS: tl.constexpr):
    """The only epilogue: bias in fp32, one rounding, store."""
    if HAS_BIAS:
        total += tl.load(bias + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)[None, :]
    cells = y + offs_m.to(tl.int64)[:, None] * stride_ym + offs_n[None, :]
    live = (offs_m < M)[:, None] & (offs_n < N)[None, :]
    tl.store(cells, total.to(y.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["M"])
def matmul_kernel(
    x,  # [M, K] or its descriptor
    w,  # [N, K] or its descriptor
    bias,  # [N] or None
    y,  # [M, N]
    partials,  # [SPLITS, M, N] fp32, None for "loop"
    counters,  # [tiles] int32, zero between launches
    M,
    N,
    K,
    split_len,
    stride_xm,
    stride_wn,
    stride_ym,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    SPLITS: tl.constexpr,
    REDUCE: tl.constexpr,
    EVEN_K: tl.constexpr,
    SWAP: tl.constexpr,
    TMA: tl.constexpr,
    WS: tl.constexpr,
    PDL: tl.constexpr,
    PREFETCH: tl.constexpr,
    LANES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    # Programs walk down GROUP_M row tiles before moving to the next weight tile.
    tile = tl.program_id(0)
    tiles_m = tl.cdiv(M, BLOCK_M)
    group_size = GROUP_M * tl.cdiv(N, BLOCK_N)
    first_m = tile // group_size * GROUP_M
    group_m = tl.minimum(tiles_m - first_m, GROUP_M)
    m_start = (first_m + tile % group_size % group_m) * BLOCK_M
    n_start = tile % group_size // group_m * BLOCK_N
    offs_m = m_start + tl.arange(0, BLOCK_M)
    offs_n = n_start + tl.arange(0, BLOCK_N)

    split = tl.program_id(1)
    k_begin = split * split_len
    k_end = tl.minimum(k_begin + split_len, K)

    if PDL:
        gdc_launch_dependents()
        if PREFETCH > 0:
            _prefetch_weights(w, n_start, k_begin, N, stride_wn, BLOCK_N, PREFETCH, LANES)
        gdc_wait()

    total = _sum_range(
        x, w, m_start, n_start, k_begin, k_end, M, N, stride_xm, stride_wn,
        BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, SWAP, TMA, WS,
    )  # fmt: skip

    live = (offs_m < M)[:, None] & (offs_n < N)[None, :]
    plane = M.to(tl.int64) * N
    if REDUCE != "loop":
        cells = partials + offs_m.to(tl.int64)[:, None] * N + offs_n[None, :]

    if REDUCE == "loop":
        for _ in range(1, SPLITS):
            k_begin += split_len
            k_end = tl.minimum(k_begin + split_len, K)
            total += _sum_range(
                x, w, m_start, n_start, k_begin, k_end, M, N, stride_xm, stride_wn,
                BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, SWAP, TMA, WS,
            )  # fmt: skip
        _finish(total, bias, y, offs_m, offs_n, M, N, stride_ym, HAS_BIAS)
    elif REDUCE == "park":
        for s in range(1, SPLITS):
            tl.store(cells + (s - 1) * plane, total, mask=live)
            k_begin += split_len
            k_end = tl.minimum(k_begin + split_len, K)
            total = _sum_range(
                x, w, m_start, n_start, k_begin, k_end, M, N, stride_xm, stride_wn,
                BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, SWAP, TMA, WS,
            )  # fmt: skip
        tl.debug_barrier()  # the stores are this program's own
        parked = tl.load(cells, mask=live, other=0.0)
        for s in tl.static_range(1, SPLITS - 1):
            parked += tl.load(cells + s * plane, mask=live, other=0.0)
        _finish(parked + total, bias, y, offs_m, offs_n, M, N, stride_ym, HAS_BIAS)
    else:
        tl.store(cells + split * plane, total, mask=live)
        if REDUCE == "last":
            # All threads' stores, then one release: whoever counts to SPLITS sees every plane.
            tl.debug_barrier()
            arrived = tl.atomic_add(counters + tile, 1, sem="acq_rel", scope="gpu")
            if arrived == SPLITS - 1:
                total = tl.load(cells, mask=live, other=0.0, cache_modifier=".cg")
                for s in tl.static_range(1, SPLITS):
                    total += tl.load(cells + s * plane, mask=live, other=0.0, cache_modifier=".cg")
                _finish(total, bias, y, offs_m, offs_n, M, N, stride_ym, HAS_BIAS)
                tl.store(counters + tile, 0)  # ready for the next launch or graph replay


@triton.jit(do_not_specialize=["M"])
def reduce_kernel(
    partials,  # [SPLITS, M, N] fp32
    bias,
    y,  # [M, N]
    M,
    N,
    stride_ym,
    SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    offs_m = tl.program_id(1) + tl.arange(0, 1)
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    cells = partials + offs_m.to(tl.int64)[:, None] * N + offs_n[None, :]
    live = (offs_m < M)[:, None] & (offs_n < N)[None, :]
    total = tl.load(cells, mask=live, other=0.0)
    for s in tl.static_range(1, SPLITS):
        total += tl.load(cells + s * M.to(tl.int64) * N, mask=live, other=0.0)
    _finish(total, bias, y, offs_m, offs_n, M, N, stride_ym, HAS_BIAS)
