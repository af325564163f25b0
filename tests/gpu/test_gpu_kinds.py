"""Windows, caps and sinks compiled for the GPU: right, bounded in cost by the window, and bit for
bit the same however they are fed; then whole models that have them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from quire.attn.triton import TritonAttention
from tests.paged_case import PagedCase, make_case

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

import tests.hf as hf
from tests.gpu.test_engine_gpu import SIZES, engine_of, make, prompts, run

LAST = 1300  # three splits
KINDS: dict[str, dict[str, Any]] = {
    "mistral": {"heads": (32, 8), "head_dim": 128, "window": 700},
    "gemma2": {"heads": (8, 4), "head_dim": 256, "window": 600, "softcap": 50.0},
    "gemma2 full": {"heads": (8, 4), "head_dim": 256, "softcap": 50.0},
    "gemma3": {"heads": (8, 4), "head_dim": 256, "window": 512},
    "gemma3 27b": {"heads": (32, 16), "head_dim": 128, "window": 1024},
    "gpt-oss": {"heads": (64, 8), "head_dim": 64, "window": 128, "has_sinks": True},
    "gpt-oss full": {"heads": (64, 8), "head_dim": 64, "has_sinks": True},
    "odd": {"heads": (14, 2), "head_dim": 80, "window": 33, "softcap": 5.0, "has_sinks": True},
    "one": {"heads": (4, 4), "head_dim": 64, "window": 1},
    "fp32": {"heads": (4, 1), "head_dim": 64, "window": 97, "dtype": torch.float32},
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def case_of(kind: str, lens: list[int]) -> tuple[PagedCase, TritonAttention]:
    words = {"dtype": torch.bfloat16, **KINDS[kind]}
    return make_case(lens, device="cuda", **words), TritonAttention(words["dtype"])


def test_mixed_step_is_right(kind: str) -> None:
    contexts = [1, 511, 512, 513, 1031, 900]
    queries = [1, 1, 512, 1, 3, 256]
    case, backend = case_of(kind, contexts)
    cache = case.cache(backend, fill=float("nan"))
    case.feed(backend, cache, contexts)
    got, want = case.step(backend, cache, queries, contexts), case.expected(queries, contexts)
    error = (got.double() - want).norm() / want.norm()
    assert error < (1e-5 if got.dtype == torch.float32 else 1e-2), f"{error:.2e}"


def test_decode_has_the_bits_of_prefill(kind: str) -> None:
    case, backend = case_of(kind, [LAST])
    cache = case.cache(backend, fill=float("nan"))
    whole = case.step(backend, cache, [LAST], [LAST])
    ends = list(range(1, LAST + 1, 7))
    decoded = case.step(backend, cache, [1] * len(ends), ends, [0] * len(ends))
    assert torch.equal(decoded, whole[[end - 1 for end in ends]])
    bounded = case.step(backend, cache, [1] * len(ends), ends, [0] * len(ends), max_context=4096)
    assert torch.equal(bounded, decoded)


@pytest.mark.parametrize("chunk", [3, 16, 100, 512, 1000])
def test_chunk_size_changes_no_bit(kind: str, chunk: int) -> None:
    case, backend = case_of(kind, [LAST])
    cache = case.cache(backend, fill=float("nan"))
    whole = case.step(backend, cache, [LAST], [LAST])
    cuts = [*range(0, LAST, chunk), LAST]
    parts = [case.step(backend, cache, [b - a], [b]) for a, b in itertools.pairwise(cuts)]
    assert torch.equal(torch.cat(parts), whole)


def test_company_changes_no_bit(kind: str) -> None:
    lens = [LAST, *range(1, 700, 11)]
    case, backend = case_of(kind, lens)
    cache = case.cache(backend, fill=float("nan"))
    case.feed(backend, cache, lens)
    together = case.step(backend, cache, [1] * len(lens), lens)
    alone = [case.step(backend, cache, [1], [n], [i]) for i, n in enumerate(lens)]
    assert torch.equal(torch.cat(alone), together)
    mixed = case.step(backend, cache, [LAST, *[1] * (len(lens) - 1)], lens)
    assert torch.equal(mixed[LAST - 1 :], together)


@pytest.mark.parametrize("kind", ["gpt-oss", "gemma2", "one"])
def test_graph_follows_growing_contexts(kind: str) -> None:
    lens = [600, 2000, 30, 1]
    case, backend = case_of(kind, lens)
    cache = case.cache(backend)
    case.feed(backend, cache, lens)
    batch = case.batch([1] * 4, [1] * 4, range(4))
    q = torch.randn(4, case.spec.num_heads, case.spec.head_dim, device="cuda").bfloat16()

    def attend() -> torch.Tensor:
        plan = backend.plan(batch, case.spec, 4096)
        return backend.run(q, cache, plan, case.spec, case.sinks)

    attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend()
    for now in ([1, 1, 1, 1], [512, 513, 30, 1], lens):
        batch.context_lens.copy_(torch.tensor(now, dtype=torch.int32))
        graph.replay()
        eager = case.batch([1] * 4, now, range(4))
        plan = backend.plan(eager, case.spec)
        assert torch.equal(out, backend.run(q, cache, plan, case.spec, case.sinks))


# ------------------------------------------------------------ whole models

GEMMA = {**SIZES, "head_dim": 256, "num_attention_heads": 4}
FAMILIES = {
    "mistral": lambda: hf._llama_like("Mistral", **SIZES, sliding_window=70),
    "qwen2": lambda: hf._llama_like(
        "Qwen2", **SIZES, use_sliding_window=True, sliding_window=100, max_window_layers=1
    ),
    "gemma": lambda: hf._llama_like("Gemma", **GEMMA),
    "gemma2": lambda: hf._llama_like("Gemma2", **GEMMA, sliding_window=64),
    "gemma3": lambda: hf.transformers.Gemma3ForCausalLM(
        hf._gemma3_config(**GEMMA, sliding_window=64)
    ),
}


def model_of(family: str) -> Any:
    torch.manual_seed(0)
    model = FAMILIES[family]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.06)
            else:
                parameter.uniform_(-0.2, 0.2) if "gemma" in family else parameter.fill_(1.0)
            parameter.copy_(parameter.bfloat16().float())  # both sides hold the same numbers
    model.set_attn_implementation("eager")  # others leave caps out
    return model


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype, worst_allowed", [("float32", 1e-3), ("bfloat16", 0.3)])
def test_logprobs_near_fp32_transformers(family: str, dtype: str, worst_allowed: float) -> None:
    model = model_of(family)
    engine = engine_of(model, max_num_batched_tokens=128, dtype=dtype)
    prompt = prompts(1, seed=4, low=250)[0]
    with torch.no_grad():
        want = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    engine.core.add(make(1, prompt, 1, prompt_logprobs=1))
    found: dict[int, float] = {}
    while engine.core.has_work:
        for event in engine.core.step():
            for at, record in enumerate(event.prompt_logprobs, event.prompt_start):
                found[at] = abs(record.logprob - want[at, record.token].item())
    assert len(found) == len(prompt) - 1
    assert max(found.values()) < worst_allowed


@pytest.mark.parametrize("family", FAMILIES)
def test_batch_invariance(family: str) -> None:
    """Alone, together, chunked small, cached or not, graph or eager: the same tokens."""
    model = model_of(family)
    some = prompts(16, seed=2)
    some += [some[0] + some[1][:40], some[3]]

    def tokens(**changes: Any) -> list[list[int]]:
        requests = [make(i, p, 40, 0.8) for i, p in enumerate(some)]
        return run(engine_of(model, **changes), requests)

    together = tokens()
    for changes in (
        {"enforce_eager": True},
        {"max_num_batched_tokens": 64, "max_chunk": 37},
        {"enable_prefix_caching": False},
        {"max_num_seqs": 1},
    ):
        assert tokens(**changes) == together, changes
