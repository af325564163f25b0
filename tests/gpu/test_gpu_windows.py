"""Windowed layer groups through the engine on CUDA: graphs, overlap, eviction, preemption.

Prompts are several windows long, so pages behind a window go to other requests while their owner
still decodes inside captured graphs. Red when a stale page is read, when a graph holds another
group's table, or when what is kept depends on the company.
"""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

import tests.hf as hf
from quire.kv.groups import PageNeeds
from tests.gpu import test_engine_gpu as base

WINDOW = 90
MODELS = {
    "all windowed": lambda: hf._llama_like("Mistral", **{**base.SIZES, "sliding_window": WINDOW}),
    "full and windowed": lambda: hf._llama_like(
        "Qwen2",
        **{
            **base.SIZES,
            "num_hidden_layers": 5,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "max_window_layers": 2,
        },
    ),
}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(base.FAMILIES, "windowed", MODELS[request.param])
    return base.model_of("windowed")


def test_logprobs_near_fp32_transformers(model) -> None:
    engine = base.engine_of(model, max_num_batched_tokens=128)
    prompt = base.prompts(1, seed=4, low=280)[0]
    with torch.no_grad():
        want = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    engine.core.add(base.make(1, prompt, 60, prompt_logprobs=1))
    worst, seen = 0.0, 0
    while engine.core.has_work:
        for event in engine.core.step():
            for at, record in enumerate(event.prompt_logprobs, event.prompt_start):
                worst = max(worst, abs(record.logprob - want[at, record.token].item()))
                seen += 1
    assert seen == len(prompt) - 1
    assert worst < 0.12, worst  # bf16 carries 8 bits through a few layers
    assert engine.core.scheduler.kv.counts.window_pages > 10


def test_tokens_do_not_depend_on_company_or_memory(model) -> None:
    """Alone, together, eager, chunked, cached or not, preempted: the same tokens."""
    some = base.prompts(24, seed=2)
    some += [some[0] + some[1][:40], some[0] + some[2][:17], some[3]]

    def tokens(**changes) -> list[list[int]]:
        return base.run(base.engine_of(model, **changes), requests())

    def requests() -> list[base.Request]:
        return [base.make(i, p, 40, 0.9) for i, p in enumerate(some)]

    together = tokens()
    assert tokens(enforce_eager=True) == together, "graph replay and eager disagree"
    assert tokens(max_num_batched_tokens=64, max_chunk=37) == together, "chunks change tokens"
    assert tokens(enable_prefix_caching=False) == together, "a cache hit changes tokens"
    alone = base.engine_of(model, max_num_seqs=1)
    assert [base.run(alone, [r])[0] for r in requests()] == together, "company changes tokens"
    pool = alone.runner.pool
    # Room for one full request with two chunks in flight, and for 20 pages of others.
    num_pages = PageNeeds(16, pool.groups.windows, max_inflight=128).of(400) + 21
    memory = num_pages * (pool.data.nbytes // pool.num_pages)
    small = base.engine_of(
        model, kv_cache_memory=memory, max_model_len=400, max_num_batched_tokens=64
    )
    assert base.run(small, requests()) == together, "preemption changes tokens"
    stats = small.core.scheduler.stats()
    assert stats.num_preempted > 0 and stats.pages_evicted > 0, "the pool was meant to be small"


def test_a_hit_at_the_end_of_a_long_prefix(model) -> None:
    """A second turn finds all of the first, though its older window pages are long gone."""
    engine = base.engine_of(model)
    (prompt,) = base.prompts(1, seed=9, low=300)
    first = base.make(0, prompt, 80)
    base.run(engine, [first])
    turn = [*first.tokens.tolist(), 5, 6, 7]
    again = base.make(1, turn, 20)
    base.run(engine, [again])
    assert again.num_cached == (len(turn) - 4) // 16 * 16
    fresh = base.make(1, turn, 20)
    base.run(base.engine_of(model, enable_prefix_caching=False), [fresh])
    assert again.output == fresh.output
