"""Rows of a product's inputs in eight bits: signed bytes or floats, with a scale of their own.

A scale is for a whole row or for every `group` inputs of it, or it was found beforehand and is the
same for all, so a row's bits do not depend on the batch. `eight_bit_matmul.py` multiplies them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.early import early_options, wait_for_inputs
from quire.kernels.launch import Launcher, alignments, ceil_div, int_kind, pad_to_power

__all__ = ["RoundedRows", "Rounding", "eight_bits", "parts_of", "round_inputs", "scale_of"]

SMALLEST = 1e-5  # the least maximum of a row that is assumed, so that nothing divides by zero
MOST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
_MOST_BLOCK = 16384
# Groups of one program where there are many: a hundred thousand programs of a warp each start
# slower than they work.
_GROUPS, _MANY = 16, 2048
_PROGRAMS, _LEAST_PART = 32, 1024  # that share rows, and the inputs that are worth one


class RoundedRows(NamedTuple):
    codes: Tensor  # [m, k] int8 or float8_e4m3fn
    scales: Tensor  # [m, groups] fp32: what a code is multiplied by


@dataclass(frozen=True, slots=True)
class Rounding:
    """How inputs become eight bits."""

    dtype: torch.dtype  # int8 or float8_e4m3fn
    group: int | None = None  # inputs that share a scale; None: those of a row
    scale: float | None = None  # of all rows, found beforehand; None: each has its own


@triton.jit
def eight_bits(value, MOST: tl.constexpr, IS_INT: tl.constexpr):
    """fp32 as codes; what is too large gets the largest. The bounds come first: a product and the
    sum after it might become one instruction, which rounds once."""
    value = tl.minimum(tl.maximum(value, -MOST), MOST)
    if IS_INT:  # to the nearest even: numbers of 2**23 have no fractions
        value = (value + 12582912.0) - 12582912.0
    return value.to(tl.int8) if IS_INT else value.to(tl.float8e4nv)


@triton.jit
def scale_of(top, MOST: tl.constexpr, SMALLEST: tl.constexpr):
    """(what a code is multiplied by, what an input is), for inputs of this largest magnitude."""
    top = tl.maximum(top, SMALLEST)
    return tl.math.div_rn(top, MOST), tl.math.div_rn(MOST, top)


@triton.jit
def _round_kernel(
    x, codes, scales, K, stride_x, num_groups, group, scale,
    MOST: tl.constexpr, SMALLEST: tl.constexpr, IS_INT: tl.constexpr, HAS_SCALE: tl.constexpr,
    IS_ONE: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(EARLY)
    row, number = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if PARTS > 1:  # every program finds the scale, and writes some of the codes
        own = tl.program_id(2) * (BLOCK // PARTS) + tl.arange(0, BLOCK // PARTS)
        part = tl.load(x + row * stride_x + own, mask=own < K, other=0.0).to(tl.float32)
    begin = number * group
    end = tl.minimum(begin + group, K)
    columns = begin + tl.arange(0, BLOCK)
    some = tl.load(x + row * stride_x + columns, mask=columns < end, other=0.0).to(tl.float32)
    if HAS_SCALE:
        step, times = scale, tl.math.div_rn(1.0, scale)
    else:
        most = tl.abs(some)
        if not IS_ONE:
            for first in tl.range(begin + BLOCK, end, BLOCK):
                more = tl.load(
                    x + row * stride_x + first + tl.arange(0, BLOCK),
                    mask=first + tl.arange(0, BLOCK) < end, other=0.0,
                )  # fmt: skip
                most = tl.maximum(most, tl.abs(more.to(tl.float32)))
        step, times = scale_of(tl.max(most, 0), MOST, SMALLEST)
    tl.store(scales + row * num_groups + number, step)
    if PARTS > 1:
        tl.store(codes + row * K + own, eight_bits(part * times, MOST, IS_INT), mask=own < K)
    else:
        code = eight_bits(some * times, MOST, IS_INT)
        tl.store(codes + row * K + columns, code, mask=columns < end)
    if not IS_ONE:
        for first in tl.range(begin + BLOCK, end, BLOCK):
            columns = first + tl.arange(0, BLOCK)
            more = tl.load(x + row * stride_x + columns, mask=columns < end, other=0.0)
            code = eight_bits(more.to(tl.float32) * times, MOST, IS_INT)
            tl.store(codes + row * K + columns, code, mask=columns < end)


@triton.jit(do_not_specialize=["num_scales"])
def _round_groups_kernel(
    x, codes, scales, K, stride_x, num_groups, group, num_scales,
    MOST: tl.constexpr, SMALLEST: tl.constexpr, IS_INT: tl.constexpr, GROUPS: tl.constexpr,
    BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """As `_round_kernel` does one by one, GROUPS of them, of any rows."""
    wait_for_inputs(EARLY)
    places = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    rows, begin = (places // num_groups).to(tl.int64), places % num_groups * group
    own = tl.arange(0, BLOCK)[None, :]
    columns = begin[:, None] + own
    is_one = places < num_scales
    inside = is_one[:, None] & (own < group) & (columns < K)
    some = tl.load(x + rows[:, None] * stride_x + columns, mask=inside, other=0.0).to(tl.float32)
    step, times = scale_of(tl.max(tl.abs(some), 1), MOST, SMALLEST)
    tl.store(scales + places, step, mask=is_one)
    code = eight_bits(some * times[:, None], MOST, IS_INT)
    tl.store(codes + rows[:, None] * K + columns, code, mask=inside)


_launch = Launcher(_round_kernel)
_launch_groups = Launcher(_round_groups_kernel)


def parts_of(m: int, k: int) -> int:
    """Programs that share the codes of a row: of few long rows, so that the chip has some for each
    multiprocessor. One turns 16,384 numbers into codes for longer than it reads them."""
    if k > _MOST_BLOCK:
        return 1
    return next((n for n in (8, 4, 2) if n * m <= _PROGRAMS and n * _LEAST_PART <= k), 1)


def round_inputs(x: Tensor, rounding: Rounding, parts: int | None = None) -> RoundedRows:
    """[m, k] in eight bits. `parts`: programs that share a row; None: as many as are quick."""
    m, k = x.shape
    assert x.stride(1) == 1
    group = rounding.group or k
    num_groups, block = ceil_div(k, group), min(_MOST_BLOCK, pad_to_power(group))
    codes = torch.empty(m, k, dtype=rounding.dtype, device=x.device)
    rows = RoundedRows(codes, torch.empty(m, num_groups, dtype=torch.float32, device=x.device))
    if m == 0:
        return rows
    if rounding.scale is None and block * _GROUPS <= _MOST_BLOCK and m * num_groups >= _MANY:
        _round_groups(x, rows, group, block)
        return rows
    if num_groups > 1 or k > block:
        parts = 1
    elif parts is None:
        parts = parts_of(m, k)
    _launch(
        (m, num_groups, parts),
        (x, *rows, k, x.stride(0), num_groups, group, rounding.scale or 1.0),
        {
            **_constants(rounding.dtype),
            "HAS_SCALE": rounding.scale is not None,
            "IS_ONE": group <= block,
            "BLOCK": block,
            "PARTS": parts,
            **early_options(),
            "num_warps": max(1, min(16, block // 512)),
            "enable_fp_fusion": False,  # products are rounded before they are made whole
        },
        _kind(x, rows, group),
    )
    return rows


def _round_groups(x: Tensor, rows: RoundedRows, group: int, block: int) -> None:
    count, num_groups = rows.scales.numel(), rows.scales.shape[1]
    _launch_groups(
        (ceil_div(count, _GROUPS), 1, 1),
        (x, *rows, x.shape[1], x.stride(0), num_groups, group, count),
        {
            **_constants(rows.codes.dtype),
            "GROUPS": _GROUPS,
            "BLOCK": block,
            **early_options(),
            "num_warps": max(1, min(16, block * _GROUPS // 512)),
            "enable_fp_fusion": False,
        },
        _kind(x, rows, group),
    )


def _constants(dtype: torch.dtype) -> dict[str, object]:
    return {"MOST": MOST[dtype], "SMALLEST": SMALLEST, "IS_INT": dtype == torch.int8}


def _kind(x: Tensor, rows: RoundedRows, group: int) -> tuple[object, ...]:
    integers = (x.shape[1], x.stride(0), rows.scales.shape[1], group)
    return x.dtype, *map(int_kind, integers), alignments(x, *rows)
