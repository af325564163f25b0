"""What is compiled and captured after the engine is ready is counted; captures are played."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from triton import knobs
from triton.knobs import CompileTimes

from quire.kernels.compiles import tell_compiles
from quire.runner import graphs
from quire.runner.graphs import Decoded, GraphCache
from quire.runner.late_work import LateWork
from quire.runner.mixed_graphs import STAGED as MIXED_STAGED
from quire.runner.mixed_graphs import MixedGraphs, MixedSize
from quire.runner.prompt_graphs import STAGED, PromptGraphs
from quire.runner.runner import ModelRunner

LOGITS = torch.tensor([1.0])


@pytest.fixture(autouse=True)
def _captures_are_played(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def captures(graph: object, **_: object):  # type: ignore[no-untyped-def]
        yield

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: None))
    monkeypatch.setattr(torch.cuda, "graph", captures)
    monkeypatch.setattr(graphs, "run_aside", lambda work: work())


def decodes() -> GraphCache:
    made = Decoded(LOGITS, LOGITS)
    return GraphCache(lambda *_: made, max_batch=8, max_context=1024, spare_row=8)


def runner_with(cache: GraphCache | None) -> ModelRunner:
    model = SimpleNamespace(device=torch.device("cpu"))
    return cast(ModelRunner, SimpleNamespace(graphs=cache, drafter=None, model=model))


def test_captures_of_every_kind_count_once_and_only_from_ready_on() -> None:
    """Red when a kind of graph goes past the counter, or replays and earlier captures count."""
    cache = decodes()
    rows = torch.zeros(4, dtype=torch.int32)
    cache.replay(rows, rows, longest=300)  # at start
    late = LateWork(runner_with(cache))
    cache.replay(rows, rows, longest=300)
    assert late.as_dict()["num_late_captures"] == 0
    cache.replay(rows[:2], rows[:2], longest=300)
    assert late.as_dict()["num_late_captures"] == 1
    prompts = PromptGraphs(lambda *_: LOGITS, cache, fewest=5)
    for _ in range(2):
        prompts.replay(dict.fromkeys(STAGED, rows), context=20)
    assert late.as_dict()["num_late_captures"] == 2
    mixed = MixedGraphs(lambda *_: None, cache, 8 << 30)  # type: ignore[arg-type, return-value]
    for _ in range(2):
        mixed.replay(dict.fromkeys(MIXED_STAGED, rows), MixedSize(64, 128))
    assert late.as_dict()["num_late_captures"] == 3


def test_only_what_is_compiled_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when kernels found on disk count, or Triton calls its listeners otherwise."""
    monkeypatch.setattr(knobs.compilation, "listener", None)
    late = LateWork(runner_with(None))
    tell_compiles(late.compiled)
    assert knobs.compilation.listener is not None
    times = CompileTimes(1, [], 1)
    for cache_hit in (True, False):
        knobs.compilation.listener(
            src=None, metadata={"name": "k"}, metadata_group={}, times=times, cache_hit=cache_hit
        )
    assert late.as_dict() == {"num_late_compiles": 1, "num_late_captures": 0}


def test_what_nobody_waited_for_does_not_count() -> None:
    """Red when work of an idle engine is counted, or what came before it is forgotten."""
    cache, rows = decodes(), torch.zeros(4, dtype=torch.int32)
    late = LateWork(runner_with(cache))
    late.compiled("k")
    cache.replay(rows, rows, longest=300)
    with late.awaited_by_nobody():
        late.compiled("k")
        cache.replay(rows[:2], rows[:2], longest=300)
    assert late.as_dict() == {"num_late_compiles": 1, "num_late_captures": 1}
    cache.replay(rows[:1], rows[:1], longest=300)
    assert late.as_dict() == {"num_late_compiles": 1, "num_late_captures": 2}
