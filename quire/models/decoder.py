"""Decoder: embed -> blocks -> norm -> head; every family here is this wiring with another spec.

Parameters live in plain layers; `parameters()` names them for the loader. `finish()` is called
once when all are loaded: it builds rotary tables and lets each Linear choose its kernel.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.attn.backend import AttnSpec
from quire.errors import NotSupported
from quire.forward import ForwardContext
from quire.models.spec import ModelSpec
from quire.nn.attention import Attention
from quire.nn.experts import Experts
from quire.nn.linear import KernelChoice, Linear
from quire.nn.mlp import MLP
from quire.nn.moe import SparseMLP
from quire.nn.norm import LayerNorm, RMSNorm
from quire.nn.rope import rope_tables


class Parameter(NamedTuple):
    """A tensor to be filled, and views of its parts when it is fused from several."""

    tensor: Tensor
    parts: dict[str, Tensor]


class Block:
    def __init__(
        self,
        spec: ModelSpec,
        heads: AttnSpec,
        layer: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        norm = RMSNorm if spec.norm == "rms" else LayerNorm
        self.attn_norm = norm(spec.hidden_size, spec.norm_eps, dtype, device)
        self.attn = Attention(spec, heads, dtype, device)
        self.mlp_norm = norm(spec.hidden_size, spec.norm_eps, dtype, device)
        self.mlp = (SparseMLP if spec.is_sparse(layer) else MLP)(spec, dtype, device)

        self.scale = spec.residual_scale

    def __call__(
        self, x: Tensor, residual: Tensor | None, ctx: ForwardContext, layer: int
    ) -> tuple[Tensor, Tensor | None]:
        """What this block adds last, and the stream it is yet to be added to."""
        x, residual = self.attn_norm(x, residual)
        x, residual = self.mlp_norm(self._scaled(self.attn(x, ctx, layer)), residual)
        return self._scaled(self.mlp(x)), residual

    def _scaled(self, x: Tensor) -> Tensor:
        return x if self.scale == 1.0 else x * self.scale


class NormAfterBlock(Block):
    """Reads the stream as it is and norms what it adds (OLMo 2)."""

    def __call__(
        self, x: Tensor, residual: Tensor | None, ctx: ForwardContext, layer: int
    ) -> tuple[Tensor, Tensor | None]:
        added, _ = self.attn_norm(self.attn(x, ctx, layer), None)
        x = x + added
        added, _ = self.mlp_norm(self.mlp(x), None)
        return x + added, None


class Decoder:
    def __init__(
        self,
        spec: ModelSpec,
        heads: AttnSpec,
        num_positions: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.spec, self.num_positions, self.dtype, self.device = spec, num_positions, dtype, device
        self._loads: Tensor | None = None
        hidden = spec.hidden_size
        self.embed = torch.empty(spec.vocab_size, hidden, dtype=dtype, device=device)
        self.positions = (
            None
            if spec.rope is not None
            else torch.empty(spec.max_positions, hidden, dtype=dtype, device=device)
        )
        kind = NormAfterBlock if spec.norm_after else Block
        self.blocks = [kind(spec, heads, i, dtype, device) for i in range(spec.num_layers)]
        norm = RMSNorm if spec.norm == "rms" else LayerNorm
        self.norm = norm(hidden, spec.norm_eps, dtype, device)
        self.head = Linear(
            hidden, {"head": spec.vocab_size}, bias=False, dtype=dtype, device=device
        )
        if spec.tied:
            self.head.weight = self.embed

    def forward(self, ctx: ForwardContext) -> Tensor:
        """Hidden states after the last norm, [tokens, hidden]."""
        batch = ctx.batch
        x = F.embedding(batch.input_ids, self.embed)
        if self.positions is not None:
            x = x + F.embedding(batch.positions, self.positions)
        if self.spec.embed_scale != 1.0:
            x = x * self.spec.embed_scale
        residual: Tensor | None = None
        for layer, block in enumerate(self.blocks):
            x, residual = block(x, residual, ctx, layer)
        x, _ = self.norm(x, residual)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """[samples, hidden] -> [samples, vocab]."""
        logits = self.head(hidden)
        return logits if self.spec.logit_scale == 1.0 else logits * self.spec.logit_scale

    def finish(self, choose: KernelChoice) -> None:
        cos = sin = None
        if self.spec.rope is not None:
            cos, sin = rope_tables(self.spec.rope, self.num_positions, self.device)
        for block in self.blocks:
            block.attn.finish(cos, sin)
            block.attn.qkv.finish(choose)
            block.attn.out.finish(choose)
            block.mlp.finish(choose)
        self.head.finish(choose, keep_weight=self.spec.tied)

    def count_expert_loads(self) -> Tensor:
        """[sparse layers, experts] tokens each expert got, counted from now on; again: from zero.

        Graphs keep what they were captured with, so the first call comes before the first step.
        Rows that pad a graph's batch are counted like all others.
        """
        sparse = [block.mlp for block in self.blocks if isinstance(block.mlp, SparseMLP)]
        if self.spec.moe is None or not sparse:
            raise NotSupported(f"{self.spec.architecture} has no experts whose loads to count")
        if self._loads is None:
            shape = (len(sparse), self.spec.moe.router.num_experts)
            self._loads = torch.empty(shape, dtype=torch.int64, device=self.device)
            for mlp, loads in zip(sparse, self._loads, strict=True):
                mlp.loads = loads
        return self._loads.zero_()

    def parameters(self) -> dict[str, Parameter]:
        """Every tensor the loader must fill, by our name."""
        found: dict[str, Parameter] = {"embed.weight": Parameter(self.embed, {})}
        if self.positions is not None:
            found["positions.weight"] = Parameter(self.positions, {})
        for i, block in enumerate(self.blocks):
            at = f"layers.{i}."
            _add_norm(found, at + "attn_norm", block.attn_norm)
            _add_norm(found, at + "mlp_norm", block.mlp_norm)
            _add_linear(found, at + "qkv", block.attn.qkv)
            _add_linear(found, at + "out", block.attn.out)
            for name, linear in block.mlp.linears().items():
                _add_linear(found, at + name, linear)
            if isinstance(block.mlp, SparseMLP):
                _add_experts(found, at + "experts", block.mlp.experts)
            if block.attn.q_norm is not None and block.attn.k_norm is not None:
                _add_norm(found, at + "q_norm", block.attn.q_norm)
                _add_norm(found, at + "k_norm", block.attn.k_norm)
        _add_norm(found, "norm", self.norm)
        if not self.spec.tied:
            _add_linear(found, "head", self.head)
        return found


def _add_norm(found: dict[str, Parameter], name: str, norm: RMSNorm | LayerNorm) -> None:
    found[name + ".weight"] = Parameter(norm.weight, {})
    if isinstance(norm, LayerNorm):
        found[name + ".bias"] = Parameter(norm.bias, {})


def _add_linear(found: dict[str, Parameter], name: str, linear: Linear) -> None:
    assert linear.weight is not None
    for kind, tensor in (("weight", linear.weight), ("bias", linear.bias)):
        if tensor is not None:
            views = tensor.split(list(linear.parts.values()))
            parts = dict(zip(linear.parts, views, strict=True))
            found[f"{name}.{kind}"] = Parameter(tensor, parts)


def _add_experts(found: dict[str, Parameter], name: str, experts: Experts) -> None:
    assert experts.up is not None and experts.down is not None
    ups: dict[str, Tensor] = {}
    for e, weight in enumerate(experts.up):
        ups[f"{e}.gate"], ups[f"{e}.up"] = weight.chunk(2)
    found[name + ".up"] = Parameter(experts.up, ups)
    found[name + ".down"] = Parameter(
        experts.down, {str(e): weight for e, weight in enumerate(experts.down)}
    )
