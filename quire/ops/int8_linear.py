"""Int8Linear: the CUDA linear kernel of signed bytes by signed bytes (W8A8).

Inputs are rounded row by row, products summed exactly: a row's bits do not depend on the batch, nor
on the tile. `int8_inputs.py` is the same in floats, for weights in other forms.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.eight_bit_matmul import eight_bit_matmul, inputs_of, pick_eight_bit
from quire.kernels.packed_matmul import multiprocessors
from quire.kernels.round_inputs import round_inputs
from quire.kernels.silu_mul import silu_mul
from quire.kernels.slabs import Slabs
from quire.ops.slabs_of import slabs_of
from quire.quant.coded import Coded
from quire.quant.weight import Weight

_CHECKED_OUTPUTS = 192
_CHECKED_ROWS = (1, 17, 33, 65, 129)  # every tile of `pick_eight_bit`


class Int8Linear:
    pairs = False

    def __init__(self, slabs: Slabs, bias: Tensor | None, gate: str | None = None) -> None:
        self.slabs, self.bias, self.gate = slabs, bias, gate

    def __call__(self, x: Tensor) -> Tensor:
        """[m, k] -> [m, n] in x's dtype; gated [m, n / 2]."""
        out = self._product(x, x.dtype)
        return silu_mul(out, self.gate) if self.gate else out

    def sums(self, x: Tensor) -> Tensor:
        return self._product(x, torch.float32)

    def _product(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        tile = pick_eight_bit(len(x), self.slabs.shape[0], multiprocessors(x.device))
        rounded = round_inputs(x, torch.int8)
        return eight_bit_matmul(rounded, self.slabs, self.bias, dtype, tile)


def can_multiply(weight: Weight, slabs: Slabs) -> bool:
    """Whether the weight asks for rounded inputs, and there is such a product."""
    return weight.inputs == "int8-row" and inputs_of(slabs) == torch.int8 and slabs.order is None


def difference(weight: Weight, dtype: torch.dtype) -> str | None:
    """What is wrong with such products on this device: fp64 holds their sums exactly."""
    some = weight.pick(slice(0, min(_CHECKED_OUTPUTS, weight.shape[0])))
    slabs = slabs_of(some)
    assert isinstance(some, Coded) and slabs is not None
    codes, scales = some.codes.view(torch.int8).double(), some.scales.float()[:, 0]
    kernel = Int8Linear(slabs, None)
    random = torch.Generator(codes.device).manual_seed(0)
    for rows in _CHECKED_ROWS:
        x = torch.randn(rows, codes.shape[1], generator=random, device=codes.device).to(dtype)
        rounded = round_inputs(x, torch.int8)
        sums = (rounded.codes.double() @ codes.T).float()
        if not torch.equal(kernel(x), (sums * rounded.scales * scales).to(dtype)):
            return f"int8 products of {rows} rows differ"
    return None
