"""Folds: inputs of a product may be divided by anything that what comes before takes over.

    (x / s) @ (w * s).T == x @ w.T

A norm before takes it in its weight. So does a product whose output only passes through something
linear: values through attention (all query heads of a kv head share them), and `up` through the
gate. Where neither comes before, nothing can be folded: a block that norms what it adds, an
activation without a gate, a clamped one, a norm in between.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from quire.compress.block import BlockTensors
from quire.compress.seen import Seen
from quire.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Fold:
    sites: tuple[str, ...]  # they share their inputs
    norm: str | None = None  # before them, by our name
    source: tuple[str, str] | None = None  # site and part of the product before them
    heads: tuple[int, int, int] | None = None  # kv heads, query heads of each, dim

    def shared(self, scale: Tensor) -> Tensor:
        """The nearest scale that can be folded: one for all query heads of a kv head."""
        if self.heads is None:
            return scale
        wide = scale.view(self.heads)
        return wide.log().mean(1, keepdim=True).exp().expand_as(wide).reshape(-1)

    def apply(
        self, scale: Tensor, block: BlockTensors, seen: dict[str, Seen], offset: float
    ) -> None:
        """Multiplies the columns of the sites by `scale` [in] and divides what comes before;
        `offset` is added to the weights of norms when they are used."""
        for site in self.sites:
            block.scale_columns(site, scale)
            if site in seen:
                seen[site].divide(scale)
        if self.norm is not None:
            weight, bias = block.named(f"{self.norm}.weight"), block.named(f"{self.norm}.bias")
            assert weight is not None, f"{self.norm} has no weight"
            weight.copy_((weight + offset) / scale - offset)
            if bias is not None:
                bias /= scale
        if self.source is not None:
            rows = scale if self.heads is None else scale.view(self.heads)[:, 0].reshape(-1)
            block.divide_rows(*self.source, rows)


def folds_of(spec: ModelSpec, block: BlockTensors) -> list[Fold]:
    """All that the block has, in the order its inputs meet them."""
    has_norms = not spec.norm_after
    found = [Fold(("qkv",), norm="attn_norm")] if has_norms else []
    if spec.mla is not None:
        inner = {"q_b": "q_norm", "kv_b": "kv_norm"}
        found += [Fold((site,), norm=norm) for site, norm in inner.items() if block.at(site)]
    elif not spec.sub_norms:
        heads = (spec.num_kv_heads, spec.num_heads // spec.num_kv_heads, spec.head_dim)
        found.append(Fold(("out",), source=("qkv", "v"), heads=heads))
    entering = [site for site in block.sites if site == "router" or site.endswith("up")]
    if has_norms:
        found.append(Fold(tuple(entering), norm="mlp_norm"))
    is_clamped = spec.moe is not None and spec.moe.swiglu_limit is not None
    if spec.mlp == "gated" and not spec.sub_norms and not is_clamped:
        found += [
            Fold((site,), source=(site.removesuffix("down") + "up", "up"))
            for site in block.sites
            if site.endswith("down")
        ]
    return found
