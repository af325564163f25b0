"""Attention kernels compiled for the GPU: right, and bit for bit the same however they are fed."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from quire.attn.triton import TritonAttention
from tests.paged_case import PagedCase, make_case

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")

LAST = 1300  # three splits
MODELS = {  # heads, head_dim, dtype
    "llama": ((32, 8), 128, torch.bfloat16),
    "qwen-14b": ((40, 8), 128, torch.bfloat16),
    "gpt2": ((12, 12), 64, torch.float16),
    "phi": ((32, 32), 80, torch.bfloat16),
    "gemma": ((8, 4), 256, torch.bfloat16),
    "wide group": ((14, 2), 64, torch.bfloat16),
    "fp32": ((4, 1), 64, torch.float32),
}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> str:
    return request.param


def case_of(model: str, lens: list[int]) -> tuple[PagedCase, TritonAttention]:
    heads, head_dim, dtype = MODELS[model]
    case = make_case(lens, heads=heads, head_dim=head_dim, dtype=dtype, device="cuda")
    return case, TritonAttention(dtype)


def test_mixed_step_is_right(model: str) -> None:
    contexts = [1, 511, 512, 513, 1031, 900]
    queries = [1, 1, 512, 1, 3, 256]
    case, backend = case_of(model, contexts)
    cache = case.cache(backend, fill=float("nan"))
    case.feed(backend, cache, contexts)
    got, want = case.step(backend, cache, queries, contexts), case.expected(queries, contexts)
    error = (got.double() - want).norm() / want.norm()
    assert error < (1e-5 if got.dtype == torch.float32 else 1e-2), f"{error:.2e}"


def test_decode_has_the_bits_of_prefill(model: str) -> None:
    case, backend = case_of(model, [LAST])
    cache = case.cache(backend, fill=float("nan"))
    whole = case.step(backend, cache, [LAST], [LAST])
    ends = list(range(1, LAST + 1, 7))
    decoded = case.step(backend, cache, [1] * len(ends), ends, [0] * len(ends))
    assert torch.equal(decoded, whole[[end - 1 for end in ends]])


@pytest.mark.parametrize("chunk", [3, 16, 100, 512, 1000])
def test_chunk_size_changes_no_bit(model: str, chunk: int) -> None:
    case, backend = case_of(model, [LAST])
    cache = case.cache(backend, fill=float("nan"))
    whole = case.step(backend, cache, [LAST], [LAST])
    cuts = [*range(0, LAST, chunk), LAST]
    parts = [case.step(backend, cache, [b - a], [b]) for a, b in itertools.pairwise(cuts)]
    assert torch.equal(torch.cat(parts), whole)


def test_company_changes_no_bit(model: str) -> None:
    lens = [LAST, *range(1, 700, 11)]
    case, backend = case_of(model, lens)
    cache = case.cache(backend, fill=float("nan"))
    case.feed(backend, cache, lens)
    together = case.step(backend, cache, [1] * len(lens), lens)
    alone = [case.step(backend, cache, [1], [n], [i]) for i, n in enumerate(lens)]
    assert torch.equal(torch.cat(alone), together)
    mixed = case.step(backend, cache, [LAST, *[1] * (len(lens) - 1)], lens)
    assert torch.equal(mixed[LAST - 1 :], together)


@pytest.mark.parametrize("model", ["llama", "gemma", "phi"])
def test_long_splits_change_no_bit(model: str) -> None:
    """Red when decode, drafts or prefill disagree where splits have grown: 512, then 1,024 from
    16,384 on, then 2,048 from 32,768."""
    last = 35_000
    case, backend = case_of(model, [last])
    cache = case.cache(backend, fill=float("nan"))
    case.feed(backend, cache, [32_500])
    whole = case.step(backend, cache, [last - 32_500], [last])
    want = case.expected([40], [last])
    assert (whole[-40:].double() - want).norm() / want.norm() < 1e-2
    ends = [32_501, 32_767, 32_768, 32_769, 34_815, 34_816, 34_817, last]
    many = case.step(backend, cache, [1] * 8, ends, [0] * 8)
    assert torch.equal(many, whole[[end - 32_501 for end in ends]])
    alone = [case.step(backend, cache, [1], [end], max_context=65_536) for end in ends]
    assert torch.equal(torch.cat(alone), many)
    lone = TritonAttention(backend.dtype, replace(backend._config_of(case.spec), programs=1))
    assert torch.equal(case.step(lone, cache, [1] * 8, ends, [0] * 8), many)
    assert torch.equal(case.step(backend, cache, [3], [32_770]), whole[267:270])


def test_graph_follows_growing_contexts() -> None:
    lens = [600, 2000, 30, 1]
    case, backend = case_of("llama", lens)
    cache = case.cache(backend)
    case.feed(backend, cache, lens)
    batch = case.batch([1] * 4, [1] * 4, range(4))
    q = torch.randn(4, 32, 128, device="cuda", dtype=torch.bfloat16)

    def run() -> torch.Tensor:
        return backend.run(q, cache, backend.plan(batch, case.spec, 4096), case.spec)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    backend.plan(batch, case.spec, 1 << 20)  # scratch outgrown: the graph must not notice
    for now in ([1, 1, 1, 1], [512, 513, 30, 1], lens):
        batch.context_lens.copy_(torch.tensor(now, dtype=torch.int32))
        graph.replay()
        eager = case.batch([1] * 4, now, range(4))
        want = backend.run(q, cache, backend.plan(eager, case.spec), case.spec)
        assert torch.equal(out, want)
