"""Windows, caps and sinks, which every backend promises: against dense attention with a mask, and
never a page behind the window (such pages hold NaNs here). That bits depend on nothing else is
below for the CPU, in `tests/kernel` and `tests/gpu` for the kernels."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.attn.backend import AttentionBackend
from quire.attn.cpu import CpuAttention
from tests.attn.test_contract import BACKENDS, close, device_of
from tests.paged_case import make_case

WINDOWS = [1, 7, 16, 33, 100]  # against pages of 16, splits of 32 and contexts below 70
KINDS: dict[str, dict[str, Any]] = {
    **{f"window {w}": {"window": w} for w in WINDOWS},
    "cap": {"softcap": 2.0},
    "sinks": {"has_sinks": True},
    "gemma2": {"window": 18, "softcap": 3.0},
    "gpt-oss": {"window": 20, "has_sinks": True},
    "all": {"window": 25, "softcap": 1.5, "has_sinks": True},
}


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> AttentionBackend:
    return BACKENDS[request.param]()


@pytest.mark.parametrize("kind", KINDS)
def test_matches_dense_attention(backend: AttentionBackend, kind: str) -> None:
    """A chunk with a past, a short prompt, a decode and a draft in one step."""
    queries, contexts = [11, 9, 1, 3], [45, 9, 65, 20]
    case = make_case(contexts, heads=(4, 1), device=device_of(backend), **KINDS[kind])
    cache = case.cache(backend)
    case.feed(backend, cache, [n - q for q, n in zip(queries, contexts, strict=True)])
    close(case.step(backend, cache, queries, contexts), case.expected(queries, contexts))


@pytest.mark.parametrize("head_dim", [256, 80])
def test_wide_and_odd_heads(backend: AttentionBackend, head_dim: int) -> None:
    case = make_case([37], head_dim=head_dim, device=device_of(backend), **KINDS["all"])
    cache = case.cache(backend)
    case.feed(backend, cache, [35])
    close(case.step(backend, cache, [2], [37]), case.expected([2], [37]))


@pytest.mark.parametrize("window", WINDOWS)
def test_a_window_is_the_last_tokens_alone(backend: AttentionBackend, window: int) -> None:
    """Red when a query reads a key more or less than a ring of the last tokens would hold."""
    case = make_case([70], heads=(4, 1), device=device_of(backend), window=window)
    cache = case.cache(backend)
    case.feed(backend, cache, [70])
    got = case.step(backend, cache, [1], [70])
    ring = replace(case, spec=replace(case.spec, window=None), qkv=[case.qkv[0][-window:]])
    close(got, ring.expected([1], [min(window, 70)]))


# ------------------------------------------------------------ the CPU


@settings(max_examples=40, deadline=None)
@given(
    context=st.integers(1, 90),
    queries=st.integers(1, 90),
    window=st.integers(1, 100),
    page_size=st.sampled_from([4, 16, 32]),
    has_sinks=st.booleans(),
)
def test_any_window(
    context: int, queries: int, window: int, page_size: int, has_sinks: bool
) -> None:
    queries = min(queries, context)
    case = make_case([context], page_size=page_size, window=window, has_sinks=has_sinks)
    for backend in (BACKENDS["reference"](), CpuAttention()):
        cache = case.cache(backend)
        case.feed(backend, cache, [context])
        close(case.step(backend, cache, [queries], [context]), case.expected([queries], [context]))


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="the promise is MKL's")
@pytest.mark.parametrize("kind", [*KINDS, "plain"])
@pytest.mark.parametrize("head_dim", [32, 80, 256])
def test_chunks_and_company_change_no_bit(kind: str, head_dim: int) -> None:
    """Red when a product's shape, a block's border or a window's first page moves a bit."""
    backend, last = CpuAttention(), 600  # beyond one block of keys
    words = {} if kind == "plain" else KINDS[kind]
    case = make_case([last, 541, 90], heads=(6, 2), head_dim=head_dim, **words)
    cache = case.cache(backend)
    case.feed(backend, cache, [last, 541, 90])
    whole = case.step(backend, cache, [last], [last])
    for chunk in (7, 250):
        for a, b in itertools.pairwise([490, *range(490 + chunk, last, chunk), last]):
            assert torch.equal(case.step(backend, cache, [b - a], [b]), whole[a:b]), (a, b)
    for n in (1, 17, 511, 512, 513, last):
        mixed = case.step(backend, cache, [1, 1, 50], [n, 541, 90])
        assert torch.equal(mixed[:1], whole[n - 1 : n]), n


def test_a_long_window_on_the_cpu_gathers_its_own_pages_alone() -> None:
    """Red when the cost of a windowed decode follows the context."""
    case = make_case([5000], window=100)
    plan = CpuAttention().plan(case.batch([1], [5000], [0]), case.spec)
    (group,) = plan.groups
    assert group.num_keys <= 100 + 512 + 16
    seen = set(group.pages.tolist()) - {0}
    assert len(seen) == -(-5000 // 16) - (5000 - 100) // 16


def test_many_rows_and_keys_are_attended_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when a piece of rows or of sequences is attended with another's mask or sinks."""
    from quire.attn import cpu_softmax

    backend = CpuAttention()
    case = make_case([90, 70, 80], **KINDS["all"])
    cache = case.cache(backend)
    case.feed(backend, cache, [90, 70, 80])
    shapes = ([60, 1, 1], [90, 70, 80]), ([1, 1, 1], [90, 70, 80])
    whole = [case.step(backend, cache, *shape) for shape in shapes]
    monkeypatch.setattr(cpu_softmax, "MAX_LOGITS", 1)
    for shape, want in zip(shapes, whole, strict=True):
        assert torch.equal(case.step(backend, cache, *shape), want)
