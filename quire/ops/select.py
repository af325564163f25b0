"""Which table of operations a device has."""

from __future__ import annotations

import torch

from quire.native.library import Library
from quire.native.packs import Packs
from quire.nn.ops import Ops
from quire.ops.native_ops import NativeOps
from quire.ops.torch_ops import TorchOps


def ops_of(
    device: torch.device,
    library: Library | None,
    packs: Packs | None = None,
    dtype: torch.dtype = torch.float32,
) -> Ops:
    """`library`: of native kernels, for a CPU that has it; `packs`: what it packed before.
    `dtype`: of the model, which GPUs expand weights to."""
    if device.type == "cuda":
        from quire.ops.cuda_ops import CudaOps  # not above: CPU installs need no triton

        return CudaOps(device, dtype)
    return TorchOps() if library is None else NativeOps(library, packs)
