"""TorchOps: every operation from the library, where neither CUDA nor our own CPU kernels are.

Products go through MKL where it is, whose tiles are filled so that rows keep their bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.models.spec import RouterSpec
from quire.nn.ops import (
    ExpertKernel,
    ExpertWeights,
    GateForm,
    HeadProduct,
    LinearKernel,
    NormedKernel,
    Table,
    Visits,
)
from quire.ops import torch_gate
from quire.ops.expert_loop import ExpertLoop, add_ranks
from quire.ops.int8_inputs import Int8Inputs
from quire.ops.mkl_linear import PackedLinear, can_pack
from quire.ops.route import choose_experts, sigmoid
from quire.quant.deferred import made
from quire.quant.weight import Dense, Weight, tensor_of


class TorchLinear:
    """Whatever the library does; not batch invariant."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class GatedLinear:
    """A linear kernel and the gate after it."""

    def __init__(self, kernel: LinearKernel, form: GateForm) -> None:
        self.kernel, self.form = kernel, form

    def __call__(self, x: Tensor) -> Tensor:
        return torch_gate.gate(self.kernel(x), self.form)


class TorchTable:
    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __call__(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)


class HeadLoop:
    """A kernel of its own for each head."""

    def __init__(self, kernels: list[LinearKernel], num_in: int) -> None:
        self.kernels, self.num_in = kernels, num_in

    def __call__(self, x: Tensor) -> Tensor:
        x, rest = x.tensor_split([self.num_in], -1)
        pieces = [kernel(x[:, i].contiguous()) for i, kernel in enumerate(self.kernels)]
        return torch.cat((torch.stack(pieces, 1), rest), -1)


class TorchOps:
    """`nn.ops.Ops`. Packed weights are expanded."""

    def linear(
        self, weights: Sequence[Weight], bias: Tensor | None, gate: str | None = None
    ) -> LinearKernel:
        weights = [made(weight) for weight in weights]
        weight = tensor_of(weights)
        kernel: LinearKernel = (PackedLinear if can_pack(weight) else TorchLinear)(weight, bias)
        kernel = Int8Inputs(kernel) if weights[0].inputs == "int8-row" else kernel
        return GatedLinear(kernel, GateForm(gate)) if gate else kernel

    def table(self, weight: Weight) -> Table:
        return TorchTable(weight.dequantize())

    def tied(self, weight: Weight) -> tuple[Table, LinearKernel]:
        return self.table(weight), self.linear([weight], None)

    def head_product(self, weight: Tensor) -> HeadProduct:
        kernels = [self.linear([Dense(w.contiguous())], None) for w in weight]
        return HeadLoop(kernels, weight.shape[-1])

    def experts(self, weights: ExpertWeights) -> ExpertKernel:
        return ExpertLoop.of(weights, self)

    def normed(self, kernel: LinearKernel, weight: Tensor, eps: float) -> NormedKernel | None:
        return None

    def chained(self, first: LinearKernel, second: LinearKernel) -> LinearKernel | None:
        return None

    def rms_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        if residual is not None:
            x = x + residual
        # Contiguous, as a lone row always is: strides must not choose the library's path.
        x = x.contiguous()
        if x.dtype == torch.float32:
            return F.rms_norm(x, weight.shape, weight, eps), x
        normed = F.rms_norm(x.float(), weight.shape, None, eps)
        if weight.dtype == x.dtype:
            return normed.to(x.dtype) * weight, x
        return (normed * weight).to(x.dtype), x  # rounded once, as Gemma's own

    def layer_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        if residual is not None:
            x = x + residual
        return F.layer_norm(x, weight.shape, weight, bias, eps), x

    def norm_heads(
        self, qkv: Tensor, widths: Sequence[int], weights: Sequence[Tensor], eps: float
    ) -> Tensor:
        q, k, v = qkv.split(list(widths), dim=1)
        # Contiguous, as a lone row always is: strides must not choose the library's path.
        q, _ = self.rms_norm(q.contiguous(), None, weights[0], eps)
        k, _ = self.rms_norm(k.contiguous(), None, weights[1], eps)
        return torch.cat((q, k, v), dim=1)

    def add_positions(self, x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
        return x + F.embedding(positions, table)

    def activate(self, x: Tensor, activation: str) -> Tensor:
        return torch_gate.activate(x, activation)

    def gate(self, x: Tensor, form: GateForm) -> Tensor:
        return torch_gate.gate(x, form)

    def route(self, logits: Tensor, rule: RouterSpec, correction: Tensor | None = None) -> Visits:
        return choose_experts(logits, rule, correction)

    def add_ranks(self, results: Tensor, weights: Tensor) -> Tensor:
        return add_ranks(results, weights)

    def add_gated(self, x: Tensor, gate: Tensor, added: Tensor) -> Tensor:
        return x + sigmoid(gate) * added
