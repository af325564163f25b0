"""Walk each tree of drafts along those that were right: `runner/tree_walk.py` says what for.

A program walks one tree, a lane to a node. It does what `verified_path` (`spec/verify.py`) does on
the host: of the drafts that follow a node, the first that equals what was drawn after it is next.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.launch import Launcher

COLUMNS = 9  # of a tree

_POINTERS = [
    "trees", "parents", "drawn", "drafts", "table", "page_tables", "tokens", "samples", "sources",
    "targets",
]  # fmt: skip


@triton.jit
def _slot(page_tables, row, place, TABLE_STRIDE: tl.constexpr, PAGE_SIZE: tl.constexpr):
    page = tl.load(page_tables + row * TABLE_STRIDE + place // PAGE_SIZE).to(tl.int64)
    return page * PAGE_SIZE + place % PAGE_SIZE


@triton.jit(do_not_specialize=["num_moves"], do_not_specialize_on_alignment=_POINTERS)
def _walk_kernel(
    trees, parents, drawn, drafts, table, page_tables, tokens, samples, sources, targets,
    num_moves,
    NODES: tl.constexpr, COLUMNS: tl.constexpr, ROW_STRIDE: tl.constexpr, GROUPS: tl.constexpr,
    GROUP_STRIDE: tl.constexpr, TABLE_STRIDE: tl.constexpr, PAGE_SIZE: tl.constexpr,
):  # fmt: skip
    own = trees + tl.program_id(0) * COLUMNS
    row, start = tl.load(own).to(tl.int64), tl.load(own + 1)
    token, sample = tl.load(own + 2), tl.load(own + 3)
    num, deep = tl.load(own + 4), tl.load(own + 5)
    tokens += tl.load(own + 6)
    samples += tl.load(own + 7)
    move_at = tl.load(own + 8)
    drawn += sample
    table += row * ROW_STRIDE + start + 1

    nodes = tl.arange(0, NODES)
    parent = tl.load(parents + tl.program_id(0) * NODES + nodes)
    is_draft = (nodes > 0) & (nodes <= num)
    guess = tl.load(drafts + sample + nodes - 1, mask=is_draft, other=0)
    node = 0
    is_right = 1  # so far
    tl.store(tokens, token.to(tl.int64))
    tl.store(samples, sample.to(tl.int64))
    tl.store(table, tl.load(drawn).to(tl.int32))
    for depth in range(1, deep + 1):
        follows = is_draft & (parent == node) & (guess == tl.load(drawn + node).to(tl.int32))
        child = tl.min(tl.where(follows, nodes, NODES), 0)
        is_right = tl.where(child < NODES, is_right, 0)
        node = tl.where(is_right > 0, child, node)
        tl.store(tokens + depth, (token + node).to(tl.int64))
        tl.store(samples + depth, (sample + node).to(tl.int64))
        tl.store(table + depth, tl.load(drawn + node).to(tl.int32), mask=is_right > 0)
        lies = start + tl.where(is_right > 0, node, depth)
        for group in tl.static_range(GROUPS):
            pages = page_tables + group * GROUP_STRIDE
            at = group * num_moves + move_at + depth - 1
            tl.store(sources + at, _slot(pages, row, lies, TABLE_STRIDE, PAGE_SIZE))
            tl.store(targets + at, _slot(pages, row, start + depth, TABLE_STRIDE, PAGE_SIZE))


_launch = Launcher(_walk_kernel)


def walk_trees(
    trees: Tensor,  # [trees, COLUMNS] int32
    parents: Tensor,  # [trees, nodes] int32, a power of two of them
    draws: tuple[Tensor, Tensor],  # [samples] drawn, and drafts in the places behind them
    tables: tuple[Tensor, Tensor],  # [rows, places] tokens, [groups, rows, pages] page ids
    page_size: int,
    made: Sequence[Tensor],  # tokens, samples, sources, targets, to be written
) -> None:
    (drawn, drafts), (tokens, page_tables) = draws, tables
    assert trees.shape[1] == COLUMNS and tokens.stride(-1) == 1, f"{trees.shape=}"
    _launch(
        (len(trees), 1, 1),
        (trees, parents, drawn, drafts, tokens, page_tables, *made, made[-1].shape[1]),
        {
            "NODES": parents.shape[1],
            "COLUMNS": COLUMNS,
            "ROW_STRIDE": tokens.stride(0),
            "GROUPS": len(page_tables),
            "GROUP_STRIDE": page_tables.stride(0),
            "TABLE_STRIDE": page_tables.stride(1),
            "PAGE_SIZE": page_size,
            "num_warps": 1,
        },
        (drawn.dtype, drafts.dtype),
    )
