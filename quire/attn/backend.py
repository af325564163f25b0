"""AttentionBackend: the seam between the model's layers and the kernels that read the page pool.

`plan` runs once a step; `prepare` and `run` once a layer. A backend owns the layout of a layer's
cache (`cache_shape`), because the best order of page, head and token differs between devices. So it
also writes the keys and values. `reference.py` is the oracle for every
other backend; `select.py` picks one with a reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

from quire.kv.forms import FLOAT32, CacheForm
from quire.kv.spec import KvScales

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor

    from quire.attn.balance import Balance
    from quire.forward import Batch

    IntArray = np.ndarray[Any, np.dtype[np.signedinteger[Any]]]


@dataclass(frozen=True, slots=True)
class AttnSpec:
    """Shape of one layer's attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    page_size: int
    window: int | None = None  # last positions a query sees, its own included; None: all
    softcap: float | None = None  # logits become cap * tanh(logits / cap)
    # Values are the first `value_dim` numbers of the keys, and only keys are stored; None: both.
    value_dim: int | None = None


@dataclass(frozen=True, slots=True)
class AttnCaps:
    """What a backend can do; `select.py` compares it with what is needed."""

    devices: frozenset[str]  # torch device types
    dtypes: frozenset[torch.dtype]
    head_dims: frozenset[int] | None  # None: any
    page_sizes: frozenset[int] | None  # None: any
    graphs: bool  # decode plans may be replayed inside a captured graph
    value_dims: frozenset[int] | None = None  # of latents; None: any
    prompt_graphs: bool = False  # so may plans with prompts: the backend is a PromptPlanner too
    # Coded forms of the cache (`kv/forms.py`), each with what divides the heads it can be kept of.
    codes: Mapping[str, int] = field(default_factory=dict)
    trees: bool = False  # reads drafts along `Batch.paths`, and is a SlotMover too (`moves.py`)
    by_node: bool = False  # and takes each draft of a tree as a sequence of its own


class LayerCache(NamedTuple):
    """One layer's pages: two tensors of the shape the backend asked for or, where they hold codes,
    of bytes [pages, bytes of a page], which the backend lays out itself."""

    keys: Tensor
    values: Tensor
    form: CacheForm = FLOAT32  # only whether it is coded counts: floats are of the tensors' dtype
    scales: KvScales | None = None  # of a checkpoint; None: each row's own


@dataclass(frozen=True, slots=True)
class HeadTransform:
    """What happens to q and k between projection and attention; the same object every step."""

    cos: Tensor | None  # [max_positions, rot_dim / 2] f32; None: no rotation
    sin: Tensor | None
    q_norm: Tensor | None  # [head_dim] RMS weight on each head (Qwen3); None: no norm
    k_norm: Tensor | None
    eps: float
    balance: Balance | None = None  # of keys that become codes


class AttentionBackend(Protocol):
    caps: AttnCaps
    cache_dtype: torch.dtype  # of keys and values that are kept as floats

    def cache_shape(self, num_pages: int, spec: AttnSpec) -> tuple[int, ...]:
        """Shape of the key tensor (and of the value tensor) of one layer; pages first. Pure."""
        ...

    def plan(self, batch: Batch, spec: AttnSpec, max_context: int | None = None) -> object:
        """Prepare one step from its lengths. `max_context` bounds every context length the plan
        will be replayed with (graphs); None means the lengths in this batch."""
        ...

    def prepare(
        self, qkv: Tensor, heads: HeadTransform, cache: LayerCache, plan: object, spec: AttnSpec
    ) -> Tensor:
        """Split fused [tokens, (heads + 2 kv_heads) * dim], transform, store k and v at the
        batch's slots, return q as [tokens, heads, dim]. Mutates the cache only."""
        ...

    def run(
        self,
        q: Tensor,
        cache: LayerCache,
        plan: object,
        spec: AttnSpec,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Causal attention of [tokens, heads, dim] queries over the pages -> same shape. `sinks`
        [heads] f32 are logits that take part in the softmax and bring no value."""
        ...


class PromptPlanner(Protocol):
    """A backend whose plan of a step with prompts is data on the device, of a fixed size."""

    def fewest_tokens(self, spec: AttnSpec) -> int:
        """Fewest tokens of a prompt to plan this way; fewer are better planned as few queries."""
        ...

    def prompt_tiles(
        self, query_lens: IntArray, context_lens: IntArray, num_tokens: int, spec: AttnSpec
    ) -> IntArray:
        """Tiles of two sequences that feed `num_tokens` together.

        The shape depends on `num_tokens` and the spec alone."""
        ...

    def plan_prompt(self, batch: Batch, spec: AttnSpec, tiles: Tensor) -> object:
        """A plan that reads what to do from `prompt_tiles` on the device."""
        ...

    def mixed_tiles(
        self,
        query_lens: IntArray,
        context_lens: IntArray,
        num_singles: int,
        most_prompts: int,
        spec: AttnSpec,
    ) -> IntArray:
        """Tiles of up to `num_singles` sequences of one token and up to `most_prompts` of more.

        The shape depends on these numbers, the sum of tokens and the spec alone. The last two
        sequences feed nothing; the last one has one key, the other none."""
        ...

    def plan_mixed(self, batch: Batch, spec: AttnSpec, tiles: Tensor, num_singles: int) -> object:
        """A plan that reads what to do from `mixed_tiles` on the device."""
        ...


def prompt_planner(backend: AttentionBackend) -> PromptPlanner:
    assert backend.caps.prompt_graphs, f"{type(backend).__name__} plans no prompts on the device"
    return cast("PromptPlanner", backend)
