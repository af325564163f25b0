"""Ahead: steps that nobody asked for, run while nobody waits, so that graphs are captured and
kernels compiled before somebody needs them.

They go through `execute` like every step, on rows of nobody. Wherever they write, their page tables
name page 0, whose content nobody reads. What comes most often comes first. A head that drafts has
graphs of its own, which it captures itself (`head_graphs.py`). Other ranks run the same steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain

import torch

from quire.params import SamplingParams
from quire.request import RequestId
from quire.runner import mixed_graphs, prompt_graphs
from quire.runner.graphs import USUAL, buckets_of
from quire.runner.runner import ModelRunner
from quire.sched.neighbours import WORTH_SHARING_AMONG
from quire.step import Admission, PageWrite, StepPlan, Work

GREEDY = SamplingParams(temperature=0.0, num_speculative_tokens=0)


class Ahead:
    def __init__(self, runner: ModelRunner, most_tokens: int) -> None:
        """`most_tokens` of a step, as the scheduler has it."""
        self._runner, self._most = runner, most_tokens
        self._num_groups = len(runner.pool.groups.windows)
        self._pieces = self._listed()

    @staticmethod
    def of(runner: object, most_tokens: int) -> Ahead | None:
        """None: it has no graphs."""
        if not isinstance(runner, ModelRunner) or runner.graphs is None:
            return None
        return Ahead(runner, most_tokens)

    def step(self) -> bool:
        """Run one; False: there was none left. Only while no step is under way."""
        piece = next(self._pieces, None)
        if piece is not None:
            with torch.inference_mode():
                piece()
        return piece is not None

    # ------------------------------------------------------------ what is run

    def _listed(self) -> Iterator[Callable[[], object]]:
        assert self._runner.graphs is not None
        contexts, drafter = buckets_of(self._runner.graphs), self._runner.drafter
        usual, rare = contexts[:USUAL], contexts[USUAL:]
        return chain(
            map(self._run_of, chain(*map(self._decodes, usual))),
            () if drafter is None else drafter.ahead(),
            map(self._run_of, self._others(contexts, rare)),
        )

    def _run_of(self, plan: StepPlan) -> Callable[[], object]:
        return lambda: self._runner.execute(plan).result()

    def _others(self, contexts: list[int], rare: list[int]) -> Iterator[StepPlan]:
        return chain(
            self._prompts(0),
            self._mixed(0),
            *map(self._prompts, contexts[:-1]),
            *(self._decodes(context, shares_prefix=True) for context in contexts[1:]),
            *map(self._decodes, rare),
            *map(self._mixed, range(1, -(-self._runner.rows.max_rows // mixed_graphs.SINGLES))),
        )

    def _decodes(self, context: int, shares_prefix: bool = False) -> Iterator[StepPlan]:
        """Of all sizes, with contexts up to this one."""
        graphs, rows = self._runner.graphs, self._runner.rows
        assert graphs is not None
        start = context - 1
        for size in graphs.sizes:
            is_worth = not shares_prefix or size >= WORTH_SHARING_AMONG
            if size <= min(rows.max_rows, self._most) and graphs.covers(size, context) and is_worth:
                yield self._plan([(start, 1)] * size, shares_prefix)

    def _prompts(self, start: int) -> Iterator[StepPlan]:
        """Lone prompts of all sizes, behind so many tokens that are there already."""
        graphs = self._runner.prompt_graphs
        for size in prompt_graphs.SIZES if graphs is not None else ():
            if size <= self._most and start + size <= self._runner.rows.max_len:
                assert graphs is not None
                graphs.size_for(size, start + size)  # captured when it comes for the second time
                yield self._plan([(start, size)])

    def _mixed(self, bucket: int) -> Iterator[StepPlan]:
        """Prompts among decodes, whose number is in this bucket, in steps of all sizes."""
        graphs, rows = self._runner.mixed_graphs, self._runner.rows
        num_singles = bucket * mixed_graphs.SINGLES + (1 if rows.max_rows > 1 else 0)
        for size in graphs.sizes if graphs is not None else ():
            longest = min(size - num_singles, rows.max_len)
            if longest <= 1 or size > self._most:
                continue
            whole, rest = divmod(size - num_singles, longest)
            lens = [longest] * whole + [rest] * (rest > 0) + [1] * num_singles
            if len(lens) <= rows.max_rows:
                assert graphs is not None
                graphs.size_for(lens, longest)  # likewise
                yield self._plan([(0, num) for num in lens])

    def _plan(self, fed: list[tuple[int, int]], shares_prefix: bool = False) -> StepPlan:
        """`fed`: (first position, number of tokens) of each row."""
        works, admissions, writes = [], [], []
        page_size = self._runner.spec.page_size
        for row, (start, num) in enumerate(fed):
            admissions.append(Admission(RequestId(row), row, (0,), num, GREEDY, 0, ()))
            works.append(Work(RequestId(row), row, start, num, True, is_read=False))
            for column in range(start // page_size, (start + num - 1) // page_size + 1):
                writes += [PageWrite(row, column, 0, group) for group in range(self._num_groups)]
        edits = (tuple(works), tuple(admissions), tuple(writes))
        return StepPlan(*edits, shares_prefix=shares_prefix)
