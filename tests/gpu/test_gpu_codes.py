"""Caches of codes on a GPU: near the reference, and the same bits however they are fed.

The interpreter judges the same kernels against an oracle of its own (`tests/attn`); here they are
compiled. Red when a compiled kernel rounds, packs or masks otherwise.
"""

from __future__ import annotations

import pytest
import torch

from quire.attn.cache_codes import RowCodes
from quire.attn.proof import prove_codes
from quire.attn.triton import TritonAttention
from quire.kv.forms import CODED
from tests.coded_case import coded_cache
from tests.gpu.test_attention_gpu import LAST, MODELS
from tests.paged_case import PagedCase, make_case

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from tests.gpu import test_engine_gpu as base


@pytest.fixture(params=CODED)
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def case_of(model: str, lens: list[int]) -> tuple[PagedCase, TritonAttention]:
    heads, head_dim, dtype = MODELS[model]
    case = make_case(lens, heads=heads, head_dim=head_dim, dtype=dtype, device="cuda")
    return case, TritonAttention(dtype)


@pytest.mark.parametrize("model", MODELS)
def test_near_the_reference(model: str, form: str) -> None:
    case, backend = case_of(model, [1])
    prove_codes(backend, CODED[form], case.spec, torch.device("cuda"))


def test_the_bytes_are_those_of_cpus(form: str) -> None:
    """Red when torch divides or rounds otherwise on this device. One row of fp8 in ten would show
    it: those whose largest number over 448 is a bf16."""
    rows = torch.randn(4096, 64, generator=torch.Generator().manual_seed(0)).half().float()
    codes = RowCodes(CODED[form], (64,), 1, (16, 1))
    assert torch.equal(codes.encode(rows.cuda(), None).cpu(), codes.encode(rows, None))


@pytest.mark.parametrize("model", ["llama", "gpt2", "gemma"])
def test_decode_and_chunks_have_the_bits_of_prefill(model: str, form: str) -> None:
    case, backend = case_of(model, [LAST])
    cache = coded_cache(case, form)
    cache = cache._replace(keys=cache.keys.cuda(), values=cache.values.cuda())
    whole = case.step(backend, cache, [LAST], [LAST])
    ends = list(range(1, LAST + 1, 7))
    decoded = case.step(backend, cache, [1] * len(ends), ends, [0] * len(ends))
    assert torch.equal(decoded, whole[[end - 1 for end in ends]])
    for begin in range(0, LAST, 500):
        end = min(LAST, begin + 500)
        assert torch.equal(case.step(backend, cache, [end - begin], [end]), whole[begin:end])


def test_graphs_company_and_chunks_change_no_token(form: str) -> None:
    """Red when a captured decode reads a page of codes otherwise than a launched one."""
    model = base.model_of("qwen3")

    def answers(**changes: object) -> list[list[int]]:
        some = [base.make(i, prompt, 24) for i, prompt in enumerate(base.prompts(12, seed=3))]
        return base.run(base.engine_of(model, kv_cache_dtype=form, **changes), some)

    whole = answers()
    assert answers(enforce_eager=True) == whole, "graph replay and eager disagree"
    assert answers(max_num_batched_tokens=64, max_chunk=37) == whole, "chunks change tokens"
    assert answers(max_num_seqs=1) == whole, "company changes tokens"
