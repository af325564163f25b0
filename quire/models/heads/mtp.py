"""MTP: the layer behind the last, which DeepSeek-V3's checkpoints hold for guessing one token on.

Its input joins the normed embedding of the next token and the normed hidden state, `eh_proj` of
both side by side; then comes a layer like the target's own, a norm, and the target's embedding and
output product, which are shared. Tensors, with L = num_hidden_layers: `model.layers.L.enorm`,
`.hnorm`, `.eh_proj`, `.shared_head.norm`, and a layer's own. One such layer guesses any number of
tokens, each from what it gave for the one before.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch
from torch import Tensor

from quire.attn.backend import AttnSpec
from quire.errors import NotSupported
from quire.forward import LayerContext, StateReads
from quire.models.decoder import Decoder, add_linear, add_norm, block_kind, norm_of, ropes_of
from quire.models.deepseek import NAMES as LAYER_NAMES
from quire.models.heads.feature_head import Guessed, Stored
from quire.models.heads.vocabulary import DraftVocabulary
from quire.models.names import Target, expand
from quire.models.spec import ModelSpec
from quire.nn.linear import Linear
from quire.nn.ops import Ops
from quire.nn.parameter import Parameter

NAMES = {
    **{theirs: ours for theirs, ours in LAYER_NAMES.items() if "{i}" in theirs},
    "model.layers.{i}.enorm.weight": "embed_norm.weight",
    "model.layers.{i}.hnorm.weight": "state_norm.weight",
    "model.layers.{i}.eh_proj.weight": "join.weight",
    "model.layers.{i}.shared_head.norm.weight": "norm.weight",
}


def mtp_spec(names: Collection[str], target: ModelSpec) -> ModelSpec:
    """Of the one layer there is. Raises NotSupported where the checkpoint has none."""
    at = f"model.layers.{target.num_layers}."
    if target.architecture != "deepseek_v3" or f"{at}eh_proj.weight" not in names:
        raise NotSupported(
            f"got speculative_config.method='mtp' for {target.architecture} without tensors"
            f" {at}eh_proj.weight and so on: this checkpoint has no layer for multi-token"
            " prediction; use 'suffix', or a checkpoint of DeepSeek-V3's kind that has one"
        )
    is_sparse = f"{at}mlp.gate.weight" in names
    moe = replace(target.moe, dense_layers=frozenset()) if target.moe and is_sparse else None
    return replace(target, num_layers=1, windows=(), moe=moe)


def mtp_names(layer: ModelSpec, num_layers: int) -> dict[str, Target]:
    """Stored names -> ours; `num_layers` are the target's."""
    moved = {
        theirs.replace("{i}", str(num_layers)): ours.replace("{i}", "0")
        for theirs, ours in NAMES.items()
    }
    return expand(moved, 1, layer.moe.router.num_experts if layer.moe else 0)


class MtpHead:
    reads = StateReads(every_token=True)

    def __init__(
        self,
        layer: ModelSpec,
        heads: AttnSpec,
        num_positions: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`layer` is from `mtp_spec`, `heads` from `heads_of`."""
        self.layer, self.num_positions, self.device = layer, num_positions, device
        width = layer.hidden_size
        self.embed_norm, self.state_norm, self.norm = (
            norm_of(layer, dtype, device) for _ in range(3)
        )
        self.join = Linear(2 * width, {"join": width}, bias=False, dtype=dtype, device=device)
        self.block = block_kind(layer)(layer, heads, 0, dtype, device)
        self.vocabulary: DraftVocabulary | None = None
        self._target: Decoder | None = None

    def parameters(self) -> dict[str, Parameter]:
        found = self.block.parameters("layers.0.")
        add_norm(found, "embed_norm", self.embed_norm)
        add_norm(found, "state_norm", self.state_norm)
        add_norm(found, "norm", self.norm)
        add_linear(found, "join", self.join)
        return found

    def finish(self, ops: Ops, target: Decoder) -> None:
        self._target = target
        self.block.finish(ops, ropes_of(self.layer, self.num_positions, self.device))
        for norm in (self.embed_norm, self.state_norm, self.norm):
            norm.finish(ops)
        self.join.finish(ops)

    def features(self, states: Tensor) -> Tensor:
        return states

    def store(self, ids: Tensor, features: Tensor, at: LayerContext) -> Stored:
        assert self._target is not None, "MtpHead used before finish()"
        embedded, _ = self.embed_norm(self._target.embed(ids), None)
        normed, _ = self.state_norm(features, None)
        x = self.join(torch.cat((embedded, normed), 1))  # of [tokens, 2 * hidden]
        return Stored(*self.block.store(x, None, at))

    def attend(self, stored: Stored, at: LayerContext) -> Guessed:
        assert self._target is not None
        added = self.block.attn.attend(stored.queries, at)
        x, stream = self.block.feed_forward(added, stored.stream)
        normed, _ = self.norm(x, stream)
        return Guessed(self._target.logits(normed), normed)
