"""Grouped products of eight bits by eight: each rounded row times the weight of its expert (W8A8).

The rows of all experts' weights lie one below the other in one `EightBitWeight`. Who multiplies
what is `grouped_matmul.py`'s, the chain of sums and the order of scales `eight_bit_matmul.py`'s: a
row's bits are those of a dense product of that row with its expert's weight, whatever the batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.eight_bit_matmul import eight_bit_sum, gate_pairs
from quire.kernels.eight_bit_weight import CHAIN, EightBitWeight, scale_row
from quire.kernels.grouped_matmul import GroupTile, max_tiles, own_rows, own_tile
from quire.kernels.launch import Launcher, alignments, ceil_div, pad_to_power
from quire.kernels.round_inputs import RoundedRows
from quire.kernels.route import SortedPairs
from quire.kernels.spread_scales import spread_scales

__all__ = ["TILES", "multiply_eight_bit", "pick_grouped_eight_bit"]

# By the mean number of rows an expert gets, one column per limit.
_LIMITS = (16, 32, 64)
TILES = (
    GroupTile(16, 64, CHAIN, 5, 4),
    GroupTile(32, 64, CHAIN, 5, 4),
    GroupTile(64, 64, CHAIN, 4, 4),
    GroupTile(64, 128, CHAIN, 4, 8),
)
_SPREAD_FROM = 64  # rows of a tile: their scales would take half a program's registers
_REGISTERS = 65536  # of a multiprocessor


def pick_grouped_eight_bit(num_pairs: int, num_experts: int) -> GroupTile:
    """About as high as the rows of an average expert."""
    mean = num_pairs / num_experts
    return TILES[sum(mean > limit for limit in _LIMITS)]


@triton.jit(do_not_specialize=["tiles_m", "x_stride"])
def _grouped_eight_bit_kernel(
    x, x_scales, codes, scales, bias, y, pairs, counts,
    tiles_m, N, K, num_groups, scale_stride, x_stride,
    GROUP: tl.constexpr, ROWS: tl.constexpr, PAIRED: tl.constexpr, IS_INT: tl.constexpr,
    NUM: tl.constexpr, PAD: tl.constexpr, TOP_K: tl.constexpr, GATHER: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STEP: tl.constexpr, GROUP_M: tl.constexpr,
    EVEN_K: tl.constexpr, HAS_BIAS: tl.constexpr, GATE: tl.constexpr, SPREAD: tl.constexpr,
):  # fmt: skip
    tile, n_start = own_tile(tiles_m, N, BLOCK_N, GROUP_M)
    expert, row, num_rows = own_rows(counts, tile, NUM, PAD, BLOCK_M)
    if expert >= NUM:
        return
    offs_m = tl.arange(0, BLOCK_M)
    live = offs_m < num_rows
    sorted_rows = (row + offs_m).to(tl.int64)
    pair_rows = tl.load(pairs + sorted_rows, mask=live, other=0).to(tl.int64)
    if GATHER:
        from_rows, to_rows = pair_rows // TOP_K, sorted_rows
    else:
        from_rows, to_rows = sorted_rows, pair_rows

    # Rows past N read the last row again: never stored, and the loads need no mask.
    within = tl.minimum(n_start + tl.arange(0, BLOCK_N), N - 1)
    columns = tl.arange(0, STEP)
    x_rows = x + from_rows[:, None] * K + columns[None, :]
    w_rows = codes + (expert.to(tl.int64) * N + within)[:, None] * K + columns[None, :]
    if ROWS > 1 and PAIRED:  # rows that share a scale may be those of two experts
        place = expert * N + within % 2 * (N // 2) + within // 2
    else:
        place = expert * N + within
    w_scales = scales + scale_row(place, N * NUM, ROWS, False)

    tl.assume(K > 0)
    # A pointer first, then its neighbours: so addresses are one and small steps from it.
    own_scales = x_scales + row + offs_m if SPREAD else x_scales + from_rows * num_groups
    total = eight_bit_sum(
        x_rows, w_rows, own_scales, w_scales, live, K, scale_stride,
        GROUP, STEP, IS_INT, EVEN_K, BLOCK_M, BLOCK_N, x_stride, SPREAD,
    )  # fmt: skip
    if HAS_BIAS:
        total += tl.load(bias + expert * N + within).to(tl.float32)[None, :]
    rounded = gate_pairs(total.to(y.dtype.element_ty), GATE)
    PAIR: tl.constexpr = 1 if GATE == "" else 2  # weight rows of one output
    offs_n = n_start // PAIR + tl.arange(0, BLOCK_N // PAIR)
    cells = y + to_rows[:, None] * (N // PAIR) + offs_n[None, :]
    tl.store(cells, rounded, mask=live[:, None] & (offs_n < N // PAIR)[None, :])


_launch = Launcher(_grouped_eight_bit_kernel)


def multiply_eight_bit(
    x: RoundedRows,
    weight: EightBitWeight,
    pairs: SortedPairs,
    bias: Tensor | None,
    dtype: torch.dtype,
    *,
    is_gather: bool,
    gate: str | None = None,
    tile: GroupTile | None = None,
) -> Tensor:
    """As `multiply_gathered` and `multiply_scattered`, with weights [experts * n, k] and a bias
    [experts, n]: [pairs, n] of a dtype, gated [pairs, n / 2]."""
    num_experts, num_pairs = pairs.counts.numel(), pairs.pairs.numel()
    n, k, num_groups = weight.shape[0] // num_experts, weight.shape[1], x.scales.shape[1]
    assert x.codes.shape[1] == k and x.codes.is_contiguous() and x.codes.dtype == weight.codes.dtype
    assert gate is None or weight.paired, "rows of a gated weight come in pairs"
    y = torch.empty((num_pairs, n // 2 if gate else n), dtype=dtype, device=x.codes.device)
    if num_pairs == 0:
        return y
    tile = tile or pick_grouped_eight_bit(num_pairs, num_experts)
    tiles_m = max_tiles(num_pairs, num_experts, tile.block_m)
    is_spread = weight.group > 0 and tile.block_m >= _SPREAD_FROM
    scales = spread_scales(x.scales, pairs, tile.block_m, is_gather) if is_spread else x.scales
    _launch(
        (tiles_m * ceil_div(n, tile.block_n), 1, 1),
        (
            *(x.codes, scales, weight.codes, weight.scales, bias, y, pairs.pairs, pairs.counts),
            *(tiles_m, n, k, num_groups, weight.scales.shape[1], scales.shape[1]),
        ),
        {
            **_constants(weight, pairs, tile),
            "GATHER": is_gather,
            "HAS_BIAS": bias is not None,
            "GATE": gate or "",
            "SPREAD": is_spread,
        },
        (
            *(x.codes.dtype, dtype, None if bias is None else bias.dtype, n, k, num_groups),
            weight.scales.shape[1],
            alignments(x.codes, scales, weight.codes, weight.scales, bias, y),
        ),
    )
    return y


def _constants(weight: EightBitWeight, pairs: SortedPairs, tile: GroupTile) -> dict[str, object]:
    num_experts = pairs.counts.numel()
    return {
        "GROUP": weight.group,
        "ROWS": weight.rows,
        "PAIRED": weight.paired,
        "IS_INT": weight.is_int,
        "NUM": num_experts,
        "PAD": pad_to_power(num_experts),
        "TOP_K": pairs.top_k,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "STEP": CHAIN,
        "GROUP_M": tile.group_m,
        "EVEN_K": weight.shape[1] % CHAIN == 0,
        "maxnreg": _most_registers(tile),
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
        "enable_fp_fusion": False,  # as in `eight_bit_matmul.py`
    }


def _most_registers(tile: GroupTile) -> int | None:
    """Of a thread, so that two programs of eight warps share a multiprocessor; None: no limit."""
    is_pair = tile.num_warps == 8 and tile.block_m * tile.block_n <= 64 * 128
    return _REGISTERS // (2 * 32 * tile.num_warps) if is_pair else None
