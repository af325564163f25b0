"""Gather: rows + plan -> a Batch for each layer group.

Lengths come from the host, token ids and pages from the rows. A CPU gathers them with numpy, a GPU
in one launch (`kernels/step_inputs.py`). Groups differ in where a token's keys and values lie and
share everything else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.forward import Batch
from quire.runner.mixed_graphs import MixedSize
from quire.runner.rows import RequestRows
from quire.runner.tree_walk import stage_walks
from quire.runner.trees import Nodes, Sequences, StepTrees
from quire.runner.upload import IntArray
from quire.step import Work


class StepShape:
    """The host's view of one step: which row feeds which positions, as arrays.

    Padding uses the spare row. Steps of few tokens are padded to `pad_to` of them by sequences of
    one. A prompt is padded to `pad_tokens` by one sequence that feeds the rest. A mixed step is
    padded to `mixed_size` by one sequence that feeds the rest and some that feed nothing, the last
    of them with one key. `trees` are for works that are single drafts of one; those that are whole
    trees say so themselves."""

    def __init__(
        self,
        works: tuple[Work, ...],
        spare_row: int,
        pad_to: int = 0,
        pad_tokens: int = 0,
        mixed_size: MixedSize | None = None,
        trees: StepTrees | None = None,
        by_node: bool = False,
    ) -> None:
        """`by_node`: for backends that take each draft of a tree as a sequence of its own, and
        whose results are not awaited."""
        if mixed_size is not None:
            pad_tokens = mixed_size.num_tokens
        num_pad = max(0, pad_to - sum(work.num_tokens for work in works)) if pad_to else 0
        columns = np.asarray(
            [(w.row, w.start, w.num_tokens, w.sample and 1 + w.num_drafts) for w in works], np.int32
        )
        if num_pad:
            pad = np.tile(np.asarray([[spare_row, 0, 1, 0]], np.int32), (num_pad, 1))
            columns = np.concatenate((columns, pad))
        if pad_tokens:
            rest = pad_tokens - sum(work.num_tokens for work in works)
            columns = np.concatenate((columns, np.asarray([[spare_row, 0, rest, 0]], np.int32)))
        if mixed_size is not None:
            empty = np.zeros((mixed_size.num_seqs - len(columns), 4), np.int32)
            empty[:, 0], empty[-1, 1] = spare_row, 1
            columns = np.concatenate((columns, empty))
        # Whether the step is laid out for a captured graph, of few tokens or mixed.
        self.is_padded_decode = pad_to > 0
        self.mixed_size = mixed_size
        self.rows, self.starts, self.query_lens = columns[:, 0], columns[:, 1], columns[:, 2]
        self.context_lens = self.starts + self.query_lens
        self.query_ends = np.cumsum(self.query_lens, dtype=np.int32)
        self._set_samples(columns[:, 3])
        has_drafts = columns[:, 3].max() > 1
        self._whole = works if by_node else ()  # whose trees are walked on the device
        self._by_node = by_node
        self._set_trees(
            StepTrees.of(works, self.num_tokens) if trees is None and has_drafts else trees
        )

    def _set_samples(self, counts: IntArray) -> None:
        """What is drawn: `counts` tokens by each work, after the last tokens that it feeds."""
        self.sampled = np.flatnonzero(counts)  # for each sample the work that draws it
        self.sample_lens = self.context_lens[self.sampled]  # and how many tokens are before it
        self.sample_ends = self.query_ends[self.sampled]
        if counts.max() > 1:
            self.sampled = np.repeat(np.arange(len(counts)), counts)
            ends = np.cumsum(counts, dtype=np.int32)[self.sampled]
            behind = ends - 1 - np.arange(ends[-1], dtype=np.int32)  # drafts fed after it
            self.sample_lens = self.context_lens[self.sampled] - behind
            self.sample_ends = self.query_ends[self.sampled] - behind

    def _set_trees(self, trees: StepTrees | None) -> None:
        """With trees, a sample's place and its position differ."""
        self.trees, self.sample_places = trees, self.sample_lens
        if trees is not None:
            self.sample_lens = self.sample_lens - trees.shifts[self.sample_ends - 1]

    @property
    def num_tokens(self) -> int:
        return int(self.query_ends[-1])

    @property
    def is_decode(self) -> bool:
        return self.num_tokens == len(self.rows)

    def places(self) -> IntArray:
        """[tokens] place of every token fed: its position, but for trees of drafts."""
        first = self.query_ends - self.query_lens
        shift = np.repeat(self.starts - first, self.query_lens)
        places: IntArray = np.arange(self.num_tokens, dtype=np.int32)
        places += shift
        return places

    def sequences(self) -> Sequences:
        """As the backend takes them."""
        seqs = Sequences(self.rows, self.query_lens, self.context_lens)
        return self.trees.apart(seqs) if self.trees is not None and self._by_node else seqs

    def stage(self, arrays: dict[str, IntArray]) -> None:
        """Add this step's lengths to its upload, before arrays whose size varies.

        A captured graph reads them at the address they had when it was captured."""
        is_flat = self.is_padded_decode and not self.is_decode  # every token is a sequence
        seqs = self.sequences()
        arrays["rows"] = np.repeat(self.rows, self.query_lens) if is_flat else seqs.rows
        places = self.starts if self.is_decode else self.places()
        arrays["positions"] = places
        if self.trees is not None:
            arrays["positions"] = places - self.trees.shifts
            arrays["places"], arrays["paths"] = places, self.trees.paths
        if not is_flat and (not self.is_decode or self.trees is not None):
            arrays["token_rows"] = np.repeat(self.rows, self.query_lens)
            ends = np.cumsum(seqs.query_lens, dtype=np.int32)
            arrays["query_starts"] = np.concatenate(([np.int32(0)], ends))
            arrays["context_lens"] = seqs.context_lens
        arrays["sample_rows"] = self.rows[self.sampled]
        arrays["sample_positions"] = self.sample_lens
        arrays["sample_index"] = self.sample_ends.astype(np.int64) - 1
        if self.trees is not None:
            arrays["sample_places"] = self.sample_places
            stage_walks(self._whole, arrays)


class FedTokens(NamedTuple):
    """What the model reads of each token fed."""

    input_ids: Tensor  # [tokens] int64
    positions: Tensor  # [tokens] int64
    slots: Tensor  # [groups, tokens] int64
    context_lens: Tensor  # [tokens] int32: of a sequence that ends with this token


def ragged_batches(
    rows: RequestRows, shape: StepShape, sent: dict[str, Tensor], page_size: int
) -> tuple[Batch, ...]:
    _, query_lens, context_lens = shape.sequences()
    return fed_batches(rows, sent, page_size, query_lens, context_lens)


def fed_batches(
    rows: RequestRows,
    sent: Mapping[str, Tensor],
    page_size: int,
    host_query_lens: IntArray,
    host_context_lens: IntArray,
) -> tuple[Batch, ...]:
    """Sequences that feed runs of tokens. All device data derives from the step's upload."""
    fed = fed_tokens(rows, sent["token_rows"], sent["positions"], page_size, sent.get("places"))
    first = Batch(
        input_ids=fed.input_ids,
        positions=fed.positions,
        slots=fed.slots[0],
        query_starts=sent["query_starts"],
        context_lens=sent["context_lens"],
        rows=sent["rows"],
        page_table=rows.page_tables[0],
        page_size=page_size,
        host_query_lens=host_query_lens,
        host_context_lens=host_context_lens,
        paths=None if (nodes := Nodes.of(sent)) is None else nodes.paths,
    )
    return _by_group(first, rows, fed.slots)


def decode_batches(
    rows: RequestRows,
    row_ids: Tensor,
    positions: Tensor,
    page_size: int,
    host_context_lens: IntArray,
    shares_prefix: bool = False,
    nodes: Nodes | None = None,
) -> tuple[Batch, ...]:
    """Sequences of one token each. All derives from two device vectors, and from two more where
    trees are fed: a graph can capture it."""
    num_seqs = row_ids.shape[0]
    places, paths = (None, None) if nodes is None else nodes
    fed = fed_tokens(rows, row_ids, positions, page_size, places)
    first = Batch(
        input_ids=fed.input_ids,
        positions=fed.positions,
        slots=fed.slots[0],
        query_starts=rows.starts_of(num_seqs),
        context_lens=fed.context_lens,
        rows=row_ids,
        page_table=rows.page_tables[0],
        page_size=page_size,
        host_query_lens=np.ones(num_seqs, dtype=np.int32),
        host_context_lens=host_context_lens,
        shares_prefix=shares_prefix,
        paths=paths,
    )
    return _by_group(first, rows, fed.slots)


def fed_tokens(
    rows: RequestRows,
    token_rows: Tensor,
    positions: Tensor,
    page_size: int,
    places: Tensor | None = None,
) -> FedTokens:
    """[tokens] int32 rows and positions -> their tokens, and where keys and values go. `places`: of
    a step with trees, where the tokens lie."""
    if positions.is_cuda:
        # Here and not above: CPU installs need no triton.
        from quire.kernels.step_inputs import step_inputs

        tables = (rows.tokens, rows.page_tables)
        return FedTokens(*step_inputs(token_rows, positions, *tables, page_size, places))
    # In numpy: some ten operations on a few numbers, each several times as long in torch.
    at, pos = token_rows.numpy(), positions.numpy().astype(np.int64)
    place = pos if places is None else places.numpy().astype(np.int64)
    pages = rows.page_tables.numpy()[:, at, place // page_size]  # [groups, tokens]
    slots = np.multiply(pages, page_size, dtype=np.int64, order="C") + place % page_size
    ids = rows.tokens.numpy()[at, place].astype(np.int64)
    return FedTokens(*map(torch.from_numpy, (ids, pos, slots, positions.numpy() + 1)))


def _by_group(first: Batch, rows: RequestRows, slots: Tensor) -> tuple[Batch, ...]:
    others = zip(rows.page_tables[1:], slots[1:], strict=True)
    return (first, *(replace(first, page_table=table, slots=at) for table, at in others))
