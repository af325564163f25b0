"""Pages to rows and back against torch's indexing, in the layouts that pools have."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.page_rows import copy_page_rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NUM_PAGES = 9


@pytest.mark.parametrize("dtype", [torch.int64, torch.int16, torch.uint8])
@pytest.mark.parametrize("places, parts, numbers", [(3, 2, 32), (2, 1, 100), (1, 2, 3000)])
def test_rows_are_the_pieces_of_a_page(
    dtype: torch.dtype, places: int, parts: int, numbers: int
) -> None:
    """Red when a piece goes to another's place, or anything beside it is touched."""
    shape = (places, parts, NUM_PAGES, numbers)
    pool = torch.randint(0, 200, shape, device=DEVICE).to(dtype).permute(2, 0, 1, 3)
    each = places * parts * numbers
    wide = torch.zeros(4, each + 8, dtype=dtype, device=DEVICE)  # a row has other regions as well
    rows, pages = wide[:, 8:], torch.tensor([5, 0, 8, 2], device=DEVICE)
    copy_page_rows(pool, pages, rows, to_rows=True)
    assert torch.equal(rows, pool[pages].reshape(4, each)) and not wide[:, :8].any()
    wanted = pool.clone()
    targets = torch.tensor([7, 1, 3, 6], device=DEVICE)
    wanted[targets] = pool[pages]
    copy_page_rows(pool, targets[:2], rows[:2], to_rows=False)
    copy_page_rows(pool, targets[2:], rows[2:], to_rows=False)
    assert torch.equal(pool, wanted)
    copy_page_rows(pool, pages[:0], rows[:0], to_rows=False)
    assert torch.equal(pool, wanted)
