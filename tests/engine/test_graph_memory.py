"""Graphs that memory does not suffice for: their steps run without one, from then on.

Captures are played: they need a GPU, the decisions around them do not.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.runner import mixed_graphs
from quire.runner.graphs import GraphCache
from quire.runner.mixed_graphs import MOST_PROMPTS, MixedGraphs
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


def test_mixed_steps_without_room_for_a_graph(
    decodes: GraphCache, counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs = MixedGraphs(counted.step, decodes, 8 << 30)
    monkeypatch.setattr(graphs, "_capture", counted.capture)
    lens = [1] * 9 + [40, 51]
    assert graphs.size_for(lens, 300) is None  # nobody waits for the first capture
    size = graphs.size_for(lens, 300)
    assert size == (128, 128)
    inputs = dict.fromkeys(mixed_graphs.STAGED, torch.zeros(128))
    assert graphs.replay(inputs, size) is LOGITS
    assert graphs.size_for(lens, 300) is None, "tries again"
    assert (counted.num_captures, counted.num_steps) == (1, 1)


def test_which_mixed_steps_have_graphs(decodes: GraphCache) -> None:
    graphs = MixedGraphs(lambda *_: None, decodes, 8 << 30)
    largest, alone = mixed_graphs.SIZES[-1], mixed_graphs.LONE_SIZES[-1]

    def size_for(singles: int, *prompts: int, longest: int = 999) -> tuple[int, int] | None:
        lens = [1] * singles + list(prompts)
        graphs.size_for(lens, longest)
        return graphs.size_for(lens, longest)

    assert size_for(1, 63) == (64, 128)  # attention is laid out for some, be there any or not
    assert size_for(0, 30, 34) == (64, 128)
    assert size_for(64) is None  # a step of decodes
    assert size_for(128, 302) == (432, 128)
    assert size_for(128, 303) == (432, 256)  # the one that pads feeds a single token, too
    assert size_for(129, 171) == (304, 256)
    assert size_for(0, *[128 // MOST_PROMPTS] * MOST_PROMPTS) == (128, 128)
    assert size_for(0, *[15] * MOST_PROMPTS) is None  # padding would be one prompt too many
    assert size_for(0, *[8] * (MOST_PROMPTS + 1)) is None
    assert size_for(0, alone) is None, "a lone prompt has graphs of its own"
    assert size_for(0, alone + 1) == (528, 128)
    assert size_for(0, largest) == (largest, 128)
    assert size_for(0, largest + 1) is None
    assert size_for(0, *[largest // 14] * 14) == (largest, 128), "larger steps hold more prompts"
    assert size_for(9, 50, longest=mixed_graphs.LONGEST) == (64, 128)
    assert size_for(9, 50, longest=mixed_graphs.LONGEST + 1) is None


def test_small_models_have_graphs_of_large_steps(decodes: GraphCache) -> None:
    """Red when a step that keeps the device busy for long is captured, or one of a small model
    that keeps the host busy is not."""
    for num_weights, largest in ((600 << 20, 4096), (1500 << 20, 2048), (8 << 30, 1008)):
        assert MixedGraphs(lambda *_: None, decodes, num_weights).sizes[-1] == largest


def test_padding_of_mixed_steps_fits_a_row(
    monkeypatch: pytest.MonkeyPatch, counted: Counted
) -> None:
    """Red when the sequence that pads would run past its row of the page table."""
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    decodes = GraphCache(counted.step, max_batch=8, max_context=32, spare_row=8)
    graphs = MixedGraphs(lambda *_: None, decodes, 8 << 30)
    for lens, size in (([10, 10], None), ([16, 16], (64, 128)), ([20, 20], (64, 128))):
        graphs.size_for(lens, 20)
        assert graphs.size_for(lens, 20) == size
