"""Ops: what a device does for the layers, one table of functions for each device.

A layer holds shapes and weights; when these are loaded it is given the table of its device, and
asks it for kernels and operations. The tables are in `quire/ops/`, and `engine/build.py` chooses.
Every operation keeps the promise that a row's bits depend on that row alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from torch import Tensor

from quire.quant.weight import Weight

if TYPE_CHECKING:
    from quire.models.spec import RouterSpec


class LinearKernel(Protocol):
    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, in] -> [tokens, out]."""
        ...


class GatedKernel(LinearKernel, Protocol):
    """A product and the gate after it, on devices where the product can be had alone."""

    kernel: LinearKernel


class NormedKernel(Protocol):
    """A norm and the kernel that alone reads what it makes."""

    def __call__(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """([tokens, out], what was normed), to the bits of `rms_norm` and the kernel after it."""
        ...


class SumKernel(LinearKernel, Protocol):
    """A product whose sums can be had before they are rounded once and gated."""

    pairs: bool  # outputs are gate, up, gate, up ...; otherwise as the weight's rows

    def sums(self, x: Tensor) -> Tensor:
        """[tokens, in] -> [tokens, out] in fp32, the bias added, without the gate. On a GPU the
        kernel launched next may read x at once: it starts when this one's inputs are there."""
        ...


class Table(Protocol):
    def __call__(self, ids: Tensor) -> Tensor:
        """[tokens] -> [tokens, width]: rows of a weight."""
        ...


class HeadProduct(Protocol):
    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, heads, in + rest] -> [tokens, heads, out + rest]: every head by a weight of its
        own; what comes behind its inputs is carried over."""
        ...


class Visits(NamedTuple):
    """The experts of each token, best first, and what their results are multiplied by."""

    experts: Tensor  # [tokens, top_k] integers
    weights: Tensor  # [tokens, top_k] f32


class ExpertKernel(Protocol):
    def __call__(self, x: Tensor, visits: Visits, loads: Tensor | None) -> Tensor:
        """[tokens, hidden] -> the same; adds each expert's number of tokens to `loads`."""
        ...


class GateForm(NamedTuple):
    """How gate | up become one: activation(gate) * up, or gpt-oss's clamped form."""

    activation: str = "silu"
    alpha: float = 1.0
    limit: float | None = None  # None: nothing is clamped


class ExpertWeights(Protocol):
    """What a kernel of experts is made of; `nn/experts.py` has it."""

    gate: GateForm
    num_experts: int

    def expert(self, name: str, number: int) -> tuple[list[Weight], Tensor | None]:
        """The parts of one expert's "up" or "down", and the bias."""
        ...

    def fused(self, name: str) -> tuple[Tensor, Tensor | None]:
        """All experts' "up" or "down" [experts, out, in] in floats, and their bias."""
        ...


class Kernels(Protocol):
    """Made once of loaded weights."""

    def linear(
        self, weights: Sequence[Weight], bias: Tensor | None, gate: str | None = None
    ) -> LinearKernel:
        """Parts one below the other. With a gate, an activation's name, the kernel gives
        activation(first half) * second half."""
        ...

    def table(self, weight: Weight) -> Table: ...

    def tied(self, weight: Weight) -> tuple[Table, LinearKernel]:
        """An embedding that is the output head too, kept once where the device can."""
        ...

    def head_product(self, weight: Tensor) -> HeadProduct:
        """`weight` is [heads, out, in] with any strides."""
        ...

    def experts(self, weights: ExpertWeights) -> ExpertKernel: ...


class Joints(Protocol):
    """Kernels that stand for two, in fewer launches. None: one after the other is as good."""

    def normed(self, kernel: LinearKernel, weight: Tensor, eps: float) -> NormedKernel | None:
        """An RMS norm, and a kernel of `linear` or `chained`."""
        ...

    def chained(self, first: LinearKernel, second: LinearKernel) -> LinearKernel | None:
        """Two kernels of `linear`; the second reads what the first makes."""
        ...


class Norms(Protocol):
    """Done in every step, as is what follows."""

    def rms_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """(normed, what was normed): x, or the sum of x and the residual. A weight that is wider
        than x scales before the result is rounded."""
        ...

    def layer_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]: ...

    def norm_heads(
        self, qkv: Tensor, widths: Sequence[int], weights: Sequence[Tensor], eps: float
    ) -> Tensor:
        """q | k | v of these widths, with q and k RMS-normed over all their heads at once. The
        memory may be that of `qkv`."""
        ...


class RowOps(Protocol):
    def add_positions(self, x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
        """[tokens, width] plus each token's row of `table` [positions, width]."""
        ...

    def activate(self, x: Tensor, activation: str) -> Tensor: ...

    def gate(self, x: Tensor, form: GateForm) -> Tensor:
        """[tokens, 2 * ffn] gate | up -> [tokens, ffn]."""
        ...


class Routing(Protocol):
    def route(self, logits: Tensor, rule: RouterSpec, correction: Tensor | None = None) -> Visits:
        """[tokens, experts] -> the best experts of each token, of equals the first. The correction
        decides who is best, but is no part of the weights."""
        ...

    def add_ranks(self, results: Tensor, weights: Tensor) -> Tensor:
        """[tokens, top_k, hidden] of experts times [tokens, top_k], summed in that order, as
        kernels of experts do it."""
        ...

    def add_gated(self, x: Tensor, gate: Tensor, added: Tensor) -> Tensor:
        """x + sigmoid(gate) * added, with one number of `gate` [tokens, 1] for a row."""
        ...


class Ops(Kernels, Joints, Norms, RowOps, Routing, Protocol):
    """All that a layer asks of its device."""
