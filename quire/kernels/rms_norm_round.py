"""RMS norm of rows in eight bits: `rms_norm.py` and `round_inputs.py` in one launch.

The codes and the scales are those of the two: the row is normed to the dtype of x by the same
code, and what is rounded to eight bits is that. For products that alone read what a norm makes;
whoever reads floats takes the norm.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.launch import Launcher, alignments
from quire.kernels.rms_norm import norm_constants, normed_row
from quire.kernels.round_inputs import (
    MOST,
    SMALLEST,
    RoundedRows,
    Rounding,
    eight_bits,
    scale_of,
)

__all__ = ["rms_norm_round"]


@triton.jit
def _rms_norm_round_kernel(
    x, residual, weight, codes, scales, summed_out, x_stride, residual_stride, eps, scale,
    WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr, ADD: tl.constexpr, EARLY: tl.constexpr,
    MOST: tl.constexpr, SMALLEST: tl.constexpr, IS_INT: tl.constexpr, HAS_SCALE: tl.constexpr,
):  # fmt: skip
    normed = normed_row(
        x, residual, weight, summed_out, x_stride, residual_stride, eps, WIDTH, WIDTH_PAD, ADD,
        EARLY,
    )  # fmt: skip
    row, cols = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH_PAD)
    keep = cols < WIDTH
    value = tl.where(keep, normed.to(tl.float32), 0.0)  # infinite scales make NaN of padding
    if HAS_SCALE:
        step, times = scale, tl.math.div_rn(1.0, scale)
    else:
        step, times = scale_of(tl.max(tl.abs(value), 0), MOST, SMALLEST)
    tl.store(scales + row, step)
    code = eight_bits(value * times, MOST, IS_INT)
    # A thread must have no more neighbours than in `rms_norm.py`: the order of the sum follows
    # from that, and bytes would be stored by sixteens.
    some = tl.max_contiguous(cols, 128 // x.dtype.element_ty.primitive_bitwidth)
    tl.store(codes + row * WIDTH + some, code, mask=keep)


_launch = Launcher(_rms_norm_round_kernel)


def rms_norm_round(
    x: Tensor, weight: Tensor, eps: float, rounding: Rounding, residual: Tensor | None = None
) -> tuple[RoundedRows, Tensor]:
    """`rms_norm` of [tokens, width], rounded with a scale for a row; and x + residual, or x."""
    tokens, width = x.shape
    assert x.stride(1) == 1 and weight.is_contiguous(), f"{x.shape=} {x.stride()=}"
    assert weight.dtype in (x.dtype, torch.float32), f"{weight.dtype=} {x.dtype=}"
    assert rounding.group in (None, width), f"{rounding=} {width=}"
    codes = torch.empty(tokens, width, dtype=rounding.dtype, device=x.device)
    rows = RoundedRows(codes, torch.empty(tokens, 1, dtype=torch.float32, device=x.device))
    summed = x
    if residual is not None:
        assert residual.shape == x.shape and residual.dtype == x.dtype and residual.stride(1) == 1
        summed = torch.empty(tokens, width, dtype=x.dtype, device=x.device)
    if tokens == 0:
        return rows, summed
    other = x if residual is None else residual
    strides = (x.stride(0), other.stride(0))
    _launch(
        (tokens, 1, 1),
        (x, other, weight, *rows, summed, *strides, eps, rounding.scale or 1.0),
        {
            **norm_constants(width, residual is not None),
            "MOST": MOST[rounding.dtype],
            "SMALLEST": SMALLEST,
            "IS_INT": rounding.dtype == torch.int8,
            "HAS_SCALE": rounding.scale is not None,
        },
        (x.dtype, weight.dtype, strides, alignments(x, other, weight, *rows)),
    )
    return rows, summed
