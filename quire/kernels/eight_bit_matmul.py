"""Products of eight bits by eight bits on the matrix unit: W8A8.

Whole numbers are summed exactly, so any tile gives the same bits. Floats are summed 128 inputs at a
time by the matrix unit, which keeps fewer bits of a sum than fp32 has, and those sums are added in
fp32 over increasing k, each times its scales where these change along k (groups of 128 inputs): one
chain, whatever the tile. One scale of a row comes last: (sum times the weight's) times the input's,
the order of the vendor's library. This kernel runs everywhere and says what the bits are;
`stream_eight_bit.py` gives the same to few rows on Hopper, sooner, `grouped_eight_bit.py` to
experts. Inputs are rows of `round_inputs.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.early import early_options, wait_for_inputs
from quire.kernels.eight_bit_weight import CHAIN, EightBitWeight, scale_row
from quire.kernels.launch import Launcher, alignments, ceil_div
from quire.kernels.round_inputs import RoundedRows
from quire.kernels.silu_mul import activated

__all__ = ["EightBitTile", "eight_bit_matmul", "eight_bit_sum", "gate_pairs", "pick_eight_bit"]


@triton.jit
def _tiles(
    x_rows, w_rows, k, live, K, NONE: tl.constexpr, EVEN_K: tl.constexpr, STEP: tl.constexpr
):
    """STEP inputs of the rows of x, and of those of w."""
    if EVEN_K:
        return tl.load(x_rows + k, mask=live, other=NONE), tl.load(w_rows + k)
    inside = (tl.arange(0, STEP) < K - k)[None, :]
    x_tile = tl.load(x_rows + k, mask=live & inside, other=NONE)
    return x_tile, tl.load(w_rows + k, mask=inside, other=NONE)


@triton.jit
def eight_bit_sum(
    x_rows, w_rows,  # the first STEP inputs of each row
    x_scales, scales,  # the first scale of each row
    live, K, scale_stride,
    GROUP: tl.constexpr, STEP: tl.constexpr, IS_INT: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, x_stride=0,
    SPREAD: tl.constexpr = False,
):  # fmt: skip
    """[BLOCK_M, BLOCK_N] in fp32, times all scales. `live`: the rows of x that there are.
    `SPREAD`: scales of a group lie together, with some to read behind those of the last row, and
    `x_stride` from one group to the next; else those of a row do."""
    inside = live[:, None]
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if IS_INT:
        whole = tl.zeros([BLOCK_N, BLOCK_M], tl.int32)
        for k in tl.range(0, K, STEP):
            x_tile, w_tile = _tiles(x_rows, w_rows, k, inside, K, 0, EVEN_K, STEP)
            whole = tl.dot(w_tile, x_tile.T, whole, out_dtype=tl.int32)
        total = whole.to(tl.float32)
    else:
        for k in tl.range(0, K, STEP):
            if GROUP > 0:  # asked for before the product: memory answers while it runs
                group = k // GROUP
                if SPREAD:
                    x_scale = tl.load(x_scales + group * x_stride)
                else:
                    x_scale = tl.load(x_scales + group, mask=live, other=0)
                w_scale = tl.load(scales + group * scale_stride)
            x_tile, w_tile = _tiles(x_rows, w_rows, k, inside, K, 0.0, EVEN_K, STEP)
            part = tl.dot(w_tile, x_tile.T, tl.zeros([BLOCK_N, BLOCK_M], tl.float32))
            if GROUP > 0:
                part = part * (w_scale[:, None] * x_scale[None, :])
            total = total + part
    if GROUP == 0:
        x_scale = tl.load(x_scales, mask=live, other=0)
        w_scale = tl.load(scales)
        total = (total * w_scale[:, None]) * x_scale[None, :]
    return total.T


@triton.jit
def gate_pairs(rounded, GATE: tl.constexpr):
    """[rows, gate and up in turns] -> [rows, activation(gate) * up]; without a gate as it is."""
    if GATE != "":
        PAIRS: tl.constexpr = rounded.shape[1] // 2
        gate, up = rounded.reshape([rounded.shape[0], PAIRS, 2]).split()
        rounded = (activated(gate, GATE) * up.to(tl.float32)).to(rounded.dtype)
    return rounded


@triton.jit(do_not_specialize=["M", "portion"])
def _eight_bit_kernel(
    x, x_scales, codes, scales, bias, y,
    M, N, K, num_groups, scale_stride, portion,
    GROUP: tl.constexpr, ROWS: tl.constexpr, PAIRED: tl.constexpr, STEP: tl.constexpr,
    IS_INT: tl.constexpr, EVEN_K: tl.constexpr, HAS_BIAS: tl.constexpr, GATE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    n_start, m_start = tl.program_id(0) * portion, tl.program_id(1) * BLOCK_M
    offs_m = m_start + tl.arange(0, BLOCK_M)
    own = tl.arange(0, BLOCK_N)
    n_end = tl.minimum(n_start + portion, N)
    rows = tl.minimum(n_start + own, n_end - 1)  # those of others: never stored
    columns = tl.arange(0, STEP)
    x_rows = x + offs_m.to(tl.int64)[:, None] * K + columns[None, :]
    w_rows = codes + rows.to(tl.int64)[:, None] * K + columns[None, :]
    w_scales = scales + scale_row(rows, N, ROWS, PAIRED)
    wait_for_inputs(EARLY)

    tl.assume(K > 0)
    total = eight_bit_sum(
        x_rows, w_rows, x_scales + offs_m * num_groups, w_scales, offs_m < M, K, scale_stride,
        GROUP, STEP, IS_INT, EVEN_K, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    if HAS_BIAS:
        total += tl.load(bias + rows).to(tl.float32)[None, :]
    rounded = gate_pairs(total.to(y.dtype.element_ty), GATE)
    PAIR: tl.constexpr = 1 if GATE == "" else 2  # weight rows of one output
    offs_n = n_start // PAIR + tl.arange(0, BLOCK_N // PAIR)
    cells = y + offs_m.to(tl.int64)[:, None] * (N // PAIR) + offs_n[None, :]
    tl.store(cells, rounded, mask=(offs_m < M)[:, None] & (offs_n < n_end // PAIR)[None, :])


_launch = Launcher(_eight_bit_kernel)


@dataclass(frozen=True, slots=True)
class EightBitTile:
    """One way to lay the product on the chip. Every tile gives the same bits."""

    block_m: int  # rows of x per program
    block_n: int  # rows of w: 64 or 128
    num_stages: int
    num_warps: int
    portion: int  # rows of w that a program has, up to block_n and even


def pick_eight_bit(m: int, n: int, num_units: int) -> EightBitTile:
    """`num_units`: multiprocessors."""
    if m > 64:
        return EightBitTile(64, 128, 4, 8, 128)
    block_m = next(size for size in (16, 32, 64) if m <= size)
    portion = 64
    if ceil_div(n, 64) < num_units:
        portion = min(64, max(16, ceil_div(n, num_units)))
        portion += portion % 2  # gates come in pairs
    return EightBitTile(block_m, 64, 5, 4, portion)


def eight_bit_matmul(
    x: RoundedRows,
    weight: EightBitWeight,
    bias: Tensor | None,
    dtype: torch.dtype,
    tile: EightBitTile,
    gate: str | None = None,
) -> Tensor:
    """[m, k] -> [m, n] of a dtype; gated [m, n / 2]."""
    (m, k), (n, num_in) = x.codes.shape, weight.shape
    assert k == num_in and weight.codes.dtype == x.codes.dtype, f"got {x.codes.dtype}, {k} inputs"
    assert gate is None or weight.paired, "rows of a gated weight come in pairs"
    y = torch.empty(m, n // 2 if gate else n, dtype=dtype, device=x.codes.device)
    if m == 0:
        return y
    _launch(
        (ceil_div(n, tile.portion), ceil_div(m, tile.block_m), 1),
        (
            *(x.codes, x.scales, weight.codes, weight.scales, bias, y),
            *(m, n, k, x.scales.shape[1], weight.scales.shape[1], tile.portion),
        ),
        {
            "GROUP": weight.group,
            "ROWS": weight.rows,
            "PAIRED": weight.paired,
            "STEP": CHAIN,
            "IS_INT": weight.is_int,
            "EVEN_K": k % CHAIN == 0,
            "HAS_BIAS": bias is not None,
            "GATE": gate or "",
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            **early_options(next_has_inputs=dtype == torch.float32),
            "num_warps": tile.num_warps,
            "num_stages": tile.num_stages,
            "enable_fp_fusion": False,  # sums of 128 are scaled, rounded, then added
        },
        (
            *(dtype, None if bias is None else bias.dtype, n, k, x.scales.shape[1]),
            weight.scales.shape[1],
            alignments(x.codes, x.scales, weight.codes, weight.scales, bias, y),
        ),
    )
    return y
