"""The whole engine on CUDA: parity with transformers, and bits that do not depend on the batch."""

from __future__ import annotations

import random

import pytest
import torch

from quire.engine.build import Engine
from quire.params import SamplingParams
from quire.request import Request

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

import tests.hf as hf

VOCAB = 512
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
FAMILIES = {
    "llama": lambda: hf._llama_like("Llama", **SIZES),
    "llama-tied": lambda: hf._llama_like("Llama", **{**SIZES, "tie_word_embeddings": True}),
    "mistral": lambda: hf._llama_like("Mistral", **{**SIZES, "sliding_window": None}),
    "qwen2": lambda: hf._llama_like("Qwen2", **SIZES),
    "qwen3": lambda: hf._llama_like("Qwen3", **{**SIZES, "head_dim": 64}),
    "phi3": lambda: hf._llama_like("Phi3", **{**SIZES, "sliding_window": None}),
    "olmo2": lambda: hf._llama_like("Olmo2", **SIZES),
    "granite": lambda: hf._llama_like("Granite", **{**SIZES, "attention_multiplier": 0.125}),
    "gpt2": lambda: hf.transformers.GPT2LMHeadModel(
        hf.transformers.GPT2Config(
            vocab_size=VOCAB, n_embd=256, n_layer=3, n_head=8, n_positions=1024
        )
    ),
}


def model_of(family: str):
    torch.manual_seed(0)
    model = FAMILIES[family]().eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim > 1:
                p.normal_(0, 0.06)
            elif "bias" in name:
                p.normal_(0, 0.05)
            p.copy_(p.bfloat16().float())  # both sides hold the same numbers
    return model


def engine_of(model, **changes) -> Engine:
    return hf.tiny_engine(
        model,
        **{
            "device": "cuda",
            "dtype": "bfloat16",
            "page_size": 16,
            "kv_cache_memory": 1 << 26,
            "max_model_len": 1024,
            "max_num_seqs": 64,
            "max_num_batched_tokens": 512,
            **changes,
        },
    )


def prompts(count: int, seed: int = 0, low: int = 1, high: int = 300) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, VOCAB) for _ in range(rng.randint(low, high))] for _ in range(count)]


def make(id: int, prompt: list[int], num: int, temperature: float = 0.0, **more) -> Request:
    params = SamplingParams(temperature=temperature, max_tokens=num, ignore_eos=True, **more)
    return Request.new(id, prompt, params, seed=1000 + id, arrival=float(id))


def run(engine: Engine, requests: list[Request]) -> list[list[int]]:
    for request in requests:
        engine.core.add(request)
    while engine.core.has_work:
        engine.core.step()
    return [request.output for request in requests]


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_near_fp32_transformers(family: str) -> None:
    model = model_of(family)
    engine = engine_of(model, max_num_batched_tokens=128)
    prompt = prompts(1, seed=4, low=250)[0]
    with torch.no_grad():
        want = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    request = make(1, prompt, 1, prompt_logprobs=1)
    engine.core.add(request)
    worst, seen = 0.0, 0
    while engine.core.has_work:
        for event in engine.core.step():
            for at, record in enumerate(event.prompt_logprobs, event.prompt_start):
                worst = max(worst, abs(record.logprob - want[at, record.token].item()))
                seen += 1
    assert seen == len(prompt) - 1
    assert worst < 0.12, worst  # bf16 carries 8 bits through three layers


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_batch_invariance(family: str, temperature: float) -> None:
    """Alone, together, chunked small, preempted, cached or not, graph or eager: the same tokens."""
    model = model_of(family)
    some = prompts(24, seed=2)
    some += [some[0] + some[1][:40], some[0] + some[2][:17], some[3]]
    num = 40

    def requests() -> list[Request]:
        return [make(i, p, num, temperature) for i, p in enumerate(some)]

    together = run(engine_of(model), requests())
    eager = run(engine_of(model, enforce_eager=True), requests())
    assert eager == together, "graph replay and eager disagree"
    chunked = run(engine_of(model, max_num_batched_tokens=64, max_chunk=37), requests())
    assert chunked == together, "chunk size changes tokens"
    uncached = run(engine_of(model, enable_prefix_caching=False), requests())
    assert uncached == together, "a cache hit changes tokens"
    alone_engine = engine_of(model, max_num_seqs=1)
    alone = [run(alone_engine, [request])[0] for request in requests()]
    assert alone == together, "company changes tokens"
    page_bytes = alone_engine.runner.pool.data.nbytes // alone_engine.runner.pool.num_pages
    small = engine_of(model, kv_cache_memory=page_bytes * 70)
    squeezed = run(small, requests())
    assert small.core.scheduler.stats().num_preempted > 0, "the pool was meant to be too small"
    assert squeezed == together, "preemption changes tokens"


def test_overlap_changes_nothing() -> None:
    model = model_of("llama")
    some = prompts(30, seed=6)
    one, two = engine_of(model), engine_of(model)
    two.core.lag = 0
    requests = [[make(i, p, 30, 0.7) for i, p in enumerate(some)] for _ in range(2)]
    assert run(one, requests[0]) == run(two, requests[1])


def test_sampling_features_run_on_the_device() -> None:
    """Penalties, truncation, bias, bans and logprobs in one batch, next to a greedy request."""
    model = model_of("llama")
    engine = engine_of(model)
    prompt = prompts(1, seed=9, low=50)[0]
    plain = run(engine_of(model), [make(1, prompt, 20)])[0]
    wishes = [
        {},
        {"temperature": 0.8, "top_k": 5},
        {"temperature": 0.8, "top_p": 0.7, "min_p": 0.01},
        {"repetition_penalty": 1.3, "presence_penalty": 0.5},
        {"logit_bias": {7: 100.0}},
        {"allowed_token_ids": [11, 12, 13]},
        {"logprobs": 5},
        {"min_tokens": 10, "stop_token_ids": [plain[3]]},
    ]
    requests = [make(i, prompt, 20, **{"temperature": 0.0, **w}) for i, w in enumerate(wishes)]
    outputs = run(engine, requests)
    assert outputs[0] == plain
    assert set(outputs[4]) == {7}
    assert set(outputs[5]) <= {11, 12, 13}
    assert outputs[6] == plain
    assert len(outputs[7]) >= 10
