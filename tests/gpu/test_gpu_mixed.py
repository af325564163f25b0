"""Graphs of steps with prompts and decodes: the tokens of the plain path, whoever meets there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from quire.engine.build import Engine
from quire.request import Request
from quire.runner.mixed_graphs import MixedGraphs, Queries
from quire.runner.prompt_graphs import Inputs
from tests.gpu import test_gpu_kinds as kinds
from tests.gpu import test_gpu_moe as moe
from tests.gpu.test_engine_gpu import FAMILIES, engine_of, make, model_of, prompts, run

# Layers that look back a window, caps, sinks and experts.
OTHERS: dict[str, Callable[[], Any]] = {
    **{f"windowed {name}": lambda name=name: kinds.model_of(name) for name in kinds.FAMILIES},
    **{f"sparse {name}": lambda name=name: moe._model(name) for name in moe.FAMILIES},
}


def mixed_of(engine: Engine) -> MixedGraphs:
    assert engine.runner.mixed_graphs is not None
    return engine.runner.mixed_graphs


@pytest.mark.parametrize("budget", [128, 150])
@pytest.mark.parametrize("family", [*FAMILIES, *OTHERS])
def test_same_tokens_with_and_without_graphs(family: str, budget: int) -> None:
    """128 is a size, 150 is padded, as are steps at the end of prompts. Red when a replay reads
    another step's tokens or plan, or padding reaches a page or a result."""
    model = OTHERS[family]() if family in OTHERS else model_of(family)
    asked = prompts(30, seed=5)
    results = []
    for eager in (True, False):
        engine = engine_of(model, enforce_eager=eager, max_num_batched_tokens=budget)
        results.append(run(engine, [make(i, p, 30, 0.5 * (i % 3)) for i, p in enumerate(asked)]))
    assert results[0] == results[1]
    assert mixed_of(engine).graphs


def test_whoever_reads_hidden_states_gets_them() -> None:
    """Logprobs of prompts, whose rows lie between decodes and padding."""
    model = model_of("llama")
    found: list[dict[tuple[int, int], float]] = []
    for eager in (True, False):
        engine = engine_of(model, enforce_eager=eager, max_num_batched_tokens=110)
        requests = [make(i, p, 20, prompt_logprobs=1) for i, p in enumerate(prompts(20, seed=9))]
        for request in requests:
            engine.core.add(request)
        seen: dict[tuple[int, int], float] = {}
        while engine.core.has_work:
            for event in engine.core.step():
                for at, record in enumerate(event.prompt_logprobs, event.prompt_start):
                    seen[event.request_id, at] = record.logprob
        found.append(seen)
    assert found[0] == found[1] and len(found[0]) > 1000
    assert mixed_of(engine).graphs


def some_requests(round: int) -> list[Request]:
    some = prompts(1 + 5 * (round % 3), seed=round, low=20, high=250)
    return [make(100 * round + i, p, 12 + 3 * i) for i, p in enumerate(some)]


def test_other_graphs_between_do_no_harm() -> None:
    """Graphs of decodes, of prompts and of both share their memory. Red when one keeps numbers from
    replay to replay in memory that another one writes."""
    model = model_of("qwen3")
    plain, engine = engine_of(model, enforce_eager=True), engine_of(model)
    for round in range(9):
        assert run(engine, some_requests(round)) == run(plain, some_requests(round))
    graphs, prompt_graphs = engine.runner.graphs, engine.runner.prompt_graphs
    assert graphs is not None and prompt_graphs is not None
    assert graphs.graphs and prompt_graphs.graphs and mixed_of(engine).graphs


def test_contexts_of_several_splits_and_many_decodes() -> None:
    """Red when a replay folds splits otherwise, or lays attention out for too few single tokens."""
    model = model_of("llama")
    long, short = prompts(8, seed=1, low=600, high=900), prompts(190, seed=2, low=2, high=9)
    found = []
    for eager in (True, False):
        sizes = {"max_num_seqs": 200, "max_num_batched_tokens": 1008, "kv_cache_memory": 1 << 27}
        engine = engine_of(model, enforce_eager=eager, **sizes)
        requests = [make(i, p, 60) for i, p in enumerate([*short, *long])]
        found.append(run(engine, requests))
    assert found[0] == found[1]
    assert 256 in {size.num_singles for size in mixed_of(engine).graphs}


def test_a_capture_without_memory_is_given_up() -> None:
    """Red when the step is lost, or tried again each time."""
    model = model_of("llama")
    engine = engine_of(model, max_num_batched_tokens=128)
    mixed = mixed_of(engine)
    whole, tried = mixed.step, 0

    def greedy(inputs: Inputs, num_singles: int) -> Queries:
        nonlocal tried
        if torch.cuda.is_current_stream_capturing():
            tried += 1
            torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
        return whole(inputs, num_singles)

    mixed.step = greedy
    asked = prompts(20, seed=3)
    got = run(engine, [make(i, p, 20) for i, p in enumerate(asked)])
    plain = engine_of(model, enforce_eager=True)
    assert got == run(plain, [make(i, p, 20) for i, p in enumerate(asked)])
    assert tried and tried == len(mixed._too_large) and not mixed.graphs
