"""The vendor's product of eight-bit floats, for rows with a scale each, where it has our bits.

Its slow accumulation is our chain: sums of 128 inputs, added in fp32; then the weight's scale, then
the input's. As with `vendor_matmul.py` nobody promises that, so each shape is compared on the
device before a model relies on it; with a bias too, which may be added before the product is
rounded. The library has no gate: of a gated weight it makes pairs of gate and up, and the gate is a
launch of its own. It is faster than ours from 129 rows on, with that launch from 225 on
(`eight_bit_configs.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from quire.kernels.eight_bit_weight import EightBitWeight
from quire.kernels.rehearsal import rehearsal
from quire.kernels.round_inputs import RoundedRows, Rounding, round_inputs
from quire.kernels.silu_mul import silu_mul

__all__ = ["Gated", "VendorEightBit"]

_CHECKED_ROWS = (129, 200, 331, 520, 1111, 2048)
# As for `vendor_matmul.py`: narrow or ragged weights are other kernels' work.
_LEAST_ROWS, _ROW_UNIT = 512, 64

Product = Callable[[RoundedRows], Tensor]


class Gated(NamedTuple):
    """What becomes of the pairs of a paired weight."""

    activation: str
    product: Product  # with the gate


class VendorEightBit:
    """Shared by the layers of a model: a shape is checked once."""

    def __init__(self) -> None:
        self._agreed: dict[tuple[object, ...], bool] = {}

    def __call__(self, x: RoundedRows, weight: EightBitWeight, bias: Tensor | None) -> Tensor:
        """[m, k] -> [m, n] bf16, the only type that it has."""
        return torch._scaled_mm(
            *(x.codes, weight.codes.t()),
            scale_a=x.scales,
            scale_b=weight.scales,
            bias=bias,
            out_dtype=torch.bfloat16,
            use_fast_accum=False,
        )

    def may_take(
        self,
        weight: EightBitWeight,
        bias: Tensor | None,
        ours: Product,
        gated: Gated | None = None,
    ) -> bool:
        """Whether it gives the bits of `ours`, which makes bf16 too and has no gate, for weights of
        this shape; and the gate after it those of `gated`."""
        n, _ = weight.shape
        is_plain = weight.group == 0 and not weight.is_int and weight.rows == 1
        if not is_plain or n < _LEAST_ROWS or n % _ROW_UNIT:
            return False
        key = (*weight.shape, bias is None, None if gated is None else gated.activation)
        if key not in self._agreed:
            self._agreed[key] = self._agrees(weight, bias, ours, gated)
        return self._agreed[key]

    def _agrees(
        self, weight: EightBitWeight, bias: Tensor | None, ours: Product, gated: Gated | None
    ) -> bool:
        inputs = _inputs(weight)
        if weight.codes.is_cuda:
            with rehearsal():
                for rows in _CHECKED_ROWS:
                    made = ours(_first(inputs, rows))
                    if gated is not None:
                        gated.product(_first(inputs, rows))
                        silu_mul(made, gated.activation, interleaved=True)
        for rows in _CHECKED_ROWS:
            x = _first(inputs, rows)
            try:
                theirs = self(x, weight, bias)
            except RuntimeError:  # another version, or another device, without such a product
                return False
            if not torch.equal(theirs, ours(x)):
                return False
            if gated is None:
                continue
            made = silu_mul(theirs, gated.activation, interleaved=True)
            if not torch.equal(made, gated.product(x)):
                return False
        return True


def _inputs(weight: EightBitWeight) -> RoundedRows:
    """Over several orders of magnitude, so that another order of sums shows."""
    random = torch.Generator(weight.codes.device).manual_seed(0)
    shape, device = (_CHECKED_ROWS[-1], weight.shape[1]), weight.codes.device
    x = torch.empty(shape, dtype=torch.bfloat16, device=device)
    spread = torch.empty_like(x).normal_(generator=random).exp_()
    return round_inputs(x.normal_(generator=random).mul_(spread), Rounding(weight.codes.dtype))


def _first(x: RoundedRows, rows: int) -> RoundedRows:
    return RoundedRows(x.codes[:rows], x.scales[:rows])
