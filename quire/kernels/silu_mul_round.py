"""The gate of a gated MLP in eight bits: `silu_mul.py` and `round_inputs.py` in one launch.

Inputs are pairs, gate, up, gate, up, as products of paired weights make them. The codes and the
scales are those of a product with the gate, rounded by a launch of its own: the activation is
rounded to the inputs' dtype, and so is its product with up.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.early import early_options, wait_for_inputs
from quire.kernels.launch import Launcher, alignments, int_kind, pad_to_power
from quire.kernels.round_inputs import (
    MOST,
    SMALLEST,
    RoundedRows,
    Rounding,
    eight_bits,
    scale_of,
)
from quire.kernels.silu_mul import activated

__all__ = ["silu_mul_round"]

# Outputs of a row that registers hold; of a longer one so many are made at a time, twice over.
_MOST_BLOCK, _BLOCK = 16384, 4096


@triton.jit
def _gated(gate_up, first, columns, width, ACTIVATION: tl.constexpr):
    """Some outputs of the row whose pairs begin at `first`, in fp32; zeros past its end."""
    dtype = gate_up.dtype.element_ty
    # A pair of halves is one 32-bit word, as in `silu_mul.py`.
    pairs = gate_up.to(tl.pointer_type(tl.uint32)) + first + columns
    words = tl.load(pairs, mask=columns < width, other=0)
    gate = (words & 0xFFFF).to(tl.uint16).to(dtype, bitcast=True)
    up = (words >> 16).to(tl.uint16).to(dtype, bitcast=True)
    return (activated(gate, ACTIVATION) * up.to(tl.float32)).to(dtype).to(tl.float32)


@triton.jit
def _silu_mul_round_kernel(
    gate_up, codes, scales, width, scale,
    MOST: tl.constexpr, SMALLEST: tl.constexpr, IS_INT: tl.constexpr, HAS_SCALE: tl.constexpr,
    IS_ONE: tl.constexpr, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(EARLY)
    row = tl.program_id(0).to(tl.int64)
    first, own = row * width, tl.arange(0, BLOCK)
    value = _gated(gate_up, first, own, width, ACTIVATION)
    if HAS_SCALE:
        step, times = scale, tl.math.div_rn(1.0, scale)
    else:
        most = tl.abs(value)
        if not IS_ONE:
            for begin in tl.range(BLOCK, width, BLOCK):
                more = _gated(gate_up, first, begin + own, width, ACTIVATION)
                most = tl.maximum(most, tl.abs(more))
        step, times = scale_of(tl.max(most, 0), MOST, SMALLEST)
    tl.store(scales + row, step)
    tl.store(codes + first + own, eight_bits(value * times, MOST, IS_INT), mask=own < width)
    if not IS_ONE:
        for begin in tl.range(BLOCK, width, BLOCK):
            more = _gated(gate_up, first, begin + own, width, ACTIVATION)
            code = eight_bits(more * times, MOST, IS_INT)
            tl.store(codes + first + begin + own, code, mask=begin + own < width)


_launch = Launcher(_silu_mul_round_kernel)


@cache
def _constants(width: int, activation: str, rounding: Rounding) -> Mapping[str, object]:
    block = pad_to_power(width) if width <= _MOST_BLOCK else _BLOCK
    return {
        "MOST": MOST[rounding.dtype],
        "SMALLEST": SMALLEST,
        "IS_INT": rounding.dtype == torch.int8,
        "HAS_SCALE": rounding.scale is not None,
        "IS_ONE": width <= block,
        "BLOCK": block,
        "ACTIVATION": activation,
        **early_options(),
        "num_warps": max(1, min(16, block // 512)),
        "enable_fp_fusion": False,  # as the products whose gate this is
    }


def silu_mul_round(gate_up: Tensor, rounding: Rounding, activation: str = "silu") -> RoundedRows:
    """[tokens, pairs of gate and up] of 16-bit floats -> [tokens, width], a scale for each row."""
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.is_contiguous(), f"{gate_up.shape=} {gate_up.stride()=}"
    assert gate_up.element_size() == 2, f"pairs of halves, not {gate_up.dtype}"
    assert rounding.group in (None, width), f"{rounding=} {width=}"
    codes = torch.empty(tokens, width, dtype=rounding.dtype, device=gate_up.device)
    rows = RoundedRows(codes, torch.empty(tokens, 1, dtype=torch.float32, device=gate_up.device))
    if tokens:
        _launch(
            (tokens, 1, 1),
            (gate_up, *rows, width, rounding.scale or 1.0),
            _constants(width, activation, rounding),
            (gate_up.dtype, int_kind(width), alignments(gate_up, *rows)),
        )
    return rows
