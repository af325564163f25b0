"""AttentionBackend: the seam between the model's layers and the kernels that read the page pool.

`plan` runs once a step, `run` once a layer. A backend owns the layout of a layer's cache
(`cache_shape`) because the best order of page, head and token differs between devices.
`reference.py` is the oracle for every other backend; `select.py` picks one with a reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from quire.forward import Batch


@dataclass(frozen=True, slots=True)
class AttnSpec:
    """Shape of one model's attention, the same for all its layers."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    page_size: int


@dataclass(frozen=True, slots=True)
class AttnCaps:
    """What a backend can do; `select.py` compares it with what is needed."""

    devices: frozenset[str]  # torch device types
    dtypes: frozenset[torch.dtype]
    head_dims: frozenset[int] | None  # None: any
    page_sizes: frozenset[int] | None  # None: any
    graphs: bool  # decode plans may be replayed inside a captured graph


class LayerCache(NamedTuple):
    """One layer's pages: two tensors of the shape the backend asked for."""

    keys: Tensor
    values: Tensor


class AttentionBackend(Protocol):
    caps: AttnCaps

    def cache_shape(self, num_pages: int, spec: AttnSpec) -> tuple[int, ...]:
        """Shape of the key tensor (and of the value tensor) of one layer. Pure."""
        ...

    def plan(self, batch: Batch, spec: AttnSpec) -> object:
        """Prepare one step; reads only lengths and tables, never keys or values."""
        ...

    def write(self, k: Tensor, v: Tensor, cache: LayerCache, batch: Batch) -> None:
        """Store this step's keys and values, [tokens, kv_heads, dim], at batch.slots."""
        ...

    def run(self, q: Tensor, cache: LayerCache, plan: object, spec: AttnSpec) -> Tensor:
        """Causal attention of [tokens, heads, dim] queries over the pages -> same shape."""
        ...
