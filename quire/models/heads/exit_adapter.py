"""ExitAdapter: what stands in the place of the last norm where a model is left early.

The stream after the first layers is far from what the head expects. A norm, a gated feed-forward
block and a norm bring it there, if they were trained to (`quire distill --kind early_exit`). It is
called as a norm is, so a decoder cut short takes it for one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quire.errors import CheckpointError
from quire.models.names import Target
from quire.models.spec import Config, ModelSpec
from quire.nn.mlp import MLP
from quire.nn.norm import RMSNorm
from quire.nn.ops import Ops
from quire.nn.parameter import Parameter

ARCHITECTURE = "QuireExitAdapter"
NAMES = {
    "input_norm.weight": Target("input_norm.weight", None, False),
    "mlp.gate_proj.weight": Target("up.weight", "gate", False),
    "mlp.up_proj.weight": Target("up.weight", "up", False),
    "mlp.down_proj.weight": Target("down.weight", None, False),
    "norm.weight": Target("norm.weight", None, False),
}


class ExitAdapter:
    def __init__(
        self, spec: ModelSpec, ffn_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """`spec` is the model's that is left early."""
        plain = replace(spec, mlp="gated", mlp_bias=False, sub_norms=False, activation="silu")
        self.device = device
        self.input_norm = RMSNorm(spec.hidden_size, spec.norm_eps, dtype, device)
        self.mlp = MLP(plain, dtype, device, ffn_size)
        self.norm = RMSNorm(spec.hidden_size, spec.norm_eps, dtype, device)

    def __call__(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        x, stream = self.input_norm(x, residual)
        return self.norm(self.mlp(x), stream)

    def parameters(self) -> dict[str, Parameter]:
        return {
            "input_norm.weight": Parameter.of(self.input_norm.weight),
            "up.weight": self.mlp.up.weight,
            "down.weight": self.mlp.down.weight,
            "norm.weight": Parameter.of(self.norm.weight),
        }

    def finish(self, ops: Ops) -> None:
        self.input_norm.finish(ops)
        self.mlp.finish(ops)
        self.norm.finish(ops)


def exit_sizes(config: Mapping[str, Any], target: ModelSpec) -> tuple[int, int]:
    """(layers before the exit, width of its block). Raises CheckpointError."""
    if config.get("architectures") != [ARCHITECTURE]:
        raise CheckpointError(
            f"got architectures={config.get('architectures')}, want a folder written by"
            " quire distill --kind early_exit"
        )
    own = Config(config)
    layer, hidden = own.count("exit_layer"), own.count("hidden_size")
    if hidden != target.hidden_size or layer >= target.num_layers:
        raise CheckpointError(
            f"the exit after layer {layer} of width {hidden} is for another model: this one has"
            f" {target.num_layers} layers of width {target.hidden_size}"
        )
    return layer, own.count("intermediate_size")
