"""Linear: a shape and a kernel slot. The slot is filled once the weight has been loaded.

Kernels (one callable each):
    TorchLinear   whatever the library does; not batch invariant
    NativeLinear  CPU, our own product (see `native/`): weights of floats or of whole numbers, each
                  row's bits the same for any number of rows and threads and on any CPU
    PackedLinear  CPU fp32 through MKL, where nothing can be compiled: the same for rows alone
    MatmulLinear  CUDA through our own matmul, batch invariant as well (see `kernels/matmul.py`)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.native.library import find_library
from quire.native.linear import NativeLinear
from quire.nn.gate import silu_mul
from quire.quant.coded import Coded

Weights = Tensor | Sequence[Tensor | Coded]  # [out, in], or parts of it one below the other


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
        self.coded: dict[str | None, Coded] = {}  # parts (None: all) that are kept packed
        self.kernel: LinearKernel | None = None

    def finish(
        self, make: KernelChoice, keep_weight: bool = False, gate: str | None = None
    ) -> None:
        """Weights are in: choose the kernel and let go of what it does not need. With a gate,
        an activation's name, the layer gives activation(first part) * second part."""
        self.kernel = make(self._weights(), self.bias, gate)
        if not keep_weight:
            self.weight = None
        self.coded = {}

    def _weights(self) -> Weights:
        assert self.weight is not None
        if not self.coded:
            return self.weight
        if None in self.coded:
            return [self.coded[None]]
        views = self.weight.split(list(self.parts.values()))
        return [self.coded.get(part, view) for part, view in zip(self.parts, views, strict=True)]

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
        self, weight: Weights, bias: Tensor | None, gate: str | None = None
    ) -> LinearKernel: ...


def kernel_choice(device: torch.device) -> KernelChoice:
    """The invariant kernel of the device where there is one, the library's otherwise."""
    if device.type == "cuda":
        from quire.kernels.matmul import Layouts
        from quire.nn.matmul_linear import MatmulLinear

        layouts = Layouts()

        def on_cuda(weight: Weights, bias: Tensor | None, gate: str | None = None) -> LinearKernel:
            assert isinstance(weight, Tensor), "packed weights are for the native library"
            return MatmulLinear(weight, bias, layouts, gate)

        return on_cuda

    def elsewhere(weight: Weights, bias: Tensor | None, gate: str | None = None) -> LinearKernel:
        kernel = _cpu_kernel(weight, bias)
        return GatedLinear(kernel, gate) if gate else kernel

    return elsewhere


def _cpu_kernel(weight: Weights, bias: Tensor | None) -> LinearKernel:
    library, _ = find_library()
    if not isinstance(weight, Tensor) or (library and weight.dtype == torch.float32):
        assert library is not None, "packed weights are for the native library"
        parts = [weight] if isinstance(weight, Tensor) else weight
        return NativeLinear.of(parts, bias, library)
    return (PackedLinear if can_pack(weight) else TorchLinear)(weight, bias)
