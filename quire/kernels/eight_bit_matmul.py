"""Products of eight bits by eight bits on the matrix unit: W8A8.

Whole numbers are summed exactly, so any tile gives the same bits. Floats are summed 128 inputs at a
time by the matrix unit, which keeps fewer bits of a sum than fp32 has, and those sums are added in
fp32 over increasing k, each times its scales where these change along k (128 by 128 blocks): one
chain, whatever the tile. Weights are slabs of bytes, inputs rows of `round_inputs.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.early import early_options, wait_for_inputs
from quire.kernels.launch import Launcher, alignments, ceil_div
from quire.kernels.packed_matmul import PackedTile
from quire.kernels.round_inputs import RoundedRows
from quire.kernels.slabs import Slabs

__all__ = ["CHAIN", "eight_bit_matmul", "inputs_of", "pick_eight_bit"]

CHAIN = 128  # inputs that the matrix unit sums on its own


@triton.jit
def _part(
    x_rows, w_rows, slab, live, columns, N, K,
    NONE: tl.constexpr, WIDTH: tl.constexpr, SLABS: tl.constexpr, EVEN_K: tl.constexpr, acc,
):  # fmt: skip
    """acc plus the products of SLABS slabs of WIDTH inputs."""
    for i in tl.static_range(SLABS):
        w_tile = tl.load(w_rows + (slab + i).to(tl.int64) * N * WIDTH)
        k = (slab + i) * WIDTH
        if EVEN_K:
            x_tile = tl.load(x_rows + k, mask=live, other=NONE)
        else:  # padded weights are zeros
            x_tile = tl.load(x_rows + k, mask=live & (columns < K - k)[None, :], other=NONE)
        acc = tl.dot(w_tile, x_tile.T, acc, out_dtype=acc.dtype)
    return acc


@triton.jit
def _sum(
    x_rows, w_rows, x_scales, scales, offs_m, rows, first, steps,
    M, N, K, num_groups, num_scale_rows,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, SLABS: tl.constexpr,
    IS_INT: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """[BLOCK_N, BLOCK_M] in fp32, with scales that change along k."""
    columns, live = tl.arange(0, WIDTH), (offs_m < M)[:, None]
    if IS_INT:
        whole = tl.zeros([BLOCK_N, BLOCK_M], tl.int32)
        for step in tl.range(0, steps):
            whole = _part(
                x_rows, w_rows, first + step * SLABS, live, columns, N, K,
                0, WIDTH, SLABS, EVEN_K, whole,
            )  # fmt: skip
        total = whole.to(tl.float32)
    else:
        total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for step in tl.range(0, steps):
            part = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            part = _part(
                x_rows, w_rows, first + step * SLABS, live, columns, N, K,
                0.0, WIDTH, SLABS, EVEN_K, part,
            )  # fmt: skip
            if GROUP > 0:
                group = step * (WIDTH * SLABS) // GROUP
                x_scale = tl.load(x_scales + offs_m * num_groups + group, mask=offs_m < M, other=0)
                w_scale = tl.load(scales + group * num_scale_rows + rows // ROWS)
                w_scale = w_scale.to(tl.float32, bitcast=True)
                part = part * (w_scale[:, None] * x_scale[None, :])
            total = total + part
    return total


@triton.jit(do_not_specialize=["M", "portion"])
def _eight_bit_kernel(
    x, x_scales, codes, scales, bias, y,
    M, N, K, num_groups, num_scale_rows, portion,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, SLABS: tl.constexpr,
    IS_INT: tl.constexpr, EVEN_K: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    n_start, m_start = tl.program_id(0) * portion, tl.program_id(1) * BLOCK_M
    offs_m = m_start + tl.arange(0, BLOCK_M)
    own = tl.arange(0, BLOCK_N)
    n_end = tl.minimum(n_start + portion, N)
    rows = tl.minimum(n_start + own, n_end - 1)  # those of others: never stored
    columns = tl.arange(0, WIDTH)
    x_rows = x + offs_m.to(tl.int64)[:, None] * K + columns[None, :]
    w_rows = codes + rows[:, None] * WIDTH + columns[None, :]
    wait_for_inputs(EARLY)

    tl.assume(K > 0)
    steps, first = tl.cdiv(K, WIDTH * SLABS), n_start * 0
    total = _sum(
        x_rows, w_rows, x_scales, scales, offs_m, rows, first, steps,
        M, N, K, num_groups, num_scale_rows,
        WIDTH, GROUP, ROWS, SLABS, IS_INT, EVEN_K, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    if GROUP == 0:
        x_scale = tl.load(x_scales + offs_m, mask=offs_m < M, other=0)
        w_scale = tl.load(scales + rows // ROWS).to(tl.float32, bitcast=True)
        total = (total * x_scale[None, :]) * w_scale[:, None]
    total = total.T  # [BLOCK_M, BLOCK_N]
    offs_n = n_start + own
    if HAS_BIAS:
        total += tl.load(bias + offs_n, mask=offs_n < n_end, other=0.0).to(tl.float32)[None, :]
    cells = y + offs_m.to(tl.int64)[:, None] * N + offs_n[None, :]
    tl.store(
        cells, total.to(y.dtype.element_ty), mask=(offs_m < M)[:, None] & (offs_n < n_end)[None, :]
    )


_launch = Launcher(_eight_bit_kernel)


def inputs_of(slabs: Slabs) -> torch.dtype | None:
    """What inputs are rounded to for such a weight; None: it has no product of this kind."""
    form = slabs.form
    if form.low != 8 or form.zeros or form.zero or form.scales != "f32" or slabs.paired:
        return None
    if form.kind == "int" and form.group == 0:
        return torch.int8
    is_even = slabs.shape[1] % CHAIN == 0 and form.width * 2 >= CHAIN
    is_chain = form.group == 0 or form.group % CHAIN == 0
    return torch.float8_e4m3fn if form.kind == "e4m3" and is_even and is_chain else None


def pick_eight_bit(m: int, n: int, multiprocessors: int) -> PackedTile:
    if m > 64:
        return PackedTile(64, 128, 4, 8, 128)
    block_m = next(size for size in (16, 32, 64) if m <= size)
    portion = 64
    if ceil_div(n, 64) < multiprocessors:
        portion = min(64, max(16, ceil_div(n, multiprocessors)))
    return PackedTile(block_m, 64, 5, 4, portion)


def eight_bit_matmul(
    x: RoundedRows, slabs: Slabs, bias: Tensor | None, dtype: torch.dtype, tile: PackedTile
) -> Tensor:
    """[m, k] -> [m, n] of a dtype."""
    (m, k), (n, num_in) = x.codes.shape, slabs.shape
    assert k == num_in and inputs_of(slabs) == x.codes.dtype, f"got {x.codes.dtype}, {slabs.form}"
    assert slabs.scales is not None
    y = torch.empty(m, n, dtype=dtype, device=x.codes.device)
    if m == 0:
        return y
    is_int, form = x.codes.dtype == torch.int8, slabs.form
    num_slabs = max(1, CHAIN // form.width)
    num_slabs = num_slabs if ceil_div(k, form.width) % num_slabs == 0 else 1
    kind_of_bias = None if bias is None else bias.dtype
    _launch(
        (ceil_div(n, tile.portion), ceil_div(m, tile.block_m), 1),
        (
            *(x.codes, x.scales, slabs.codes, slabs.scales, bias, y),
            *(m, n, k, x.scales.shape[1], slabs.num_scale_rows, tile.portion),
        ),
        {
            "WIDTH": form.width,
            "GROUP": form.group,
            "ROWS": form.rows,
            "SLABS": num_slabs,
            "IS_INT": is_int,
            "EVEN_K": k % form.width == 0,
            "HAS_BIAS": bias is not None,
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            **early_options(),
            "num_warps": tile.num_warps,
            "num_stages": tile.num_stages,
            "enable_fp_fusion": False,  # sums of 128 are scaled, rounded, then added
        },
        (
            *(dtype, kind_of_bias, *slabs.kind, x.scales.shape[1]),
            alignments(x.codes, x.scales, bias, y),
        ),
    )
    return y
