"""Shared splits are attended once for all their sequences, and nobody can tell from the bits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import tests.interpreter  # noqa: F401  mends the interpreter for this NumPy
from quire.attn.backend import AttnSpec, LayerCache
from quire.attn.triton import TritonAttention
from quire.forward import Batch
from quire.kernels.paged_tile import Launch, PagedConfig

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float16
PAGE, SPLIT, NUM_PAGES, MAX_PAGES = 16, 32, 128, 8
CONFIG = PagedConfig(16, SPLIT, Launch(16, 4, 2), Launch(16, 4, 2))
GROWING = replace(CONFIG, split_size=16, octave=1)  # 0 16 32 64 128


def batch_of(tables: list[list[int]], contexts: list[int]) -> Batch:
    """Decodes whose rows stand in reverse, so that a row is not mistaken for its sequence."""
    num = len(contexts)
    table = torch.zeros(num + 1, MAX_PAGES, dtype=torch.int32)
    for seq, pages in enumerate(tables):
        table[num - seq, : len(pages)] = torch.tensor(pages)
    lens = np.asarray(contexts, np.int32)

    def ints(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    positions = ints([n - 1 for n in contexts]).long()
    return Batch(
        input_ids=positions,
        positions=positions,
        slots=positions,
        query_starts=ints(list(range(num + 1))),
        context_lens=ints(contexts),
        rows=ints([num - seq for seq in range(num)]),
        page_table=table.to(DEVICE),
        page_size=PAGE,
        host_query_lens=np.ones(num, np.int32),
        host_context_lens=lens,
    )


def attended(
    spec: AttnSpec,
    batch: Batch,
    cache: LayerCache,
    q: torch.Tensor,
    config: PagedConfig = CONFIG,
) -> torch.Tensor:
    backend = TritonAttention(DTYPE, config)
    plan = backend.plan(batch, spec, max_context=PAGE * MAX_PAGES)
    for scratch in backend._scratch:
        scratch.fill_(float("nan"))  # whatever is read must have been written
    return backend.run(q, cache, plan, spec)


PREFIX = list(range(40, 46))  # three splits
CASES = {
    "all share": ([[*PREFIX, 1], [*PREFIX, 2], [*PREFIX, 3]], [100, 97, 112]),
    "one strays": ([[*PREFIX, 1], [7, 8, 9, 10, 11, 12, 13], [*PREFIX, 3]], [100, 105, 112]),
    "two prefixes": (
        [[*PREFIX, 1], [50, 51, 52, 53, 2], [*PREFIX, 3], [50, 51, 52, 53, 4]],
        [100, 70, 112, 66],
    ),
    "ends inside": ([[*PREFIX[:4], 1], [*PREFIX[:4]], [*PREFIX, 3]], [70, 64, 100]),
    "several companies": ([[40, 41, i] for i in range(1, 10)], [33 + i for i in range(9)]),
    "padding": ([[*PREFIX, 1], [*PREFIX, 2], [0]], [100, 97, 1]),
    "nobody": ([[1, 2, 3], [4, 5, 6]], [40, 48]),
}


@pytest.mark.parametrize("name", [*CASES, "growing"])
def test_bits_are_those_of_reading_alone(name: str) -> None:
    config = GROWING if name == "growing" else CONFIG
    name = "all share" if name == "growing" else name
    tables, contexts = CASES[name]
    heads = (4, 2) if name == "one strays" else (6, 1)
    torch.manual_seed(0)
    spec = AttnSpec(heads[0], heads[1], 32, 32**-0.5, PAGE)
    shape = (NUM_PAGES, heads[1], PAGE, 32)
    cache = LayerCache(*(torch.randn(shape, dtype=DTYPE, device=DEVICE) for _ in range(2)))
    q = torch.randn(len(contexts), heads[0], 32, dtype=DTYPE, device=DEVICE)
    batch = batch_of(tables, contexts)
    alone = attended(spec, batch, cache, q, config)
    together = attended(spec, replace(batch, shares_prefix=True), cache, q, config)
    assert torch.isfinite(alone).all()
    assert torch.equal(alone, together)


def test_shared_pages_are_read_by_the_shared_kernel() -> None:
    """Poisoned for everyone but the leader's table, which alone the shared kernel follows."""
    torch.manual_seed(0)
    spec = AttnSpec(2, 2, 32, 32**-0.5, PAGE)
    cache = LayerCache(
        *(torch.randn(NUM_PAGES, 2, PAGE, 32, dtype=DTYPE, device=DEVICE) for _ in range(2))
    )
    q = torch.randn(2, 2, 32, dtype=DTYPE, device=DEVICE)
    right = batch_of([[40, 41, 1], [40, 41, 2]], [40, 40])
    wrong = batch_of([[40, 41, 1], [99, 41, 2]], [40, 40])  # same last page, so counted as shared
    expected = attended(spec, replace(right, shares_prefix=True), cache, q)
    assert torch.equal(attended(spec, replace(wrong, shares_prefix=True), cache, q), expected)
    assert not torch.equal(attended(spec, wrong, cache, q), expected)
