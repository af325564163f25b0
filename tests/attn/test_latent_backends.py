"""What every latent backend promises, in absorbed form; the expanded form is beside it."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch

from quire.attn.latent import LatentAttention
from quire.attn.latent_cpu import LatentCpu
from quire.attn.latent_native import LatentNative
from quire.attn.latent_reference import LatentReference
from quire.attn.latent_triton import LatentTriton
from tests.attn.test_contract import SHAPES, SMALL_TILES, close, device_of
from tests.latent_case import Sizes, make_latent_case

BACKENDS: dict[str, Callable[[], LatentAttention]] = {
    "reference": LatentReference,
    "cpu": LatentCpu,
    "native": LatentNative,
    "triton": lambda: LatentTriton(torch.float32, SMALL_TILES),
}


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> LatentAttention:
    return BACKENDS[request.param]()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("heads", [4, 20])
def test_matches_dense_heads(backend: LatentAttention, shape: str, heads: int) -> None:
    query_lens, context_lens = SHAPES[shape]
    case = make_latent_case(context_lens, Sizes(heads=heads), device=device_of(backend))
    cache = case.cache(backend)
    case.feed(backend, cache, [n - q for q, n in zip(query_lens, context_lens, strict=True)])
    got = case.step(backend, cache, query_lens, context_lens)
    close(got, case.expected(query_lens, context_lens))


def test_empty_batch(backend: LatentAttention) -> None:
    case = make_latent_case([5], device=device_of(backend))
    assert case.step(backend, case.cache(backend), [], []).shape == (0, 4, 32)


def test_company_changes_no_bit(backend: LatentAttention) -> None:
    lens = [17, 40, 33]
    case = make_latent_case(lens, device=device_of(backend))
    cache = case.cache(backend)
    case.feed(backend, cache, lens)
    together = case.step(backend, cache, [1, 1, 1], lens)
    for i, n in enumerate(lens):
        assert torch.equal(together[i : i + 1], case.step(backend, cache, [1], [n], seqs=[i]))


@pytest.mark.parametrize("chunk", [1, 4, 11])
def test_chunks_change_no_bit(backend: LatentAttention, chunk: int) -> None:
    """Red when the number of tokens in a step decides how they are computed."""
    case = make_latent_case([45], device=device_of(backend))
    cache = case.cache(backend)
    whole = case.step(backend, cache, [45], [45])[28:]  # 28 .. 45 crosses the border of a split
    cuts = [*range(28, 45, chunk), 45]
    parts = [case.step(backend, cache, [b - a], [b]) for a, b in itertools.pairwise(cuts)]
    if isinstance(backend, LatentReference):
        close(torch.cat(parts), whole.double())
    else:
        assert torch.equal(torch.cat(parts), whole)


def test_writes_only_its_own_slots(backend: LatentAttention) -> None:
    case = make_latent_case([20, 20], device=device_of(backend))
    cache = case.cache(backend, fill=7.0)
    case.step(backend, cache, [20], [20], seqs=[0])
    own = case.paged.page_table[case.paged.rows[0], :2].long()
    others = torch.ones(case.paged.num_pages, dtype=torch.bool, device=own.device)
    others[own] = False
    assert (cache.keys[others] == 7.0).all()
    assert (cache.keys[own] == 7.0).sum() == 12 * (32 + 16)  # the last page's unused slots
