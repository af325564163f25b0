"""Gather: rows + plan -> a Batch for each layer group.

Lengths come from the host, token ids and pages from the rows. Groups differ in where a token's
keys and values lie and share everything else.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from quire.forward import Batch
from quire.runner.rows import RequestRows
from quire.runner.upload import IntArray
from quire.step import Work


class StepShape:
    """The host's view of one step: who feeds what, as arrays. Pads with the spare row."""

    def __init__(self, works: tuple[Work, ...], spare_row: int, pad_to: int = 0) -> None:
        num_pad = max(0, pad_to - len(works))
        columns = np.asarray([(w.row, w.start, w.num_tokens, w.sample) for w in works], np.int32)
        if num_pad:
            pad = np.tile(np.asarray([[spare_row, 0, 1, 0]], np.int32), (num_pad, 1))
            columns = np.concatenate((columns, pad))
        self.num_real = len(works)
        self.is_padded = pad_to > 0  # laid out for a captured graph
        self.rows, self.starts, self.query_lens = columns[:, 0], columns[:, 1], columns[:, 2]
        self.context_lens = self.starts + self.query_lens
        self.query_ends = np.cumsum(self.query_lens, dtype=np.int32)
        self.sampled = np.flatnonzero(columns[:, 3])  # works that draw a token

    @property
    def num_tokens(self) -> int:
        return int(self.query_ends[-1])

    @property
    def is_decode(self) -> bool:
        return self.num_tokens == len(self.rows)

    def positions(self) -> IntArray:
        """[tokens] position of every token fed."""
        first = self.query_ends - self.query_lens
        shift = np.repeat(self.starts - first, self.query_lens)
        positions: IntArray = np.arange(self.num_tokens, dtype=np.int32)
        positions += shift
        return positions

    def stage(self, arrays: dict[str, IntArray], token_stride: int) -> None:
        rows = self.rows[self.sampled]
        drawn_at = self.context_lens[self.sampled]
        arrays["rows"] = self.rows
        arrays["sample_rows"] = rows
        arrays["sample_index"] = self.query_ends[self.sampled] - 1
        arrays["sample_positions"] = drawn_at
        arrays["sample_slots"] = rows * np.int32(token_stride) + drawn_at
        if not self.is_decode:
            arrays["positions"] = self.positions()
            arrays["token_rows"] = np.repeat(self.rows, self.query_lens)
            arrays["query_starts"] = np.concatenate(([np.int32(0)], self.query_ends))
            arrays["context_lens"] = self.context_lens
        else:
            arrays["positions"] = self.starts


def ragged_batches(
    rows: RequestRows, shape: StepShape, sent: dict[str, Tensor], page_size: int
) -> tuple[Batch, ...]:
    positions, token_rows = sent["positions"].long(), sent["token_rows"].long()
    slots = _slots(rows, token_rows, positions, page_size)
    first = Batch(
        input_ids=rows.tokens[token_rows, positions].long(),
        positions=positions,
        slots=slots[0],
        query_starts=sent["query_starts"],
        context_lens=sent["context_lens"],
        rows=sent["rows"],
        page_table=rows.page_tables[0],
        page_size=page_size,
        host_query_lens=shape.query_lens,
        host_context_lens=shape.context_lens,
    )
    return _by_group(first, rows, slots)


def decode_batches(
    rows: RequestRows,
    row_ids: Tensor,
    positions: Tensor,
    page_size: int,
    host_context_lens: IntArray,
    shares_prefix: bool = False,
) -> tuple[Batch, ...]:
    """One token each. Everything derives from two device vectors, so a graph can capture it."""
    num_seqs = row_ids.shape[0]
    at, pos = row_ids.long(), positions.long()
    steps = torch.arange(num_seqs + 1, dtype=torch.int32, device=row_ids.device)
    slots = _slots(rows, at, pos, page_size)
    first = Batch(
        input_ids=rows.tokens[at, pos].long(),
        positions=pos,
        slots=slots[0],
        query_starts=steps,
        context_lens=positions + 1,
        rows=row_ids,
        page_table=rows.page_tables[0],
        page_size=page_size,
        host_query_lens=np.ones(num_seqs, dtype=np.int32),
        host_context_lens=host_context_lens,
        shares_prefix=shares_prefix,
    )
    return _by_group(first, rows, slots)


def _slots(rows: RequestRows, token_rows: Tensor, positions: Tensor, page_size: int) -> Tensor:
    """[groups, tokens]"""
    pages = rows.page_tables[:, token_rows, positions // page_size].long()
    return pages * page_size + positions % page_size


def _by_group(first: Batch, rows: RequestRows, slots: Tensor) -> tuple[Batch, ...]:
    others = zip(rows.page_tables[1:], slots[1:], strict=True)
    return (first, *(replace(first, page_table=table, slots=at) for table, at in others))
