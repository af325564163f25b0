"""What every AttentionBackend promises; a new backend is one line in BACKENDS."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from quire.attn.backend import AttentionBackend, HeadTransform
from quire.attn.cpu import CpuAttention
from quire.attn.latent import LatentAttention
from quire.attn.native import NativeAttention
from quire.attn.reference import ReferenceAttention
from quire.attn.triton import TritonAttention
from quire.kernels.paged_tile import Launch, PagedConfig
from tests.paged_case import PLAIN, make_case

SMALL_TILES = PagedConfig(16, 32, Launch(16, 4, 1), Launch(32, 4, 1))
BACKENDS: dict[str, Callable[[], AttentionBackend]] = {
    "reference": ReferenceAttention,
    "cpu": CpuAttention,
    "native": NativeAttention,
    "triton": lambda: TritonAttention(torch.float32, SMALL_TILES),
}

SHAPES = {  # query lengths, context lengths
    "one token": ([1], [1]),
    "whole prompt": ([37], [37]),
    "decodes": ([1, 1, 1, 1, 1], [1, 15, 16, 17, 70]),
    "chunk with a past": ([10], [42]),
    "mixed": ([1, 17, 1, 3], [40, 17, 65, 20]),
}


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> AttentionBackend:
    return BACKENDS[request.param]()


def device_of(backend: AttentionBackend | LatentAttention) -> str:
    return "cuda" if torch.cuda.is_available() and "cpu" not in backend.caps.devices else "cpu"


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got.double(), want.to(got.device), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("heads", [(2, 2), (8, 2)], ids=str)
def test_matches_dense_attention(
    backend: AttentionBackend, shape: str, heads: tuple[int, int]
) -> None:
    query_lens, context_lens = SHAPES[shape]
    case = make_case(context_lens, heads=heads, device=device_of(backend))
    cache = case.cache(backend)
    case.feed(backend, cache, [n - q for q, n in zip(query_lens, context_lens, strict=True)])
    close(
        case.step(backend, cache, query_lens, context_lens),
        case.expected(query_lens, context_lens),
    )


@pytest.mark.parametrize("rot_dim", [32, 16])
@pytest.mark.parametrize("has_norm", [False, True])
def test_heads_are_transformed(backend: AttentionBackend, rot_dim: int, has_norm: bool) -> None:
    device = device_of(backend)
    angles = torch.outer(torch.arange(64.0), 100.0 ** -torch.linspace(0, 1, rot_dim // 2))
    weights = torch.randn(2, 32) if has_norm else (None, None)
    norms = [None if w is None else w.to(device) for w in weights]
    transform = HeadTransform(angles.cos().to(device), angles.sin().to(device), *norms, 1e-6)
    case = make_case([24, 17], device=device)
    cache = case.cache(backend)
    case.feed(backend, cache, [14, 16], transform)
    got = case.step(backend, cache, [10, 1], [24, 17], transform=transform)
    close(got, case.expected([10, 1], [24, 17], transform))


def test_empty_batch(backend: AttentionBackend) -> None:
    case = make_case([5], device=device_of(backend))
    assert case.step(backend, case.cache(backend), [], []).shape == (0, 4, 32)


def test_company_changes_no_bit(backend: AttentionBackend) -> None:
    lens = [17, 40, 33]
    case = make_case(lens, device=device_of(backend))
    cache = case.cache(backend)
    case.feed(backend, cache, lens)
    together = case.step(backend, cache, [1, 1, 1], lens)
    for i, n in enumerate(lens):
        alone = case.step(backend, cache, [1], [n], seqs=[i])
        assert torch.equal(together[i : i + 1], alone)


def test_writes_only_its_own_slots(backend: AttentionBackend) -> None:
    case = make_case([20, 20], device=device_of(backend))
    cache = case.cache(backend, fill=7.0)
    case.step(backend, cache, [20], [20], seqs=[0], transform=PLAIN)
    own = case.page_table[case.rows[0], :2].long()
    others = torch.ones(case.num_pages, dtype=torch.bool, device=own.device)
    others[own] = False
    for part in cache[:2]:
        assert (part[others] == 7.0).all()
        assert (part[own] == 7.0).sum() == 12 * 2 * 32  # the last page's unused slots
