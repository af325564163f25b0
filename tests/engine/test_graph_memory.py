"""Graphs that memory does not suffice for: their steps run without one, from then on.

Captures are played: they need a GPU, the decisions around them do not.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.runner.graphs import GraphCache
from quire.runner.prompt_graphs import STAGED, PromptGraphs

LOGITS = torch.tensor([1.0, 2.0])


class Counted:
    def __init__(self) -> None:
        self.num_captures = self.num_steps = 0

    def capture(self, *args: object) -> object:
        self.num_captures += 1
        raise torch.OutOfMemoryError("played")

    def step(self, *args: object) -> Tensor:
        self.num_steps += 1
        return LOGITS


@pytest.fixture
def counted() -> Counted:
    return Counted()


@pytest.fixture
def decodes(counted: Counted, monkeypatch: pytest.MonkeyPatch) -> GraphCache:
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    graphs = GraphCache(counted.step, max_batch=8, max_context=1024, spare_row=8)
    monkeypatch.setattr(graphs, "_capture", counted.capture)
    return graphs


def test_decodes_without_room_for_a_graph(decodes: GraphCache, counted: Counted) -> None:
    """Red when the error ends the requests of the step, or every step tries again."""
    rows = torch.zeros(4, dtype=torch.int32)
    for _ in range(3):
        assert decodes.replay(rows, rows, longest=300) is LOGITS
    assert (counted.num_captures, counted.num_steps) == (1, 3)
    decodes.replay(rows[:2], rows[:2], longest=300)  # a smaller one may fit
    assert counted.num_captures == 2


def test_prompts_without_room_for_a_graph(
    decodes: GraphCache, counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs = PromptGraphs(counted.step, decodes, fewest=5)
    monkeypatch.setattr(graphs, "_capture", counted.capture)
    assert graphs.size_for(20, context=20) == 0  # nobody waits for the first capture
    assert graphs.size_for(20, context=20) == 32
    inputs = {name: torch.zeros(32, dtype=torch.int32) for name in STAGED}
    assert graphs.replay(inputs, context=20) is LOGITS
    assert graphs.size_for(25, context=25) == 0
    assert (counted.num_captures, counted.num_steps) == (1, 1)


@pytest.mark.parametrize("fewest, sizes", [(5, [0, 32]), (33, [0, 0])])
def test_few_tokens_are_left_to_the_plan_for_few(
    decodes: GraphCache, counted: Counted, fewest: int, sizes: list[int]
) -> None:
    graphs = PromptGraphs(counted.step, decodes, fewest)
    assert [graphs.size_for(30, context=600) for _ in range(2)] == sizes
    assert [graphs.size_for(n, context=n) for n in (4, 513, 4, 513)] == [0] * 4
