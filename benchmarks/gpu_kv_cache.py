"""Decode attention over caches of codes beside bf16: microseconds, GB/s and how much faster.

    python -m benchmarks.gpu_kv_cache                   # under a minute, one JSON line at the end
    python -m benchmarks.gpu_kv_cache --launches        # every form with every launch of a list
    python -m benchmarks.gpu_kv_cache --compile-only    # no GPU needed

Without a GPU the split and prefill kernels of every form are compiled for an H200, and what the
assembler says is shown, with the widths of operands: neighbours that a thread holds of a product's
factors. All must be 2, as floats of 16 bits have them, or decode and prefill sum in other orders.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from benchmarks.gpu_attention import (
    DEVICE,
    DIM,
    DTYPE,
    KV_BYTES,
    KV_HEADS,
    ON_GPU,
    PAGE,
    POOL_TOKENS,
    default_backend,
    make_batches,
    make_pool,
    time_attention,
)
from benchmarks.gpu_matmul import become_compiler
from benchmarks.gpu_packed import Compiling, inspect
from quire.attn.backend import LayerCache
from quire.attn.triton import TritonAttention
from quire.kernels import paged_prefill, paged_split
from quire.kernels.paged_inputs import Coded, PagedInputs, SplitGrid
from quire.kernels.paged_tile import default_config
from quire.kv.forms import CODED, CacheForm

SHAPES = ((8, 8192), (8, 32768), (64, 4096)) if ON_GPU else ((2, 40), (2, 80))
# Of the split kernel over codes: stages, registers of a thread (0: as many as it takes), programs.
LAUNCHES = ((3, 128, 512), (4, 128, 384), (3, 0, 384), (4, 0, 384), (3, 0, 256))
KERNELS = ("lanes", "folds", "prefill")  # of splits: with states to merge, and without


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compile-only", action="store_true", help="compile for an H200 and stop")
    parser.add_argument("--launches", action="store_true", help="try every launch of a list")
    given = parser.parse_args()
    if given.compile_only:
        show_compiled()
    else:
        print(json.dumps(measured(LAUNCHES if given.launches else LAUNCHES[:0])))


# ------------------------------------------------------------ timing


@torch.inference_mode()
def measured(launches: Sequence[tuple[int, int, int]]) -> dict[str, dict[str, dict[str, float]]]:
    """What each form takes, by shape and form; `times` is how much faster than plain bf16.

    As the backend launches it, and with every launch of the list."""
    torch.manual_seed(0)
    caches = dict(kinds())
    found: dict[str, dict[str, dict[str, float]]] = {}
    for num_seqs, length in SHAPES:
        shape = f"{num_seqs} x {length}"
        batches = make_batches([length] * num_seqs, 1, copies=8)
        rows = found[shape] = {}
        for name, (cache, token_bytes) in caches.items():
            backends = {name: default_backend()}
            if name != "plain":
                backends |= {f"{name} {launch}": launched(*launch) for launch in launches}
            for title, backend in backends.items():
                us = time_attention(backend, cache, batches, length)
                rows[title] = {
                    "us": round(us, 1),
                    "GB/s": round(num_seqs * length * token_bytes / us / 1e3),
                    "times": round(rows.get("plain", {"us": us})["us"] / us, 2),
                }
                print(f"{shape:>10} {title:>20} {rows[title]}", flush=True)
    return found


def launched(stages: int, registers: int, programs: int) -> TritonAttention:
    base = default_config(DIM, DTYPE)
    split = replace(base.split, num_stages=stages, max_registers=registers)
    return TritonAttention(DTYPE, replace(base, coded_split=split, coded_programs=programs))


def kinds() -> Iterator[tuple[str, tuple[LayerCache, int]]]:
    """(cache, bytes of a token) by the name of its form."""
    yield "plain", (make_pool(), KV_BYTES)
    for name, form in CODED.items():
        row = KV_HEADS * form.row_bytes(DIM)
        shape = (2, POOL_TOKENS // PAGE, PAGE * row)
        pages = torch.randint(0, 100, shape, dtype=torch.uint8, device=DEVICE)
        yield name, (LayerCache(pages[0], pages[1], form), 2 * row)


# ------------------------------------------------------------ compiling


def show_compiled() -> None:
    become_compiler()
    print(f"{'form':>6}{'kernel':>9}{'regs':>6}{'spill':>7}{'shared':>9} widths")
    for form in (None, *CODED.values()):
        for kernel in KERNELS:
            made = build(form, kernel)
            built = inspect(made)
            widths = ",".join(sorted(set(re.findall(r"kWidth = (\d+)", made.asm["ttgir"]))))
            name = "plain" if form is None else form.name
            size = f"{built.registers:>6}{built.spilled:>7}{built.shared:>9}"
            print(f"{name:>6}{kernel:>9}{size} {widths}", flush=True)


def build(form: CacheForm | None, kernel: str) -> Any:
    """The kernel as Llama-3.1-8B's heads need it. In a process that is a compiler."""
    heads, kv_heads, dim, dtype = 32, 8, 128, torch.bfloat16
    q = torch.empty(1, heads, dim, dtype=dtype)
    config, inputs = default_config(dim, dtype), outlined(form, kv_heads, dim, dtype)
    tiles = torch.zeros(1, 3, dtype=torch.int32)
    if form is not None:
        config = config.for_codes
    if kernel == "prefill":
        compiling = Compiling(paged_prefill, paged_prefill._prefill_kernel)
        paged_prefill.prefill_attention(q, inputs, tiles, config, q)
    else:
        compiling = Compiling(paged_split, paged_split._split_kernel)
        scratch = torch.empty(1)
        folds = kernel == "folds"
        grid = SplitGrid(None, 1, 1, 2, 1 if folds else 2, scratch, scratch, folds)
        paged_split.split_attention(q, inputs, grid, config, q)
    return compiling.made


def outlined(form: CacheForm | None, kv_heads: int, dim: int, dtype: torch.dtype) -> PagedInputs:
    """Inputs that no kernel reads."""
    pages, coded = torch.empty(1, kv_heads, PAGE, dim, dtype=dtype), None
    if form is not None:
        codes = torch.int8 if form.name == "int8" else torch.uint8
        pages = torch.empty(1, PAGE * kv_heads * form.row_bytes(dim), dtype=codes)
        coded = Coded(form.bits, (kv_heads, PAGE, dim))
    table, one = torch.zeros(1, 16, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    return PagedInputs(pages, pages, table, one, one, one, dim**-0.5, coded=coded)


if __name__ == "__main__":
    main()
