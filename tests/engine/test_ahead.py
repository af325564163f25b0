"""Steps run ahead: they ask for every graph that traffic can ask for, and touch nobody's pages.

Graphs are played: they need a GPU, the decisions around them do not.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from quire.runner.ahead import Ahead
from quire.runner.graphs import USUAL, GraphCache
from quire.runner.mixed_graphs import MOST_PROMPTS, MixedGraphs
from quire.runner.prompt_graphs import PromptGraphs
from quire.runner.runner import ModelRunner
from quire.step import StepPlan

MOST = 8192  # tokens of a step


class Played:
    """A runner that notes which graph each step asks for."""

    def __init__(self, max_rows: int, max_len: int) -> None:
        nothing: Any = None
        self.graphs = GraphCache(nothing, max_rows, max_len, spare_row=max_rows)
        self.prompt_graphs = PromptGraphs(nothing, self.graphs, fewest=5)
        self.mixed_graphs = MixedGraphs(nothing, self.graphs, 600 << 20)
        self.rows = SimpleNamespace(max_rows=max_rows, max_len=max_len)
        self.pool = SimpleNamespace(groups=SimpleNamespace(windows=(None, 64)))
        self.spec = SimpleNamespace(page_size=16)
        self.drafter: object | None = None
        self.plans: list[StepPlan] = []
        self.keys: set[object] = set()

    def execute(self, plan: StepPlan) -> SimpleNamespace:
        self.plans.append(plan)
        fed = [(work.start, work.num_tokens) for work in plan.works]
        self.keys.add(self.key(fed, plan.shares_prefix))
        return SimpleNamespace(result=lambda: None)

    def key(self, fed: list[tuple[int, int]], shares_prefix: bool = False) -> object:
        """Of the graph that such a step replays when it comes again; None: it has none."""
        lens, longest = [num for _, num in fed], max(start + num for start, num in fed)
        if max(lens) == 1:
            if not self.graphs.covers(len(fed), longest):
                return None
            size, bucket = self.graphs.batch_bucket(len(fed)), self.graphs.context_bucket(longest)
            return "decodes", size, bucket, shares_prefix
        if len(fed) == 1:
            self.prompt_graphs.size_for(lens[0], longest)
            if size := self.prompt_graphs.size_for(lens[0], longest):
                return "prompt", size, self.graphs.context_bucket(longest)
        self.mixed_graphs.size_for(lens, longest)
        return self.mixed_graphs.size_for(lens, longest)


def ran(max_rows: int, max_len: int = 9216) -> Played:
    runner = Played(max_rows, max_len)
    ahead = Ahead(cast(ModelRunner, runner), MOST)
    while ahead.step():
        pass
    return runner


@pytest.fixture(autouse=True)
def _no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)


@pytest.mark.parametrize("max_len", [2048, 9216])
@pytest.mark.parametrize("max_rows", [1, 40, 512])
def test_traffic_asks_for_nothing_else(max_rows: int, max_len: int) -> None:
    """Red when a size, a bound of contexts or a number of decodes beside prompts is forgotten."""
    runner, rng = ran(max_rows, max_len), random.Random(0)
    for _ in range(2000):
        count = min(max_rows, int(2 ** rng.uniform(0, 9.1)))
        starts = [int(rng.uniform(0, 1) ** 3 * (max_len - 1)) for _ in range(count)]
        fed = [(start, 1) for start in starts]
        shares = count >= 8 and max(start for start, _ in fed) >= 512 and rng.random() < 0.3
        for at in range(0 if shares else min(count, rng.choice([0, 0, 1, MOST_PROMPTS]))):
            start = rng.choice([0, 0, starts[at]])
            fed[at] = (start, min(int(2 ** rng.uniform(1, 11.9)), max_len - start))
        key = runner.key(fed, shares)
        assert key is None or key in runner.keys, (fed, key)


def test_what_comes_most_often_comes_first() -> None:
    runner = ran(40)
    assert len(runner.keys) == len(runner.plans), "a graph was asked for twice"
    first = [len(plan.works) for plan in runner.plans[: len(runner.graphs.sizes)]]
    assert first[:9] == [1, 2, 4, 8, 16, 24, 32, 40, 1]


def test_a_head_captures_behind_the_usual_decodes() -> None:
    """Red when its captures are left out, or come where nobody waits for them any more."""
    runner, at = Played(40, 9216), list[int]()
    pieces = [lambda: at.append(len(runner.plans))] * 3
    runner.drafter = SimpleNamespace(ahead=lambda: iter(pieces))
    ahead = Ahead(cast(ModelRunner, runner), MOST)
    while ahead.step():
        pass
    fits = sum(size <= 40 for size in runner.graphs.sizes)
    assert at == [USUAL * fits] * 3 and len(runner.plans) > at[0]


def test_nobody_else_is_written_to() -> None:
    """Red when a step writes where a row's table may still name a page of a cached prefix."""
    runner = ran(40)
    for plan in runner.plans:
        named = {(write.row, write.column, write.group) for write in plan.page_writes}
        assert {write.page for write in plan.page_writes} == {0}
        assert not plan.saves and not plan.loads and not plan.page_copies
        for work in plan.works:
            for position in (work.start, work.start + work.num_tokens - 1):
                assert {(work.row, position // 16, group) for group in (0, 1)} <= named
            assert work.start + work.num_tokens <= 9216
