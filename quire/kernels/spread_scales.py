"""Scales of inputs group by group, in the order of sorted rows.

A tile of many rows needs their scales at every step along k. Where those of a group lie together, a
thread reads neighbours from one address and needs no masks; row by row, addresses and masks alone
take a quarter of its registers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.launch import Launcher, alignments, ceil_div, int_kind
from quire.kernels.route import SortedPairs

__all__ = ["spread_scales"]

_BLOCK = 256


@triton.jit(do_not_specialize=["stride", "num_rows"])
def _spread_kernel(
    scales, spread, pairs, num_groups, stride, num_rows, TOP_K: tl.constexpr, GATHER: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    rows, group = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1)
    is_one = rows < num_rows
    from_rows = rows
    if GATHER:
        from_rows = tl.load(pairs + rows, mask=is_one, other=0).to(tl.int32) // TOP_K
    scale = tl.load(scales + from_rows * num_groups + group, mask=is_one, other=0)
    tl.store(spread + group * stride + rows, scale, mask=rows < stride)


_launch = Launcher(_spread_kernel)


def spread_scales(scales: Tensor, pairs: SortedPairs, block_m: int, is_gather: bool) -> Tensor:
    """Scales [rows, groups] as [groups, sorted rows and `block_m` more]; `is_gather`: the rows are
    those of tokens, else they are sorted already."""
    num_pairs, num_groups = pairs.pairs.numel(), scales.shape[1]
    stride = num_pairs + block_m
    made = torch.empty(num_groups, stride, dtype=scales.dtype, device=scales.device)
    _launch(
        (ceil_div(stride, _BLOCK), num_groups, 1),
        (scales, made, pairs.pairs, num_groups, stride, num_pairs),
        {"TOP_K": pairs.top_k, "GATHER": is_gather, "BLOCK": _BLOCK},
        (int_kind(num_groups), alignments(scales, made, pairs.pairs)),
    )
    return made
