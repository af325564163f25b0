"""Which form of latent attention a token takes: absorbed, unless the batch says where prompts end.

A token's bits must not depend on how it was scheduled, so the form must not depend on how many
tokens a step feeds. The simplest rule is to absorb every token. If the batch has the prompts'
lengths, prompt positions are expanded and generated ones absorbed, whatever the chunk, also when
they are computed again after preemption. Pages of generated tokens must then not serve as a prefix
of other prompts, where the same tokens would have been expanded.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.forward import Batch

_Ints = NDArray[np.signedinteger[Any]]


@dataclass(frozen=True, slots=True)
class Part:
    """The tokens of a step that take one form, and the batch they would be on their own."""

    tokens: Tensor | None  # [n] int64, places in the step; None: all of them
    batch: Batch

    def take(self, x: Tensor) -> Tensor:
        return x if self.tokens is None else x.index_select(0, self.tokens)


class Forms(NamedTuple):
    absorbed: Part | None
    expanded: Part | None


def split_forms(batch: Batch) -> Forms:
    """A chunk across the end of its prompt goes to both parts."""
    prompts = batch.host_prompt_lens
    if prompts is None:
        return Forms(Part(None, batch), None)
    ends = batch.host_context_lens
    starts = ends - batch.host_query_lens
    borders = np.clip(prompts, starts, ends)
    # |starts ... expanded ... borders ... absorbed ... ends|
    if (borders == starts).all():
        return Forms(Part(None, batch), None)
    if (borders == ends).all():
        return Forms(None, Part(None, batch))
    first = np.cumsum(batch.host_query_lens) - batch.host_query_lens
    shift = first - starts  # from a sequence's positions to places in the step
    return Forms(_part(batch, borders, ends, shift), _part(batch, starts, borders, shift))


def _part(batch: Batch, starts: _Ints, ends: _Ints, shift: _Ints) -> Part:
    seqs = np.flatnonzero(ends > starts)
    lens = (ends - starts)[seqs]
    query_ends = np.cumsum(lens)
    places = np.arange(query_ends[-1]) + np.repeat(starts[seqs] + shift[seqs], lens)
    places -= np.repeat(query_ends - lens, lens)
    sizes = [len(places), len(seqs), len(seqs) + 1, len(seqs)]
    packed = np.concatenate((places, seqs, [0], query_ends, ends[seqs])).astype(np.int32)
    tokens, at, query_starts, contexts = _upload(packed, batch.page_table.device).split(sizes)
    index = tokens.long()
    own = replace(
        batch,
        input_ids=batch.input_ids[index],
        positions=batch.positions[index],
        slots=batch.slots[index],
        query_starts=query_starts,
        context_lens=contexts,
        rows=batch.rows[at.long()],
        host_query_lens=lens.astype(np.int32),
        host_context_lens=ends[seqs].astype(np.int32),
        host_prompt_lens=None,
        paths=None if batch.paths is None else batch.paths[index],
    )
    return Part(index, own)


def _upload(values: _Ints, device: torch.device) -> Tensor:
    host = torch.from_numpy(values)
    if device.type != "cuda":
        return host
    return host.pin_memory().to(device, non_blocking=True)
