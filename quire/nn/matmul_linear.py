"""MatmulLinear: the CUDA linear kernel, our batch-invariant matmul over a shared workspace."""

from __future__ import annotations

from torch import Tensor

from quire.kernels.matmul import MatmulWorkspace, PreparedMatmul


class MatmulLinear:
    def __init__(self, weight: Tensor, bias: Tensor | None, workspace: MatmulWorkspace) -> None:
        self.product = PreparedMatmul(weight, bias, workspace)

    def __call__(self, x: Tensor) -> Tensor:
        return self.product(x)
