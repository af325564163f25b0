"""CudaOps: the operations of a GPU, our own kernels throughout.

Kernels are imported here and nowhere below, so that CPU installs need no triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.clamped_swiglu import clamped_swiglu
from quire.kernels.grouped_matmul import multiply_gathered, multiply_scattered
from quire.kernels.latent_heads import multiply_heads
from quire.kernels.matmul import Layouts
from quire.kernels.rms_norm import rms_norm
from quire.kernels.route import combine, route, sort_pairs
from quire.kernels.silu_mul import silu_mul
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
from quire.ops.eight_bit_experts import EightBitExperts, can_fuse
from quire.ops.eight_bit_joints import EightBitJoints
from quire.ops.int8_inputs import Int8SumInputs
from quire.ops.matmul_linear import MatmulLinear
from quire.ops.packed_experts import PackedExperts, are_packed, rows_of
from quire.ops.packed_forms import PackedForms, PackedTable, as_it_is, has_order
from quire.ops.packed_linear import PackedLinear
from quire.ops.route import sigmoid
from quire.ops.torch_gate import ACTIVATIONS
from quire.ops.torch_ops import TorchTable
from quire.quant.deferred import made
from quire.quant.weight import Dense, Weight, tensor_of


class CudaOps:
    """`nn.ops.Ops`."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        """`dtype`: of activations, and of weights that are expanded."""
        self._layouts = Layouts()  # shared by all products
        self.packed = PackedForms(device, dtype, self._layouts)
        self._joints = EightBitJoints(dtype)

    def linear(
        self, weights: Sequence[Weight], bias: Tensor | None, gate: str | None = None
    ) -> LinearKernel:
        weights = [made(weight) for weight in weights]
        if all(isinstance(weight, Dense) for weight in weights):
            floats = tensor_of([self.packed.ready(weight) for weight in weights])
            kernel = MatmulLinear(floats, bias, self._layouts, gate)
            return Int8SumInputs(kernel) if weights[0].inputs == "int8-row" else kernel
        return self.packed.linear(weights, bias, gate)

    def table(self, weight: Weight) -> Table:
        weight = self.packed.ready(weight)
        dense = isinstance(weight, Dense)
        ordered = has_order(weight)
        if ordered:
            self.packed.refuse_order(weight)
        slabs = None if dense or ordered else self.packed.slabs(weight)
        if slabs is not None:
            return PackedTable(slabs, self.packed.dtype)
        return TorchTable(weight.dequantize() if dense else self.packed.expanded(weight))

    def tied(self, weight: Weight) -> tuple[Table, LinearKernel]:
        weight = self.packed.ready(weight)
        if isinstance(weight, Dense):
            return self.table(weight), self.linear([weight], None)
        if has_order(weight):
            self.packed.refuse_order(weight)
            weight = Dense(self.packed.expanded(weight), weight.inputs)
        else:
            weight = as_it_is(weight)  # a head is worth its inputs
        kernel = self.packed.linear([weight], None, None)
        if isinstance(kernel, PackedLinear):
            return PackedTable(kernel.slabs, self.packed.dtype), kernel
        assert isinstance(kernel, MatmulLinear)
        return TorchTable(kernel.product.w), kernel

    def head_product(self, weight: Tensor) -> HeadProduct:
        return CudaHeads(weight.to(self.packed.device, self.packed.dtype))

    def experts(self, weights: ExpertWeights) -> ExpertKernel:
        if not are_packed(weights):
            return GroupedExperts(weights.fused("up"), weights.fused("down"), weights.gate)
        rows = [rows_of(weights, name, self.packed.ready) for name in ("up", "down")]
        num, act = weights.num_experts, partial(gate, form=weights.gate)
        rounded = self.packed.expert_bytes(rows[0], rows[1], num, can_fuse(weights.gate))
        if rounded is not None:
            return EightBitExperts(*rounded, num, weights.gate, act)
        slabs = self.packed.expert_slabs(rows[0], rows[1], num)
        if slabs is not None:
            return PackedExperts(*slabs, num, act)
        up, down = ((of.floats(num, self.packed.expanded), of.bias) for of in rows)
        return GroupedExperts(up, down, weights.gate)

    def normed(self, kernel: LinearKernel, weight: Tensor, eps: float) -> NormedKernel | None:
        return self._joints.normed(kernel, weight, eps)

    def chained(self, first: LinearKernel, second: LinearKernel) -> LinearKernel | None:
        return self._joints.chained(first, second)

    def rms_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        return rms_norm(x, weight, eps, residual)

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
        return ACTIVATIONS[activation](x)

    def gate(self, x: Tensor, form: GateForm) -> Tensor:
        return gate(x, form)

    def route(self, logits: Tensor, rule: RouterSpec, correction: Tensor | None = None) -> Visits:
        return Visits(*route(logits, rule, correction))

    def add_ranks(self, results: Tensor, weights: Tensor) -> Tensor:
        return combine(results.flatten(0, 1), weights)

    def add_gated(self, x: Tensor, gate: Tensor, added: Tensor) -> Tensor:
        return x + sigmoid(gate) * added


def gate(x: Tensor, form: GateForm) -> Tensor:
    if form.limit is not None:
        return clamped_swiglu(x, form.alpha, form.limit)
    return silu_mul(x, form.activation)


class CudaHeads:
    """One launch does all heads and reads the weight in place."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        num_in = self.weight.shape[-1]
        if x.shape[-1] == num_in:
            return multiply_heads(x, self.weight)
        x, rest = x.tensor_split([num_in], -1)
        return torch.cat((multiply_heads(x, self.weight), rest), -1)


class GroupedExperts:
    """Two grouped products over tokens sorted by expert, without a loop."""

    def __init__(
        self,
        up: tuple[Tensor, Tensor | None],
        down: tuple[Tensor, Tensor | None],
        form: GateForm = GateForm(),  # noqa: B008 (a value, never changed)
    ) -> None:
        """Weights [experts, out, in] and biases of both products."""
        self.up, self.down, self.form = up, down, form

    def __call__(self, x: Tensor, visits: Visits, loads: Tensor | None) -> Tensor:
        (up, up_bias), (down, down_bias) = self.up, self.down
        pairs = sort_pairs(visits.experts.int(), len(up), loads)
        # [pairs, 2 * ffn], sorted by expert
        gate_up = multiply_gathered(x, up, pairs, bias=up_bias)
        # [pairs, hidden], token by token again
        out = multiply_scattered(gate(gate_up, self.form), down, pairs, bias=down_bias)
        return combine(out, visits.weights)
