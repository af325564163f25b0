"""Linear: a shape and a kernel slot. The slot is filled once the weight has been loaded.

Kernels (one callable each):
    TorchLinear   whatever the library does; not batch invariant
    PackedLinear  CPU fp32 through MKL with the weight packed once: faster for small batches, and
                  each row's bits are the same for any number of rows
    MatmulLinear  CUDA through our own matmul, batch invariant as well (see `kernels/matmul.py`)
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.nn.gate import silu_mul


class LinearKernel(Protocol):
    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, in] -> [tokens, out]."""
        ...


class TorchLinear:
    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class PackedLinear:
    """MKL's packed sgemm. The packing does not depend on the batch, so one serves all sizes.

    The last rows of a batch, when they do not fill a tile of the library, take another path in it
    and get other bits (which counts do so depends on the CPU and the number of threads). So the
    library only ever sees whole tiles: the batch is padded to a multiple of ROW_TILE rows, and
    the weight once to a multiple of COLUMN_TILE outputs. That costs little where reading the
    weight is the cost.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.num_out = weight.shape[0]
        missing = -self.num_out % COLUMN_TILE
        if missing:
            weight = F.pad(weight, (0, 0, 0, missing))
            bias = None if bias is None else F.pad(bias, (0, missing))
        self.packed = torch.ops.mkl._mkl_reorder_linear_weight(weight, PACK_HINT)
        # The op reads only the sizes of the original weight: a stride-0 stand-in frees its bytes.
        self.shape_of = weight.new_empty(1, 1).expand(weight.shape)
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        num_rows = x.shape[0]
        missing = -num_rows % ROW_TILE
        if missing:
            x = F.pad(x, (0, 0, 0, missing))
        out: Tensor = torch.ops.mkl._mkl_linear(
            x, self.packed, self.shape_of, self.bias, x.shape[0]
        )
        return out[:num_rows, : self.num_out]


ROW_TILE = 8  # rows; the least multiple that gave equal bits on every CPU tried, Intel and AMD
COLUMN_TILE = 64  # outputs
PACK_HINT = 32  # rows MKL is told to expect; results do not depend on it


def can_pack(weight: Tensor) -> bool:
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and torch.backends.mkl.is_available()
        and hasattr(torch.ops.mkl, "_mkl_linear")
    )


class Linear:
    """y = x @ weight.T + bias with a fused weight of one or several parts (q|k|v, gate|up)."""

    def __init__(
        self,
        num_in: int,
        parts: dict[str, int],
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        num_out = sum(parts.values())
        self.parts = parts
        self.weight: Tensor | None = torch.empty(num_out, num_in, dtype=dtype, device=device)
        self.bias = torch.empty(num_out, dtype=dtype, device=device) if bias else None
        self.kernel: LinearKernel | None = None

    def finish(
        self, make: KernelChoice, keep_weight: bool = False, gate: str | None = None
    ) -> None:
        """Weights are in: choose the kernel and let go of what it does not need. With a gate,
        an activation's name, the layer gives activation(first part) * second part."""
        assert self.weight is not None
        self.kernel = make(self.weight, self.bias, gate)
        if not keep_weight:
            self.weight = None

    def __call__(self, x: Tensor) -> Tensor:
        assert self.kernel is not None, "Linear used before its weight was loaded"
        return self.kernel(x)


class GatedLinear:
    """A linear kernel and the gate after it, where no kernel does both at once."""

    def __init__(self, kernel: LinearKernel, gate: str) -> None:
        self.kernel, self.gate = kernel, gate

    def __call__(self, x: Tensor) -> Tensor:
        return silu_mul(self.kernel(x), self.gate)


class KernelChoice(Protocol):
    def __call__(
        self, weight: Tensor, bias: Tensor | None, gate: str | None = None
    ) -> LinearKernel: ...


def kernel_choice(device: torch.device) -> KernelChoice:
    """The invariant kernel of the device where there is one, the library's otherwise."""
    if device.type == "cuda":
        from quire.kernels.matmul import Layouts
        from quire.nn.matmul_linear import MatmulLinear

        layouts = Layouts()

        def on_cuda(weight: Tensor, bias: Tensor | None, gate: str | None = None) -> LinearKernel:
            return MatmulLinear(weight, bias, layouts, gate)

        return on_cuda

    def elsewhere(weight: Tensor, bias: Tensor | None, gate: str | None = None) -> LinearKernel:
        kernel = (PackedLinear if can_pack(weight) else TorchLinear)(weight, bias)
        return GatedLinear(kernel, gate) if gate else kernel

    return elsewhere
