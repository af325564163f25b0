"""On a GPU too, the last layer may leave out rows that nobody reads: tokens and log-probabilities
in bf16 are bit for bit those of engines that keep every row.

Red when a row's bits depend on the batch somewhere behind the last layer's cache: then prompts
would be answered differently by how their last chunk was computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from quire.engine.build import Engine
from quire.forward import ForwardContext, Tail
from quire.request import Request
from quire.step import TokenLogprobs
from tests.gpu import test_engine_gpu, test_gpu_kinds, test_gpu_mla, test_gpu_moe
from tests.gpu.test_engine_gpu import engine_of, make, prompts

NEVER = 1 << 30

MODELS: dict[str, Callable[[], Any]] = {
    **{
        family: lambda family=family: test_engine_gpu.model_of(family)
        for family in ("llama", "qwen3", "olmo2", "granite", "gpt2")
    },
    **{
        family: lambda family=family: test_gpu_kinds.model_of(family)
        for family in ("gemma2", "gemma3")
    },
    **{
        family: lambda family=family: test_gpu_moe._model(family)
        for family in test_gpu_moe.FAMILIES
    },
    **{
        family: lambda family=family: test_gpu_mla.engine_model(family)
        for family in test_gpu_mla.FAMILIES
    },
}


def requests() -> list[Request]:
    """Long prompts first, so that nobody ends in the first step; one token; two share a prefix."""
    some = [*prompts(3, seed=6, low=700, high=700), *prompts(20, seed=5)]
    some += [[7], some[0][:200] + some[1][:40]]
    return [
        make(i, p, 8 + i % 5, temperature=0.9 * (i % 2), logprobs=3) for i, p in enumerate(some)
    ]


def records(engine: Engine, some: list[Request]) -> dict[int, list[TokenLogprobs]]:
    found: dict[int, list[TokenLogprobs]] = {request.id: [] for request in some}
    for request in some:
        engine.core.add(request)
    while engine.core.has_work:
        for event in engine.core.step():
            found[event.request_id] += event.logprobs
    for request in some:
        assert [record.token for record in found[request.id]] == request.output
    return found


def count_tails(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows kept in each step that has a tail, filled as the engine runs."""
    kept: list[int] = []
    read_out = engine.runner.model.read_out

    def watched(
        q: torch.Tensor, residual: torch.Tensor, ctx: ForwardContext, tail: Tail | None
    ) -> torch.Tensor:
        if tail is not None:
            kept.append(len(tail.index))
        return read_out(q, residual, ctx, tail)

    monkeypatch.setattr(engine.runner.model, "read_out", watched)
    return kept


@pytest.mark.parametrize("use_cache", [True, False], ids=["prefix cache", "no cache"])
@pytest.mark.parametrize("family", MODELS)
def test_no_bit_changes(family: str, use_cache: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a prefix cache latent attention expands prompts."""
    model = MODELS[family]()

    def engine(min_dropped: int) -> Engine:
        # Chunks that go on stand before prompts that end in the same step.
        sizes = {"max_num_batched_tokens": 320, "max_chunk": 150}
        made = engine_of(model, enable_prefix_caching=use_cache, **sizes)
        made.runner.min_dropped = min_dropped
        return made

    want = records(engine(NEVER), requests())
    for min_dropped in (1, 64):
        cut = engine(min_dropped)
        kept = count_tails(cut, monkeypatch)
        assert records(cut, requests()) == want
        assert 0 in kept and max(kept) > 3


def test_keys_and_values_are_all_stored() -> None:
    """Every position's, of the dropped tokens too: a page read later is as it was."""
    model = test_engine_gpu.model_of("llama")
    pools = []
    for min_dropped in (1, NEVER):
        # Eager: rows that pad a graph write keys and values of their own.
        engine = engine_of(model, enable_prefix_caching=False, enforce_eager=True)
        engine.runner.min_dropped = min_dropped
        records(engine, requests())
        pools.append(engine.runner.pool.data)
    assert torch.equal(*pools)
