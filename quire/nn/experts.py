"""Experts: the weights of all experts of a layer, and the two ways to multiply by a few of them.

    ExpertLoop      CPU: one Linear kernel per expert, and a loop over those that got tokens
    GroupedExperts  CUDA: two grouped products over tokens sorted by expert, without a loop

A token visits `top_k` experts: a *pair* is one such visit, numbered token by token. Either way a
row's bits depend on that row and its experts alone, and the results of a token's experts are added
in the order of their rank. Which experts a token visits is `moe.py`'s choice.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from quire.nn.gate import silu_mul
from quire.nn.linear import KernelChoice, LinearKernel


class Visits(NamedTuple):
    """The experts of each token, best first, and what their results are multiplied by."""

    experts: Tensor  # [tokens, top_k] integers
    weights: Tensor  # [tokens, top_k] f32


class ExpertKernel(Protocol):
    def __call__(self, x: Tensor, visits: Visits, loads: Tensor | None) -> Tensor:
        """[tokens, hidden] -> the same; adds each expert's number of tokens to `loads`."""
        ...


class ExpertLoop:
    """The cost follows the experts that were chosen, not those that there are."""

    def __init__(self, up: list[LinearKernel], down: list[LinearKernel]) -> None:
        self.up, self.down = up, down

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
        sorted_out = self._multiply(self.down, silu_mul(gate_up), sizes)
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


class GroupedExperts:
    def __init__(self, up: Tensor, down: Tensor) -> None:
        self.up, self.down = up, down

    def __call__(self, x: Tensor, visits: Visits, loads: Tensor | None) -> Tensor:
        from quire.kernels.grouped_matmul import multiply_gathered, multiply_scattered
        from quire.kernels.route import combine, sort_pairs

        pairs = sort_pairs(visits.experts, len(self.up), loads)
        gate_up = multiply_gathered(x, self.up, pairs)  # [pairs, 2 * ffn], sorted by expert
        out = multiply_scattered(silu_mul(gate_up), self.down, pairs)  # token by token again
        return combine(out, visits.weights)


class Experts:
    """Fused weights, to be filled one expert at a time; `finish` hands them to a kernel."""

    def __init__(
        self, num_experts: int, hidden: int, ffn: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        # Gate and up of an expert lie behind one another, as in a dense layer's fused weight.
        self.up: Tensor | None = torch.empty(
            num_experts, 2 * ffn, hidden, dtype=dtype, device=device
        )
        self.down: Tensor | None = torch.empty(num_experts, hidden, ffn, dtype=dtype, device=device)
        self.kernel: ExpertKernel | None = None

    def finish(self, choose: KernelChoice) -> None:
        """Weights are in. A kernel that packs them lets go of the fused tensors."""
        up, down = self.up, self.down
        assert up is not None and down is not None
        if up.is_cuda:
            self.kernel = GroupedExperts(up, down)
        else:
            self.kernel = ExpertLoop(
                [choose(weight, None) for weight in up], [choose(weight, None) for weight in down]
            )
        self.up = self.down = None

    def __call__(self, x: Tensor, visits: Visits, loads: Tensor | None) -> Tensor:
        assert self.kernel is not None, "Experts used before their weights were loaded"
        return self.kernel(x, visits, loads)
