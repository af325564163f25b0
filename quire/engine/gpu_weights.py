"""What a GPU keeps of packed weights, and what it says of them."""

from __future__ import annotations

import torch

from quire.config import Decision, EngineArgs
from quire.load.checkpoint import Checkpoint
from quire.load.gguf_checkpoint import GGUFCheckpoint
from quire.memory.sizing import size_text
from quire.nn.ops import Ops
from quire.quant.methods import method_of


def keeps_packed_on(device: torch.device, args: EngineArgs, checkpoint: Checkpoint) -> bool:
    """Whether a GPU keeps what is stored packed. A dtype that was asked for is what weights are
    expanded to, as on a CPU."""
    is_packed = isinstance(checkpoint, GGUFCheckpoint) or method_of(checkpoint.config) is not None
    return device.type == "cuda" and args.dtype == "auto" and is_packed


def gpu_weight_decisions(ops: Ops, device: str) -> list[Decision]:
    """Forms with the bytes they take, those that had to be expanded, and those whose inputs are not
    rounded; none of plain floats."""
    if device != "cuda":
        return []
    from quire.ops.cuda_ops import CudaOps  # not above: CPU installs need no triton

    return packed_decisions(ops) if isinstance(ops, CudaOps) else []


def packed_decisions(ops: Ops) -> list[Decision]:
    from quire.ops.cuda_ops import CudaOps

    assert isinstance(ops, CudaOps)
    packed = ops.packed
    if not packed.kept:
        return []
    forms = ", ".join(f"{name} {size_text(size)}" for name, size in packed.kept.most_common())
    made = [Decision("weights", forms, "their kernels were checked here")]
    for form, why in packed.refused.items():
        made.append(Decision("expanded weights", form, why))
    for form, why in packed.unrounded.items():
        made.append(Decision("inputs", "not rounded", f"products of {form} fail here: {why}"))
    return made
