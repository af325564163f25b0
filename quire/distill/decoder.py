"""The engine's decoder outside the engine: run over whole sequences, and made of leaves to train.

`streams` runs any decoder over a batch of sequences and gives what blocks read on the way.
`TrainableDecoder` is one in fp32 whose weights are leaves of autograd's graph (`leaves.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quire.distill.attention import NO_CACHE, GraphAttention, GraphPlan
from quire.distill.leaves import LeafOps, Leaves
from quire.errors import NotSupported
from quire.forward import LayerContext
from quire.models.decoder import Decoder, heads_of
from quire.models.names import Target
from quire.models.spec import ModelSpec
from quire.nn.attention import Attention
from quire.nn.norm import RMSNorm

PAGE_SIZE = 16  # of pages that nobody keeps


class Streams(NamedTuple):
    final: Tensor  # [seqs, length, hidden] after the last norm
    taps: Tensor  # [seqs, length, taps, hidden]: what the tapped blocks read


def streams(model: Decoder, ids: Tensor, taps: Sequence[int] = ()) -> Streams:
    """`ids` is [seqs, length], padded behind; block `len(blocks)` is what the last norm reads."""
    at = LayerContext(GraphAttention(), NO_CACHE, plan := GraphPlan.of(ids))
    x = model.embed(ids.flatten())
    if model.positions is not None:
        assert model.ops is not None
        x = model.ops.add_positions(x, plan.positions, model.positions)
    if model.embed_scale != 1.0:
        x = x * model.embed_scale
    residual: Tensor | None = None
    kept: dict[int, Tensor] = {}
    for layer, block in enumerate(model.blocks):
        if layer in taps:
            kept[layer] = x if residual is None else x + residual
        q, residual = block.store(x, residual, at)
        x, residual = block.feed_forward(block.attn.attend(q, at), residual)
    if len(model.blocks) in taps:
        kept[len(model.blocks)] = x if residual is None else x + residual
    final, _ = model.norm(x, residual)
    tapped = torch.stack([kept[layer] for layer in taps], 1) if taps else final.new_empty(0)
    shape = tuple(ids.shape)
    return Streams(
        final.unflatten(0, shape),
        tapped.unflatten(0, shape) if taps else tapped,
    )


def check_trainable(spec: ModelSpec, what: str) -> None:
    """Raises NotSupported for layers that autograd cannot follow here."""
    if spec.mla is not None:
        raise NotSupported(
            f"{what} is a {spec.architecture}, whose latent attention has no backward pass here;"
            " use a model with plain attention"
        )


@dataclass(frozen=True, slots=True)
class TrainableDecoder:
    model: Decoder
    leaves: Leaves

    @staticmethod
    def of(
        spec: ModelSpec,
        names: Mapping[str, Target],
        tensors: Mapping[str, Tensor],
        device: torch.device,
    ) -> TrainableDecoder:
        """`tensors` by their names in a checkpoint; each fills what `names` says."""
        if spec.moe is not None:
            raise NotSupported(
                f"{spec.architecture} has experts, which are not trained here; use a dense model"
            )
        if spec.sub_norms:
            raise NotSupported(
                f"{spec.architecture} rounds its weights and inputs as it runs, which learning here"
                " does not; use a model with plain weights"
            )
        check_trainable(spec, "the pupil")
        heads = heads_of(spec, PAGE_SIZE)
        model = Decoder(spec, heads, spec.max_positions, torch.float32, device)
        leaves = Leaves.fill(model.parameters(), names, tensors, spec.norm_offset)
        for norm in _norms(model):
            norm.offset = 0.0  # it is in the leaf
        model.finish(LeafOps())
        return TrainableDecoder(model, leaves)


def _norms(model: Decoder) -> list[RMSNorm]:
    found: list[Any] = [model.norm]
    for block in model.blocks:
        found += block.norms().values()
        if isinstance(block.attn, Attention):
            found += block.attn.norms().values()
    return [norm for norm in found if isinstance(norm, RMSNorm)]
