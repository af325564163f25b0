"""Inputs of experts whose columns are sorted, each expert's in an order of its own (act-order).

The grouped product reads a row of x for each pair, column by column. So a pair's row is written out
in its expert's order before, and the product takes it as it lies.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.launch import Launcher, alignments, ceil_div, pad_to_power
from quire.kernels.route import SortedPairs

__all__ = ["expert_columns"]

_BLOCK = 1024


@triton.jit
def _expert_columns_kernel(
    x, orders, pairs, counts, y, K,
    NUM: tl.constexpr, PAD: tl.constexpr, TOP_K: tl.constexpr, GATHER: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    experts = tl.arange(0, PAD)
    rows = tl.load(counts + experts, mask=experts < NUM, other=0)
    expert = tl.sum((tl.cumsum(rows, 0) <= row).to(tl.int32), 0)
    if expert >= NUM:  # pairs of experts that are elsewhere come last
        return
    at = tl.load(pairs + row) if GATHER else row
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = columns < K
    order = tl.load(orders + expert.to(tl.int64) * K + columns, mask=live, other=0)
    inputs = tl.load(x + (at // TOP_K).to(tl.int64) * K + order, mask=live, other=0.0)
    tl.store(y + at.to(tl.int64) * K + columns, inputs, mask=live)


_launch = Launcher(_expert_columns_kernel)


def expert_columns(x: Tensor, orders: Tensor, pairs: SortedPairs, is_gather: bool) -> Tensor:
    """x with columns as `orders` [experts, k] int32 has them. `is_gather`: rows of x are tokens,
    those of the result pairs, token by token; else both are pairs, sorted by expert. Rows of no
    expert here are left as they were."""
    k, num_pairs = x.shape[1], pairs.pairs.numel()
    assert orders.dtype == torch.int32 and orders.shape == (pairs.counts.numel(), k)
    assert x.is_contiguous() and orders.is_contiguous(), f"got x {tuple(x.shape)}"
    y = torch.empty((num_pairs, k), dtype=x.dtype, device=x.device)
    if num_pairs == 0:
        return y
    _launch(
        (num_pairs, ceil_div(k, _BLOCK), 1),
        (x, orders, pairs.pairs, pairs.counts, y, k),
        {
            "NUM": len(orders),
            "PAD": pad_to_power(len(orders)),
            "TOP_K": pairs.top_k if is_gather else 1,
            "GATHER": is_gather,
            "BLOCK": _BLOCK,
            "num_warps": 4,
        },
        (x.dtype, k, alignments(x, orders, y)),
    )
    return y
