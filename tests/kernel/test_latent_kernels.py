"""Kernels of latent attention: every shape they must take, and bits that depend on none of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from quire.attn.latent import LatentAttention, Projected
from quire.attn.latent_reference import LatentReference
from quire.attn.latent_triton import LatentTriton
from quire.attn.triton import TritonPlan
from quire.kernels.latent_heads import multiply_heads
from quire.kernels.latent_tile import head_blocks, latent_config
from quire.kernels.paged_tile import Launch, PagedConfig
from tests.latent_case import Sizes, make_latent_case

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ORACLE = LatentReference()  # same cache layout, and quicker to write through here
TILES = PagedConfig(16, 32, Launch(16, 4, 2), Launch(32, 4, 2))
TINY = Sizes(2, 16, 16, 16, 16)


def check(got: torch.Tensor, want: torch.Tensor, tol: float) -> None:
    assert torch.isfinite(got).all()
    error = (got.double() - want).norm() / want.norm()
    assert error < tol, f"relative error {error:.2e}"


def run(
    backend: LatentAttention, sizes: Sizes, queries: list[int], contexts: list[int], page_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    case = make_latent_case(contexts, sizes, page_size=page_size, device=DEVICE)
    cache = case.cache(backend, fill=float("nan"))  # unwritten slots must not leak
    case.feed(ORACLE, cache, contexts)
    return case.step(backend, cache, queries, contexts), case.expected(queries, contexts)


@pytest.mark.parametrize(
    "sizes, page_size",
    [
        (Sizes(1, 32, 16), 16),
        (Sizes(5, 40, 24), 32),  # fills neither tile
        (Sizes(32, 32, 16), 64),  # two parts of heads
        (Sizes(21, 16, 8), 16),  # parts of seven
    ],
    ids=str,
)
def test_mixed_batch(sizes: Sizes, page_size: int) -> None:
    backend = LatentTriton(torch.float32, TILES)
    got, want = run(backend, sizes, [1, 11, 2, 1], [1, 39, 20, 70], page_size)
    check(got, want, 1e-6)


def test_half_precision() -> None:
    backend = LatentTriton(torch.float16, TILES)
    case = make_latent_case([39, 20], dtype=torch.float16, device=DEVICE)
    cache = case.cache(backend)
    case.feed(ORACLE, cache, [39, 20])
    check(case.step(backend, cache, [11, 1], [39, 20]), case.expected([11, 1], [39, 20]), 3e-3)


@pytest.mark.parametrize("context", [31, 32, 33, 65])
def test_decode_across_split_borders(context: int) -> None:
    backend = LatentTriton(torch.float32, TILES)
    check(*run(backend, TINY, [1], [context], 16), 1e-6)


def test_bound_and_lanes_change_no_bit() -> None:
    """What a captured graph relies on: any bound on contexts gives the bits of the exact plan."""
    lens = [1, 33, 70]
    backend = LatentTriton(torch.float32, TILES)
    case = make_latent_case(lens, TINY, device=DEVICE)
    cache = case.cache(backend, fill=float("nan"))
    case.feed(ORACLE, cache, lens)
    ones = [1] * len(lens)
    want = case.step(backend, cache, ones, lens)
    for bound in (70, 1000):
        assert torch.equal(case.step(backend, cache, ones, lens, max_context=bound), want)
    backend = LatentTriton(torch.float32, replace(TILES, programs=1))  # one lane does all
    assert torch.equal(case.step(backend, cache, ones, lens, max_context=1000), want)


def test_a_shared_prefix_is_left_to_nobody() -> None:
    """Red when lanes are taken away for a kernel that latents do not have."""
    case = make_latent_case([64, 64], TINY, device=DEVICE)
    batch = case.paged.batch([1, 1], [60, 64], range(2))
    grids = []
    for shares in (False, True):
        plan = LatentTriton(torch.float32, TILES).plan(
            replace(batch, shares_prefix=shares), case.spec, max_context=256
        )
        assert isinstance(plan.absorbed_plan, TritonPlan) and plan.absorbed_plan.split is not None
        grids.append((plan.absorbed_plan.split.lanes, plan.absorbed_plan.split.company))
    assert grids[0] == grids[1]


def test_a_bounded_plan_depends_on_the_batch_size_alone() -> None:
    case = make_latent_case([64, 64], TINY, device=DEVICE)
    backend = LatentTriton(torch.float32, TILES)
    plans = [
        backend.plan(case.paged.batch([1, 1], lens, range(2)), case.spec, max_context=256)
        for lens in ([1, 2], [60, 64])
    ]
    grids = []
    for plan in plans:
        assert plan.expanded is None and isinstance(plan.absorbed_plan, TritonPlan)
        split = plan.absorbed_plan.split
        assert split is not None and split.tiles is None
        grids.append((split.num_tiles, split.max_splits, split.lanes, split.acc.data_ptr()))
    assert grids[0] == grids[1]


def test_parts_of_heads() -> None:
    """Every published model: parts are equal and fit the tiles of both paths."""
    for heads in (16, 20, 40, 64, 128):
        config = latent_config(heads, torch.bfloat16)
        parts = head_blocks(heads, config)
        assert heads % parts == 0
        assert heads // parts <= min(config.split.block_m, config.prefill.block_m)
    assert head_blocks(16, latent_config(16, torch.bfloat16)) == 1
    assert head_blocks(128, latent_config(128, torch.bfloat16)) == 4


def test_writes_what_the_reference_writes() -> None:
    case = make_latent_case([20, 9], Sizes(18, 24, 8), device=DEVICE)
    oracle, backend = case.cache(ORACLE, fill=3.0), case.cache(ORACLE, fill=3.0)
    batch = case.paged.batch([20, 9], [20, 9], range(2))
    parts = [torch.cat([of[i] for of in case.tokens]) for i in range(3)]
    triton = LatentTriton(torch.float32, TILES)
    want = ORACLE.prepare(
        Projected(*parts), case.transform, oracle, ORACLE.plan(batch, case.spec), case.spec
    )
    # As the layer hands it over: pieces of wider rows.
    wide = torch.cat((parts[0].flatten(1), parts[2]), 1)
    q = wide[:, : -parts[2].shape[1]].unflatten(1, parts[0].shape[1:])
    tokens = Projected(q, parts[1], wide[:, -parts[2].shape[1] :])
    got = triton.prepare(tokens, case.transform, backend, triton.plan(batch, case.spec), case.spec)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(backend.keys, oracle.keys, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("num_tokens", [1, 16, 17, 130])
def test_heads_are_multiplied(num_tokens: int) -> None:
    torch.manual_seed(0)
    kv_b = torch.randn(3, 20 + 12, 70, device=DEVICE)  # [heads, nope + v, rank]
    q = torch.randn(num_tokens, 3, 20 + 8, device=DEVICE)
    latents = torch.randn(num_tokens, 3, 70, device=DEVICE)
    got = multiply_heads(q[..., :20], kv_b[:, :20].transpose(1, 2))
    want = torch.einsum("thn,hnr->thr", q[..., :20].double(), kv_b[:, :20].double())
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    got = multiply_heads(latents, kv_b[:, 20:])
    want = torch.einsum("thr,hvr->thv", latents.double(), kv_b[:, 20:].double())
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


def test_no_tokens() -> None:
    weight = torch.randn(3, 12, 16, device=DEVICE)
    assert multiply_heads(torch.empty(0, 3, 16, device=DEVICE), weight).shape == (0, 3, 12)
