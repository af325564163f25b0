"""The Hopper prefill kernel: the bits of the Triton one, whatever it is fed."""

from __future__ import annotations

import pytest
import torch

from quire.attn.triton import TritonAttention, TritonPlan
from quire.kernels.paged_prefill import prefill_attention
from quire.kernels.paged_prefill_hopper import HopperPrefill, can_run
from quire.kernels.paged_split import PagedInputs
from tests.paged_case import make_case

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = pytest.mark.skipif(not IS_HOPPER, reason="needs a Hopper GPU")

MODELS = {  # heads, head_dim, page_size, dtype
    "llama": ((32, 8), 128, 16, torch.bfloat16),
    "qwen-14b": ((40, 8), 128, 32, torch.bfloat16),
    "no groups": ((8, 8), 128, 64, torch.float16),
    "large pages": ((16, 2), 128, 128, torch.bfloat16),
    "gpt2": ((12, 12), 64, 16, torch.float16),
    "wide group": ((14, 2), 64, 64, torch.bfloat16),
}
STEPS = {  # queries, contexts
    "one tile": ([33], [33]),
    "whole tiles": ([512], [512]),
    "a key past the split": ([513], [513]),
    "many tiles": ([700], [700]),
    "chunk": ([100], [1000]),
    "chunk to a split's end": ([64], [1024]),
    "long chunk": ([512], [2311]),
    "several": ([33, 700, 64, 40], [513, 1031, 64, 2000]),
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("model", MODELS)
def test_has_the_bits_of_the_triton_kernel(model: str, step: str) -> None:
    heads, head_dim, page_size, dtype = MODELS[model]
    queries, contexts = STEPS[step]
    case = make_case(
        contexts, heads=heads, head_dim=head_dim, page_size=page_size, dtype=dtype, device="cuda"
    )
    backend = TritonAttention(dtype)
    cache = case.cache(backend, fill=float("nan"))  # slots past the end must not leak
    case.feed(backend, cache, contexts)
    batch = case.batch(queries, contexts, range(len(queries)))
    plan = backend.plan(batch, case.spec)
    assert isinstance(plan, TritonPlan) and plan.prefill_tiles is not None
    inputs = PagedInputs(
        cache.keys, cache.values, batch.page_table, batch.rows, batch.query_starts,
        batch.context_lens, case.spec.scale,
    )  # fmt: skip
    q = torch.randn(sum(queries), heads[0], head_dim, device="cuda").to(dtype)
    want, got = torch.zeros_like(q), torch.zeros_like(q)
    prefill_attention(q, inputs, plan.prefill_tiles, plan.config, want)
    assert can_run(q, inputs, plan.config)
    HopperPrefill()(q, inputs, plan.prefill_tiles, plan.config, got)
    assert want.isfinite().all() and want.any()
    assert torch.equal(got, want)


def test_declines_what_it_cannot_run() -> None:
    """Red when the choice between the kernels lets through a shape this one has no tiles for."""
    backend = TritonAttention(torch.bfloat16)
    for head_dim, dtype in ((80, torch.bfloat16), (256, torch.bfloat16), (128, torch.float32)):
        case = make_case([64], heads=(4, 2), head_dim=head_dim, dtype=dtype, device="cuda")
        cache = case.cache(backend)
        batch = case.batch([64], [64], [0])
        plan = TritonAttention(dtype).plan(batch, case.spec)
        inputs = PagedInputs(
            cache.keys, cache.values, batch.page_table, batch.rows, batch.query_starts,
            batch.context_lens, case.spec.scale,
        )  # fmt: skip
        q = torch.zeros(64, 4, head_dim, device="cuda", dtype=dtype)
        assert not can_run(q, inputs, plan.config), f"{head_dim=} {dtype=}"
