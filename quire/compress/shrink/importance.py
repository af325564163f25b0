"""Importance: what each layer, head and channel adds, seen while calibration text runs through.

An input of a product adds its energy times the squared norm of its column. That ranks channels of
feed-forward blocks and heads by the product they end in, and channels of the stream by all products
that read it (after Minitron, arXiv 2407.14679). A layer is worth the angle by which it turns the
stream (block influence, arXiv 2403.03853).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.compress.block import BlockTensors
from quire.compress.seen import Needs, Seen
from quire.compress.source import Source
from quire.compress.stream import Stream


@dataclass(slots=True)
class Importance:
    influence: list[float] = field(default_factory=list)  # by layer
    heads: dict[int, Tensor] = field(default_factory=dict)  # by layer, [heads]
    channels: dict[int, Tensor] = field(default_factory=dict)  # by layer, [channels of the mlp]
    hidden: Tensor | None = None  # [hidden]

    def add(self, block: BlockTensors, seen: dict[str, Seen], num_heads: int) -> None:
        """Of the next layer; what it does not have cannot be cut either."""
        layer = len(self.influence)
        if "out" in seen:
            self.heads[layer] = _added(block, "out", seen).view(num_heads, -1).sum(1)
        if "down" in seen:
            self.channels[layer] = _added(block, "down", seen)
        for site in ("qkv", "up"):
            if site in seen:
                self.add_readers(_added(block, site, seen))

    def add_readers(self, added: Tensor) -> None:
        """Of products that read the stream; each counts as much as the others."""
        share = added / added.sum().clamp(min=1e-30)
        self.hidden = share if self.hidden is None else self.hidden + share


def measure(source: Source, stream: Stream, device: torch.device) -> Importance:
    """Runs the whole model; the stream is at its end then."""
    found = Importance()
    for layer in range(source.spec.num_layers):
        before = stream.states()
        stream.load(layer, source.checkpoint, source.names)
        seen = stream.observe(layer, Needs(rows=True))
        stream.advance(layer)
        stream.unload(layer)
        block = source.block(layer, frozenset(), device)
        for site, inputs in seen.items():
            if matrices := block.at(site):
                inputs.check(matrices[0].module)
        found.add(block, seen, source.spec.num_heads)
        found.influence.append(_turned(before, stream.states()))
    return found


def _added(block: BlockTensors, site: str, seen: dict[str, Seen]) -> Tensor:
    """[in]: energy that each input brings to the outputs of a site."""
    columns = sum(block.tensors[m.name].square().sum(0) for m in block.at(site))
    assert isinstance(columns, Tensor)
    return seen[site].energy * columns


def _turned(before: list[Tensor], after: list[Tensor]) -> float:
    """1 less the mean cosine between the stream before and after."""
    pairs = zip(before, after, strict=True)
    cosines = torch.cat([F.cosine_similarity(one, other, dim=1) for one, other in pairs])
    return 1.0 - cosines.double().mean().item()
