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
from quire.forward import ForwardContext
from quire.models.spec import ModelSpec
from quire.nn.attention import Attention
from quire.nn.linear import KernelChoice, Linear
from quire.nn.mlp import MLP
from quire.nn.norm import LayerNorm, RMSNorm
from quire.nn.rope import rope_tables


class Parameter(NamedTuple):
    """A tensor to be filled, and the row ranges of its parts when it is fused from several."""

    tensor: Tensor
    parts: dict[str, tuple[int, int]]


class Block:
    def __init__(
        self, spec: ModelSpec, heads: AttnSpec, dtype: torch.dtype, device: torch.device
    ) -> None:
        norm = RMSNorm if spec.norm == "rms" else LayerNorm
        self.attn_norm = norm(spec.hidden_size, spec.norm_eps, dtype, device)
        self.attn = Attention(spec, heads, dtype, device)
        self.mlp_norm = norm(spec.hidden_size, spec.norm_eps, dtype, device)
        self.mlp = MLP(spec, dtype, device)

    def __call__(
        self, x: Tensor, residual: Tensor | None, ctx: ForwardContext, layer: int
    ) -> tuple[Tensor, Tensor]:
        x, residual = self.attn_norm(x, residual)
        x = self.attn(x, ctx, layer)
        x, residual = self.mlp_norm(x, residual)
        return self.mlp(x), residual


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
        hidden = spec.hidden_size
        self.embed = torch.empty(spec.vocab_size, hidden, dtype=dtype, device=device)
        self.positions = (
            None
            if spec.rope is not None
            else torch.empty(spec.max_positions, hidden, dtype=dtype, device=device)
        )
        self.blocks = [Block(spec, heads, dtype, device) for _ in range(spec.num_layers)]
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
        residual: Tensor | None = None
        for layer, block in enumerate(self.blocks):
            x, residual = block(x, residual, ctx, layer)
        x, _ = self.norm(x, residual)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """[samples, hidden] -> [samples, vocab]."""
        return self.head(hidden)

    def finish(self, choose: KernelChoice) -> None:
        cos = sin = None
        if self.spec.rope is not None:
            cos, sin = rope_tables(self.spec.rope, self.num_positions, self.device)
        for block in self.blocks:
            block.attn.finish(cos, sin)
            for linear in (block.attn.qkv, block.attn.out, block.mlp.up, block.mlp.down):
                linear.finish(choose)
        self.head.finish(choose, keep_weight=self.spec.tied)

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
            _add_linear(found, at + "up", block.mlp.up)
            _add_linear(found, at + "down", block.mlp.down)
            if block.attn.q_norm is not None and block.attn.k_norm is not None:
                found[at + "q_norm"] = Parameter(block.attn.q_norm, {})
                found[at + "k_norm"] = Parameter(block.attn.k_norm, {})
        _add_norm(found, "norm", self.norm)
        if not self.spec.tied:
            _add_linear(found, "head", self.head)
        return found


def _add_norm(found: dict[str, Parameter], name: str, norm: RMSNorm | LayerNorm) -> None:
    found[name + ".weight"] = Parameter(norm.weight, {})
    if isinstance(norm, LayerNorm):
        found[name + ".bias"] = Parameter(norm.bias, {})


def _add_linear(found: dict[str, Parameter], name: str, linear: Linear) -> None:
    ranges, start = {}, 0
    for part, size in linear.parts.items():
        ranges[part] = (start, size)
        start += size
    assert linear.weight is not None
    found[name + ".weight"] = Parameter(linear.weight, ranges)
    if linear.bias is not None:
        found[name + ".bias"] = Parameter(linear.bias, ranges)
