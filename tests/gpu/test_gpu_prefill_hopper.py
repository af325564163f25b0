"""The Hopper prefill kernel: the bits of the Triton one, whatever it is fed and however soon."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quire.attn.backend import LayerCache
from quire.attn.triton import TritonAttention, TritonPlan
from quire.forward import Batch
from quire.kernels.paged_inputs import PagedInputs
from quire.kernels.paged_prefill import prefill_attention
from tests.paged_case import PLAIN, PagedCase, make_case

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = pytest.mark.skipif(not IS_HOPPER, reason="needs a Hopper GPU")

MODELS = {  # heads, head_dim, page_size, dtype: every one compiles both kernels
    "llama": ((32, 8), 128, 16, torch.bfloat16),
    "wide group": ((14, 2), 64, 64, torch.float16),
    "no groups, large pages": ((2, 2), 128, 128, torch.bfloat16),
}
STEPS = {  # queries, contexts: no table is a multiple of 16 wide, which would compile again
    "one tile": ([33], [33]),
    "whole tiles": ([512], [512]),
    "a key past the split": ([513], [513]),
    "many tiles": ([700], [700]),
    "chunk": ([150], [1017]),
    "chunk to a split's end": ([160], [1024]),
    "long chunk": ([512], [2311]),
    "splits of 1,024": ([700], [18_001]),
    "several": ([133, 700, 64, 40], [513, 1031, 64, 2000]),
}


def case_of(model: str, contexts: list[int]) -> tuple[PagedCase, TritonAttention]:
    heads, head_dim, page_size, dtype = MODELS[model]
    case = make_case(
        contexts, heads=heads, head_dim=head_dim, page_size=page_size, dtype=dtype, device="cuda"
    )
    return case, TritonAttention(dtype)


def inputs_of(cache: LayerCache, batch: Batch, scale: float) -> PagedInputs:
    table, rows = batch.page_table, batch.rows
    return PagedInputs(*cache[:2], table, rows, batch.query_starts, batch.context_lens, scale)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("model", MODELS)
def test_has_the_bits_of_the_triton_kernel(model: str, step: str) -> None:
    """Red when a row, a tile or a split is attended otherwise, or a slot past the end leaks."""
    queries, contexts = STEPS[step]
    case, backend = case_of(model, contexts)
    cache = case.cache(backend, fill=float("nan"))
    case.feed(backend, cache, contexts)
    batch = case.batch(queries, contexts, range(len(queries)))
    plan = backend.plan(batch, case.spec)
    assert isinstance(plan, TritonPlan) and plan.prefill_tiles is not None
    inputs = inputs_of(cache, batch, case.spec.scale)
    q = torch.randn(sum(queries), case.spec.num_heads, case.spec.head_dim, device="cuda")
    q = q.to(backend.dtype)
    want, got = torch.zeros_like(q), torch.zeros_like(q)
    prefill_attention(q, inputs, plan.prefill_tiles, plan.config, want)
    hopper = backend._hopper_prefill
    assert hopper is not None and hopper.can_run(q, inputs, plan.config)
    hopper(q, inputs, plan.prefill_tiles, plan.config, got)
    assert want.isfinite().all() and want.any()
    assert torch.equal(got, want)


def test_backend_is_right_with_it() -> None:
    """Red when the backend, which takes this kernel here, strays from attention in fp64."""
    queries, contexts = [1, 300, 513], [700, 1031, 513]
    case, backend = case_of("llama", contexts)
    cache = case.cache(backend, fill=float("nan"))
    case.feed(backend, cache, contexts)
    got, want = case.step(backend, cache, queries, contexts), case.expected(queries, contexts)
    assert (got.double() - want).norm() / want.norm() < 1e-2


def test_waits_for_the_kernel_before() -> None:
    """Red when a warp reads queries, keys or values that the kernel before is still writing."""
    length, rounds = 700, 24
    case, backend = case_of("llama", [length])
    batch = case.batch([length], [length], [0])
    plan = backend.plan(batch, case.spec)
    cache = case.cache(backend)
    qkvs = [torch.randn_like(case.qkv[0]) for _ in range(rounds)]

    def attend(qkv: Tensor, is_slow: bool) -> Tensor:
        q = backend.prepare(qkv, PLAIN, cache, plan, case.spec)
        if is_slow:
            torch.cuda.synchronize()
        out = backend.run(q, cache, plan, case.spec)
        if is_slow:
            torch.cuda.synchronize()
        return out

    want = [attend(qkv, True) for qkv in qkvs]
    torch.cuda._sleep(20_000_000)  # about 10 ms in which the launches below queue up
    got = [attend(qkv, False) for qkv in qkvs]
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert not torch.equal(got[0], got[1])


def test_declines_what_it_cannot_run() -> None:
    """Red when the choice between the kernels lets through what this one does not compute."""
    hopper = TritonAttention(torch.bfloat16)._hopper_prefill
    assert hopper is not None
    for head_dim, dtype in ((128, torch.bfloat16), (80, torch.bfloat16), (128, torch.float32)):
        case = make_case([64], heads=(4, 2), head_dim=head_dim, dtype=dtype, device="cuda")
        backend = TritonAttention(dtype)
        batch = case.batch([64], [64], [0])
        plan = backend.plan(batch, case.spec)
        assert isinstance(plan, TritonPlan)
        inputs = inputs_of(case.cache(backend), batch, case.spec.scale)
        q = torch.zeros(64, 4, head_dim, device="cuda", dtype=dtype)
        runs = (head_dim, dtype) == (128, torch.bfloat16)
        assert hopper.can_run(q, inputs, plan.config) == runs, f"{head_dim=} {dtype=}"
        for odd in (
            replace(inputs, window=64),
            replace(inputs, softcap=50.0),
            replace(inputs, sinks=torch.zeros(4, device="cuda")),
        ):
            assert not hopper.can_run(q, odd, plan.config)
