"""Grouped matmul with packed weights: each row times the packed weight of its expert.

The rows of all experts' weights lie one below the other in one `Slabs`. Who multiplies what is
`grouped_matmul.py`'s, how codes become floats `unpack.py`'s; the bits are those of the dense
grouped product with expanded weights.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.grouped_matmul import GroupTile, max_tiles, own_rows, own_tile, pick_tile
from quire.kernels.launch import Launcher, alignments, ceil_div, pad_to_power
from quire.kernels.packed_kernel import packed_sum
from quire.kernels.packed_matmul import unroll_of
from quire.kernels.route import SortedPairs
from quire.kernels.slabs import Slabs

__all__ = ["multiply_packed"]

_MOST_ROWS = 128  # of a tile: more would leave too few registers to unpack in


@triton.jit(do_not_specialize=["tiles_m"])
def _grouped_packed_kernel(
    x, codes, scales, supers, offsets, zeros, values, bias, y, pairs, counts,
    tiles_m, N, K, num_scale_rows,
    KIND: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, WIDTH: tl.constexpr,
    FIELDS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, SCALES: tl.constexpr,
    OFFSETS: tl.constexpr, SUPER: tl.constexpr, ZERO: tl.constexpr, ZEROS: tl.constexpr,
    LANES: tl.constexpr, PLAIN: tl.constexpr,
    NUM: tl.constexpr, PAD: tl.constexpr, TOP_K: tl.constexpr, GATHER: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr, UNROLL: tl.constexpr,
    TAIL: tl.constexpr, EVEN_K: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    tl.static_assert(not LANES)
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

    offs_n = n_start + tl.arange(0, BLOCK_N)
    # Rows past N read the last row again: never stored, and the loads need no mask.
    w_row = expert * N + tl.minimum(offs_n, N - 1)
    acc = packed_sum(
        x + from_rows[:, None] * K + tl.arange(0, WIDTH)[None, :], live[:, None],
        (codes, scales, supers, offsets, zeros), values, w_row, N * NUM, K, num_scale_rows,
        KIND, LOW, HIGH, WIDTH, FIELDS, GROUP, ROWS, False,
        SCALES, OFFSETS, SUPER, ZERO, ZEROS, PLAIN,
        BLOCK_M, BLOCK_N, UNROLL, TAIL, EVEN_K,
    )  # fmt: skip
    total = acc.T  # [BLOCK_M, BLOCK_N]
    if HAS_BIAS:
        total += tl.load(bias + w_row).to(tl.float32)[None, :]
    cells = y + to_rows[:, None] * N + offs_n[None, :]
    tl.store(cells, total.to(y.dtype.element_ty), mask=live[:, None] & (offs_n < N)[None, :])


_launch = Launcher(_grouped_packed_kernel)


def multiply_packed(
    x: Tensor,
    slabs: Slabs,
    pairs: SortedPairs,
    bias: Tensor | None,
    is_gather: bool,
    tile: GroupTile | None = None,
) -> Tensor:
    """As `multiply_gathered` and `multiply_scattered`, with slabs [experts * n, k] and a bias
    [experts, n]."""
    num_experts, num_pairs = pairs.counts.numel(), pairs.pairs.numel()
    n, k = slabs.shape[0] // num_experts, slabs.shape[1]
    assert x.shape[1] == k and x.is_contiguous(), f"got x {tuple(x.shape)}, w {slabs.shape}"
    y = torch.empty((num_pairs, n), dtype=x.dtype, device=x.device)
    if num_pairs == 0:
        return y
    tile = tile or _tile(num_pairs, num_experts)
    tiles_m = max_tiles(num_pairs, num_experts, tile.block_m)
    unroll = unroll_of(slabs.form)
    _launch(
        (tiles_m * ceil_div(n, tile.block_n), 1, 1),
        (
            *(x, *slabs.tensors, bias, y, pairs.pairs, pairs.counts),
            *(tiles_m, n, k, slabs.num_scale_rows),
        ),
        {
            **slabs.constants,
            "NUM": num_experts,
            "PAD": pad_to_power(num_experts),
            "TOP_K": pairs.top_k,
            "GATHER": is_gather,
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "GROUP_M": tile.group_m,
            "UNROLL": unroll,
            "TAIL": ceil_div(k, slabs.form.slab) % unroll != 0,
            "EVEN_K": k % slabs.form.slab == 0,
            "HAS_BIAS": bias is not None,
            "num_warps": tile.num_warps,
            "num_stages": tile.num_stages,
        },
        (x.dtype, None if bias is None else bias.dtype, n, *slabs.kind, alignments(x, y, bias)),
    )
    return y


def _tile(num_pairs: int, num_experts: int) -> GroupTile:
    """As high as the dense product's; weights are on the row side of the matrix unit."""
    dense = pick_tile(num_pairs, num_experts)
    block_m = min(dense.block_m, _MOST_ROWS)
    return GroupTile(block_m, 64, 0, 4 if block_m <= 64 else 3, 4, swap=True)
