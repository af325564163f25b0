"""Rows of a product's inputs in eight bits: signed bytes or floats, with a scale of their own.

A scale is for a whole row, or for every `group` inputs of it, so a row's bits do not depend on the
batch. `eight_bit_matmul.py` multiplies them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.early import early_options, wait_for_inputs
from quire.kernels.launch import Launcher, alignments, ceil_div, int_kind, pad_to_power

__all__ = ["RoundedRows", "round_inputs"]

SMALLEST = 1e-5  # the least maximum of a row that is assumed, so that nothing divides by zero
MOST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
_MOST_BLOCK = 4096


class RoundedRows(NamedTuple):
    codes: Tensor  # [m, k] int8 or float8_e4m3fn
    scales: Tensor  # [m, groups] fp32: what a code is multiplied by


@triton.jit
def _round_kernel(
    x, codes, scales, K, stride_x, num_groups, group,
    MOST: tl.constexpr, SMALLEST: tl.constexpr, IS_INT: tl.constexpr,
    BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(EARLY)
    row, number = tl.program_id(0).to(tl.int64), tl.program_id(1)
    begin = number * group
    end = tl.minimum(begin + group, K)
    most = tl.zeros([BLOCK], tl.float32)
    for first in tl.range(begin, end, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        some = tl.load(x + row * stride_x + columns, mask=columns < end, other=0.0)
        most = tl.maximum(most, tl.abs(some.to(tl.float32)))
    top = tl.maximum(tl.max(most, 0), SMALLEST)
    times = tl.math.div_rn(MOST, top)
    tl.store(scales + row * num_groups + number, tl.math.div_rn(top, MOST))
    for first in tl.range(begin, end, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        some = tl.load(x + row * stride_x + columns, mask=columns < end, other=0.0)
        value = some.to(tl.float32) * times
        if IS_INT:  # to the nearest even: numbers of 2**23 have no fractions
            whole = (value + 12582912.0) - 12582912.0
            code = tl.minimum(tl.maximum(whole, -MOST), MOST).to(tl.int8)
        else:
            code = tl.minimum(tl.maximum(value, -MOST), MOST).to(tl.float8e4nv)
        tl.store(codes + row * K + columns, code, mask=columns < end)


_launch = Launcher(_round_kernel)


def round_inputs(x: Tensor, dtype: torch.dtype, group: int | None = None) -> RoundedRows:
    """[m, k] in eight bits; `group`: inputs that share a scale, None: those of a row."""
    m, k = x.shape
    assert x.stride(1) == 1
    group = group or k
    num_groups = ceil_div(k, group)
    codes = torch.empty(m, k, dtype=dtype, device=x.device)
    scales = torch.empty(m, num_groups, dtype=torch.float32, device=x.device)
    if m == 0:
        return RoundedRows(codes, scales)
    _launch(
        (m, num_groups, 1),
        (x, codes, scales, k, x.stride(0), num_groups, group),
        {
            "MOST": MOST[dtype],
            "SMALLEST": SMALLEST,
            "IS_INT": dtype == torch.int8,
            "BLOCK": min(_MOST_BLOCK, pad_to_power(group)),
            **early_options(),
            "num_warps": 4,
            "enable_fp_fusion": False,  # products are rounded before they are made whole
        },
        (
            *(x.dtype, int_kind(k), int_kind(x.stride(0)), int_kind(num_groups), int_kind(group)),
            alignments(x, codes, scales),
        ),
    )
    return RoundedRows(codes, scales)
