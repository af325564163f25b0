"""Experts: the weights of all experts of a layer, and the two ways to multiply by a few of them.

    ExpertLoop      CPU: one Linear kernel per expert, and a loop over those that got tokens
    GroupedExperts  CUDA: two grouped products over tokens sorted by expert, without a loop

A token visits `top_k` experts: a *pair* is one such visit, numbered token by token. Either way a
row's bits depend on that row and its experts alone, and the results of a token's experts are added
in the order of their rank. Which experts a token visits is `moe.py`'s choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from quire.nn.gate import silu_mul
from quire.nn.linear import KernelChoice, LinearKernel


class Gate(Protocol):
    def __call__(self, gate_up: Tensor, /) -> Tensor:
        """[rows, 2 * ffn] gate | up -> [rows, ffn]; a row's bits depend on that row alone."""
        ...


class ExpertForm(NamedTuple):
    """What tells one family's experts from another's, apart from their sizes."""

    gate: Gate = silu_mul
    has_bias: bool = False


class Biases(NamedTuple):
    up: Tensor  # [experts, 2 * ffn]
    down: Tensor  # [experts, hidden]


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

    def __init__(
        self, up: list[LinearKernel], down: list[LinearKernel], gate: Gate = silu_mul
    ) -> None:
        self.up, self.down, self.gate = up, down, gate

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


class GroupedExperts:
    def __init__(
        self, up: Tensor, down: Tensor, biases: Biases | None = None, gate: Gate = silu_mul
    ) -> None:
        self.up, self.down, self.gate = up, down, gate
        self.up_bias = None if biases is None else biases.up
        self.down_bias = None if biases is None else biases.down

    def __call__(self, x: Tensor, visits: Visits, loads: Tensor | None) -> Tensor:
        from quire.kernels.grouped_matmul import multiply_gathered, multiply_scattered
        from quire.kernels.route import combine, sort_pairs

        pairs = sort_pairs(visits.experts, len(self.up), loads)
        # [pairs, 2 * ffn], sorted by expert
        gate_up = multiply_gathered(x, self.up, pairs, bias=self.up_bias)
        # [pairs, hidden], token by token again
        out = multiply_scattered(self.gate(gate_up), self.down, pairs, bias=self.down_bias)
        return combine(out, visits.weights)


class Experts:
    """Fused weights, to be filled one expert at a time; `finish` hands them to a kernel."""

    def __init__(
        self,
        num_experts: int,
        hidden: int,
        ffn: int,
        dtype: torch.dtype,
        device: torch.device,
        form: ExpertForm = ExpertForm(),  # noqa: B008 (a value, never changed)
    ) -> None:
        def empty(*shape: int) -> Tensor:
            return torch.empty(num_experts, *shape, dtype=dtype, device=device)

        # Gate and up of an expert lie behind one another, as in a dense layer's fused weight.
        self.up: Tensor | None = empty(2 * ffn, hidden)
        self.down: Tensor | None = empty(hidden, ffn)
        self.biases = Biases(empty(2 * ffn), empty(hidden)) if form.has_bias else None
        self.gate = form.gate
        self.kernel: ExpertKernel | None = None

    def parameters(self) -> dict[str, Fused]:
        """Every tensor to be filled, and its parts: one for each expert."""
        assert self.up is not None and self.down is not None, "filled and let go already"
        found = {"up": _by_gate(self.up), "down": _by_expert(self.down)}
        if self.biases is not None:
            found["up_bias"] = _by_gate(self.biases.up)
            found["down_bias"] = _by_expert(self.biases.down)
        return found

    def finish(self, choose: KernelChoice) -> None:
        """Weights are in. A kernel that packs them lets go of the fused tensors."""
        up, down, biases = self.up, self.down, self.biases
        assert up is not None and down is not None
        if up.is_cuda:
            self.kernel = GroupedExperts(up, down, biases, self.gate)
        else:
            ups = _kernels(choose, up, biases and biases.up)
            self.kernel = ExpertLoop(ups, _kernels(choose, down, biases and biases.down), self.gate)
        self.up = self.down = self.biases = None

    def __call__(self, x: Tensor, visits: Visits, loads: Tensor | None) -> Tensor:
        assert self.kernel is not None, "Experts used before their weights were loaded"
        return self.kernel(x, visits, loads)


def _kernels(choose: KernelChoice, weights: Tensor, biases: Tensor | None) -> list[LinearKernel]:
    rows: Sequence[Tensor | None] = [None] * len(weights) if biases is None else list(biases)
    return [choose(weight, bias) for weight, bias in zip(weights, rows, strict=True)]


class Fused(NamedTuple):
    """A tensor fused from several, and views of those."""

    tensor: Tensor
    parts: dict[str, Tensor]


def _by_expert(fused: Tensor) -> Fused:
    return Fused(fused, {str(e): part for e, part in enumerate(fused)})


def _by_gate(fused: Tensor) -> Fused:
    parts: dict[str, Tensor] = {}
    for e, own in enumerate(fused):
        parts[f"{e}.gate"], parts[f"{e}.up"] = own.chunk(2)
    return Fused(fused, parts)
