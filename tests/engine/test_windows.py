"""Models whose layers see a window, through the whole engine, against transformers.

Prompts are longer than the windows and chunks end inside them, so pages behind a window are given
back and handed to others while their owner still runs: a stale page, a wrong group's table or a
prefix hit without its window gives other tokens than the oracle.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from quire.engine.build import Engine
from quire.kv.groups import PageNeeds
from quire.params import SamplingParams
from quire.request import Request
from tests.engine.test_graph_path import with_graphs
from tests.hf import VOCAB, greedy, tiny_engine, tiny_model

# All layers windowed; a full one first; two of three windowed, with another rotation.
FAMILIES = ["mistral-window", "qwen2-window", "gemma3"]
PROMPTS = [[(5 * i + 3 * j) % (VOCAB - 3) + 3 for j in range(n)] for i, n in enumerate((47, 9, 30))]
NUM_TOKENS = 16


@cache
def oracle(family: str) -> tuple[Any, list[list[int]]]:
    """The model, and what transformers generates for each prompt."""
    model = tiny_model(family)
    return model, [greedy(model, prompt, NUM_TOKENS) for prompt in PROMPTS]


def generate(engine: Engine, prompts: list[list[int]], num_tokens: int) -> list[Request]:
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    requests = [Request.new(i, prompt, params) for i, prompt in enumerate(prompts)]
    for request in requests:
        engine.core.add(request)
    while engine.core.has_work:
        engine.core.step()
    return requests


def outputs(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    return [request.output for request in generate(engine, prompts, NUM_TOKENS)]


@pytest.mark.parametrize("lag", [0, 1], ids=["in-step", "overlap"])
@pytest.mark.parametrize("family", FAMILIES)
def test_same_tokens_as_transformers(family: str, lag: int) -> None:
    model, want = oracle(family)
    engine = tiny_engine(model, max_num_batched_tokens=16, max_model_len=96)
    engine.core.lag = lag
    assert outputs(engine, PROMPTS) == want
    assert engine.core.scheduler.kv.counts.window_pages > 10


@pytest.mark.parametrize("family", FAMILIES)
def test_same_tokens_through_captured_steps(family: str) -> None:
    """Red when a decode-only step reads one group's table for another's layers."""
    model, want = oracle(family)
    engine = tiny_engine(model, max_model_len=96)
    graphs = with_graphs(engine)
    assert outputs(engine, PROMPTS) == want
    assert graphs.num_replays > 10


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prefix_hit_reads_the_right_window(family: str) -> None:
    """Red when a hit is granted whose window is gone, or adopts other pages than its own."""
    model, _ = oracle(family)
    engine = tiny_engine(model, max_num_batched_tokens=32, max_model_len=96)
    prompt = PROMPTS[0]
    (first,) = generate(engine, [prompt], 10)
    turn, branch = [*first.tokens.tolist(), 7, 8, 9], [*prompt[:30], 5, 6]
    again, other = generate(engine, [turn, branch], 4)
    assert again.num_cached == 56 and other.num_cached == 28
    assert again.output == greedy(model, turn, 4)
    assert other.output == greedy(model, branch, 4)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_pool_of_one_request_serves_many(family: str) -> None:
    """Red when what sizing calls enough is not: requests would preempt each other forever."""
    model, want = oracle(family)
    shape = {"max_num_batched_tokens": 8, "max_model_len": 64}
    pool = tiny_engine(model, **shape).runner.pool
    needs = PageNeeds(4, pool.groups.windows, max_inflight=8)
    least = (needs.of(64) + 1) * (pool.data.nbytes // pool.num_pages)
    engine = tiny_engine(model, **shape, kv_cache_memory=least)
    assert engine.runner.pool.num_pages == needs.of(64) + 1
    assert outputs(engine, PROMPTS) == want
    assert engine.core.scheduler.stats().pages_evicted > 0
