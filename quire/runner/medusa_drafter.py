"""MedusaDrafter: heads on the hidden state that the newest token was drawn from.

A head for each token ahead, all from one state: there are no pages and nothing to catch up with.
What each head guesses is drawn in turn, so that penalties and grammars see the guesses before it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from quire.models.heads.medusa import MedusaHeads
from quire.request import RequestId
from quire.runner.draft_draws import DraftDraws
from quire.runner.gather import StepShape
from quire.runner.kept_states import KeptStates
from quire.runner.runner import ModelRunner
from quire.runner.states import StepStates
from quire.runner.trees import TreeNode
from quire.spec.speculation import SpecCounts
from quire.step import StepPlan, Work


class MedusaDrafter:
    def __init__(self, target: ModelRunner, heads: MedusaHeads) -> None:
        self.heads, self.counts = heads, SpecCounts()
        self._target, self._kept, self._draws = target, KeptStates(), DraftDraws(target)

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
        taken = [self._kept.take(work.row, work.start)[1] for work in works]
        hidden = torch.cat([states[-1:] for states in taken])  # [works, hidden]
        for depth in range(min(max(w.num_drafts for w in works), self.heads.num_heads)):
            on = [i for i, work in enumerate(works) if work.num_drafts > depth]
            if len(on) < len(works):
                works, hidden = [works[i] for i in on], hidden[on]
            logits = self.heads.logits(hidden, depth)
            self._draws.draw(works, [work.start + depth + 1 for work in works], logits)

    def _fill_trees(self, works: list[Work]) -> None:
        """A head for each level: what it guesses is the same behind every guess before it, but for
        what penalties and grammars make of it."""
        hidden = torch.cat([self._kept.take(work.row, work.start)[1][-1:] for work in works])
        level = list(enumerate(TreeNode(work, 0) for work in works))  # with places in `hidden`
        for depth in range(self.heads.num_heads):
            level = [(at, node) for at, node in level if node.children]
            if not level:
                return
            index = [at for at, _ in level]
            few = sorted(set(index))
            logits = self.heads.logits(self._picked(hidden, few), depth)
            own = [few.index(at) for at in index]
            self._draws.draw_children([node for _, node in level], self._picked(logits, own))
            level = [
                (at, TreeNode(node.work, child)) for at, node in level for child in node.children
            ]

    def _picked(self, x: Tensor, index: list[int]) -> Tensor:
        """These rows, as a tensor of its own; nobody is waited for."""
        return x.index_select(0, self._target.uploader.send_one(torch.tensor(index)))

    @torch.inference_mode()
    def rehearse(self, num_works: int) -> None:
        """One guess for so many requests, of an engine that has not served anybody yet."""
        model, most = self._target.model, self._target.rows.max_len
        fed = [Work(RequestId(0), 0, i % most, 1, True) for i in range(num_works)]
        shape = num_works, model.spec.hidden_size
        hidden = torch.zeros(shape, dtype=model.dtype, device=model.device)
        self._draws.rehearse(fed, self.heads.logits(hidden, 0))
