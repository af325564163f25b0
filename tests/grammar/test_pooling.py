"""Embeddings against transformers' hidden states, however the prompt was read."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from quire.errors import BadRequest
from quire.llm import LLM
from quire.params import SamplingParams, StructuredOutputsParams
from quire.request import Request
from quire.step import TokenEvent
from tests.engine.test_graph_path import with_graphs

MakeLLM = Callable[..., LLM]
PROMPTS = [
    "the",
    "the quick brown fox jumps over the lazy dog",
    "naïve café, voilà: Ünïcödé",
    "the quick brown fox jumps over the lazy dog, and returns",
    "x",
]


@cache
def model(folder: Path) -> Any:
    return transformers.AutoModel.from_pretrained(folder).eval()


@torch.no_grad()
def expected(folder: Path, ids: list[int], pooling: str) -> Tensor:
    states = model(folder)(torch.tensor([ids])).last_hidden_state[0]
    return states.mean(dim=0) if pooling == "mean" else states[-1]


def assert_embeds(llm: LLM, folder: Path, pooling: str, near: float) -> None:
    for output in llm.embed(PROMPTS, pooling, use_tqdm=False):
        want = expected(folder, output.prompt_token_ids, pooling)
        got = torch.tensor(output.outputs.embedding)
        torch.testing.assert_close(got, want, rtol=near, atol=near)
        assert output.finished


@pytest.mark.parametrize("pooling", ["mean", "last"])
@pytest.mark.parametrize(
    "changes", [{}, {"max_num_batched_tokens": 8, "max_num_seqs": 3}, {"max_chunk": 3}], ids=str
)
def test_against_transformers(
    make_llm: MakeLLM, oracle_folder: Path, near: float, pooling: str, changes: dict[str, Any]
) -> None:
    """Red when a chunk is left out of the mean, counted twice, or goes to another row."""
    llm = make_llm(**changes)
    for _ in range(2):  # the second time the prefix cache holds every prompt
        assert_embeds(llm, oracle_folder, pooling, near)


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_chunks_of_one_token(
    make_llm: MakeLLM, oracle_folder: Path, near: float, pooling: str
) -> None:
    """Red when a prompt read token by token is taken for a decode that a graph may replay."""
    llm = make_llm(max_chunk=1)
    with_graphs(llm._engine)
    assert_embeds(llm, oracle_folder, pooling, near)


@pytest.mark.parametrize("lag", [0, 1])
def test_beside_generating_requests(
    make_llm: MakeLLM, oracle_folder: Path, near: float, lag: int
) -> None:
    """Red when embeddings and generations disturb each other, preempted or not."""
    page_bytes = make_llm()._engine.runner.pool.cache.page_bytes
    llm = make_llm(kv_cache_memory=page_bytes * 36, max_num_batched_tokens=16)
    core = llm._engine.core
    core.lag = lag
    plain = SamplingParams(max_tokens=40, seed=1, ignore_eos=True)

    def run(wanted: list[SamplingParams]) -> tuple[list[Request], dict[int, TokenEvent]]:
        requests = []
        for i, params in enumerate(wanted):
            requests += llm._intake.requests(PROMPTS[i % len(PROMPTS)], params)[1]
        for request in requests:
            core.add(request)
        ends = {}
        while core.has_work:
            ends.update({e.request_id: e for e in core.step() if e.finish is not None})
        return requests, ends

    alone, _ = run([plain] * 5)
    pools = [SamplingParams(pooling=kind) for kind in ("mean", "last") for _ in range(5)]
    mixed, ends = run([plain] * 5 + pools + [plain] * 5)
    assert core.scheduler.stats().num_preempted > 0, "the pool was meant to be too small"
    assert [r.output for r in mixed[:5]] == [r.output for r in alone]
    for request in mixed[5:15]:
        event = ends[request.id]
        want = expected(
            oracle_folder,
            request.tokens[: request.num_prompt].tolist(),
            str(request.params.pooling),
        )
        torch.testing.assert_close(torch.tensor(event.pooled), want, rtol=near, atol=near)
        assert event.tokens == () and event.error is None
    assert all(not ends[request.id].pooled for request in mixed[:5])


def test_a_mean_reads_no_cache_and_fills_it(make_llm: MakeLLM) -> None:
    """Red when a mean skips cached positions, or its pages are of no use to others."""
    llm = make_llm()
    prompt = PROMPTS[1]
    llm.embed(prompt, use_tqdm=False)
    (after,) = llm.generate(prompt, SamplingParams(max_tokens=1), use_tqdm=False)
    assert after.num_cached_tokens > 0
    _, (request,) = llm._intake.requests(prompt, SamplingParams(pooling="mean"))
    llm._engine.core.add(request)
    while llm._engine.core.has_work:
        llm._engine.core.step()
    assert request.num_cached == 0 and "mean pooling" in request.cache_note


def test_params() -> None:
    """Red when an embedding could generate, or a wrong name is taken for a mean."""
    assert SamplingParams(pooling="mean").max_tokens == 1
    assert SamplingParams(pooling="last", max_tokens=50).max_tokens == 1
    for bad in (
        {"pooling": "max"},
        {"pooling": "mean", "n": 2},
        {"pooling": "mean", "min_tokens": 3},
        {"pooling": "mean", "structured_outputs": StructuredOutputsParams(regex="a")},
    ):
        with pytest.raises(BadRequest):
            SamplingParams(**bad)
