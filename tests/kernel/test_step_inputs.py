"""step_inputs against plain lookups, and against what the runner computes with torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.kernels import step_inputs as kernel
from quire.kernels.step_inputs import StepInputs, step_inputs
from quire.runner.gather import fed_tokens
from quire.runner.rows import RequestRows

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CPU = torch.device("cpu")


def random_rows(num_groups: int, max_len: int = 90, max_pages: int = 31) -> RequestRows:
    rows = RequestRows(9, max_len, max_pages, CPU, num_groups)
    rows.tokens.random_(0, 2**31 - 1)
    rows.page_tables.random_(0, 2**31 - 1)  # slots beyond 32 bits
    return rows


def made(rows: RequestRows, row_ids: Tensor, positions: Tensor, page_size: int) -> StepInputs:
    tables = (rows.tokens.to(DEVICE), rows.page_tables.to(DEVICE))
    out = step_inputs(row_ids.to(DEVICE), positions.to(DEVICE), *tables, page_size)
    return StepInputs(*(tensor.cpu() for tensor in out))


@pytest.mark.parametrize("num_groups", [1, 3])
@pytest.mark.parametrize("num_tokens", [1, 5, 127, 128, 300])
@pytest.mark.parametrize("page_size", [3, 16])
def test_same_as_torch(num_groups: int, num_tokens: int, page_size: int) -> None:
    """Red when a group reads another's table, a token another's row, or a slot loses its bits."""
    rows = random_rows(num_groups)
    row_ids = torch.randint(0, 10, (num_tokens,), dtype=torch.int32)
    positions = torch.randint(0, 91, (num_tokens,), dtype=torch.int32)
    got = made(rows, row_ids, positions, page_size)
    want = fed_tokens(rows, row_ids, positions, page_size)
    for name, tensor in want._asdict().items():
        assert getattr(got, name).dtype == tensor.dtype, name
        assert torch.equal(getattr(got, name), tensor), name


def test_plain_lookups() -> None:
    rows = random_rows(num_groups=2)
    got = made(rows, torch.tensor([7, 2]).int(), torch.tensor([33, 90]).int(), 8)
    tokens, tables = rows.tokens.tolist(), rows.page_tables.tolist()
    assert got.input_ids.tolist() == [tokens[7][33], tokens[2][90]]
    assert got.positions.tolist() == [33, 90]
    assert got.context_lens.tolist() == [34, 91]
    for group in (0, 1):
        pages = (tables[group][7][33 // 8], tables[group][2][90 // 8])
        assert got.slots[group].tolist() == [8 * pages[0] + 1, 8 * pages[1] + 2]


@pytest.mark.parametrize("num_tokens", [1, 3, 4])
def test_slots_of_every_group_begin_aligned(num_tokens: int) -> None:
    """Red when kernels that take slots are compiled once more for the second group."""
    rows, ids = random_rows(num_groups=3), torch.zeros(num_tokens, dtype=torch.int32)
    tables = (rows.tokens.to(DEVICE), rows.page_tables.to(DEVICE))
    slots = step_inputs(ids.to(DEVICE), ids.to(DEVICE), *tables, 4).slots
    assert all((own.data_ptr() - slots.data_ptr()) % 16 == 0 for own in slots)
    assert all(own.is_contiguous() for own in slots)


def test_parts_of_a_transfer_and_nothing() -> None:
    """Red when rows and positions must begin at an aligned address, or an empty step fails."""
    rows = random_rows(num_groups=1)
    sent = torch.randint(0, 10, (kernel.BLOCK + 8,), dtype=torch.int32)
    row_ids, positions = sent[1 : kernel.BLOCK + 3], sent[3 : kernel.BLOCK + 5]
    got, want = made(rows, row_ids, positions, 4), fed_tokens(rows, row_ids, positions, 4)
    assert torch.equal(got.slots, want.slots) and torch.equal(got.input_ids, want.input_ids)
    nothing = made(rows, sent[:0], sent[:0], 4)
    assert [tuple(tensor.shape) for tensor in nothing] == [(0,), (0,), (1, 0), (0,)]
