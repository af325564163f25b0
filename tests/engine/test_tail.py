"""The last layer computes the rows that are sampled, and nothing else changes: no bit of a logit,
none of the cache, and whoever came for hidden states gets them.

The same requests go through two engines, of which one keeps every row. Red when a row is picked
through the wrong index, when attention of the kept ones sees other keys or takes another form, or
when dropped tokens leave no keys and values behind.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from quire.engine.build import Engine
from quire.forward import Batch, ForwardContext, Tail
from quire.params import SamplingParams
from quire.request import Request
from quire.step import TokenEvent
from tests.hf import greedy, tiny_engine, tiny_model
from tests.model import test_deepseek, test_gpt_oss
from tests.model.test_parity import TOLERANCE, make, prompts, run

NEVER = 1 << 30

MODELS: dict[str, Callable[[], Any]] = {
    **{
        family: lambda family=family: tiny_model(family)
        for family in (
            "llama-gqa",
            "qwen3",  # heads are normed
            "olmo2",  # norms after, and over all heads at once
            "granite",  # what is added is scaled
            "gpt2",  # LayerNorm, learnt positions
            "gemma2",  # caps, norms on both sides; the last layer sees everything
            "gemma3",  # ... and here its own group's window
            "mistral-window",  # all layers have one
            "qwen2-window",  # the last ones have one
            "qwen2-moe",
            "qwen3-moe-mixed",
        )
    },
    "gpt-oss": test_gpt_oss.tiny_gpt_oss,
    "v2-lite": lambda: test_deepseek.model_of("v2-lite"),
    "v3": lambda: test_deepseek.model_of("v3"),
    "v3-native": lambda: test_deepseek.model_of("v3-native"),
}


@cache
def model_of(family: str) -> Any:
    return MODELS[family]()


class Seen(NamedTuple):
    """What an engine computed, step by step."""

    logits: list[Tensor]
    fed: list[int]  # rows
    kept: list[int | None]  # rows of the tail, where there was one
    events: list[TokenEvent]


def watch(engine: Engine, requests: list[Request], monkeypatch: pytest.MonkeyPatch) -> Seen:
    seen = Seen([], [], [], [])
    model = engine.runner.model
    read_out, logits = model.read_out, model.logits

    def watched(q: Tensor, residual: Tensor, ctx: ForwardContext, tail: Tail | None) -> Tensor:
        hidden = read_out(q, residual, ctx, tail)
        seen.fed.append(ctx.batch.num_tokens)
        seen.kept.append(None if tail is None else len(tail.index))
        assert len(hidden) == (ctx.batch.num_tokens if tail is None else len(tail.index))
        return hidden

    def watched_logits(hidden: Tensor) -> Tensor:
        seen.logits.append(logits(hidden))
        return seen.logits[-1]

    def watched_tape(
        batches: tuple[Batch, ...], sent: Any, has_tail: bool, adapted: Any, **more: Any
    ) -> Any:
        seen.fed.append(batches[0].num_tokens)
        seen.kept.append(len(sent["sample_index"]) if has_tail else None)
        return run_tape(batches, sent, has_tail, adapted, **more)

    if engine.runner.tapes is not None:
        run_tape = engine.runner.tapes.run
        monkeypatch.setattr(engine.runner.tapes, "run", watched_tape)
    monkeypatch.setattr(model, "read_out", watched)
    monkeypatch.setattr(model, "logits", watched_logits)
    for request in requests:
        engine.core.add(request)
    while engine.core.has_work:
        seen.events.extend(engine.core.step())
    return seen


def compare(
    make_engine: Callable[[], Engine],
    make_requests: Callable[[], list[Request]],
    monkeypatch: pytest.MonkeyPatch,
) -> Seen:
    """The engine with a tail, after checking that it computed what the one without did."""
    kept, full = make_engine(), make_engine()
    kept.runner.min_dropped, full.runner.min_dropped = 1, NEVER
    got = watch(kept, make_requests(), monkeypatch)
    want = watch(full, make_requests(), monkeypatch)
    assert want.kept == [None] * len(want.fed), "the oracle left rows out"
    assert got.fed == want.fed, "not the same steps"
    assert got.events == want.events
    for ours, theirs in zip(got.logits, want.logits, strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(kept.runner.pool.data, full.runner.pool.data), "keys and values"
    return got


def mixed_prompts() -> list[list[int]]:
    """More than there are rows, from a single token to several chunks; some share a prefix."""
    long = list(range(30, 87))  # nobody ends in the first step
    some = [long, long[::-1], long[:40], *prompts(5, seed=1)]
    return [*some, [7], long + some[3][:9]]


def mixed_requests() -> list[Request]:
    return [make(i, p, 6 + i % 3) for i, p in enumerate(mixed_prompts())]


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="the promise is MKL's")
@pytest.mark.parametrize("family", MODELS)
def test_no_bit_changes(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of prompts beside decodes, and prompts that go on before some that end."""

    def engine() -> Engine:
        return tiny_engine(model_of(family), max_num_batched_tokens=24, max_num_seqs=4, max_chunk=9)

    got = compare(engine, mixed_requests, monkeypatch)
    # Prompts that go on, decodes alone, and steps in between.
    assert {0, None} < set(got.kept) and max(kept or 0 for kept in got.kept) >= 3
    for fed, kept in zip(got.fed, got.kept, strict=True):
        assert kept is None or kept < fed


def test_tokens_are_those_of_transformers() -> None:
    """Rows stay in the order of the requests, whatever is left out between them."""
    engine = tiny_engine(model_of("llama-gqa"), max_num_seqs=4, max_chunk=9)
    engine.runner.min_dropped = 1
    requests = mixed_requests()
    run(engine, requests)
    for request, prompt in zip(requests, mixed_prompts(), strict=True):
        want = greedy(model_of("llama-gqa"), prompt, request.params.max_tokens)
        assert request.output == want


@pytest.mark.parametrize("family", ["v2-lite", "v3"])
def test_latent_tokens_keep_their_form(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts expanded, answers absorbed, some of which are computed again after preemption: then
    the token a chunk ends with may be of either kind."""

    def engine() -> Engine:
        return tiny_engine(
            model_of(family),
            attention_backend="reference",
            enable_prefix_caching=False,
            max_num_seqs=5,
            **{**test_deepseek.tiny_pool(family, 80 // 4 + 9), "max_chunk": 7},
        )

    def requests() -> list[Request]:
        return [make(i, p, 20) for i, p in enumerate(prompts(5, seed=6))]

    kept, full = engine(), engine()
    assert kept.runner.expand_prompts
    forms = set()
    plain = kept.runner.backend.plan

    def plan(batch: Any, *more: Any) -> object:
        made = plain(batch, *more)
        if batch.is_decode:
            forms.add((made.absorbed is not None, made.expanded is not None))
        return made

    monkeypatch.setattr(kept.runner.backend, "plan", plan)
    kept.runner.min_dropped, full.runner.min_dropped = 1, NEVER
    got = watch(kept, requests(), monkeypatch)
    want = watch(full, requests(), monkeypatch)
    assert kept.core.scheduler.stats().num_preempted > 0
    assert forms == {(True, False), (False, True), (True, True)}
    assert got.events == want.events and got.fed == want.fed
    # The oracle's library products take their order from the shape: near, not the same bits.
    for ours, theirs in zip(got.logits, want.logits, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


class Rows:
    """Counts the rows that pass through a callable attribute."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.counts = inner, []

    def __call__(self, x: Tensor, *rest: Any) -> Tensor:
        self.counts.append(len(x))
        return self.inner(x, *rest)


def test_only_sampled_rows_go_on() -> None:
    """Red when something after the last layer's cache still works on all tokens."""
    engine = tiny_engine(model_of("llama-gqa"), max_num_batched_tokens=24, enforce_eager=True)
    engine.runner.min_dropped = 1
    first, *_, last = engine.runner.model.blocks
    watched = [Rows(last.attn.out), Rows(last.mlp), Rows(first.mlp)]
    last.attn.out, last.mlp, first.mlp = watched
    run(engine, [make(0, list(range(5, 55)), 3)])  # chunks of 24, 24 and 2, then two decodes
    assert watched[0].counts == watched[1].counts == [1, 1, 1]
    assert watched[2].counts == [24, 24, 2, 1, 1]


def test_few_rows_are_not_worth_it() -> None:
    engine = tiny_engine(model_of("llama-gqa"), enforce_eager=True)
    engine.runner.min_dropped = 8
    last = engine.runner.model.blocks[-1]
    last.mlp = watched = Rows(last.mlp)
    run(engine, [make(0, [5] * 8, 1)])
    run(engine, [make(1, [6] * 9, 1)])
    assert watched.counts == [8, 1]


# ------------------------------------------------------------ who reads hidden states


def test_prompt_logprobs_beside_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its prompt is read in whole; afterwards its decodes let others' chunks be cut again."""
    model = model_of("llama-gqa")
    first, later = prompts(1, seed=3, longest=50)[0] + [5, 6, 7] * 5, list(range(9, 90))

    def requests() -> list[Request]:
        asks = make(0, first, 8)
        asks.params = asks.params.with_(prompt_logprobs=1)
        return [asks, make(1, later, 3)]

    got = compare(lambda: tiny_engine(model, max_num_batched_tokens=16), requests, monkeypatch)
    asked = [event for event in got.events if event.request_id == 0]
    found = {
        position: record.logprob
        for event in asked
        for position, record in enumerate(event.prompt_logprobs, event.prompt_start)
    }
    want = model(torch.tensor([first])).logits[0].log_softmax(-1)
    assert sorted(found) == list(range(len(first) - 1))
    for position, value in found.items():
        assert abs(value - want[position, first[position + 1]].item()) < TOLERANCE
    num_reading = -(-len(first) // 16)
    assert got.kept[: num_reading - 1] == [None] * (num_reading - 1)
    assert 1 in got.kept[num_reading:], "the other's chunks were not cut"


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_embeddings_beside_others(pooling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompt = model_of("llama-gqa"), list(range(20, 60))

    def requests() -> list[Request]:
        params = SamplingParams(max_tokens=1, pooling=pooling)
        return [make(0, [5, 6, 7], 9), Request.new(1, prompt, params, arrival=1.0)]

    got = compare(lambda: tiny_engine(model, max_num_batched_tokens=16), requests, monkeypatch)
    (embedding,) = [event.pooled for event in got.events if event.pooled]
    states = model.model(torch.tensor([prompt])).last_hidden_state[0]
    want = states[-1] if pooling == "last" else states.mean(0)
    assert (torch.tensor(embedding) - want).abs().max() < TOLERANCE
