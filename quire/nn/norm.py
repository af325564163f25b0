"""RMSNorm and LayerNorm, each with the residual add folded in: (x, residual) -> (normed, sum)."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.nn.ops import LinearKernel, NormedKernel, Ops


class RMSNorm:
    """`offset` is added to the weight, in fp32, before it scales (Gemma)."""

    def __init__(
        self,
        size: int,
        eps: float,
        dtype: torch.dtype,
        device: torch.device,
        offset: float = 0.0,
    ) -> None:
        self.weight = torch.empty(size, dtype=dtype, device=device)
        self.eps, self.offset = eps, offset
        self.ops: Ops | None = None
        self._sum: Tensor | None = None  # of weight and offset, once the weight is there

    def scale(self) -> Tensor:
        """What the normed row is multiplied by: fp32 where there is an offset. The weight must
        have been loaded."""
        if self.offset == 0.0:
            return self.weight
        if self._sum is None:
            self._sum = self.weight.float() + self.offset
        return self._sum

    def finish(self, ops: Ops) -> None:
        self.ops = ops

    def into(self, kernel: LinearKernel | None) -> NormedKernel | None:
        """Both together, for a kernel that alone reads what this makes; None: one after the
        other."""
        assert self.ops is not None and kernel is not None, "joined before weights were loaded"
        return self.ops.normed(kernel, self.scale(), self.eps)

    def __call__(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        assert self.ops is not None, "RMSNorm used before its weight was loaded"
        return self.ops.rms_norm(x, residual, self.scale(), self.eps)


class LayerNorm:
    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        self.weight = torch.empty(size, dtype=dtype, device=device)
        self.bias = torch.empty(size, dtype=dtype, device=device)
        self.eps = eps
        self.ops: Ops | None = None

    def finish(self, ops: Ops) -> None:
        self.ops = ops

    def into(self, kernel: LinearKernel | None) -> NormedKernel | None:
        return None

    def __call__(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        assert self.ops is not None, "LayerNorm used before its weight was loaded"
        return self.ops.layer_norm(x, residual, self.weight, self.bias, self.eps)
