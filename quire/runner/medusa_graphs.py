"""MedusaGraphs: a head of Medusa at a time as a graph, with its draw (`head_graphs.py`).

All heads read the same hidden states, so these are brought once for all of them. As in
`feature_graphs.py`, rows and positions of all levels go up at once, requests with shorter chains
are the spare row's from their end on, and what graphs cannot draw is drawn between them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from quire.models.heads.medusa import MedusaHeads
from quire.runner.draft_draws import DraftDraws, DrawForm
from quire.runner.graphs import GraphCache
from quire.runner.head_graphs import HeadGraphs, Lasting
from quire.runner.upload import IntArray, Uploader
from quire.step import Work

ROWS, DRAWN = range(2)  # what a draw reads: of each request an int32


class MedusaGraphs:
    def __init__(self, decodes: GraphCache, heads: MedusaHeads, draws: DraftDraws) -> None:
        self._decodes, self._heads, self._draws = decodes, heads, draws
        device = draws.rows.tokens.device
        self._uploader, self._kept = Uploader(device), Lasting(decodes.sizes[-1])
        self._graphs = HeadGraphs(decodes.memory.alone, self._kept)
        self._now = torch.zeros(2, self._kept.most, dtype=torch.int32, device=device)

    def covers(self, num_works: int) -> bool:
        return num_works <= self._decodes.sizes[-1]

    def draft(self, works: Sequence[Work], hidden: list[Tensor], form: DrawForm) -> None:
        """Chains of drafts into the rows of `works`, from [1, hidden] of each."""
        self.bring(hidden)
        depth = min(max(work.num_drafts for work in works), self._heads.num_heads)
        size = self._decodes.batch_bucket(len(works))
        made = _levels(works, depth, size, self._decodes.spare_row)
        sent = self._uploader.send({"levels": made})["levels"].view(made.shape)
        for head, level in enumerate(sent):
            self._now[:, :size].copy_(level)
            self._run(size, head, form)

    def bring(self, hidden: list[Tensor]) -> None:
        """What `logits` are of, [1, hidden] of each work."""
        self._kept.put_joined("hidden", hidden)

    def logits(self, head: int, num_works: int) -> Tensor:
        """To be drawn from."""
        made = self._run(self._decodes.batch_bucket(num_works), head, DrawForm.APART)
        assert made is not None, "a piece that draws hands out no logits"
        return made[:num_works]

    def ahead(self, like: Tensor, most_works: int) -> Iterator[Callable[[], object]]:
        """Captures of what comes most often, one a call; `like` is a hidden state."""
        for size in self._decodes.sizes:
            if size <= self._decodes.batch_bucket(most_works):
                for head in range(self._heads.num_heads):
                    for form in (DrawForm.WHOLE, DrawForm.NARROWED):
                        yield partial(self._nobody_guesses, like, size, head, form)

    def _nobody_guesses(self, like: Tensor, size: int, head: int, form: DrawForm) -> None:
        self._kept.place("hidden", like)
        self._now[ROWS].fill_(self._decodes.spare_row)
        self._now[DRAWN].zero_()
        self._run(size, head, form)

    def _run(self, size: int, head: int, form: DrawForm) -> Tensor | None:
        key = ("medusa's head", head, size, form.name)
        return self._graphs.run(key, partial(self._piece, size, head, form))

    def _piece(self, size: int, head: int, form: DrawForm) -> Tensor | None:
        logits = self._heads.logits(self._kept.first("hidden", size), head)
        if form is DrawForm.APART:
            return logits
        self._draws.draw_lasting(logits, self._now[ROWS, :size], self._now[DRAWN, :size], form)
        return None


def _levels(works: Sequence[Work], depth: int, size: int, spare: int) -> IntArray:
    """[levels, 2, size]"""
    made = np.zeros((depth, 2, size), np.int32)
    made[:, ROWS], num = spare, len(works)
    rows, starts, nums = np.asarray([(w.row, w.start, w.num_drafts) for w in works], np.int32).T
    depths = np.arange(depth)[:, None]
    is_on = nums > depths  # [levels, works]
    made[:, ROWS, :num] = np.where(is_on, rows, spare)
    made[:, DRAWN, :num] = np.where(is_on, starts + depths + 1, 0)
    return made
