"""Graphs captured while nobody waits: traffic finds them, and cached pages are as they were."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from quire.engine.build import Engine
from quire.runner.ahead import Ahead
from quire.runner.late_work import LateWork
from tests.gpu.test_engine_gpu import FAMILIES, engine_of, make, model_of, prompts, run


def traffic(engine: Engine, first: int) -> list[list[int]]:
    """Lone prompts, many at once, and many behind one long prefix."""
    shared = prompts(1, seed=8, low=600, high=600)[0]
    asked = [*prompts(40, seed=7), *(shared + own for own in prompts(20, seed=9, high=30))]
    requests = [make(first + i, p, 20, 0.5 * (i % 3)) for i, p in enumerate(asked)]
    for request in requests:
        request.seed = 7  # whenever it is asked
    alone = [run(engine, [request])[0] for request in requests[:4]]
    return [*alone, *run(engine, requests[4:])]


@pytest.mark.parametrize("family", FAMILIES)
def test_traffic_captures_nothing_and_reads_what_it_wrote(family: str) -> None:
    """Red when a kind of graph is forgotten, or a step ahead writes to a cached page."""
    model = model_of(family)
    want = traffic(engine_of(model, enforce_eager=True), 0)
    engine = engine_of(model)
    late = LateWork(engine.runner)
    assert traffic(engine, 0) == want
    assert late.as_dict()["num_late_captures"] > 0
    ahead = Ahead.of(engine.runner, engine.config.sched.max_num_batched_tokens)
    assert ahead is not None
    while ahead.step():
        pass
    late = LateWork(engine.runner)
    assert traffic(engine, 1000) == want
    assert late.as_dict()["num_late_captures"] == 0
