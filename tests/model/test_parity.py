"""Every family against transformers, through the paged path: logits, then greedy tokens."""

from __future__ import annotations

import random

import pytest
import torch

from quire.params import SamplingParams
from quire.request import Request
from quire.step import Admission, PageWrite, StepPlan, Work
from tests.hf import FAMILIES, VOCAB, greedy, tiny_engine, tiny_model

TOLERANCE = 1e-4


def prompts(count: int, seed: int = 0, longest: int = 60) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, VOCAB) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def run(engine, requests) -> None:
    for request in requests:
        engine.core.add(request)
    while engine.core.has_work:
        engine.core.step()


def make(id: int, prompt: list[int], num_tokens: int, **more) -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    return Request.new(id, prompt, params, arrival=float(id), **more)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(family: str) -> None:
    """Every position of a chunked prompt, read through prompt logprobs of the whole vocabulary."""
    model = tiny_model(family)
    engine = tiny_engine(model, max_num_batched_tokens=16)
    prompt = prompts(1, seed=3, longest=50)[0] + [5, 6, 7, 8, 9] * 5
    want = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    request = make(1, prompt, 1)
    request.params = request.params.with_(prompt_logprobs=20, logprobs=20)
    engine.core.add(request)
    seen = 0
    while engine.core.has_work:
        for event in engine.core.step():
            for position, record in enumerate(event.prompt_logprobs, event.prompt_start):
                assert record.token == prompt[position + 1]
                assert abs(record.logprob - want[position, record.token].item()) < TOLERANCE
                got = torch.tensor(record.top_logprobs)
                tops = want[position][torch.tensor(record.top_tokens)]
                assert (got - tops).abs().max() < TOLERANCE
                seen += 1
            for record in event.logprobs:
                tops = want[-1][torch.tensor(record.top_tokens)]
                assert (torch.tensor(record.top_logprobs) - tops).abs().max() < TOLERANCE
    assert seen == len(prompt) - 1


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_in_a_mixed_batch(family: str) -> None:
    """Prefill chunks and decodes in the same steps, shared prefixes, more requests than rows."""
    model = tiny_model(family)
    engine = tiny_engine(model, max_num_batched_tokens=24, max_num_seqs=4)
    some = prompts(7, seed=1)
    some += [some[0] + some[1][:9], some[0] + some[2][:5]]
    requests = [make(i, p, 12) for i, p in enumerate(some)]
    run(engine, requests)
    for request, prompt in zip(requests, some, strict=True):
        assert request.output == greedy(model, prompt, 12)
    assert engine.core.scheduler.stats().prefix_hit_tokens > 0


def test_dynamic_rope_beyond_the_trained_context() -> None:
    """One prompt as long as the engine's context: then both scale by the same length."""
    model = tiny_model("llama-dynamic")
    engine = tiny_engine(model, max_model_len=300, max_num_batched_tokens=300)
    prompt = random.Random(0).choices(range(3, VOCAB), k=299)
    # transformers scales by the length it is fed: 300 tokens
    want = model(torch.tensor([[*prompt, 7]])).logits[0, 298]
    request = make(1, prompt, 1)
    request.params = request.params.with_(logprobs=5)
    engine.core.add(request)
    records = []
    while engine.core.has_work:
        for event in engine.core.step():
            records += event.logprobs
    want = want.log_softmax(-1)
    got = torch.tensor(records[0].top_logprobs)
    assert (got - want[torch.tensor(records[0].top_tokens)]).abs().max() < TOLERANCE


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_backends_agree_on_a_ragged_step(backend: str) -> None:
    """A hand-made plan: a chunk with a past, a fresh prompt and a decode in one forward."""
    model = tiny_model("llama-gqa")
    engine = tiny_engine(model, attention_backend=backend)
    runner, params = engine.runner, SamplingParams(temperature=0.0, logprobs=10)
    a, b, c = prompts(3, seed=5, longest=30)
    a, b, c = a + [9] * 12, b + [8] * 12, c + [7] * 12
    admissions = tuple(
        Admission(i, i, tokens, len(tokens), params, 0, ()) for i, tokens in enumerate((a, b, c))
    )
    writes = tuple(PageWrite(row, i, 1 + row * 20 + i) for row in range(3) for i in range(20))
    first = StepPlan(
        (Work(0, 0, 0, 7, False), Work(2, 2, 0, len(c) - 1, False)), admissions, writes
    )
    runner.execute(first).result()
    second = StepPlan(
        (
            Work(0, 0, 7, len(a) - 7, True),
            Work(1, 1, 0, len(b), True),
            Work(2, 2, len(c) - 1, 1, True),
        )
    )
    result = runner.execute(second).result()
    for tokens, (record,) in zip((a, b, c), result.logprobs, strict=True):
        want = model(torch.tensor([tokens])).logits[0, -1].log_softmax(-1)
        got = torch.tensor(record.top_logprobs)
        assert (got - want[torch.tensor(record.top_tokens)]).abs().max() < TOLERANCE
