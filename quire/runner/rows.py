"""RequestRows: one permanent row per live request in tables on the device.

A row holds the request's token ids, page tables and sampling columns. Plans carry changes only;
they are staged as flat index/value lists and applied in a few scatters, never with a sync. Row
`max_rows` is a spare: padding of captured graphs points at it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from quire.params import SamplingParams
from quire.runner.upload import IntArray, Uploader
from quire.step import Admission, StepPlan, Work

# What a row's sampling needs, as bits, so that a step's needs are one reduction.
NOT_GREEDY, TOP_K, TOP_P, MIN_P, PENALTIES, EDITS, BAD_WORDS, LOGPROBS = (1 << i for i in range(8))
PROMPT_LOGPROBS, GRAMMAR, POOLING = (1 << i for i in range(8, 11))
HIDDEN = PROMPT_LOGPROBS | POOLING  # need hidden states, which decode graphs do not return

# Order of the sampling columns.
TEMPERATURE, NUCLEUS, FLOOR, REPETITION, PRESENCE, FREQUENCY = range(6)
CANDIDATES, SEED, PROMPT_LEN = range(3)


@dataclass(frozen=True, slots=True)
class RowInfo:
    """The host's copy of what a row asked for."""

    params: SamplingParams
    num_prompt: int
    banned_until_min: tuple[int, ...]


class RequestRows:
    def __init__(
        self,
        max_rows: int,
        max_len: int,
        max_pages: int,
        device: torch.device,
        num_groups: int = 1,
    ) -> None:
        self.max_rows, self.max_len, self.max_pages = max_rows, max_len, max_pages
        rows = max_rows + 1
        self.tokens = torch.zeros(rows, max_len + 1, dtype=torch.int32, device=device)
        # A table for each layer group. The number of rows is a multiple of four, so every table
        # begins at a multiple of 16 bytes, which kernels are compiled for.
        self._table_rows = -(-rows // 4) * 4
        self.page_tables = torch.zeros(
            num_groups, self._table_rows, max_pages, dtype=torch.int32, device=device
        )
        # Transposed: a column here is one request's settings, so a gathered setting is contiguous.
        self.floats = torch.zeros(6, rows, dtype=torch.float32, device=device)
        self.ints = torch.zeros(3, rows, dtype=torch.int64, device=device)
        self.float_columns, self.int_columns = self.floats.unbind(), self.ints.unbind()
        # 0, 1, 2...: where the queries of a decode step begin.
        self.counts = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self.needs = np.zeros(rows, dtype=np.int32)
        self.info: list[RowInfo | None] = [None] * rows
        self.adapters = np.zeros(rows, dtype=np.int64)  # numbers; 0: none
        self.homes = np.zeros(rows, dtype=np.int64)  # the rank that has each one's pages

    def starts_of(self, num_seqs: int) -> Tensor:
        """[num_seqs + 1] where queries of one token each begin; with drafts they outnumber rows."""
        if num_seqs < len(self.counts):
            return self.counts[: num_seqs + 1]
        return torch.arange(num_seqs + 1, dtype=torch.int32, device=self.counts.device)

    def num_prompt(self, row: int) -> int:
        info = self.info[row]
        return 0 if info is None else info.num_prompt

    def may_draft(self, row: int) -> bool:
        """Whether the row's request takes drafts at all."""
        info = self.info[row]
        return (
            info is not None
            and info.params.num_speculative_tokens != 0
            and info.params.pooling is None
        )

    def feeds_prompt(self, plan: StepPlan) -> bool:
        """Whether anybody is fed tokens of a prompt; those who enter now are asked in the plan."""
        new = {admission.row: admission.num_prompt for admission in plan.admissions}
        return any(work.start < new.get(work.row, self.num_prompt(work.row)) for work in plan.works)

    def uses_adapters(self, plan: StepPlan) -> bool:
        """Whether anybody who is fed has an adapter; those who enter now are asked in the plan."""
        new = {admission.row: admission.adapter for admission in plan.admissions}
        return any(new.get(work.row, self.adapters[work.row]) for work in plan.works)

    def reads_hidden(self, works: tuple[Work, ...]) -> bool:
        """Whether a request whose row is already set needs hidden states in this step."""
        needs = np.bitwise_or.reduce(self.needs[[w.row for w in works]])
        if needs & POOLING:
            return True
        return bool(needs & PROMPT_LOGPROBS) and any(map(self._reads_prompt, works))

    def _reads_prompt(self, work: Work) -> bool:
        """Whether this work's hidden states are wanted for prompt logprobs."""
        if not self.needs[work.row] & PROMPT_LOGPROBS:
            return False
        info = self.info[work.row]
        return info is not None and work.start < info.num_prompt - 1

    def stage(self, plan: StepPlan, arrays: dict[str, IntArray]) -> None:
        """Add this plan's edits to the step's upload."""
        known = [(a.row, 0, a.tokens) for a in plan.admissions]
        # A refused draft stays in its row until the next step writes there.
        known += [
            (w.row, w.start + w.num_tokens - w.num_drafts, w.drafts) for w in plan.works if w.drafts
        ]
        if known:
            arrays["token_at"] = np.concatenate(
                [self._token_slots(row, start, start + len(ids)) for row, start, ids in known]
            )
            arrays["token_ids"] = np.concatenate(
                [np.fromiter(ids, np.int32, len(ids)) for _, _, ids in known]
            )
        if plan.page_writes:
            # [writes, (row, column, page, group)]
            cells_of = chain.from_iterable(plan.page_writes)  # a fifth of asarray's time
            writes = np.fromiter(cells_of, np.int64, 4 * len(plan.page_writes)).reshape(-1, 4)
            # A cell may be staged twice (taken, then swapped for a shared page): last one wins.
            table_rows = writes[:, 3] * self._table_rows + writes[:, 0]
            cells = table_rows * self.max_pages + writes[:, 1]
            _, last = np.unique(cells[::-1], return_index=True)
            keep = len(cells) - 1 - last
            arrays["page_at"] = cells[keep]
            arrays["page_ids"] = writes[keep, 2].astype(np.int32)

    def _token_slots(self, row: int, start: int, stop: int) -> IntArray:
        base = row * (self.max_len + 1)
        return np.arange(base + start, base + stop, dtype=np.int64)

    def apply(self, plan: StepPlan, sent: dict[str, Tensor]) -> None:
        """Update what the forward reads, and the host's copy of each row."""
        for a in plan.admissions:
            self.info[a.row] = RowInfo(a.params, a.num_prompt, a.banned_until_min)
            self.needs[a.row] = needs_of(a.params)
            self.adapters[a.row] = a.adapter
            self.homes[a.row] = a.home
        if "token_at" in sent:
            self.tokens.view(-1).index_copy_(0, sent["token_at"], sent["token_ids"])
        if plan.page_writes:
            self.page_tables.view(-1).index_copy_(0, sent["page_at"], sent["page_ids"])

    def set_wishes(self, admissions: tuple[Admission, ...], uploader: Uploader) -> None:
        """Update what sampling reads of a row."""
        if not admissions:
            return
        floats = torch.tensor([_floats_of(a.params) for a in admissions], dtype=torch.float32)
        ints = torch.tensor(
            [(a.row, a.params.top_k, a.seed, a.num_prompt) for a in admissions], dtype=torch.int64
        )
        ints = uploader.send_one(ints)
        self.floats.index_copy_(1, ints[:, 0], uploader.send_one(floats).t())
        self.ints.index_copy_(1, ints[:, 0], ints[:, 1:].t())


def _floats_of(p: SamplingParams) -> tuple[float, ...]:
    return (
        p.temperature,
        p.top_p,
        p.min_p,
        p.repetition_penalty,
        p.presence_penalty,
        p.frequency_penalty,
    )


def needs_of(p: SamplingParams) -> int:
    needs = 0
    if not p.is_greedy:
        needs |= NOT_GREEDY
        needs |= TOP_K * (p.top_k > 0) | TOP_P * (p.top_p < 1.0) | MIN_P * (p.min_p > 0.0)
    needs |= PENALTIES * p.has_penalties
    needs |= EDITS * bool(p.logit_bias or p.allowed_token_ids or p.min_tokens)
    needs |= BAD_WORDS * bool(p.bad_word_ids)
    needs |= LOGPROBS * (p.logprobs is not None)
    needs |= PROMPT_LOGPROBS * (p.prompt_logprobs is not None)
    needs |= GRAMMAR * (p.structured_outputs is not None)
    return needs | POOLING * (p.pooling is not None)
