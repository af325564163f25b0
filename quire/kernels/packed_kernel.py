"""The device side of products with packed weights: the dense kernel's chain, weights unpacked.

An output is one chain of fp32 matrix-unit additions over increasing k, as in `matmul_kernel.py`,
and the weights that enter it are the expanded ones, bit for bit (`unpack.py`). So are the results.
Weights are always on the row side of the matrix unit, whose operand may come from registers.
`packed_matmul.py` launches it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.early import wait_for_inputs
from quire.kernels.silu_mul import activated
from quire.kernels.unpack import weight_field
from quire.kernels.unpack_scales import above_rows

__all__ = ["packed_kernel", "packed_sum"]


@triton.jit
def _load_inputs(x_rows, k, live, columns, K, EVEN_K: tl.constexpr):
    if EVEN_K:
        return tl.load(x_rows + k, mask=live, other=0.0)
    # Adding zero products leaves an accumulator's bits alone; padded weights are finite.
    return tl.load(x_rows + k, mask=live & (columns < K - k)[None, :], other=0.0)


@triton.jit
def packed_sum(
    x_rows, live, tensors, values, rows, N, K, num_scale_rows,
    KIND: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, WIDTH: tl.constexpr,
    FIELDS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, PAIRED: tl.constexpr,
    SCALES: tl.constexpr, OFFSETS: tl.constexpr, SUPER: tl.constexpr, ZERO: tl.constexpr,
    ZEROS: tl.constexpr, PLAIN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, UNROLL: tl.constexpr,
    TAIL: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """[BLOCK_N, BLOCK_M] in fp32: `rows` of the weight times x, whose first columns are at
    `x_rows`. One chain of matrix-unit additions, k increasing."""
    DTYPE: tl.constexpr = x_rows.dtype.element_ty
    if SCALES == "e4m3 times" or SCALES == "e4m3 over":
        above = above_rows(tensors[2], rows)
        tensors = (tensors[0], tensors[1], above, tensors[3], tensors[4])
    columns = tl.arange(0, WIDTH)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    tl.assume(K > 0)
    num_slabs = tl.cdiv(K, WIDTH * FIELDS)
    for step in tl.range(0, num_slabs // UNROLL):
        slab = step * UNROLL
        for i in tl.static_range(UNROLL):
            for f in tl.static_range(FIELDS):
                w_tile = weight_field(
                    tensors, values, rows, slab, i, f, N, num_scale_rows,
                    KIND, LOW, HIGH, WIDTH, GROUP, ROWS, PAIRED, UNROLL,
                    SCALES, OFFSETS, SUPER, ZERO, ZEROS, False, PLAIN, DTYPE,
                )  # fmt: skip
                k = ((slab + i) * FIELDS + f) * WIDTH
                x_tile = _load_inputs(x_rows, k, live, columns, K, EVEN_K)
                acc = tl.dot(w_tile, x_tile.T, acc, input_precision="ieee")
    if TAIL:
        for i in tl.range(0, num_slabs % UNROLL):
            slab = num_slabs // UNROLL * UNROLL + i
            for f in tl.static_range(FIELDS):
                w_tile = weight_field(
                    tensors, values, rows, slab, 0, f, N, num_scale_rows,
                    KIND, LOW, HIGH, WIDTH, GROUP, ROWS, PAIRED, 1,
                    SCALES, OFFSETS, SUPER, ZERO, ZEROS, False, PLAIN, DTYPE,
                )  # fmt: skip
                k = (slab * FIELDS + f) * WIDTH
                x_tile = _load_inputs(x_rows, k, live, columns, K, EVEN_K)
                acc = tl.dot(w_tile, x_tile.T, acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["M", "portion"])
def packed_kernel(
    x,  # [M, K]
    codes, scales, supers, offsets, zeros, values,  # of `Slabs`
    bias,  # [N] or None
    y,  # [M, N], or [M, N / 2] when gated
    M, N, K, num_scale_rows, stride_xm, stride_ym,
    portion,  # rows of the weight for each program, no more than BLOCK_N
    KIND: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, WIDTH: tl.constexpr,
    FIELDS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, SCALES: tl.constexpr,
    OFFSETS: tl.constexpr, SUPER: tl.constexpr, ZERO: tl.constexpr, ZEROS: tl.constexpr,
    LANES: tl.constexpr, PLAIN: tl.constexpr, PAIRED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, UNROLL: tl.constexpr,
    TAIL: tl.constexpr,  # the last step is a shorter one
    EVEN_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATE: tl.constexpr,  # an activation: rows of w are gate, up, gate, up ..., y = act(gate) * up
    EARLY: tl.constexpr,
):  # fmt: skip
    tl.static_assert(not LANES)
    n_start, m_start = tl.program_id(0) * portion, tl.program_id(1) * BLOCK_M
    offs_m = m_start + tl.arange(0, BLOCK_M)
    own = tl.arange(0, BLOCK_N)
    n_end = tl.minimum(n_start + portion, N)
    # Rows of others read the last row again: never stored, and the loads need no mask.
    rows = tl.minimum(n_start + own, n_end - 1)
    columns = tl.arange(0, WIDTH)
    x_rows = x + offs_m.to(tl.int64)[:, None] * stride_xm + columns[None, :]
    live = (offs_m < M)[:, None]

    wait_for_inputs(EARLY)
    acc = packed_sum(
        x_rows, live, (codes, scales, supers, offsets, zeros), values, rows, N, K, num_scale_rows,
        KIND, LOW, HIGH, WIDTH, FIELDS, GROUP, ROWS, PAIRED,
        SCALES, OFFSETS, SUPER, ZERO, ZEROS, PLAIN,
        BLOCK_M, BLOCK_N, UNROLL, TAIL, EVEN_K,
    )  # fmt: skip
    total = acc.T  # [BLOCK_M, BLOCK_N]

    # The dense kernel's epilogue: bias in fp32, one rounding, store.
    offs_n = n_start + own
    if HAS_BIAS:
        total += tl.load(bias + offs_n, mask=offs_n < n_end, other=0.0).to(tl.float32)[None, :]
    rounded = total.to(y.dtype.element_ty)
    if GATE != "":
        gate, up = rounded.reshape(BLOCK_M, BLOCK_N // 2, 2).split()
        rounded = (activated(gate, GATE) * up.to(tl.float32)).to(rounded.dtype)
        offs_n = n_start // 2 + tl.arange(0, BLOCK_N // 2)
        n_end = n_end // 2
    cells = y + offs_m.to(tl.int64)[:, None] * stride_ym + offs_n[None, :]
    tl.store(cells, rounded, mask=(offs_m < M)[:, None] & (offs_n < n_end)[None, :])
