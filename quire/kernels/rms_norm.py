"""RMS norm of rows, alone or fused with the residual addition that precedes it.

One program per row and a tile shape that depends on the width alone, so a row's bits do not
depend on how many rows there are. Rounds where Llama's module in Hugging Face does: the residual
sum to the input dtype, the normalised row to the input dtype, then the product with the weight.
With a weight in fp32 the row is rounded once, after the product, as Gemma's module does.
`rms_norm_round.py` has the same row in eight bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.early import early_options, wait_for_inputs
from quire.kernels.launch import Launcher, alignments, pad_to_power


@triton.jit
def normed_row(
    x,
    residual,
    weight,
    summed_out,
    x_stride,
    residual_stride,
    eps,
    WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
    ADD: tl.constexpr,
    EARLY: tl.constexpr,
):
    """This program's row [WIDTH_PAD] in the dtype of x; stores the sum with the residual."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, WIDTH_PAD)
    keep = cols < WIDTH
    dtype = x.dtype.element_ty
    w = tl.load(weight + cols, mask=keep, other=0.0).to(tl.float32)
    wait_for_inputs(EARLY)
    h = tl.load(x + row * x_stride + cols, mask=keep, other=0.0).to(tl.float32)
    if ADD:
        r = tl.load(residual + row * residual_stride + cols, mask=keep, other=0.0)
        summed = (h + r.to(tl.float32)).to(dtype)
        tl.store(summed_out + row * WIDTH + cols, summed, mask=keep)
        h = summed.to(tl.float32)
    scale = tl.rsqrt(tl.sum(h * h, 0) / WIDTH + eps)
    normed = h * scale
    if weight.dtype.element_ty == dtype:
        normed = normed.to(dtype).to(tl.float32)
    return (normed * w).to(dtype)


@triton.jit
def _rms_norm_kernel(
    x,
    residual,
    weight,
    normed_out,
    summed_out,
    x_stride,
    residual_stride,
    eps,
    WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
    ADD: tl.constexpr,
    EARLY: tl.constexpr,
):
    normed = normed_row(
        x, residual, weight, summed_out, x_stride, residual_stride, eps, WIDTH, WIDTH_PAD, ADD,
        EARLY,
    )  # fmt: skip
    cols = tl.arange(0, WIDTH_PAD)
    place = normed_out + tl.program_id(0).to(tl.int64) * WIDTH + cols
    tl.store(place, normed, mask=cols < WIDTH)


_launch = Launcher(_rms_norm_kernel)


@cache
def norm_constants(width: int, adds: bool) -> Mapping[str, object]:
    pad = pad_to_power(width)
    return {
        "WIDTH": width,
        "WIDTH_PAD": pad,
        "ADD": adds,
        **early_options(),
        "num_warps": max(1, min(16, pad // 512)),  # two 16-byte loads of bf16 a thread
    }


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(norm(x + residual) * weight, x + residual) of [tokens, width] rows; no residual: x alone."""
    tokens, width = x.shape
    assert x.stride(1) == 1 and weight.is_contiguous(), f"{x.shape=} {x.stride()=}"
    assert weight.dtype in (x.dtype, torch.float32), f"{weight.dtype=} {x.dtype=}"
    normed = torch.empty((tokens, width), dtype=x.dtype, device=x.device)
    summed = x
    if residual is not None:
        assert residual.shape == x.shape and residual.dtype == x.dtype and residual.stride(1) == 1
        summed = torch.empty_like(normed)
    if tokens == 0:
        return normed, summed
    other = x if residual is None else residual
    strides = (x.stride(0), other.stride(0))
    _launch(
        (tokens, 1, 1),
        (x, other, weight, normed, summed, *strides, eps),
        norm_constants(width, residual is not None),
        (x.dtype, weight.dtype, strides, alignments(x, other, weight)),
    )
    return normed, summed
