"""PackedExperts: the CUDA kernel of experts whose weights stay packed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from quire.kernels.expert_columns import expert_columns
from quire.kernels.grouped_packed import multiply_packed
from quire.kernels.route import SortedPairs, combine, sort_pairs
from quire.kernels.slabs import Slabs
from quire.nn.ops import ExpertWeights, Visits
from quire.ops.slabs_of import joined
from quire.quant.coded import Coded
from quire.quant.deferred import Deferred
from quire.quant.weight import Dense, Weight


class ExpertSlabs(NamedTuple):
    slabs: Slabs  # [experts * out, in]
    bias: Tensor | None  # [experts, out]
    orders: Tensor | None = None  # [experts, in] int32: the input of each column of an expert

    @property
    def num_bytes(self) -> int:
        orders = 0 if self.orders is None else self.orders.numel() * self.orders.element_size()
        return self.slabs.num_bytes + orders


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
        gate_up = _product(x, self.up, pairs, is_gather=True)
        # [pairs, hidden], token by token again
        out = _product(self.gate(gate_up), self.down, pairs, is_gather=False)
        return combine(out, visits.weights)


def _product(x: Tensor, part: ExpertSlabs, pairs: SortedPairs, is_gather: bool) -> Tensor:
    if part.slabs.order is not None:  # of all experts
        x = x.index_select(1, part.slabs.order)
    elif part.orders is not None:
        x = expert_columns(x, part.orders, pairs, is_gather)
        pairs = pairs._replace(top_k=1) if is_gather else pairs  # a row for each pair
    return multiply_packed(x, part.slabs, pairs, part.bias, is_gather)


class ExpertRows(NamedTuple):
    """All experts' weights of one product, one below the other."""

    weights: list[Weight]  # as few as can be
    bias: Tensor | None  # [experts, out]

    def unordered(self, num_experts: int) -> tuple[ExpertRows, Tensor | None]:
        """The same with columns of codes as they lie, and the input of each [experts, in]. None,
        and what there is as it is: all have one order, or an expert's parts have several."""
        coded = [weight for weight in self.weights if isinstance(weight, Coded)]
        own = sum(weight.shape[0] for weight in self.weights) // num_experts  # rows of an expert
        is_shared = len(coded) < 2 or all(weight.order is None for weight in coded)
        if is_shared or len(coded) < len(self.weights) or any(w.shape[0] % own for w in coded):
            return self, None
        plain = torch.arange(coded[0].shape[1], device=coded[0].codes.device)
        orders = [
            (plain if w.order is None else w.order).int().expand(w.shape[0] // own, len(plain))
            for w in coded
        ]
        weights = joined([replace(weight, order=None) for weight in coded])
        return ExpertRows(weights, self.bias), torch.cat(orders)

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
