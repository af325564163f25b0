"""Choice: which layers, heads and channels stay, and what that makes of each stored tensor.

Rows and columns of a weight are of one kind each: heads of queries, heads of keys and values,
channels of the feed-forward block, or channels of the stream. A tensor that holds several parts
one below the other (q, k and v) is cut part by part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.compress.shrink.importance import Importance
from quire.compress.shrink.sizes import Sizes
from quire.models.names import Target
from quire.models.spec import ModelSpec
from quire.nn.parameter import Parameter

# Of what kind rows and columns are, by our names without the layer; a norm has rows alone.
ROWS = {"out.weight": "hidden", "out.bias": "hidden", "down.weight": "hidden"}
ROWS |= {"down.bias": "hidden"}
ROWS |= {f"{name}_norm.weight": "hidden" for name in ("attn", "mlp", "attn_out", "mlp_out")}
ROWS |= {"norm.weight": "hidden"}
COLUMNS = {"qkv.weight": "hidden", "up.weight": "hidden", "out.weight": "q", "down.weight": "mlp"}
COLUMNS |= {"embed.weight": "hidden", "head.weight": "hidden", "score.weight": "hidden"}
PARTS = {"q": "q", "k": "kv", "v": "kv", "gate": "mlp", "up": "mlp"}  # of qkv and up: their rows


@dataclass(frozen=True, slots=True)
class LayerChoice:
    """Places that stay, in rising order."""

    old: int  # its number before
    kept: Mapping[str, Tensor]  # by kind: "q" and "kv" are dims of heads, "mlp", "hidden"


@dataclass(frozen=True, slots=True)
class Choice:
    layers: tuple[LayerChoice, ...]
    hidden: Tensor  # [hidden]

    @staticmethod
    def of(sizes: Sizes, spec: ModelSpec, found: Importance) -> Choice:
        hidden = _best(found.hidden, sizes.hidden, spec.hidden_size)
        influence = torch.tensor(found.influence, dtype=torch.float64)
        kept_layers = _best(influence, sizes.layers, spec.num_layers).tolist()
        layers = []
        for layer in kept_layers:
            q, kv = _heads(sizes, spec, found.heads.get(layer))
            kept = {"q": q, "kv": kv, "hidden": hidden}
            kept["mlp"] = _best(found.channels.get(layer), sizes.mlp, spec.ffn_size)
            layers.append(LayerChoice(layer, kept))
        return Choice(tuple(layers), hidden)


def cut(tensor: Tensor, target: Target, parameter: Parameter, kept: Mapping[str, Tensor]) -> Tensor:
    """A stored tensor with what stays of it."""
    own = target.name.split(".", 2)[2] if target.name.startswith("layers.") else target.name
    if (kind := COLUMNS.get(own)) is not None:
        tensor = tensor[:, kept[kind].to(tensor.device)]
    if (kind := ROWS.get(own)) is not None:
        tensor = tensor[kept[kind].to(tensor.device)]
    elif own.partition(".")[0] in ("qkv", "up"):
        tensor = tensor[_rows(target, parameter, kept).to(tensor.device)]
    return tensor.contiguous()


def _rows(target: Target, parameter: Parameter, kept: Mapping[str, Tensor]) -> Tensor:
    if target.part is not None:
        return kept[PARTS[target.part]]
    places = []
    for part, at in parameter.parts.items():
        assert isinstance(at, slice)
        places.append(kept[PARTS[part]] + (at.start or 0))
    return torch.cat(places)


def _best(scores: Tensor | None, count: int, whole: int) -> Tensor:
    """The places of the largest, in rising order."""
    if count == whole or scores is None:
        assert count == whole, "nothing was measured to choose by"
        return torch.arange(whole)
    order = scores.sort(descending=True, stable=True).indices
    return order[:count].sort().values.cpu()


def _heads(sizes: Sizes, spec: ModelSpec, scores: Tensor | None) -> tuple[Tensor, Tensor]:
    """Dims of the heads that stay: the best groups, and the best query heads of each."""
    groups, dims = spec.num_kv_heads, torch.arange(spec.head_dim)
    each, count = spec.num_heads // groups, sizes.heads // sizes.kv_heads
    by_group = torch.zeros(groups, each) if scores is None else scores.cpu().view(groups, each)
    best = by_group.sort(dim=1, descending=True, stable=True)
    worth = best.values[:, :count].sum(1)
    kv = _best(worth, sizes.kv_heads, groups)
    q = best.indices[kv, :count].sort(dim=1).values + kv.unsqueeze(1) * each
    return _wide(q.flatten(), dims), _wide(kv, dims)


def _wide(heads: Tensor, dims: Tensor) -> Tensor:
    return (heads.unsqueeze(1) * len(dims) + dims).flatten()
