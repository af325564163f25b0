"""Kernels that read trees of drafts, compiled for an H200 on any machine beside those for chains.

    python -m benchmarks.trees_compile        # no GPU needed

Of each form of the cache the split kernel of 128-wide heads, of latents and of shared prefixes, and
the walk. Widths are those of `gpu_kv_cache.py`: other ones would sum in another order.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_matmul import become_compiler
from benchmarks.gpu_packed import Compiling, inspect
from quire.kernels import latent_split, paged_shared, paged_split, tree_walk
from quire.kernels.latent_tile import head_blocks, latent_config
from quire.kernels.paged_inputs import Coded, PagedInputs, SplitGrid
from quire.kernels.paged_tile import default_config
from quire.kv.forms import CODED, CacheForm

HEADS, KV_HEADS, DIM = 32, 8, 128  # of Llama-3.1-8B
RANK, ROPE, LATENT_HEADS = 512, 64, 128  # of DeepSeek-V3
WIDTH = 8  # of a path
DTYPE, PAGE = torch.bfloat16, 16


def grid_of(folds: bool = False, company: int = 0) -> SplitGrid:
    scratch = torch.empty(1)
    return SplitGrid(None, 1, 1, 2, 1 if folds else 2, scratch, scratch, folds, company)


def inputs_of(form: CacheForm | None, has_trees: bool) -> PagedInputs:
    """Inputs that no kernel reads."""
    pages, coded = torch.empty(1, KV_HEADS, PAGE, DIM, dtype=DTYPE), None
    if form is not None:
        codes = torch.int8 if form.name == "int8" else torch.uint8
        pages = torch.empty(1, PAGE * KV_HEADS * form.row_bytes(DIM), dtype=codes)
        coded = Coded(form.bits, (KV_HEADS, PAGE, DIM))
    return with_paths(pages, has_trees, coded)


def with_paths(pages: Tensor, has_trees: bool, coded: Coded | None = None) -> PagedInputs:
    table, one = torch.zeros(1, 16, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    paths = torch.zeros(1, WIDTH, dtype=torch.int32) if has_trees else None
    return PagedInputs(pages, pages, table, one, one, one, 0.1, coded=coded, paths=paths)


def heads_kernels(has_trees: bool) -> Iterator[tuple[str, Any]]:
    q = torch.empty(1, HEADS, DIM, dtype=DTYPE)
    for form in (None, *CODED.values()):
        config = default_config(DIM, DTYPE)
        inputs = inputs_of(form, has_trees)
        if form is not None:
            config = config.for_codes
        name = "floats" if form is None else form.name
        for folds in (True, False):
            compiling = Compiling(paged_split, paged_split._split_kernel)
            paged_split.split_attention(q, inputs, grid_of(folds), config, q)
            yield f"{name}, {'folds' if folds else 'lanes'}", compiling.made
        compiling = Compiling(paged_split, paged_split._split_kernel)
        paged_split.split_attention(q, inputs, grid_of(company=32), config, q)
        yield f"{name}, beside shared", compiling.made
        compiling = Compiling(paged_shared, paged_shared._shared_kernel)
        paged_shared.shared_attention(q, inputs, grid_of(company=32), config)
        yield f"{name}, shared", compiling.made


def latent_kernel(has_trees: bool) -> Any:
    config = latent_config(LATENT_HEADS, DTYPE)
    q = torch.empty(1, LATENT_HEADS, RANK + ROPE, dtype=DTYPE)
    inputs = with_paths(torch.empty(1, 1, PAGE, RANK + ROPE, dtype=DTYPE), has_trees)
    compiling = Compiling(latent_split, latent_split._latent_split_kernel)
    out, parts = torch.empty(1, LATENT_HEADS, RANK, dtype=DTYPE), head_blocks(LATENT_HEADS, config)
    latent_split.latent_split_attention(q, inputs, grid_of(), config, parts, out)
    return compiling.made


def walk_kernel() -> Any:
    compiling = Compiling(tree_walk, tree_walk._walk_kernel)
    ints = torch.zeros(2, 16, dtype=torch.int32)
    wide = torch.zeros(2, 4, dtype=torch.int64)
    trees = torch.zeros(2, tree_walk.COLUMNS, dtype=torch.int32)
    made = (wide[0], wide[0], wide, wide)
    tables = (ints, torch.zeros(2, 4, 8, dtype=torch.int32))
    tree_walk.walk_trees(trees, ints, (wide[0], ints[0]), tables, 16, made)
    return compiling.made


def show(name: str, made: Any) -> tuple[int, str]:
    built = inspect(made)
    widths = ",".join(sorted(set(re.findall(r"kWidth = (\d+)", made.asm["ttgir"]))))
    print(f"{name:>24} {built} widths {widths}", flush=True)
    return built.spilled, widths


def main() -> int:
    """Not 0 where a kernel for trees sums otherwise than its twin, or spills and that does not."""
    become_compiler()
    twins = zip(heads_kernels(True), heads_kernels(False), strict=True)
    pairs = [(name, tree, chain) for (name, tree), (_, chain) in twins]
    pairs.append(("latents", latent_kernel(True), latent_kernel(False)))
    num_worse = 0
    for name, tree, chain in pairs:
        spilled, widths = show(f"{name}, trees", tree)
        before, usual = show(name, chain)
        num_worse += widths != usual or spilled > max(before, 32)
    num_worse += show("walk", walk_kernel())[0] > 0
    return 1 if num_worse else 0


if __name__ == "__main__":
    raise SystemExit(main())
