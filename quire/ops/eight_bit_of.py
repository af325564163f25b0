"""Which weights are multiplied with inputs of eight bits, and what they are as plain bytes.

A weight says how its inputs are rounded (`quant/weight.py`); here it is decided whether there are
kernels for the two. Inputs that no kernel multiplies stay floats.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels.eight_bit_weight import CHAIN, EightBitWeight
from quire.kernels.matmul import interleave
from quire.kernels.round_inputs import Rounding
from quire.quant.coded import Coded
from quire.quant.scaled import Scaled, ceil
from quire.quant.weight import Weight

__all__ = ["EightBitForm", "eight_bit_form", "eight_bit_weight"]

_UNIT = 16  # inputs: rows of bytes must be aligned


@dataclass(frozen=True, slots=True)
class EightBitForm:
    rounding: Rounding
    group: int  # inputs that share a scale of the weight; 0: all

    @property
    def name(self) -> str:
        """
        >>> EightBitForm(Rounding(torch.int8), 0).name
        'int8 by int8'
        """
        if self.rounding.dtype == torch.int8:
            return "int8 by int8"
        return f"e4m3 g{self.group} by e4m3" if self.group else "e4m3 by e4m3"


def eight_bit_form(weight: Weight) -> EightBitForm | None:
    """None: there is no such product, or the weight asks for none."""
    if weight.shape[1] % _UNIT:
        return None
    if isinstance(weight, Coded):
        is_whole = weight.inputs == "int8-row" and _is_signed_bytes(weight)
        return EightBitForm(Rounding(torch.int8), 0) if is_whole else None
    if not isinstance(weight, Scaled) or weight.tensor.dtype != torch.float8_e4m3fn:
        return None
    is_row = weight.block[1] >= weight.shape[1]
    if weight.inputs == "fp8-128":
        rounding = Rounding(torch.float8_e4m3fn, CHAIN)
        return EightBitForm(rounding, CHAIN) if is_row or weight.block[1] == CHAIN else None
    if weight.inputs == "fp8-row" and is_row:
        return EightBitForm(Rounding(torch.float8_e4m3fn), 0)
    if weight.inputs == "fp8-one" and is_row:
        return EightBitForm(Rounding(torch.float8_e4m3fn, scale=weight.input_scale), 0)
    return None


def _is_signed_bytes(weight: Coded) -> bool:
    """With one scale for a row and nothing else."""
    beside = (weight.offsets, weight.zeros, weight.super_scales, weight.order, weight.tables)
    is_plain = all(each is None for each in beside) and weight.table is None
    is_plain = is_plain and not weight.are_powers
    scales = weight.scales
    return (
        weight.bits == 8
        and weight.zero == 0
        and is_plain
        and (scales.shape[1] == 1 or bool((scales == scales[:, :1]).all()))
    )


def eight_bit_weight(
    weight: Weight, form: EightBitForm, paired: bool = False, num_experts: int = 1
) -> EightBitWeight:
    """`paired`: rows gate | up as gate, up, gate, up, within each of the experts that lie one below
    the other."""
    shared = 1
    if isinstance(weight, Coded):
        codes, scales = weight.codes.view(torch.int8), weight.scales[:, :1].float()
    else:
        assert isinstance(weight, Scaled), f"got {type(weight).__name__}"
        codes, scales = weight.tensor, weight.scales
        if form.group and scales.shape[1] == 1:
            scales = scales.expand(-1, ceil(weight.shape[1], form.group))
        if form.group and weight.block[0] < weight.shape[0]:
            shared = weight.block[0]
        else:
            scales = scales.repeat_interleave(weight.block[0], 0)[: weight.shape[0]]
    if paired:  # indexing knows no floats of eight bits everywhere, bytes it does
        codes = _paired(codes.view(torch.uint8), num_experts).view(codes.dtype)
        scales = _paired(scales, num_experts) if shared == 1 else scales
    return EightBitWeight(
        codes.contiguous(), scales.t().contiguous(), form.group, paired, rows=shared
    )


def _paired(rows: Tensor, num_experts: int) -> Tensor:
    """[experts * 2 f, ...]"""
    of_experts = rows.view(num_experts, -1, rows.shape[1]).transpose(0, 1)
    return interleave(of_experts).transpose(0, 1).reshape(rows.shape)
