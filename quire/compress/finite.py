"""Finite: a weight that is no number is named before anything is made of it.

A NaN in the last block is read by nothing behind it: a pass would end well and write it, or hide it
behind numbers that look like others. So every tensor is looked at when it is read.
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from quire.errors import CheckpointError
from quire.load.checkpoint import Checkpoint
from quire.load.safetensors_checkpoint import Shard

SAFETENSORS = ".safetensors"


def check_finite(tensor: Tensor, name: str, checkpoint: Checkpoint) -> Tensor:
    """The tensor. Raises CheckpointError with its name, its file and what to do."""
    if bool((found := tensor.isfinite()).all()):
        return tensor
    bad = (~found).nonzero()
    first = tuple(bad[0].tolist())
    raise CheckpointError(
        f"{name} in {_file_of(name, checkpoint)} is not finite: {len(bad)} of {tensor.numel()}"
        f" numbers are not, the first is {tensor[first].item()} at {list(first)}. The file is"
        " damaged, or its training diverged: fetch it anew, or take an earlier checkpoint"
    )


def _file_of(name: str, checkpoint: Checkpoint) -> Path | str:
    """Packed weights lie under longer names of the same module."""
    files = list(checkpoint.files)
    module = name.removesuffix(".weight") + "."
    for path in files if len(files) > 1 else ():
        if path.suffix == SAFETENSORS and any(
            held.startswith(module) for held in Shard(path).entries
        ):
            return path
    return files[0] if files else "the checkpoint"
