"""ModelPlan: what a model is made of, layer by layer, before any of it is loaded.

Which positions each layer sees, what the cache keeps of a token and in which groups of layers, how
many weights there are and how many a token meets. Weights are counted on a decoder without memory,
so the numbers are those of the tensors that would be loaded. Speeds are `cli/layer_plan.py`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch

from quire.kv.groups import PageNeeds
from quire.kv.spec import CacheSpec
from quire.models.decoder import Decoder, heads_of
from quire.models.spec import ModelSpec


class LayerRun(NamedTuple):
    """Layers in a row that are alike."""

    first: int
    last: int
    attention: str
    feed_forward: str

    @property
    def layers(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"


class GroupPlan(NamedTuple):
    """Layers that share a page table, and what a request of the context asked about holds there."""

    layers: tuple[int, ...]
    window: int | None
    token_bytes: int  # of one token in all its layers, while it is held
    num_pages: int


class Weights(NamedTuple):
    total: int
    active: int  # of those, what one token meets


@dataclass(frozen=True, slots=True)
class ModelPlan:
    runs: tuple[LayerRun, ...]
    groups: tuple[GroupPlan, ...]
    weights: Weights
    page_bytes: int  # of any group
    # What a token would take if every head kept keys and values of its own.
    expanded_token_bytes: int

    @property
    def token_bytes(self) -> int:
        return sum(group.token_bytes for group in self.groups)

    @property
    def num_pages(self) -> int:
        return sum(group.num_pages for group in self.groups)


def plan_of(spec: ModelSpec, cache: CacheSpec, context: int, needs: PageNeeds) -> ModelPlan:
    """Of `needs` the tokens in flight count."""
    return ModelPlan(
        runs=tuple(layer_runs(spec)),
        groups=tuple(
            GroupPlan(
                group.layers,
                group.window,
                sum(cache.layer_bytes(layer) for layer in group.layers),
                needs.in_group(group.window, context),
            )
            for group in cache.groups.groups
        ),
        weights=count_weights(spec),
        page_bytes=cache.page_bytes,
        expanded_token_bytes=spec.num_layers * _expanded_entry(spec) * cache.plain.bits // 8,
    )


def _expanded_entry(spec: ModelSpec) -> int:
    if spec.mla is not None:
        mla = spec.mla
        return spec.num_heads * (mla.nope_dim + mla.rope_dim + mla.v_dim)
    return 2 * spec.num_heads * spec.head_dim


def layer_runs(spec: ModelSpec) -> Sequence[LayerRun]:
    def kinds(layer: int) -> tuple[str, str]:
        return _attention(spec, layer), _feed_forward(spec, layer)

    runs = []
    for (attention, feed_forward), same in groupby(range(spec.num_layers), kinds):
        layers = list(same)
        runs.append(LayerRun(layers[0], layers[-1], attention, feed_forward))
    return runs


def _attention(spec: ModelSpec, layer: int) -> str:
    if spec.mla is not None:
        return f"latent {spec.mla.kv_rank}+{spec.mla.rope_dim}"
    window = spec.window_of(layer)
    return "full" if window is None else f"window {window}"


def _feed_forward(spec: ModelSpec, layer: int) -> str:
    if spec.moe is None or not spec.is_sparse(layer):
        return f"{spec.mlp} {spec.ffn_size}"
    router, moe = spec.moe.router, spec.moe
    shared = f" + shared {moe.shared_ffn_size}" if moe.shared_ffn_size else ""
    return f"experts {router.top_k} of {router.num_experts}, each {moe.ffn_size}{shared}"


def count_weights(spec: ModelSpec) -> Weights:
    """All tensors of the model: norms, biases and embeddings too."""
    sizes = {name: p.num_elements for name, p in empty_decoder(spec).parameters().items()}
    total = sum(sizes.values())
    if spec.moe is None:
        return Weights(total, total)
    router = spec.moe.router
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    return Weights(
        total, total - experts // router.num_experts * (router.num_experts - router.top_k)
    )


def empty_decoder(spec: ModelSpec) -> Decoder:
    """Shapes alone; only the page size is made up."""
    heads = heads_of(spec, page_size=16)
    return Decoder(spec, heads, spec.max_positions, torch.float32, torch.device("meta"))
