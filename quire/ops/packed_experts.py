"""PackedExperts: the CUDA kernel of experts whose weights stay packed."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from quire.kernels.grouped_packed import multiply_packed
from quire.kernels.route import combine, sort_pairs
from quire.kernels.slabs import Slabs
from quire.nn.ops import ExpertWeights, Visits
from quire.ops.slabs_of import joined
from quire.quant.deferred import Deferred
from quire.quant.weight import Dense, Weight


class ExpertSlabs(NamedTuple):
    slabs: Slabs  # [experts * out, in]
    bias: Tensor | None  # [experts, out]


class PackedExperts:
    """Two grouped products over tokens sorted by expert, without a loop."""

    def __init__(
        self,
        up: ExpertSlabs,
        down: ExpertSlabs,
        num_experts: int,
        gate: Callable[[Tensor], Tensor],
    ) -> None:
        self.up, self.down, self.num_experts, self.gate = up, down, num_experts, gate

    def __call__(self, x: Tensor, visits: Visits, loads: Tensor | None) -> Tensor:
        pairs = sort_pairs(visits.experts.int(), self.num_experts, loads)
        # [pairs, 2 * ffn], sorted by expert
        gate_up = multiply_packed(x, self.up.slabs, pairs, self.up.bias, is_gather=True)
        # [pairs, hidden], token by token again
        out = multiply_packed(
            self.gate(gate_up), self.down.slabs, pairs, self.down.bias, is_gather=False
        )
        return combine(out, visits.weights)


class ExpertRows(NamedTuple):
    """All experts' weights of one product, one below the other."""

    weights: list[Weight]  # as few as can be
    bias: Tensor | None  # [experts, out]

    def floats(self, num_experts: int, expanded: Callable[[Weight], Tensor]) -> Tensor:
        """[experts, out, in]"""
        rows = torch.cat([expanded(weight) for weight in self.weights])
        return rows.view(num_experts, -1, rows.shape[1])


def are_packed(weights: ExpertWeights) -> bool:
    """Whether they came part by part, in whatever form; else they are one tensor of floats."""
    parts, _ = weights.expert("up", 0)
    return len(parts) > 1 or isinstance(parts[0], Deferred) or not isinstance(parts[0], Dense)


def rows_of(weights: ExpertWeights, name: str, ready: Callable[[Weight], Weight]) -> ExpertRows:
    parts: list[Weight] = []
    biases: list[Tensor] = []
    for number in range(weights.num_experts):
        own, bias = weights.expert(name, number)
        parts += [ready(part) for part in own]
        biases += [] if bias is None else [bias]
    return ExpertRows(joined(parts), torch.stack(biases) if biases else None)
