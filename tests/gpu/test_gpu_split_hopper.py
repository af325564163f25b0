"""The Hopper kernel for single queries: the bits of the Triton one, whatever it is fed, however
soon and in whatever turns."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quire.attn.backend import LayerCache
from quire.attn.triton import TritonAttention, TritonPlan
from quire.kernels.hopper import has_hopper_kernels
from quire.kernels.merge_splits import merge_splits
from quire.kernels.paged_inputs import PagedInputs, SplitGrid
from quire.kernels.paged_split import split_attention
from quire.kernels.rms_norm import rms_norm
from tests.paged_case import PLAIN, PagedCase, make_case

IS_HOPPER = torch.cuda.is_available() and has_hopper_kernels(torch.device("cuda"))
pytestmark = pytest.mark.skipif(not IS_HOPPER, reason="needs a Hopper GPU")

MODELS = {  # heads, head_dim, page_size, dtype
    "llama": ((32, 8), 128, 16, torch.bfloat16),
    "wide group": ((14, 2), 64, 32, torch.float16),
    "widest group, large pages": ((16, 1), 128, 256, torch.bfloat16),
    "no groups": ((2, 2), 64, 64, torch.bfloat16),
}
CONTEXTS = {
    "one key": [1],
    "around tiles and pages": [2, 15, 16, 17, 63, 64, 65, 127, 128, 129],
    "around splits": [511, 512, 513, 1024, 1025, 700],
    "long": [5000, 17, 3],
    "splits of 1,024": [18_001],
    "more items than programs": [(37 * i) % 1100 + 1 for i in range(140)],
    "turns without keys, then one with": [17] * 20 + [9000],
    "one with keys, then turns without": [30_000] + [17] * 15,
}


def case_of(model: str, contexts: list[int]) -> tuple[PagedCase, TritonAttention, LayerCache]:
    heads, head_dim, page_size, dtype = MODELS[model]
    case = make_case(
        contexts, heads=heads, head_dim=head_dim, page_size=page_size, dtype=dtype, device="cuda"
    )
    backend = TritonAttention(dtype)
    cache = case.cache(backend, fill=float("nan"))
    case.feed(backend, cache, contexts)
    return case, backend, cache


def planned(
    case: PagedCase, backend: TritonAttention, cache: LayerCache, contexts: list[int]
) -> tuple[Tensor, PagedInputs, SplitGrid, TritonPlan]:
    batch = case.batch([1] * len(contexts), contexts, range(len(contexts)))
    plan = backend.plan(batch, case.spec, max(contexts))
    assert isinstance(plan, TritonPlan) and plan.split is not None
    table, rows = batch.page_table, batch.rows
    inputs = PagedInputs(
        *cache[:2], table, rows, batch.query_starts, batch.context_lens, case.spec.scale
    )
    shape = (len(contexts), case.spec.num_heads, case.spec.head_dim)
    q = torch.randn(shape, device="cuda").to(backend.dtype)
    return q, inputs, plan.split, plan


@pytest.mark.parametrize("contexts", CONTEXTS)
@pytest.mark.parametrize("model", MODELS)
def test_has_the_bits_of_the_triton_kernel(model: str, contexts: str) -> None:
    """Red when an item is left out or attended otherwise, or a slot past the end leaks."""
    lens = CONTEXTS[contexts]
    case, backend, cache = case_of(model, lens)
    q, inputs, grid, plan = planned(case, backend, cache, lens)
    hopper = backend._hopper_split
    assert hopper is not None
    for lanes in {1, grid.lanes, grid.max_splits}:
        own = replace(grid, lanes=lanes, folds=grid.folds or lanes == 1)
        if lanes > 1 and grid.folds:
            continue  # no scratch
        want, got = torch.full_like(q, 7), torch.full_like(q, 9)
        split_attention(q, inputs, own, plan.config, want)
        merge_splits(inputs, own, plan.config, want)
        own.acc.fill_(float("nan"))
        own.sums.fill_(float("nan"))
        hopper(q, inputs, own, plan.config, got)
        merge_splits(inputs, own, plan.config, got)
        assert want.isfinite().all() and want.any()
        assert torch.equal(got, want), f"{lanes=} {own.folds=}"


def test_backend_takes_it_for_batches_that_gain() -> None:
    """Red when the kernel is there and nobody uses it, or where it is the slower one."""
    for count, is_taken in ((3, True), (128, True), (200, False)):
        lens = [70] * count
        case, backend, cache = case_of("llama", lens)
        q, _, _, plan = planned(case, backend, cache, lens)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
            got = backend.run(q, cache, plan, case.spec)
            torch.cuda.synchronize()
        assert is_taken == any("hopper_split" in event.name for event in seen.events())
        assert got.isfinite().all()


def test_backend_is_right_with_it() -> None:
    """Red when the backend strays from attention in fp64."""
    lens = [700, 1031, 513, 1, 64]
    case, backend, cache = case_of("llama", lens)
    got = case.step(backend, cache, [1] * 5, lens, max_context=2048)
    want = case.expected([1] * 5, lens)
    assert (got.double() - want).norm() / want.norm() < 1e-2


@pytest.mark.parametrize("num_drafts", [0, 3, 9])
@pytest.mark.parametrize("ends", [[290] * 6, [65, 512, 513, 1030], [64] * 100, [66]])
def test_newest_keys_are_read_after_they_are_written(ends: list[int], num_drafts: int) -> None:
    """In a graph, where every kernel starts as early as it may: red when queries, or the keys and
    values that the kernel before writes, are those of the replay before. Drafts are neighbours of
    one row, each of which reads the newest keys of those before it."""
    case, backend, _ = case_of("llama", [end + num_drafts for end in ends])
    caches = [case.cache(backend) for _ in range(4)]
    for cache in caches:
        case.feed(backend, cache, [end + num_drafts for end in ends])
    lens = [end + draft for end in ends for draft in range(1 + num_drafts)]
    seqs = [seq for seq in range(len(ends)) for _ in range(1 + num_drafts)]
    batch = case.batch([1] * len(lens), lens, seqs)
    plan = backend.plan(batch, case.spec, max(lens))
    width = case.qkv[0].shape[1]
    x = torch.randn(len(lens), width, device="cuda", dtype=torch.bfloat16)
    ones = torch.ones(width, device="cuda", dtype=torch.bfloat16)

    def layers(is_slow: bool) -> Tensor:
        outs = []
        for cache in caches:
            qkv, _ = rms_norm(x, ones, 1e-6)
            q = backend.prepare(qkv, PLAIN, cache, plan, case.spec)
            if is_slow:
                torch.cuda.synchronize()
            outs.append(backend.run(q, cache, plan, case.spec))
            if is_slow:
                torch.cuda.synchronize()
        return torch.stack(outs)

    layers(True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layers(False)
    before = None
    for _ in range(8):
        x.normal_()
        graph.replay()
        got = out.clone()
        assert torch.equal(got, layers(True))
        assert before is None or not torch.equal(got, before)
        before = got


def test_declines_what_it_cannot_run() -> None:
    """Red when the choice between the kernels lets through what this one does not compute."""
    for head_dim, dtype in ((128, torch.bfloat16), (80, torch.bfloat16), (128, torch.float32)):
        case = make_case([64], heads=(4, 2), head_dim=head_dim, dtype=dtype, device="cuda")
        backend = TritonAttention(dtype)
        q, inputs, grid, plan = planned(case, backend, case.cache(backend), [64])
        hopper = backend._hopper_split
        assert hopper is not None
        runs = (head_dim, dtype) == (128, torch.bfloat16)
        assert hopper.can_run(q, inputs, grid, plan.config) == runs, f"{head_dim=} {dtype=}"
        for odd in (
            replace(inputs, window=64),
            replace(inputs, softcap=50.0),
            replace(inputs, sinks=torch.zeros(4, device="cuda")),
        ):
            assert not hopper.can_run(q, odd, grid, plan.config)
        tiles = torch.zeros(1, 3, dtype=torch.int32, device="cuda")
        for other in (replace(grid, tiles=tiles), replace(grid, company=4)):
            assert not hopper.can_run(q, inputs, other, plan.config)
