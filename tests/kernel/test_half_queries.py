"""Queries of bf16 as fp16, beside numbers that no rounding touches.

Red when a row's power of two is off by one, overflows or is not given back, and when a row's bits
follow its neighbours.
"""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

import tests.interpreter  # noqa: F401  before triton is loaded
from quire.kernels.half_queries import half_queries

ROWS, WIDTH = 16, 32


@triton.jit
def _split(q, halves, back, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    place = tl.arange(0, ROWS)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    parts, factors = half_queries(tl.tuple([tl.load(q + place), tl.load(q + ROWS * WIDTH + place)]))
    tl.store(halves + place, parts[0])
    tl.store(halves + ROWS * WIDTH + place, parts[1])
    tl.store(back + tl.arange(0, ROWS), factors)


def halved(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(the halves [2, rows, width], factors [rows]) in fp64 of parts [2, rows, width]."""
    halves, back = torch.empty_like(q, dtype=torch.float16), torch.empty(ROWS, device=q.device)
    _split[(1,)](q, halves, back, ROWS, WIDTH)
    return halves.double(), back.double()


@pytest.fixture
def queries() -> torch.Tensor:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    numbers = torch.randn(2, ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
    sizes = torch.logspace(-30, 30, ROWS)  # far beyond what fp16 holds
    return (numbers * sizes[:, None]).bfloat16().to(device)


def test_nothing_is_lost(queries: torch.Tensor) -> None:
    halves, back = halved(queries)
    assert torch.equal(halves * back[:, None], queries.double())
    most = halves.abs().amax((0, 2))
    assert bool(((most >= 2**14) & (most < 2**15)).all()), "products could leave fp32"


def test_rows_of_nothing_and_next_to_it(queries: torch.Tensor) -> None:
    queries[:, 3], queries[:, 5] = 0.0, 1e-38
    halves, back = halved(queries)
    assert not halves[:, 3].any() and bool(back.isfinite().all()) and bool((back > 0).all())
    assert bool(halves.isfinite().all())


def test_a_row_does_not_know_the_others(queries: torch.Tensor) -> None:
    halves, back = halved(queries)
    queries[:, 1:] *= 512.0
    again, factors = halved(queries)
    assert torch.equal(again[:, 0], halves[:, 0]) and factors[0] == back[0]
