"""Experts: the weights of all experts of a layer, filled one expert at a time.

A token visits `top_k` experts: a *pair* is one such visit, numbered token by token. A row's bits
depend on that row and its experts alone, and the results of a token's experts are added in the
order of their rank. Which experts a token visits is `moe.py`'s choice, how they multiply the
device's.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from quire.nn.ops import ExpertKernel, GateForm, Ops, Visits
from quire.nn.parameter import Index, Parameter
from quire.quant.weight import Weight


class Experts:
    def __init__(
        self,
        num_experts: int,
        hidden: int,
        ffn: int,
        dtype: torch.dtype,
        device: torch.device,
        gate: GateForm = GateForm(),  # noqa: B008 (a value, never changed)
        has_bias: bool = False,
    ) -> None:
        self.num_experts, self.gate = num_experts, gate
        # Gate and up of an expert lie behind one another, as in a dense layer's fused weight.
        halves = {
            f"{e}.{name}": (e, rows)
            for e in range(num_experts)
            for name, rows in (("gate", slice(0, ffn)), ("up", slice(ffn, 2 * ffn)))
        }
        wholes = {str(e): e for e in range(num_experts)}

        def parameter(parts: Mapping[str, Index], *shape: int) -> Parameter:
            return Parameter((num_experts, *shape), dtype, device, parts, can_pack=len(shape) == 2)

        self.parameters: dict[str, Parameter] = {
            "up": parameter(halves, 2 * ffn, hidden),
            "down": parameter(wholes, hidden, ffn),
        }
        if has_bias:
            self.parameters["up_bias"] = parameter(halves, 2 * ffn)
            self.parameters["down_bias"] = parameter(wholes, hidden)
        self.kernel: ExpertKernel | None = None

    def expert(self, name: str, number: int) -> tuple[list[Weight], Tensor | None]:
        """The parts of one expert's "up" or "down", and the bias."""
        parts = [f"{number}.gate", f"{number}.up"] if name == "up" else [str(number)]
        bias = self._bias(name)
        weights = self.parameters[name].weights_of(parts, number)
        return weights, None if bias is None else bias[number]

    def fused(self, name: str) -> tuple[Tensor, Tensor | None]:
        """All experts' "up" or "down" [experts, out, in] in floats, and their bias."""
        assert not self.parameters[name].packed, "packed experts are multiplied one by one"
        return self.parameters[name].tensor, self._bias(name)

    def _bias(self, name: str) -> Tensor | None:
        found = self.parameters.get(name + "_bias")
        return None if found is None else found.tensor

    def finish(self, ops: Ops) -> None:
        """Weights are in; the kernel has what it needs of them."""
        self.kernel = ops.experts(self)
        for parameter in self.parameters.values():
            parameter.release()

    def __call__(self, x: Tensor, visits: Visits, loads: Tensor | None) -> Tensor:
        assert self.kernel is not None, "Experts used before their weights were loaded"
        return self.kernel(x, visits, loads)
