"""Batch, ForwardContext, Tail and Taps: what a layer may read in one step, and what it gives away.

Types only. A step is one ragged batch: `num_seqs` requests, each feeding a run of consecutive
tokens (a prefill chunk of many, a decode of one), laid end to end. `runner/gather.py` builds a
`Batch`; attention backends turn it into their own plan once per step. Where few of its tokens are
read after the last layer, `runner/tail.py` says which.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from torch import Tensor

    from quire.attn.backend import AttentionBackend, LayerCache
    from quire.dist.homes import Homes
    from quire.memory.pool import PagePool
    from quire.nn.linear import Adapted


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's inputs. Tensors are on the model's device, int32 unless said otherwise.

    Sequence i feeds tokens [query_starts[i], query_starts[i + 1]) of the flat token axis; after
    the step it has context_lens[i] tokens of keys and values, those fed now included. Its page j
    is page_table[rows[i], j]; the token at position p lives in that table's page p // page_size.
    Layer groups (`kv/groups.py`) have a batch each, which differ in `slots` and `page_table`
    alone; entries of a windowed group that lie behind the window are stale.
    """

    input_ids: Tensor  # [tokens] int64
    positions: Tensor  # [tokens] int64
    slots: Tensor  # [tokens] int64, page * page_size + offset: where this token's K and V go
    query_starts: Tensor  # [seqs + 1]
    context_lens: Tensor  # [seqs]
    rows: Tensor  # [seqs] row of each sequence in page_table
    page_table: Tensor  # [max_rows, max_pages] shared by all steps, rows are permanent
    page_size: int
    # The same lengths on the host, for planning without a device sync.
    host_query_lens: np.ndarray[Any, Any]  # [seqs] int32
    host_context_lens: np.ndarray[Any, Any]  # [seqs] int32
    host_prompt_lens: np.ndarray[Any, Any] | None = None  # [seqs] int32; see `attn/latent_forms.py`
    # Many neighbours have the same pages in front: worth reading those once for all of them.
    shares_prefix: bool = False
    # Of drafts that are trees: how many drafts each token sees, itself included, and their places,
    # in the order of positions. Places stand for positions in `slots` and `context_lens`.
    paths: Tensor | None = None  # [tokens, 1 + depth]; -1 first: the token is of no tree

    @property
    def num_seqs(self) -> int:
        return len(self.host_query_lens)

    @property
    def num_tokens(self) -> int:
        return self.input_ids.shape[0]

    @property
    def is_decode(self) -> bool:
        """Every sequence feeds exactly one token."""
        return self.num_tokens == self.num_seqs


@dataclass(frozen=True, slots=True)
class LayerContext:
    """What one layer's forward receives besides its input."""

    attention: AttentionBackend
    cache: LayerCache
    plan: object  # whatever the backend's plan() returned for the layer's group
    adapted: Adapted | None = None  # where some row of the step has an adapter
    homes: Homes | None = None  # where ranks attend rows of their own; the plan is of ours


@dataclass(frozen=True, slots=True)
class StateReads:
    """Which hidden states of a step somebody reads besides the model's own head."""

    layers: tuple[int, ...] = ()  # the stream before these; their number: behind the last
    every_token: bool = False  # what follows the last norm, of all tokens

    def leaves_tail(self, num_layers: int) -> bool:
        """Whether the last layer may still leave out tokens that nothing is drawn after."""
        return not self.every_token and num_layers not in self.layers


@dataclass(frozen=True, slots=True)
class Taps:
    """The stream before some layers, [tokens, hidden] each, put here as the step passes them."""

    layers: tuple[int, ...]
    streams: dict[int, Tensor] = field(default_factory=dict)

    def take(self, layer: int, stream: Tensor) -> None:
        if layer in self.layers:
            self.streams[layer] = stream

    def taken(self) -> tuple[Tensor, ...]:
        """In the order asked for. A step whose tail is empty never comes behind the last layer."""
        return tuple(self.streams[layer] for layer in self.layers if layer in self.streams)


# What a block adds last, and what it is added to; None: that has happened. [tokens, hidden] each.
Stream = tuple["Tensor", "Tensor | None"]


def stream_of(parts: Sequence[Tensor]) -> Stream:
    return parts[0], parts[1] if len(parts) > 1 else None


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """What a model's forward receives: a step, planned."""

    batch: Batch  # the first group's
    attention: AttentionBackend
    attn_plans: tuple[object, ...]  # by group
    pool: PagePool
    taps: Taps | None = None  # streams that somebody reads besides the result
    adapted: Adapted | None = None
    incoming: Stream | None = None  # from the stage before, where another rank has those layers
    homes: Homes | None = None  # where ranks attend rows of their own; the plans are of ours

    def at(self, layer: int) -> LayerContext:
        plan = self.attn_plans[self.pool.group_of(layer)]
        return LayerContext(self.attention, self.pool.layer(layer), plan, self.adapted, self.homes)


@dataclass(frozen=True, slots=True)
class Tail:
    """The tokens of a step whose hidden states are read after the last layer.

    Once that layer has stored everybody's keys and values, the rest of it is for these alone. They
    may be none at all: chunks of prompts that go on in a later step.
    """

    index: Tensor  # [kept] int64, places in the step
    # Plans the last layer for these tokens alone; called there, when the device has work to do.
    plan: Callable[[], object]
    homes: Homes | None = None  # of these tokens
    own: Tensor | None = None  # [own kept] int64, places among our tokens; None: all are ours

    @property
    def is_empty(self) -> bool:
        return self.index.shape[0] == 0

    def of(self, x: Tensor) -> Tensor:
        """[tokens, ...] -> [kept, ...]"""
        return x.index_select(0, self.index)

    def of_queries(self, q: Tensor) -> Tensor:
        """The same of what `store` returned."""
        return q.index_select(0, self.index if self.own is None else self.own)
