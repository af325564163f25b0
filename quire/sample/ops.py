"""SampleOps: what a device does for the sampler, one table for each device, as `nn/ops.py` for
layers.

The GPU draws in fused kernels without ever waiting; the CPU draws row by row in numpy, which is
faster there than batched torch and makes rows independent by nature.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from quire.sample.inputs import SampleInputs, TokenMask


class Best(NamedTuple):
    ranks: Tensor  # [S] int64: of the chosen values, 1 = largest
    tokens: Tensor  # [S, num] int64: the largest of each row, best first


class SampleOps(Protocol):
    def draw(self, logits: Tensor, inputs: SampleInputs) -> Tensor:
        """[S, V] any float -> [S] tokens, stored in the rows too. May write into `logits`."""
        ...

    def ranked(self, logits: Tensor, inputs: SampleInputs, num: int) -> Tensor:
        """[S, V] -> [S, num] int64 tokens by the time of their arrival: the first is the draw, the
        second what would be drawn in its place. Nothing is stored. May write into `logits`."""
        ...

    def ban(self, logits: Tensor, mask: TokenMask) -> None:
        """Writes -inf into [S, V] logits in place where the mask has no bit."""
        ...

    def best(self, logprobs: Tensor, chosen: Tensor, num: int) -> Best:
        """[S, V] f32 and [S, 1] values among them -> their ranks, and the `num` best tokens."""
        ...


def sample_ops_of(device: torch.device) -> SampleOps:
    if device.type == "cuda":
        from quire.sample.cuda_ops import CudaSampling  # not above: CPU installs need no triton

        return CudaSampling()
    from quire.sample.cpu_ops import CpuSampling

    return CpuSampling()
