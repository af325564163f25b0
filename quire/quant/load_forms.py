"""Forms that any matrix of floats can be brought into while it is loaded, by a user's word.

Nothing is calibrated: scales follow from the largest number of a row, a group or a block. `rtn-...`
are whole numbers (`rtn.py`); here are a row's int8, eight-bit floats, and two kinds of four bits.
Embeddings and heads are worth eight bits in all of them, whole numbers of them, and inputs as they
are. `sparse24` leaves weights out instead (`zeroed.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from quire.quant.codebook import Codebook
from quire.quant.coded import Coded
from quire.quant.form_name import ALONE, FP8_ROWS, INT8_ROWS, SPARSE24, check_form
from quire.quant.rtn import RtnForm, half
from quire.quant.scaled import Scaled
from quire.quant.weight import Inputs, Weight
from quire.quant.zeroed import Zeroed24

BLOCK = 32
E4M3_MOST = 448.0
# Of E2M1, and where a number goes to the next one; ties go to the even code.
E2M1_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12)
E2M1_TABLE = (*E2M1_DOUBLED, *(-v for v in E2M1_DOUBLED))
# Quantiles of a normal distribution, zero among them, as bitsandbytes has them.
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
NF4_BLOCKS = (64, 32, 16, 8)


class LoadForm(Protocol):
    def of(self, weight: Tensor) -> Weight | None:
        """[out, in] fp32 in this form; None where its shape or its numbers do not fit."""
        ...

    def for_heads(self) -> LoadForm:
        """The form of embeddings and heads beside it."""
        ...


def load_form(name: str, on_gpu: bool = False) -> LoadForm:
    """`on_gpu`: where inputs are rounded as well, if the name allows it. Raises NotSupported."""
    check_form(name)
    made: dict[str, LoadForm] = {
        INT8_ROWS: Int8Rows("int8-row" if on_gpu else "float"),
        INT8_ROWS + ALONE: Int8Rows(),
        FP8_ROWS: Float8Rows("fp8-row" if on_gpu else "float"),
        FP8_ROWS + ALONE: Float8Rows(),
        "nf4": NormalFloat4(),
        "mxfp4": MicroFloat4(),
        SPARSE24: Zeroed24(),
    }
    return made[name] if name in made else RtnForm.parse(name)


@dataclass(frozen=True, slots=True)
class Int8Rows:
    """Signed bytes with one scale for each output."""

    inputs: Inputs = "float"

    def of(self, weight: Tensor) -> Weight | None:
        num_in = weight.shape[1]
        if num_in % BLOCK or not _is_finite(weight):
            return None
        scales = half(weight.abs().amax(1, keepdim=True) / 127)
        codes = (weight / _nonzero(scales.float())).round_().clamp_(-127, 127).to(torch.int8)
        share = num_in // BLOCK
        return Coded(codes.view(torch.uint8), 8, BLOCK, scales, inputs=self.inputs, share=share)

    def for_heads(self) -> Int8Rows:
        return Int8Rows()


@dataclass(frozen=True, slots=True)
class Float8Rows:
    """E4M3 with one scale for each output."""

    inputs: Inputs = "float"

    def of(self, weight: Tensor) -> Weight | None:
        if not _is_finite(weight):
            return None
        scales = weight.abs().amax(1, keepdim=True) / E4M3_MOST
        codes = (weight / _nonzero(scales)).clamp_(-E4M3_MOST, E4M3_MOST).to(torch.float8_e4m3fn)
        return Scaled(codes, scales, (1, weight.shape[1]), self.inputs)

    def for_heads(self) -> Int8Rows:
        """E4M3 is for products with inputs of E4M3, which heads do not have."""
        return Int8Rows()


@dataclass(frozen=True, slots=True)
class NormalFloat4:
    """The nearest of 16 values, times the largest number of each 64 inputs (or fewer)."""

    def of(self, weight: Tensor) -> Weight | None:
        num_out, num_in = weight.shape
        block = next((size for size in NF4_BLOCKS if num_in % size == 0), None)
        if block is None or not _is_finite(weight):
            return None
        groups = weight.view(num_out, -1, block)
        scales = groups.abs().amax(-1)  # [out, groups]
        values = torch.tensor(NF4, device=weight.device)
        borders = (values[1:] + values[:-1]) / 2
        codes = torch.bucketize(groups / _nonzero(scales).unsqueeze(-1), borders)
        return Codebook(codes.byte().view(weight.shape), NF4, scales)

    def for_heads(self) -> RtnForm:
        return RtnForm(8, BLOCK)


@dataclass(frozen=True, slots=True)
class MicroFloat4:
    """E2M1 times a power of two for each 32 inputs."""

    def of(self, weight: Tensor) -> Weight | None:
        num_out, num_in = weight.shape
        if num_in % BLOCK or not _is_finite(weight):
            return None
        groups = weight.view(num_out, -1, BLOCK)
        # amax = m * 2**e with m in [0.5, 1): its leading power is 2**(e - 1), and 4 is E2M1's.
        exponents = (torch.frexp(groups.abs().amax(-1)).exponent - 3).clamp_(-126, 127)
        sizes = torch.ldexp(groups.abs(), -exponents.unsqueeze(-1))
        codes = torch.zeros_like(sizes, dtype=torch.uint8)
        for at, (low, high) in enumerate(pairwise(E2M1_DOUBLED)):
            border = (low + high) / 4  # of halves
            codes += (sizes >= border if at % 2 else sizes > border).byte()
        codes += 8 * (groups < 0).byte()
        scales = (exponents + 127).byte()  # the table is doubled, and 2**(e - 128) halves it
        return Coded(codes.view(weight.shape), 4, BLOCK, scales, table=E2M1_TABLE, are_powers=True)

    def for_heads(self) -> RtnForm:
        return RtnForm(8, BLOCK)


def _is_finite(weight: Tensor) -> bool:
    return bool(weight.isfinite().all())


def _nonzero(scales: Tensor) -> Tensor:
    """As divisors; what is all zeros has none."""
    return torch.where(scales == 0.0, 1.0, scales)
