"""MatmulLinear: the CUDA linear kernel, our batch-invariant matmul with its layouts shared."""

from __future__ import annotations

from torch import Tensor

from quire.kernels.matmul import Layouts, PreparedMatmul, interleave


class MatmulLinear:
    def __init__(
        self, weight: Tensor, bias: Tensor | None, layouts: Layouts, gate: str | None
    ) -> None:
        if gate is not None:
            weight = interleave(weight)
            bias = None if bias is None else interleave(bias)
        self.pairs = gate is not None
        self.product = PreparedMatmul(weight, bias, layouts, gate)

    def __call__(self, x: Tensor) -> Tensor:
        return self.product(x)

    def sums(self, x: Tensor) -> Tensor:
        return self.product.sums(x)
