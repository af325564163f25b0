"""Leaves: the weights of the engine's own layers as leaves of autograd's graph.

Layers are filled from stored tensors as the loader does it, and finished with `LeafOps`, whose
products use the very tensors that learn. `stored` gives them back under the names of checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from quire.models.names import Target
from quire.nn.ops import GateForm, LinearKernel
from quire.nn.parameter import Index, Parameter
from quire.ops.torch_gate import ACTIVATIONS, clamped_swiglu
from quire.ops.torch_ops import TorchLinear, TorchOps
from quire.quant.weight import Weight, tensor_of


class WholeGate:
    """A linear kernel and the gate after it, all rows at once: nobody counts on a row's bits being
    the same in another batch, and a launch for every few rows would take longer than the rest."""

    def __init__(self, kernel: LinearKernel, form: GateForm) -> None:
        self.kernel, self.form = kernel, form

    def __call__(self, x: Tensor) -> Tensor:
        both = self.kernel(x)  # [tokens, 2 * ffn] gate | up
        if self.form.limit is not None:
            return clamped_swiglu(both, self.form.alpha, self.form.limit)
        gates, ups = both.chunk(2, -1)
        return ACTIVATIONS[self.form.activation](gates) * ups


class LeafOps(TorchOps):
    """Nothing is packed or copied."""

    def linear(
        self, weights: Sequence[Weight], bias: Tensor | None, gate: str | None = None
    ) -> LinearKernel:
        kernel: LinearKernel = TorchLinear(tensor_of(weights), bias)
        return WholeGate(kernel, GateForm(gate)) if gate else kernel


class Place(NamedTuple):
    """Where a stored tensor is among the leaves."""

    name: str
    part: Index | None
    transposed: bool
    offset: float  # of a norm's weight: what the leaf has more than is stored


@dataclass(frozen=True, slots=True)
class Leaves:
    tensors: Mapping[str, Tensor]  # by our names
    places: Mapping[str, Place]  # by stored names

    @staticmethod
    def fill(
        parameters: Mapping[str, Parameter],
        names: Mapping[str, Target],
        stored: Mapping[str, Tensor],
        norm_offset: float = 0.0,
    ) -> Leaves:
        """Every parameter is filled by what is stored; the layers must not be finished yet."""
        places: dict[str, Place] = {}
        for theirs, tensor in stored.items():
            target = names[theirs]
            parameter = parameters[target.name]
            is_norm = "norm" in target.name and target.name.endswith("weight")
            offset = norm_offset if is_norm else 0.0
            value = tensor.t() if target.transposed else tensor
            parameter.put(target.part, value.float() + offset if offset else value)
            part = None if target.part is None else parameter.parts[target.part]
            places[theirs] = Place(target.name, part, target.transposed, offset)
        made = {name: parameter.tensor.requires_grad_() for name, parameter in parameters.items()}
        return Leaves(made, places)

    def stored(self, dtype: torch.dtype) -> dict[str, Tensor]:
        made = {}
        for theirs, place in self.places.items():
            leaf = self.tensors[place.name].detach()
            value = leaf if place.part is None else leaf[place.part]
            value = (value.t() if place.transposed else value) - place.offset
            made[theirs] = value.to("cpu", dtype).contiguous()
        return made
