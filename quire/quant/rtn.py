"""Rounding to nearest: any matrix of floats as codes of 4 or 8 bits, made while it is loaded.

A group of inputs shares an fp16 scale, and with `-asym` a zero of its own. Nothing is
calibrated; what a checkpoint was quantised to with care is better kept as it is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire.quant.coded import Coded
from quire.quant.form_name import GROUPS, parse_rtn

BLOCK = 32


@dataclass(frozen=True, slots=True)
class RtnForm:
    bits: int
    group: int  # inputs that share a scale
    has_zeros: bool = False

    @staticmethod
    def parse(name: str) -> RtnForm:
        """
        >>> RtnForm.parse("rtn-int4-g32")
        RtnForm(bits=4, group=32, has_zeros=False)
        """
        return RtnForm(*parse_rtn(name))

    def of(self, weight: Tensor) -> Coded | None:
        """[out, in] fp32 in this form; None where its inputs are no multiple of a block. Inputs
        that no group fits get the largest that does."""
        num_out, num_in = weight.shape
        group = next((g for g in reversed(GROUPS) if g <= self.group and num_in % g == 0), None)
        if group is None or not bool(weight.isfinite().all()):
            return None
        groups = weight.view(num_out, num_in // group, group)
        low, high = groups.amin(-1), groups.amax(-1)
        if self.has_zeros:
            return self._with_zeros(groups, low, high)
        most = 2 ** (self.bits - 1)
        scale = half(torch.maximum(high, -low) / (most - 0.5))
        codes = (groups / _nonzero(scale)).round_().clamp_(-most, most - 1)
        share = group // BLOCK
        if self.bits == 8:
            packed = codes.to(torch.int8).view(torch.uint8)
            return Coded(packed.view(weight.shape), 8, BLOCK, scale, share=share)
        packed = (codes + most).byte().view(weight.shape)
        return Coded(packed, self.bits, BLOCK, scale, zero=most, share=share)

    def for_heads(self) -> RtnForm:
        return replace(self, bits=8)

    def _with_zeros(self, groups: Tensor, low: Tensor, high: Tensor) -> Coded:
        """Whole numbers from the least to the most of each group, zero among them."""
        # Codes of eight bits are signed, and so are their zeros.
        most, middle = 2**self.bits - 1, 128 if self.bits == 8 else 0
        low, high = low.clamp(max=0.0), high.clamp(min=0.0)
        scale = half((high - low) / most)
        zero = (-low / _nonzero(scale).squeeze(-1)).round_().clamp_(0, most)
        codes = (groups / _nonzero(scale)).round_().add_(zero.unsqueeze(-1)).clamp_(0, most)
        kind = torch.int8 if middle else torch.uint8
        shape = (groups.shape[0], groups.shape[1] * groups.shape[2])
        packed = (codes - middle).to(kind).view(torch.uint8).view(shape)
        zeros = (zero - middle).to(kind)
        share = groups.shape[2] // BLOCK
        return Coded(packed, self.bits, BLOCK, scale, zeros=zeros, share=share)


def half(values: Tensor) -> Tensor:
    """fp16, the largest of it for what is larger."""
    most = torch.finfo(torch.float16).max
    return values.clamp(-most, most).half()


def _nonzero(scale: Tensor) -> Tensor:
    """As divisors [out, groups, 1]; a group of zeros has none."""
    wide = scale.float()
    return torch.where(wide == 0.0, 1.0, wide).unsqueeze(-1)
