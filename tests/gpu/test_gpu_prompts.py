"""Graphs of short prompts: the tokens of the plain path, whatever is padded and replayed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from quire.engine.build import Engine
from quire.runner.prompt_graphs import PromptGraphs
from tests.gpu import test_gpu_kinds as kinds
from tests.gpu import test_gpu_moe as moe
from tests.gpu.test_engine_gpu import FAMILIES, engine_of, make, model_of, prompts, run

LENGTHS = (5, 9, 16, 17, 31, 32, 33, 100, 130, 250, 300)
# Layers that look back a window, caps, sinks and experts.
OTHERS: dict[str, Callable[[], Any]] = {
    **{f"windowed {name}": lambda name=name: kinds.model_of(name) for name in kinds.FAMILIES},
    **{f"sparse {name}": lambda name=name: moe._model(name) for name in moe.FAMILIES},
}


def graphs_of(engine: Engine) -> PromptGraphs:
    assert engine.runner.prompt_graphs is not None
    return engine.runner.prompt_graphs


def one_by_one(engine: Engine, asked: Sequence[list[int]]) -> list[list[int]]:
    """Each alone in its steps."""
    return [run(engine, [make(id, prompt, 6)])[0] for id, prompt in enumerate(asked)]


@pytest.mark.parametrize("family", FAMILIES)
def test_same_tokens_with_and_without_graphs(family: str) -> None:
    """Red when a replay reads another prompt's upload, or padding reaches a page or a result."""
    model = model_of(family)
    asked = [
        prompts(1, seed=100 * round + n, low=n, high=n)[0] for round in range(3) for n in LENGTHS
    ]
    plain = engine_of(model, enforce_eager=True, enable_prefix_caching=False)
    engine = engine_of(model, enable_prefix_caching=False)
    assert one_by_one(engine, asked) == one_by_one(plain, asked)
    assert len(graphs_of(engine).graphs) >= 5


@pytest.mark.parametrize("family", [*FAMILIES, *OTHERS])
def test_same_tokens_behind_a_cached_prefix(family: str) -> None:
    """Prompts that continue others, in contexts of one split and of several. Red when a replay
    takes its first token's position, its pages or its context from the prompt it was captured
    with, or looks past a window."""
    model = OTHERS[family]() if family in OTHERS else model_of(family)
    short, long = (prompts(1, seed=n, low=n, high=n)[0] for n in (200, 700))
    tails = [
        prompts(1, seed=n + round, low=n, high=n)[0] for round in range(3) for n in (3, 30, 60)
    ]
    asked = [short, long, *(prefix + tail for tail in tails for prefix in (short, long))]
    plain, engine = engine_of(model, enforce_eager=True), engine_of(model)
    assert one_by_one(engine, asked) == one_by_one(plain, asked)
    hits = engine.core.scheduler.stats().prefix_hit_tokens
    assert hits > 3000, hits  # 9 times 192 and 688, less behind windows
    graphs = graphs_of(engine)
    assert len(graphs.graphs) >= (6 if graphs.fewest <= 11 else 4)  # sizes times bounds
