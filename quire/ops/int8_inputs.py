"""Products whose inputs are rounded to eight bits, one scale per token: how BitNet was trained.

Here the rounded numbers stay in the model's dtype, for devices whose kernels know no such inputs.
Each row is rounded on its own, so a row's bits do not depend on the batch.
"""

from __future__ import annotations

from torch import Tensor

from quire.nn.ops import LinearKernel, SumKernel

LEAST, MOST = -128.0, 127.0
SMALLEST = 1e-5  # the least maximum of a row that is assumed, so that nothing divides by zero


def round_rows(x: Tensor) -> Tensor:
    """Round each row to 256 even steps, so that its largest magnitude is step 127."""
    wide = x.float()
    scale = MOST / wide.abs().amax(dim=-1, keepdim=True).clamp_min(SMALLEST)
    return ((wide * scale).round().clamp(LEAST, MOST) / scale).to(x.dtype)


class Int8Inputs:
    """A kernel whose inputs are rounded first."""

    def __init__(self, kernel: LinearKernel) -> None:
        self.kernel = kernel

    def __call__(self, x: Tensor) -> Tensor:
        return self.kernel(round_rows(x))


class Int8SumInputs(Int8Inputs):
    """The same of a kernel whose sums can be had: `SumKernel`."""

    def __init__(self, kernel: SumKernel) -> None:
        super().__init__(kernel)
        self.summed, self.pairs = kernel, kernel.pairs

    def sums(self, x: Tensor) -> Tensor:
        return self.summed.sums(round_rows(x))
