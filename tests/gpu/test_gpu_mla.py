"""Latent attention compiled for the GPU: right, and bit for bit the same however it is fed.

Kernels at the sizes of DeepSeek-V2-Lite (16 heads) and V3 (128), then whole engines against
transformers and against themselves.
"""

from __future__ import annotations

import itertools

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

import tests.hf as hf
from quire.attn.latent_triton import LatentTriton
from quire.kernels.latent_heads import multiply_heads
from tests.gpu.test_engine_gpu import SIZES, engine_of, make, prompts, run
from tests.latent_case import LatentCase, Sizes, make_latent_case

LAST = 1300  # three splits
MODELS = {
    "v2-lite": (Sizes(16, 512, 64, 128, 128), torch.bfloat16),
    "v3": (Sizes(128, 512, 64, 128, 128), torch.bfloat16),
    "minicpm3": (Sizes(40, 256, 32, 64, 64), torch.float16),
    "fp32": (Sizes(4, 64, 16, 32, 32), torch.float32),
}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> str:
    return request.param


def case_of(model: str, lens: list[int]) -> tuple[LatentCase, LatentTriton]:
    sizes, dtype = MODELS[model]
    case = make_latent_case(lens, sizes, dtype=dtype, device="cuda")
    return case, LatentTriton(dtype)


def check(got: torch.Tensor, want: torch.Tensor) -> None:
    error = (got.double() - want).norm() / want.norm()
    assert error < (1e-5 if got.dtype == torch.float32 else 2e-2), f"{error:.2e}"


def test_mixed_step_is_right(model: str) -> None:
    contexts, queries = [1, 511, 512, 513, 1031, 900], [1, 1, 512, 1, 3, 256]
    case, backend = case_of(model, contexts)
    cache = case.cache(backend, fill=float("nan"))
    case.feed(backend, cache, contexts)
    check(case.step(backend, cache, queries, contexts), case.expected(queries, contexts))


def test_decode_has_the_bits_of_prefill(model: str) -> None:
    case, backend = case_of(model, [LAST])
    cache = case.cache(backend, fill=float("nan"))
    whole = case.step(backend, cache, [LAST], [LAST])
    ends = list(range(1, LAST + 1, 7))
    decoded = case.step(backend, cache, [1] * len(ends), ends, [0] * len(ends))
    assert torch.equal(decoded, whole[[end - 1 for end in ends]])


@pytest.mark.parametrize("chunk", [1, 2, 16, 100, 512])
def test_chunk_size_changes_no_bit(model: str, chunk: int) -> None:
    case, backend = case_of(model, [LAST])
    cache = case.cache(backend, fill=float("nan"))
    whole = case.step(backend, cache, [LAST], [LAST])
    cuts = [*range(max(0, LAST - 40 * chunk), LAST, chunk), LAST]
    parts = [case.step(backend, cache, [b - a], [b]) for a, b in itertools.pairwise(cuts)]
    assert torch.equal(torch.cat(parts), whole[cuts[0] :])


def test_company_changes_no_bit(model: str) -> None:
    lens = [LAST, *range(1, 700, 23)]
    case, backend = case_of(model, lens)
    cache = case.cache(backend, fill=float("nan"))
    case.feed(backend, cache, lens)
    together = case.step(backend, cache, [1] * len(lens), lens)
    alone = [case.step(backend, cache, [1], [n], [i]) for i, n in enumerate(lens)]
    assert torch.equal(torch.cat(alone), together)


@pytest.mark.parametrize("name", ["v2-lite", "v3"])
def test_graph_follows_growing_contexts(name: str) -> None:
    lens = [600, 2000, 30, 1]
    case, backend = case_of(name, lens)
    cache = case.cache(backend)
    case.feed(backend, cache, lens)
    batch = case.paged.batch([1] * 4, [1] * 4, range(4))
    heads, width = case.sizes.heads, case.spec.head_dim
    q = torch.randn(4, heads, width, device="cuda", dtype=torch.bfloat16)

    def attend() -> torch.Tensor:
        return backend.run(q, cache, backend.plan(batch, case.spec, 4096), case.spec)

    attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend()
    backend.plan(batch, case.spec, 1 << 18)  # scratch outgrown: the graph must not notice
    for now in ([1, 1, 1, 1], [512, 513, 30, 1], lens):
        batch.context_lens.copy_(torch.tensor(now, dtype=torch.int32))
        graph.replay()
        eager = case.paged.batch([1] * 4, now, range(4))
        assert torch.equal(out, backend.run(q, cache, backend.plan(eager, case.spec), case.spec))


# ------------------------------------------------------------ the expanded form


def test_expanded_step_is_right(model: str) -> None:
    contexts, queries, prompts_of = [700, 513, 300, 64], [700, 100, 1, 10], [700, 450, 200, 64]
    case, backend = case_of(model, contexts)
    cache = case.cache(backend, fill=float("nan"))
    case.feed(backend, cache, contexts)
    got = case.step_in_forms(backend, cache, queries, contexts, prompts_of)
    check(got, case.expected(queries, contexts, is_latent=False))


@pytest.mark.parametrize("chunk", [1, 100, 512])
def test_expanded_chunks_and_blocks_change_no_bit(model: str, chunk: int) -> None:
    case, backend = case_of(model, [LAST])
    cache = case.cache(backend, fill=float("nan"))
    whole = case.step_in_forms(backend, cache, [LAST], [LAST], [LAST - 5])
    in_blocks = LatentTriton(backend.dtype, block_keys=512)
    cuts = [*range(max(0, LAST - 20 * chunk), LAST, chunk), LAST]
    for other in (backend, in_blocks):
        parts = [
            case.step_in_forms(other, cache, [b - a], [b], [LAST - 5])
            for a, b in itertools.pairwise(cuts)
        ]
        assert torch.equal(torch.cat(parts), whole[cuts[0] :])


# ------------------------------------------------------------ products of heads


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("side", ["queries", "results"])
def test_head_products_do_not_see_the_batch(heads: int, side: str) -> None:
    """Wide spread of magnitudes, so that two orders of summation do round differently."""
    torch.manual_seed(0)
    kv_b = torch.randn(heads, 256, 512, device="cuda").bfloat16()
    weight = kv_b[:, :128].transpose(1, 2) if side == "queries" else kv_b[:, 128:]
    x = torch.randn(700, heads, weight.shape[2], device="cuda")
    x = (x * torch.randn_like(x).exp()).bfloat16()
    whole = multiply_heads(x, weight)
    want = torch.einsum("thi,hoi->tho", x.double(), weight.double())
    assert (whole.double() - want).norm() / want.norm() < 1e-2
    for size in (1, 2, 15, 16, 17, 64, 65, 128, 300):
        assert torch.equal(multiply_heads(x[:size], weight), whole[:size]), size


# ------------------------------------------------------------ engines

DEEPSEEK = {
    **SIZES,
    "num_key_value_heads": 8,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 128,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
}
FAMILIES = {
    "v2-lite": lambda: hf._llama_like("DeepseekV2", **DEEPSEEK, q_lora_rank=None),
    "v3": lambda: hf._llama_like("DeepseekV3", **DEEPSEEK, q_lora_rank=96, n_group=4, topk_group=2),
}


def engine_model(family: str):
    torch.manual_seed(0)
    model = FAMILIES[family]().eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                p.normal_(0, 0.06)
            p.copy_(p.bfloat16().float())  # both sides hold the same numbers
        for name, buffer in model.named_buffers():
            if "correction" in name:
                buffer.normal_(0, 0.1)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_near_fp32_transformers(family: str) -> None:
    model = engine_model(family)
    engine = engine_of(model, max_num_batched_tokens=128)
    prompt = prompts(1, seed=4, low=250)[0]
    with torch.no_grad():
        want = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    engine.core.add(make(1, prompt, 1, prompt_logprobs=1))
    errors = []
    while engine.core.has_work:
        for event in engine.core.step():
            for at, record in enumerate(event.prompt_logprobs, event.prompt_start):
                errors.append(abs(record.logprob - want[at, record.token].item()))
    assert len(errors) == len(prompt) - 1
    # A token whose experts are nearly tied may visit another one in bf16: most positions are
    # held to what a dense model is held to, not all.
    assert sorted(errors)[int(0.8 * len(errors))] < 0.12, sorted(errors)[-60::6]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_batch_invariance(family: str, temperature: float) -> None:
    """Alone, together, chunked small, on hits, graph or eager: the same tokens."""
    model = engine_model(family)
    some = prompts(24, seed=2)
    some += [some[0] + some[1][:40], some[0] + some[2][:17], some[3]]

    def requests() -> list:
        return [make(i, p, 30, temperature) for i, p in enumerate(some)]

    together = run(engine_of(model), requests())
    assert run(engine_of(model, enforce_eager=True), requests()) == together, "graph or eager"
    chunked = run(engine_of(model, max_num_batched_tokens=64, max_chunk=37), requests())
    assert chunked == together, "chunk size changes tokens"
    # Without a cache prompts take the expanded form: other bits, as independent of the schedule.
    apart = run(engine_of(model, enable_prefix_caching=False), requests())
    small = {"max_num_batched_tokens": 64, "max_chunk": 37}
    again = run(engine_of(model, enable_prefix_caching=False, **small), requests())
    assert again == apart, "chunk size changes tokens where prompts are expanded"
    lone = engine_of(model, max_num_seqs=1)
    assert [run(lone, [request])[0] for request in requests()] == together, "company"
