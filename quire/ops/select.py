"""Which table of operations a device has."""

from __future__ import annotations

import torch

from quire.native.library import Library
from quire.native.packs import Packs
from quire.nn.ops import Ops
from quire.ops.native_ops import NativeOps
from quire.ops.torch_ops import TorchOps


def ops_of(device: torch.device, library: Library | None, packs: Packs | None = None) -> Ops:
    """`library`: of native kernels, for a CPU that has it; `packs`: what it packed before."""
    if device.type == "cuda":
        from quire.ops.cuda_ops import CudaOps  # not above: CPU installs need no triton

        return CudaOps()
    return TorchOps() if library is None else NativeOps(library, packs)
