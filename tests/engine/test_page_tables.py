"""Page tables and page bytes of several layer groups, as the runner lays them out."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from quire.attn.backend import AttnSpec
from quire.attn.reference import ReferenceAttention
from quire.kv.forms import FLOAT32
from quire.kv.groups import LayerGroups, layer_groups
from quire.kv.spec import CacheSpec, KvShape
from quire.memory.pool import PagePool
from quire.runner.gather import StepShape, decode_batches, ragged_batches
from quire.runner.rows import RequestRows
from quire.runner.upload import Uploader
from quire.step import PageWrite, StepPlan, Work

CPU = torch.device("cpu")
WINDOWS = [8, None, 8, 8, None]
SPEC = AttnSpec(4, 2, 8, 1.0, page_size=4)


def make_rows(writes: list[PageWrite], num_groups: int = 3) -> RequestRows:
    rows = RequestRows(max_rows=2, max_len=40, max_pages=7, device=CPU, num_groups=num_groups)
    plan, arrays = StepPlan(page_writes=tuple(writes)), {}
    rows.stage(plan, arrays)
    uploader = Uploader(CPU)
    rows.apply(plan, uploader.send(arrays))
    return rows


def test_a_write_reaches_one_cell_of_one_group() -> None:
    """Red when a group's table is written through another's, or the first of two writes wins."""
    writes = [PageWrite(1, 6, 5), PageWrite(1, 6, 9, 2), PageWrite(0, 0, 3, 1), PageWrite(1, 6, 4)]
    rows = make_rows(writes)
    found = {tuple(cell): int(rows.page_tables[tuple(cell)]) for cell in rows.page_tables.nonzero()}
    assert {tuple(map(int, cell)): page for cell, page in found.items()} == {
        (0, 1, 6): 4,
        (2, 1, 6): 9,
        (1, 0, 0): 3,
    }


@pytest.mark.parametrize("max_pages", [1, 3, 7, 8])
def test_every_table_is_aligned(max_pages: int) -> None:
    """Red when kernels must be compiled a second time because a group's table begins anywhere."""
    rows = RequestRows(max_rows=6, max_len=40, max_pages=max_pages, device=CPU, num_groups=3)
    offsets = [table.data_ptr() - rows.page_tables.data_ptr() for table in rows.page_tables]
    assert all(offset % 16 == 0 for offset in offsets)
    assert all(table.is_contiguous() for table in rows.page_tables)


def test_groups_differ_in_pages_and_share_the_rest() -> None:
    """Red when a token's slot comes from another group's page, in either kind of batch."""
    writes = [PageWrite(1, column, 10 * g + column + 1, g) for g in range(3) for column in range(3)]
    rows = make_rows(writes)
    position = torch.tensor([9], dtype=torch.int32)
    lens = np.asarray([10], dtype=np.int32)
    decode = decode_batches(rows, torch.tensor([1], dtype=torch.int32), position, 4, lens)
    shape = StepShape((Work(7, 1, 2, 8, True),), spare_row=2)
    arrays: dict[str, np.ndarray] = {}
    shape.stage(arrays)
    ragged = ragged_batches(rows, shape, Uploader(CPU).send(arrays), 4)
    for g in range(3):
        pages = [10 * g + p // 4 + 1 for p in range(2, 10)]
        want = [page * 4 + p % 4 for page, p in zip(pages, range(2, 10), strict=True)]
        assert ragged[g].slots.tolist() == want
        assert decode[g].slots.tolist() == want[-1:]
        assert decode[g].page_table[1, :3].tolist() == [10 * g + 1, 10 * g + 2, 10 * g + 3]
        assert ragged[g].input_ids is ragged[0].input_ids
        assert ragged[g].slots.is_contiguous()


def floats_pool(spec: AttnSpec, groups: LayerGroups, num_pages: int) -> PagePool:
    parts = 2 if spec.value_dim is None else 1
    shape = KvShape(spec.num_kv_heads, spec.head_dim, parts)
    cache = CacheSpec(shape, groups, spec.page_size, FLOAT32)
    return PagePool(ReferenceAttention(), spec, cache, num_pages, CPU)


def test_layers_of_different_groups_share_a_place() -> None:
    """Red when a group has tensors of its own (memory grows with groups) or two layers of one
    group share them (keys would be overwritten)."""
    groups = layer_groups(WINDOWS, len(WINDOWS))
    pool = floats_pool(SPEC, groups, 11)
    assert pool.data.nbytes == 11 * pool.cache.page_bytes
    owners = {layer: pool.layer(layer).keys.data_ptr() for layer in range(5)}
    for one in range(5):
        for two in range(5):
            same_place = groups.place_of(one) == groups.place_of(two)
            assert (owners[one] == owners[two]) == same_place
            if one != two and same_place:
                assert pool.group_of(one) != pool.group_of(two)


def test_copies_move_a_page_of_every_place() -> None:
    """Red when copy-on-write leaves a layer's keys or values behind."""
    groups = layer_groups(WINDOWS, len(WINDOWS))
    pool = floats_pool(SPEC, groups, 6)
    pool.data.normal_()
    before = pool.data.clone()
    pool.copy(torch.tensor([2, 3]), torch.tensor([4, 1]))
    assert torch.equal(pool.data[:, :, [4, 1]], before[:, :, [2, 3]])
    assert torch.equal(pool.data[:, :, [0, 2, 3, 5]], before[:, :, [0, 2, 3, 5]])


def test_values_inside_the_keys_take_no_bytes() -> None:
    """Red when a latent cache pays for a value tensor nobody reads."""
    latent = AttnSpec(4, 1, 24, 1.0, page_size=4, value_dim=16)
    pool = floats_pool(latent, layer_groups((), 3), 5)
    assert pool.layer(1).values.numel() == 0
    assert pool.layer(1).keys.numel() == 5 * 4 * 24
    assert pool.data.nbytes == 5 * pool.cache.page_bytes == 5 * 3 * 4 * 24 * 4
    pool.data[:, :, 2] = 1.0
    pool.copy(torch.tensor([2]), torch.tensor([3]))
    assert (pool.data[:, :, 3] == 1.0).all()


HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(
    not HUGE_PAGES.exists() or "[always]" in HUGE_PAGES.read_text(),
    reason="the system makes all pages huge",
)
def test_a_token_takes_little_memory() -> None:
    """Red when the first token of each layer brings in a huge page, or the pool is written whole:
    30 layers would take 120 MB more."""
    groups, num_pages = layer_groups((), 8), 1 << 15
    pool = floats_pool(SPEC, groups, num_pages)
    assert pool.data[0, 0].nbytes >= 8 << 20
    before = resident_bytes()
    pool.data[:, :, 1] = 1.0
    assert resident_bytes() - before < 4 << 20
    assert (pool.data[:, :, 2] == 0).all()
