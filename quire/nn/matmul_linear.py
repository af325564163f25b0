"""MatmulLinear: the CUDA linear kernel, our batch-invariant matmul over a shared workspace."""

from __future__ import annotations

from torch import Tensor

from quire.kernels.matmul import MatmulWorkspace, matmul


class MatmulLinear:
    def __init__(self, weight: Tensor, bias: Tensor | None, workspace: MatmulWorkspace) -> None:
        self.weight, self.bias, self.workspace = weight, bias, workspace

    def __call__(self, x: Tensor) -> Tensor:
        return matmul(x, self.weight, self.bias, workspace=self.workspace)
