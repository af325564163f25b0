"""EightBitLinear: the CUDA linear kernel of eight bits by eight bits (W8A8).

Inputs are rounded row by row, and every kernel gives the same sums: a row's bits do not depend on
the batch. `int8_inputs.py` is the same in floats, for weights in other forms.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quire.kernels.eight_bit_configs import MOST_EIGHT_BIT_ROWS, MOST_GATED_ROWS
from quire.kernels.eight_bit_matmul import EightBitTile, eight_bit_matmul, pick_eight_bit
from quire.kernels.eight_bit_weight import CHAIN, EightBitWeight
from quire.kernels.hopper import has_hopper_kernels
from quire.kernels.matmul import interleave
from quire.kernels.packed_matmul import multiprocessors
from quire.kernels.rehearsal import rehearsal
from quire.kernels.round_inputs import RoundedRows, Rounding, round_inputs
from quire.kernels.silu_mul import silu_mul
from quire.kernels.silu_mul_round import silu_mul_round
from quire.kernels.vendor_eight_bit import Gated, VendorEightBit
from quire.ops.eight_bit_of import EightBitForm, eight_bit_weight
from quire.quant.weight import Weight

if TYPE_CHECKING:
    from quire.kernels.many_eight_bit import ManyEightBit
    from quire.kernels.stream_eight_bit import StreamEightBit

_CHECKED_OUTPUTS = 192
_CHECKED_ROWS = (1, 9, 17, 33, 65, 129)  # every tile, and every streamed one
_ONE_TILE = EightBitTile(16, 64, 3, 4, 64)
_FAR = 1e-3  # sums of 128 keep 13 bits or so; what is this far from a sum has another cause


class EightBitLinear:
    def __init__(
        self,
        weight: EightBitWeight,
        rounding: Rounding,
        bias: Tensor | None,
        gate: str | None = None,
        library: VendorEightBit | None = None,
    ) -> None:
        """`library`: asked for many rows in bf16 where it has our bits."""
        if gate is not None:
            assert weight.paired
            bias = None if bias is None else interleave(bias)
        self.weight, self.rounding, self.bias, self.gate = weight, rounding, bias, gate
        self.pairs = weight.paired
        self.few, self.many = _on_hopper(weight, bias, gate)
        self.library: VendorEightBit | None = None
        if library is not None and self.many is not None:
            own = partial(self.multiply, dtype=torch.bfloat16)
            ours = (self._ungated, Gated(gate, own)) if gate else (own, None)
            self.library = library if library.may_take(weight, self.bias, *ours) else None

    def __call__(self, x: Tensor) -> Tensor:
        """[m, k] -> [m, n] in x's dtype; gated [m, n / 2]."""
        return self.multiply(round_inputs(x, self.rounding), x.dtype)

    def multiply(self, x: RoundedRows, dtype: torch.dtype) -> Tensor:
        """Rows that somebody has rounded as `rounding` says."""
        m, n = len(x.codes), self.weight.shape[0]
        if (made := self._of_library(x, dtype)) is not None:
            return silu_mul(made, self.gate, interleaved=True) if self.gate else made
        if self.few is not None and m and (config := self.few.pick(m)) is not None:
            self.few(x, out := self._out(x, dtype), config)
            return out
        if self.many is not None and (tile_n := self.many.pick(m)) is not None:
            self.many(x, out := self._out(x, dtype), tile_n)
            return out
        tile = pick_eight_bit(m, n, multiprocessors(x.codes.device))
        return eight_bit_matmul(x, self.weight, self.bias, dtype, tile, self.gate)

    def rounded(self, x: RoundedRows, dtype: torch.dtype, rounding: Rounding) -> RoundedRows:
        """What `multiply` makes, rounded for the product that reads it."""
        if self.gate and (made := self._of_library(x, dtype)) is not None:
            return silu_mul_round(made, rounding, self.gate)
        return round_inputs(self.multiply(x, dtype), rounding)

    def _of_library(self, x: RoundedRows, dtype: torch.dtype) -> Tensor | None:
        """The product without the gate; None: ours are faster, or the library has other bits."""
        is_many = len(x.codes) > (MOST_GATED_ROWS if self.gate else MOST_EIGHT_BIT_ROWS)
        if self.library is None or not is_many or dtype != torch.bfloat16:
            return None
        return self.library(x, self.weight, self.bias)

    def _ungated(self, x: RoundedRows) -> Tensor:
        tile = pick_eight_bit(len(x.codes), self.weight.shape[0], multiprocessors(x.codes.device))
        return eight_bit_matmul(x, self.weight, self.bias, torch.bfloat16, tile)

    def sums(self, x: Tensor) -> Tensor:
        """[m, k] -> [m, n] in fp32, without the gate: of the kernel that takes any."""
        tile = pick_eight_bit(len(x), self.weight.shape[0], multiprocessors(x.device))
        rounded = round_inputs(x, self.rounding)
        return eight_bit_matmul(rounded, self.weight, self.bias, torch.float32, tile)

    def _out(self, x: RoundedRows, dtype: torch.dtype) -> Tensor:
        width = self.weight.shape[0] // (2 if self.gate else 1)
        return torch.empty(len(x.codes), width, dtype=dtype, device=x.codes.device)


def _on_hopper(
    weight: EightBitWeight, bias: Tensor | None, gate: str | None
) -> tuple[StreamEightBit | None, ManyEightBit | None]:
    """The kernels for few rows and for many; None where they cannot run."""
    if not has_hopper_kernels(weight.codes.device) or weight.shape[1] % CHAIN:
        return None, None
    from quire.kernels.many_eight_bit import ManyEightBit
    from quire.kernels.stream_eight_bit import StreamEightBit

    return StreamEightBit(weight, bias, gate), ManyEightBit(weight, bias, gate)


def difference(weight: Weight, form: EightBitForm, dtype: torch.dtype) -> str | None:
    """What is wrong with such products on this device: tiles that differ, or sums that are far from
    those of fp64, which are exact for whole numbers."""
    some = eight_bit_weight(weight.pick(slice(0, min(_CHECKED_OUTPUTS, weight.shape[0]))), form)
    kernel = EightBitLinear(some, form.rounding, None)
    random = torch.Generator(some.codes.device).manual_seed(0)
    shape = (_CHECKED_ROWS[-1], some.shape[1])
    x = torch.randn(shape, generator=random, device=some.codes.device).to(dtype)
    rounded = round_inputs(x, form.rounding)
    if x.is_cuda:
        with rehearsal():
            for rows in _CHECKED_ROWS:
                kernel(x[:rows])
            _by_tiles(kernel, rounded, dtype)
    one = eight_bit_matmul(rounded, some, None, dtype, _ONE_TILE)
    for rows in _CHECKED_ROWS:
        if not torch.equal(kernel(x[:rows]), one[:rows]):
            return f"products of {rows} rows differ"
    if not all(torch.equal(each, one) for each in _by_tiles(kernel, rounded, dtype)):
        return "products of many rows differ"
    want = _reference(rounded, some)
    if some.is_int:
        return None if torch.equal(one, want.to(dtype)) else "whole numbers are not summed exactly"
    far = (one.double() - want).abs().max() / want.abs().max()
    return None if far < _FAR + torch.finfo(dtype).eps else f"sums are {far:.1e} off"


def _by_tiles(kernel: EightBitLinear, x: RoundedRows, dtype: torch.dtype) -> list[Tensor]:
    """By the kernel for many rows, in each of its tiles."""
    made: list[Tensor] = []
    if kernel.many is None:
        return made
    for tile_n in kernel.many.tiles:
        out = torch.empty(len(x.codes), kernel.weight.shape[0], dtype=dtype, device=x.codes.device)
        kernel.many(x, out, tile_n)
        made.append(out)
    return made


def _reference(x: RoundedRows, weight: EightBitWeight) -> Tensor:
    """fp64; of whole numbers rounded as kernels do after the sum."""
    if weight.is_int:
        sums = (x.codes.double() @ weight.codes.double().T).float()
        return (sums * weight.row_scales) * x.scales
    k = x.codes.shape[1]
    wide = x.scales.repeat_interleave(weight.group or k, 1)[:, :k].double()
    scales = weight.row_scales.repeat_interleave(weight.group or k, 0)[:k].double()
    return (x.codes.double() * wide) @ (weight.codes.double() * scales.T).T
