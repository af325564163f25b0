"""A request's tokens do not depend on its company, its history or the shape of the memory.

Oracle: the same request alone in an engine with room for everything, whose greedy tokens are also
those of transformers. Greedy and seeded sampled requests, always both. Turns red when anything
that should not matter does: chunking, page size, preemption, prefix hits, overlap, the batch.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch

from quire.engine.build import Engine
from quire.params import SamplingParams
from quire.request import Request
from quire.step import TokenLogprobs
from tests.hf import VOCAB, greedy, tiny_engine, tiny_model

NUM_TOKENS = 20
LONGEST = 80  # prompt and output
IF_LONG = ["llama-mha-bias"] if os.environ.get("QUIRE_LONG_TESTS") else []

PLAIN = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2)
WISHES = {
    "greedy": PLAIN.with_(temperature=0.0),
    "plain": PLAIN,
    "cut": PLAIN.with_(
        temperature=0.8,
        top_k=40,
        top_p=0.9,
        min_p=0.01,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=0.2,
    ),
}


@cache
def model(family: str) -> Any:
    return tiny_model(family)


def prompts() -> list[list[int]]:
    """Lengths from one token up; pairs that share long prefixes; one page-aligned twin."""
    rng = random.Random(7)
    base = [rng.randrange(3, VOCAB) for _ in range(48)]
    own = [
        [rng.randrange(3, VOCAB) for _ in range(n)] for n in (1, 2, 5, 17, 33, LONGEST - NUM_TOKENS)
    ]
    return [*own, base, list(base), base[:32], base + own[2]]


def make(id: int, prompt: Sequence[int], wish: str) -> Request:
    return Request.new(id, prompt, WISHES[wish], seed=1000 + id, arrival=float(id))


def everyone() -> list[Request]:
    return [
        make(10 * number + index, prompt, wish)
        for number, wish in enumerate(WISHES)
        for index, prompt in enumerate(prompts())
    ]


def outputs(engine: Engine, requests: Sequence[Request]) -> dict[int, list[int]]:
    for request in requests:
        engine.core.add(request)
    while engine.core.has_work:
        engine.core.step()
    assert engine.core.scheduler.kv.allocator.num_live == 0
    return {request.id: request.output for request in requests}


def engine_of(family: str, **changes: Any) -> Engine:
    """`packed`: weights in four bits, in place of floats."""
    if family != "packed":
        return tiny_engine(model(family), **changes)
    form = {"dtype": "auto", "quantization": "rtn-int4-g32"}
    return tiny_engine(model("llama-packable"), **form, **changes)


@cache
def alone(family: str) -> dict[int, list[int]]:
    """Each request in an engine of its own history: nothing cached, nobody else, one chunk."""
    engine = engine_of(family, page_size=16, enable_prefix_caching=False, max_num_seqs=1)
    found: dict[int, list[int]] = {}
    for request in everyone():
        found |= outputs(engine, [request])
    return found


def records(engine: Engine, requests: Sequence[Request]) -> dict[int, list[TokenLogprobs]]:
    """Every drawn token with its log-probabilities, as exact floats."""
    found: dict[int, list[TokenLogprobs]] = {request.id: [] for request in requests}
    for request in requests:
        engine.core.add(request)
    while engine.core.has_work:
        for event in engine.core.step():
            found[event.request_id] += event.logprobs
    assert all(len(of) == NUM_TOKENS for of in found.values())
    return found


@cache
def records_alone(family: str) -> dict[int, list[TokenLogprobs]]:
    engine = engine_of(family, page_size=16, enable_prefix_caching=False, max_num_seqs=1)
    found: dict[int, list[TokenLogprobs]] = {}
    for request in everyone():
        found |= records(engine, [request])
    return found


# What may differ between engines and must not show.
ENGINES: dict[str, dict[str, Any]] = {
    "full batch": {"max_num_seqs": 30, "max_num_batched_tokens": 2048},
    "few rows": {"max_num_seqs": 3},
    "chunks of 1": {"max_chunk": 1},
    "chunks of 3": {"max_chunk": 3},
    "chunks of 16": {"max_chunk": 16},
    "small steps": {"max_num_batched_tokens": 11, "max_num_seqs": 8},
    "whole prompts": {"enable_chunked_prefill": False},
    "pages of 1": {"page_size": 1},
    "pages of 16": {"page_size": 16},
    "no prefix cache": {"enable_prefix_caching": False},
    "reference attention": {"attention_backend": "reference"},
}


@pytest.mark.parametrize("family", ["llama-gqa", "gpt2"])
def test_greedy_alone_is_what_transformers_says(family: str) -> None:
    """Anchors the oracle of this file to one nobody here wrote."""
    for index, prompt in enumerate(prompts()):
        assert alone(family)[index] == greedy(model(family), prompt, NUM_TOKENS)


@pytest.mark.parametrize("overlap", [False, True], ids=["in-step", "overlap"])
@pytest.mark.parametrize("name", ENGINES)
def test_tokens_do_not_depend_on_the_engine(name: str, overlap: bool) -> None:
    engine = tiny_engine(model("llama-gqa"), **ENGINES[name])
    engine.core.lag = int(overlap)
    assert outputs(engine, everyone()) == alone("llama-gqa")


EXACT = [name for name in ENGINES if name != "reference attention"]  # another order of sums


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="the promise is MKL's")
@pytest.mark.parametrize("family", ["llama-gqa", "packed", *IF_LONG])
@pytest.mark.parametrize("name", [*EXACT, "tiny pool"])
def test_logprobs_do_not_depend_on_the_engine(name: str, family: str) -> None:
    """Equal tokens could be luck; equal floats cannot. `docs/decisions` promises them on a CPU."""
    args = ENGINES.get(name) or {
        "max_model_len": LONGEST,
        "kv_cache_memory": small_pool(family, 4, LONGEST // 4 + 9),
    }
    assert records(engine_of(family, **args), everyone()) == records_alone(family)


@pytest.mark.parametrize(
    ("family", "page_size"),
    [
        ("llama-gqa", 1),
        ("llama-gqa", 4),
        ("llama-gqa", 16),
        ("gpt2", 4),
        ("packed", 4),
        ("packed", 16),
    ],
)
@pytest.mark.parametrize("overlap", [False, True], ids=["in-step", "overlap"])
def test_tokens_survive_preemption(family: str, page_size: int, overlap: bool) -> None:
    """A pool that holds little more than one request: everybody is preempted again and again."""
    num_pages = -(-LONGEST // page_size) + 1 + 32 // page_size
    small = small_pool(family, page_size, num_pages)
    engine = engine_of(family, page_size=page_size, max_model_len=LONGEST, kv_cache_memory=small)
    engine.core.lag = int(overlap)
    assert outputs(engine, everyone()) == alone(family)
    stats = engine.core.scheduler.stats()
    assert stats.num_preempted > 10 and stats.pages_evicted > 10, stats


@pytest.mark.parametrize("overlap", [False, True], ids=["in-step", "overlap"])
def test_prompt_logprobs_survive_preemption(overlap: bool) -> None:
    """Red when a prompt that starts again loses positions, or a hit takes them away."""
    params = PLAIN.with_(prompt_logprobs=0, temperature=0.0)
    engine = tiny_engine(
        model("llama-gqa"),
        max_model_len=LONGEST,
        max_num_batched_tokens=24,
        kv_cache_memory=small_pool("llama-gqa", 4, LONGEST // 4 + 9),
    )
    engine.core.lag = int(overlap)
    found: dict[int, dict[int, float]] = {}
    for id, prompt in enumerate(prompts()):
        found[id] = {}
        engine.core.add(Request.new(id, prompt, params, arrival=float(id)))
    while engine.core.has_work:
        for event in engine.core.step():
            for position, record in enumerate(event.prompt_logprobs, event.prompt_start):
                found[event.request_id][position] = record.logprob
    assert engine.core.scheduler.stats().num_preempted >= 2
    for id, prompt in enumerate(prompts()):
        want = model("llama-gqa")(torch.tensor([prompt])).logits[0].log_softmax(-1)
        assert sorted(found[id]) == list(range(len(prompt) - 1))
        for position, value in found[id].items():
            assert abs(value - want[position, prompt[position + 1]].item()) < 1e-4


def small_pool(family: str, page_size: int, num_pages: int) -> int:
    pool = engine_of(family, page_size=page_size).runner.pool
    return pool.data.nbytes // pool.num_pages * num_pages


@pytest.mark.parametrize("family", ["llama-gqa", "packed"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_tokens_are_the_same_on_hit_and_miss(page_size: int, family: str) -> None:
    """Twice through one engine: the second time every prompt is in the cache to its last token."""
    engine = engine_of(family, page_size=page_size, max_num_batched_tokens=64)
    first = outputs(engine, everyone())
    again = everyone()
    assert outputs(engine, again) == first == alone(family)
    for request in again:
        whole = request.num_prompt // page_size * page_size
        assert request.num_cached == min(whole, request.num_prompt - 1)


@pytest.mark.parametrize("overlap", [False, True], ids=["in-step", "overlap"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_copies_equal_separate_requests(page_size: int, overlap: bool) -> None:
    """n > 1 is an optimisation: each copy says what a request with its seed says on its own."""
    engine = tiny_engine(model("llama-gqa"), page_size=page_size, max_num_seqs=3)
    engine.core.lag = int(overlap)
    plain = tiny_engine(model("llama-gqa"), enable_prefix_caching=False)
    for index, prompt in enumerate(prompts()):
        copies, separate = (
            [Request.new(4 * index + i, prompt, WISHES["cut"], seed=40 + i) for i in range(4)]
            for _ in range(2)
        )
        copies[0].children = copies[1:]
        outputs(engine, copies[:1])
        want = outputs(plain, separate)
        assert [r.output for r in copies] == list(want.values()), f"prompt {index}"
        assert len(set(map(tuple, want.values()))) > 1, "seeds must make a difference"


def test_an_abort_does_not_disturb_the_others() -> None:
    """Red when a row or page of an aborted request is reused while someone still reads it."""
    for overlap in (0, 1):
        engine = tiny_engine(model("llama-gqa"), max_num_seqs=6, max_num_batched_tokens=24)
        engine.core.lag = overlap
        requests = everyone()
        rng = random.Random(3)
        gone = {request.id for request in rng.sample(requests, 10)}
        for request in requests:
            engine.core.add(request)
        while engine.core.has_work:
            engine.core.step()
            if gone and rng.random() < 0.3:
                engine.core.abort(gone.pop())
        want = alone("llama-gqa")
        for request in requests:
            assert request.output == want[request.id][: request.num_output]
        assert sum(request.num_output == NUM_TOKENS for request in requests) >= 20
