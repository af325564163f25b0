"""MedusaDrafter: heads on the hidden state that the newest token was drawn from.

A head for each token ahead, all from one state: there are no pages and nothing to catch up with.
What each head guesses is drawn in turn, so that penalties and grammars see the guesses before it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from quire.models.heads.medusa import MedusaHeads
from quire.request import RequestId
from quire.runner.draft_draws import DraftDraws, DrawForm
from quire.runner.gather import StepShape
from quire.runner.kept_states import KeptStates
from quire.runner.medusa_graphs import MedusaGraphs
from quire.runner.runner import ModelRunner
from quire.runner.states import StepStates
from quire.runner.trees import TreeNode
from quire.spec.speculation import SpecCounts
from quire.step import StepPlan, Work


class MedusaDrafter:
    def __init__(self, target: ModelRunner, heads: MedusaHeads) -> None:
        self.heads, self.counts = heads, SpecCounts()
        self._target, self._kept, self._draws = target, KeptStates(), DraftDraws(target)
        self.graphs: MedusaGraphs | None = None
        if target.graphs is not None:
            self.graphs = MedusaGraphs(target.graphs, heads, self._draws)

    def begin(self, plan: StepPlan) -> None:
        for admission in plan.admissions:
            self._kept.forget(admission.row)
        for work in plan.works:
            if not work.is_read:
                self._kept.forget(work.row)

    def copy_pages(self, sources: Tensor, targets: Tensor) -> None:
        """There are none."""

    def _is_read(self, work: Work) -> bool:
        return work.is_read and self._target.rows.may_draft(work.row)

    def keep(self, works: Sequence[Work], shape: StepShape, states: StepStates) -> None:
        sampled, end = states.sampled.clone(), 0
        for work in works:
            if not work.sample:
                continue
            num = 1 + work.num_drafts
            begin, end = end, end + num
            if self._is_read(work):
                self._kept.forget(work.row)
                first = work.start + work.num_tokens - num
                self._kept.put(work.row, first, sampled[begin:end])

    def fill(self, works: Sequence[Work]) -> None:
        begun = time.perf_counter()
        ready = [work for work in works if self._kept.num_before(work.row, work.start)]
        if ready:
            self._draws.begin(ready)
            if any(work.parents for work in ready):
                self._fill_trees(ready)
            else:
                self._fill(ready)
            self._draws.end()
        self.counts.seconds += time.perf_counter() - begun

    def _fill(self, works: list[Work]) -> None:
        taken, form = self._taken(works), self._draws.form(works)
        graphs = self._graphs_for(len(works))
        if graphs is not None and form is not DrawForm.APART:
            graphs.draft(works, taken, form)
            return
        read, index = self._reader(taken), list(range(len(works)))
        for depth in range(min(max(w.num_drafts for w in works), self.heads.num_heads)):
            on = [i for i in index if works[i].num_drafts > depth]
            some = [works[i] for i in on]
            self._draws.draw(some, [w.start + depth + 1 for w in some], read(depth, on))

    def _fill_trees(self, works: list[Work]) -> None:
        """A head for each level: what it guesses is the same behind every guess before it, but for
        what penalties and grammars make of it."""
        read = self._reader(self._taken(works))
        level = list(enumerate(TreeNode(work, 0) for work in works))  # with places in `works`
        for depth in range(self.heads.num_heads):
            level = [(at, node) for at, node in level if node.children]
            if not level:
                return
            logits = read(depth, [at for at, _ in level])
            self._draws.draw_children([node for _, node in level], logits)
            level = [
                (at, TreeNode(node.work, child)) for at, node in level for child in node.children
            ]

    def _taken(self, works: Sequence[Work]) -> list[Tensor]:
        """[1, hidden] of each: the state that its newest token was drawn from."""
        return [self._kept.take(work.row, work.start)[1][-1:] for work in works]

    def _graphs_for(self, num: int) -> MedusaGraphs | None:
        return self.graphs if self.graphs is not None and self.graphs.covers(num) else None

    def _reader(self, taken: list[Tensor]) -> Callable[[int, list[int]], Tensor]:
        """What a head's number and places among these states give: logits of these."""
        graphs = self._graphs_for(len(taken))
        if graphs is not None:
            graphs.bring(taken)
            return lambda head, index: self._picked(graphs.logits(head, len(taken)), index)
        hidden = torch.cat(taken)

        def read(head: int, index: list[int]) -> Tensor:
            few = sorted(set(index))
            logits = self.heads.logits(self._picked(hidden, few), head)
            return self._picked(logits, [few.index(at) for at in index])

        return read

    def _picked(self, x: Tensor, index: list[int]) -> Tensor:
        """These rows, as a tensor of its own; nobody is waited for."""
        if index == list(range(len(x))):
            return x
        return x.index_select(0, self._target.uploader.send_one(torch.tensor(index)))

    @torch.inference_mode()
    def rehearse(self, num_works: int) -> None:
        """One guess for so many requests, of an engine that has not served anybody yet."""
        most = self._target.rows.max_len
        works = [Work(RequestId(0), 0, i % most, 2, True, 1) for i in range(num_works)]
        graphs, hidden = self._graphs_for(num_works), self._hidden(num_works)
        if graphs is not None:
            graphs.draft(works, [hidden], DrawForm.WHOLE)
        else:
            self._draws.rehearse(works, self.heads.logits(hidden, 0))

    def _hidden(self, num: int) -> Tensor:
        model = self._target.model
        shape = num, model.spec.hidden_size
        return torch.zeros(shape, dtype=model.dtype, device=model.device)

    def ahead(self) -> Iterator[Callable[[], object]]:
        """As in `Drafter`."""
        if self.graphs is not None:
            yield from self.graphs.ahead(self._hidden(1), self._target.rows.max_rows)
