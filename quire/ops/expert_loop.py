"""ExpertLoop: one Linear kernel per expert, and a loop over those that got tokens.

The cost follows the experts that were chosen, not those that there are.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quire.nn.ops import ExpertWeights, LinearKernel, Ops, Visits


class ExpertLoop:
    def __init__(
        self,
        up: list[LinearKernel],
        down: list[LinearKernel],
        gate: Callable[[Tensor], Tensor],
    ) -> None:
        self.up, self.down, self.gate = up, down, gate

    @staticmethod
    def of(weights: ExpertWeights, ops: Ops) -> ExpertLoop:
        def kernels(name: str) -> list[LinearKernel]:
            return [ops.linear(*weights.expert(name, e)) for e in range(weights.num_experts)]

        return ExpertLoop(kernels("up"), kernels("down"), lambda x: ops.gate(x, weights.gate))

    def __call__(self, x: Tensor, visits: Visits, loads: Tensor | None) -> Tensor:
        num_tokens, top_k = visits.experts.shape
        experts = visits.experts.reshape(-1)  # [pairs]
        order = experts.argsort(stable=True)  # pairs, sorted by expert
        counts = experts.bincount(minlength=len(self.up))
        if loads is not None:
            loads += counts
        sizes = [(expert, size) for expert, size in enumerate(counts.tolist()) if size]
        rows = x.index_select(0, order // top_k)
        gate_up = self._multiply(self.up, rows, sizes)
        sorted_out = self._multiply(self.down, self.gate(gate_up), sizes)
        out = torch.empty_like(sorted_out).index_copy_(0, order, sorted_out)
        return add_ranks(out.view(num_tokens, top_k, -1), visits.weights)

    @staticmethod
    def _multiply(
        kernels: list[LinearKernel], rows: Tensor, sizes: list[tuple[int, int]]
    ) -> Tensor:
        pieces = rows.split([size for _, size in sizes])
        return torch.cat(
            [kernels[expert](piece) for (expert, _), piece in zip(sizes, pieces, strict=True)]
        )


def add_ranks(results: Tensor, weights: Tensor) -> Tensor:
    """[tokens, top_k, hidden] times [tokens, top_k], summed in f32 in the order of ranks."""
    total = results[:, 0].float() * weights[:, :1]
    for rank in range(1, results.shape[1]):
        total = total + results[:, rank].float() * weights[:, rank, None]
    return total.to(results.dtype)
