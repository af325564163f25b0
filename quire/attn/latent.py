"""Latent attention: the cache keeps one vector of a token, not the keys and values of all heads.

A slot holds [latent | rotated key]. A head's key is a product of the latent, followed by the
rotated key; its value is another product of the latent. There are two ways to compute with them:

    absorbed  the key product is applied to the query instead, the value product to the result: all
              heads then share the pages as they lie, and attention has one kv head whose values are
              the first `value_dim` numbers of its keys
    expanded  keys and values of every head are computed from the pages before attention: 3.4 times
              less attention work for a DeepSeek, but each step expands the whole context anew

They round differently, so which one a token takes must not depend on the step it came in:
`latent_forms.py` has the rule. Backends are `latent_reference.py`, `latent_cpu.py` and
`latent_triton.py`; the layer that owns the products is `nn/mla.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from torch import Tensor

from quire.attn.moves import move_by_head, move_rows

if TYPE_CHECKING:
    import torch

    from quire.attn.backend import AttnCaps, AttnSpec, HeadTransform, LayerCache
    from quire.attn.heads import Rotation
    from quire.attn.latent_forms import Part
    from quire.forward import Batch


class Projected(NamedTuple):
    """A step's tokens as the layer projects them; contiguous in the last dimension."""

    q: Tensor  # [tokens, heads, nope + rope], yet to be rotated in its last dims
    latent: Tensor  # [tokens, kv_rank], normed
    key: Tensor  # [tokens, rope], yet to be rotated


class Expand(Protocol):
    def __call__(self, latents: Tensor) -> Tensor:
        """[n, kv_rank] -> [n, heads, nope + v_dim]; a row's bits depend on that row alone."""
        ...


@dataclass(slots=True)
class LatentPlan:
    """One step: its tokens by form, and what the backend worked out for each form."""

    batch: Batch
    absorbed: Part | None
    expanded: Part | None
    absorbed_plan: object = None
    expanded_plan: object = None
    rotation: Rotation | None = None  # gathered by the first layer, the same for all


class LatentAttention(ABC):
    """An attention backend for pages of latents. `AttnSpec.head_dim` is kv_rank + rope here,
    `value_dim` is kv_rank, and queries in expanded form have the width of a head instead."""

    caps: AttnCaps
    cache_dtype: torch.dtype

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = self.cache_dtype = dtype

    def cache_shape(self, num_pages: int, spec: AttnSpec) -> tuple[int, ...]:
        return (num_pages, 1, spec.page_size, spec.head_dim)

    def move(self, cache: LayerCache, sources: Tensor, targets: Tensor, spec: AttnSpec) -> None:
        """As in `moves.py`, where the backend takes trees."""
        if cache.form.is_coded:
            move_rows(cache.keys, sources, targets, (spec.page_size, 1))
        else:
            move_by_head(cache.keys, sources, targets)

    @abstractmethod
    def plan(self, batch: Batch, spec: AttnSpec, max_context: int | None = None) -> LatentPlan:
        """As in `AttentionBackend`. A bounded plan is for decode, which is absorbed."""

    @abstractmethod
    def prepare(
        self,
        tokens: Projected,
        heads: HeadTransform,
        cache: LayerCache,
        plan: LatentPlan,
        spec: AttnSpec,
    ) -> Tensor:
        """Rotate, store latents and keys at the batch's slots, return q as [tokens, heads,
        nope + rope]. May rotate in place."""

    @abstractmethod
    def run(self, q: Tensor, cache: LayerCache, plan: LatentPlan, spec: AttnSpec) -> Tensor:
        """The absorbed part: its [tokens, heads, head_dim] queries -> [tokens, heads, value_dim],
        to be multiplied into values by the caller."""

    @abstractmethod
    def run_expanded(
        self, q: Tensor, cache: LayerCache, plan: LatentPlan, spec: AttnSpec, expand: Expand
    ) -> Tensor:
        """The expanded part: its [tokens, heads, nope + rope] queries -> [tokens, heads, v_dim]."""


def latent_attention(backend: object) -> LatentAttention:
    """The backend of a model whose layers are latent."""
    assert isinstance(backend, LatentAttention), f"{type(backend).__name__} has no latent pages"
    return backend


def latent_plan(plan: object) -> LatentPlan:
    assert isinstance(plan, LatentPlan), f"{plan=}"
    return plan
