"""NativeOps: the operations of a CPU through our own library.

On `Rows`, the stand-ins of a recording, an operation is added to the tape; on tensors it runs at
once, to the same bits (`native_rows.py`). What the library does not do (other dtypes, odd
widths) is torch's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from quire.models.spec import RouterSpec
from quire.native.head_product import NativeHeads
from quire.native.library import Library
from quire.native.linear import NativeLinear
from quire.native.packs import Packs
from quire.native.panels import FLOAT_CODES, FLOAT_NAMES, can_be_panels
from quire.native.tape import LANES, Positions, Rows, Tape
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
from quire.ops import native_rows
from quire.ops.expert_loop import ExpertLoop
from quire.ops.int8_inputs import round_rows
from quire.ops.native_experts import MAX_EXPERTS, NativeExperts, add_gated, can_fuse, route
from quire.ops.torch_ops import TorchOps
from quire.quant.coded import Coded
from quire.quant.deferred import made, name_of
from quire.quant.weight import Dense, Weight

FLOATS = tuple(FLOAT_NAMES.values())


class NativeOps:
    """`nn.ops.Ops`."""

    def __init__(self, library: Library, packs: Packs | None = None) -> None:
        """`packs`: weights under their names, packed at an earlier start."""
        self.library, self.packs = library, packs
        self.kept: Counter[str] = Counter()  # bytes of weights by their form
        self._torch = TorchOps()

    @property
    def has_codes(self) -> bool:
        """Whether some weights are kept in whole numbers."""
        return any(not form.startswith(FLOATS) for form in self.kept)

    def linear(
        self, weights: Sequence[Weight], bias: Tensor | None, gate: str | None = None
    ) -> LinearKernel:
        name = name_of(weights)
        kernel: LinearKernel | None = self._packed_before(name)
        if kernel is None:
            weights = [_expanded(made(weight)) for weight in weights]
            if not all(map(can_be_panels, weights)):
                return self._torch.linear(weights, bias, gate)
            kernel = self._pack(weights, bias, name)
        return GatedNative(kernel, self, GateForm(gate)) if gate else kernel

    def table(self, weight: Weight) -> Table:
        return self.tied(weight)[0]

    def tied(self, weight: Weight) -> tuple[Table, LinearKernel]:
        name = name_of([weight])
        kernel = self._packed_before(name)
        if kernel is None:
            weight = made(weight)
            has_order = isinstance(weight, Coded) and weight.order is not None
            weight = Dense(weight.dequantize()) if has_order else _expanded(weight)
            if not can_be_panels(weight):
                return self._torch.tied(weight)
            kernel = self._native([weight], None)
            self._keep(name, kernel)
        return NativeTable(kernel), kernel

    def head_product(self, weight: Tensor) -> HeadProduct:
        if weight.dtype not in FLOAT_CODES:
            return self._torch.head_product(weight)
        kernel = NativeHeads(weight, self.library)
        for head in kernel.panels:
            self.kept[head.form] += head.num_bytes
        return kernel

    def experts(self, weights: ExpertWeights) -> ExpertKernel:
        loop = ExpertLoop.of(weights, self)
        up = [kernel for kernel in loop.up if isinstance(kernel, NativeLinear)]
        down = [kernel for kernel in loop.down if isinstance(kernel, NativeLinear)]
        if len(up) == len(down) == weights.num_experts and can_fuse(up, down):
            return NativeExperts(up, down, weights.gate)
        return loop

    def normed(self, kernel: LinearKernel, weight: Tensor, eps: float) -> NormedKernel | None:
        return None

    def chained(self, first: LinearKernel, second: LinearKernel) -> LinearKernel | None:
        return None

    def rms_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        if self._takes(x, x.shape[-1]):
            return native_rows.norm(self.library, x, residual, weight, eps)
        return self._torch.rms_norm(x, residual, weight, eps)

    def layer_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        if self._takes(x, x.shape[-1]):
            return native_rows.norm(self.library, x, residual, weight, eps, bias)
        return self._torch.layer_norm(x, residual, weight, bias, eps)

    def norm_heads(
        self, qkv: Tensor, widths: Sequence[int], weights: Sequence[Tensor], eps: float
    ) -> Tensor:
        if not all(self._takes(qkv, width) for width in widths):
            return self._torch.norm_heads(qkv, widths, weights, eps)
        begin = 0
        for weight in weights:  # q, then k; v stays as it is
            native_rows.norm_columns(self.library, qkv, begin, weight, eps)
            begin += weight.shape[0]
        return qkv

    def add_positions(self, x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
        if isinstance(positions, Positions):
            assert isinstance(x, Rows)
            return cast("Any", native_rows.add_positions(x, table))
        return self._torch.add_positions(x, positions, table)

    def activate(self, x: Tensor, activation: str) -> Tensor:
        if self._takes(x, x.shape[-1]):
            return native_rows.activate(self.library, x, activation)
        return self._torch.activate(x, activation)

    def round_rows(self, x: Tensor) -> Tensor:
        """To eight bits, one scale per token."""
        if self._takes(x, x.shape[-1]):
            return native_rows.round_rows(self.library, x)
        return round_rows(x)

    def gate(self, x: Tensor, form: GateForm) -> Tensor:
        if self._takes(x, x.shape[-1] // 2):
            return native_rows.gate(self.library, x, form)
        return self._torch.gate(x, form)

    def route(self, logits: Tensor, rule: RouterSpec, correction: Tensor | None = None) -> Visits:
        if logits.dtype == torch.float32 and rule.num_experts <= MAX_EXPERTS:
            return route(self.library, logits, rule, correction)
        return self._torch.route(logits, rule, correction)

    def add_ranks(self, results: Tensor, weights: Tensor) -> Tensor:
        return self._torch.add_ranks(results, weights)

    def add_gated(self, x: Tensor, gate: Tensor, added: Tensor) -> Tensor:
        if self._takes(x, x.shape[-1]):
            return add_gated(self.library, x, gate, added)
        return self._torch.add_gated(x, gate, added)

    def _packed_before(self, name: str | None) -> NativeLinear | None:
        if self.packs is None or name is None or (parts := self.packs.find(name)) is None:
            return None
        return self._counted(NativeLinear(parts, self.library))

    def _pack(
        self, weights: Sequence[Weight], bias: Tensor | None, name: str | None
    ) -> LinearKernel:
        kernel = self._native(weights, bias)
        if any(isinstance(w, Dense) and w.inputs == "int8-row" for w in weights):
            return RoundedInputs(kernel, self)  # floats are multiplied as they are
        self._keep(name, kernel)
        return kernel

    def _keep(self, name: str | None, kernel: NativeLinear) -> None:
        if self.packs is not None and name is not None:
            self.packs.add(name, kernel.parts)

    def _native(self, weights: Sequence[Weight], bias: Tensor | None) -> NativeLinear:
        return self._counted(NativeLinear.of(weights, bias, self.library))

    def _counted(self, kernel: NativeLinear) -> NativeLinear:
        for part in kernel.parts:
            self.kept[part.form] += part.num_bytes
        return kernel

    @staticmethod
    def _takes(x: Tensor, width: int) -> bool:
        return x.dtype == torch.float32 and width % LANES == 0


def _expanded(weight: Weight) -> Weight:
    """In floats, where the library has no kernel for the form."""
    return weight if can_be_panels(weight) else Dense(weight.dequantize(), weight.inputs)


class RoundedInputs:
    """A kernel whose inputs are rounded first; see `int8_inputs.py`."""

    def __init__(self, kernel: LinearKernel, ops: NativeOps) -> None:
        self.kernel, self.ops = kernel, ops

    def __call__(self, x: Tensor) -> Tensor:
        return self.kernel(self.ops.round_rows(x))


class GatedNative:
    """A product of gate | up and the gate after it."""

    def __init__(self, kernel: LinearKernel, ops: NativeOps, form: GateForm) -> None:
        self.kernel, self.ops, self.form = kernel, ops, form

    def __call__(self, x: Tensor) -> Tensor:
        return self.ops.gate(self.kernel(x), self.form)


class NativeTable:
    """Rows of a weight in panels; on a tape, of each step's own ids."""

    def __init__(self, kernel: NativeLinear) -> None:
        self.kernel = kernel

    def __call__(self, ids: Tensor) -> Tensor:
        if isinstance(ids, Tape):
            return ids.embed(self.kernel.parts[0])
        return self.kernel.rows(ids)
