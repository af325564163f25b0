"""A step's inputs in one launch: (row, place) of each token -> all that a layer reads of it.

Token ids and pages are looked up in the rows' tables; places become slots in every layer group. A
token's place is its position, but for drafts of trees (`runner/trees.py`).
It is the first kernel of a captured decode step and replaces some fifteen of torch's, each of which
takes longer to launch than to run. A program owns a run of tokens in one group; those of the first
group also write what all groups share. This launch and the next one are plain, so later kernels may
read these positions, slots and lengths before their wait (`early.py`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.launch import Launcher

BLOCK = 128  # tokens of one program, one for each thread: two loads deep, nothing to reuse
ALIGNED = 2  # int64s in 16 bytes: every group's slots begin aligned, which kernels compile for

_POINTERS = [
    "rows", "places", "positions", "tokens", "page_tables", "input_ids", "wide_positions", "slots",
    "context_lens",
]  # fmt: skip


class StepInputs(NamedTuple):
    input_ids: Tensor  # [tokens] int64
    positions: Tensor  # [tokens] int64
    slots: Tensor  # [groups, tokens] int64
    context_lens: Tensor  # [tokens] int32: what the token may see, itself included


@triton.jit(
    do_not_specialize=["num_tokens", "slot_stride"], do_not_specialize_on_alignment=_POINTERS
)
def _step_inputs_kernel(
    rows, places, positions, tokens, page_tables, input_ids, wide_positions, slots, context_lens,
    num_tokens, slot_stride,
    TOKEN_STRIDE: tl.constexpr, GROUP_STRIDE: tl.constexpr, PAGE_STRIDE: tl.constexpr,
    PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num_tokens
    row = tl.load(rows + at, mask=inside, other=0).to(tl.int64)
    place = tl.load(places + at, mask=inside, other=0)
    cell = group * GROUP_STRIDE + row * PAGE_STRIDE + place // PAGE_SIZE
    page = tl.load(page_tables + cell, mask=inside, other=0).to(tl.int64)
    slot = page * PAGE_SIZE + place % PAGE_SIZE
    tl.store(slots + group * slot_stride + at, slot, mask=inside)
    if group == 0:
        position = tl.load(positions + at, mask=inside, other=0)
        token = tl.load(tokens + row * TOKEN_STRIDE + place, mask=inside, other=0)
        tl.store(input_ids + at, token.to(tl.int64), mask=inside)
        tl.store(wide_positions + at, position.to(tl.int64), mask=inside)
        tl.store(context_lens + at, position + 1, mask=inside)


_launch = Launcher(_step_inputs_kernel, skips_rehearsals=False)  # makes ids to embed


def step_inputs(
    rows: Tensor,  # [tokens] int32
    positions: Tensor,  # [tokens] int32
    tokens: Tensor,  # [max_rows, max_len] int32
    page_tables: Tensor,  # [groups, max_rows, max_pages] int32
    page_size: int,
    places: Tensor | None = None,  # [tokens] int32; None: the positions
) -> StepInputs:
    """Look up the token at each (row, place) and where its keys and values go."""
    places = positions if places is None else places
    for table in (rows, places, positions, tokens, page_tables):
        assert table.dtype == torch.int32 and table.stride(-1) == 1, f"{table.dtype=}"
    num_tokens, num_groups = len(positions), len(page_tables)
    width = triton.cdiv(num_tokens, ALIGNED) * ALIGNED
    made = StepInputs(
        positions.new_empty(num_tokens, dtype=torch.int64),
        positions.new_empty(num_tokens, dtype=torch.int64),
        positions.new_empty((num_groups, width), dtype=torch.int64)[:, :num_tokens],
        torch.empty_like(positions),
    )
    if num_tokens:
        _launch(
            (triton.cdiv(num_tokens, BLOCK), num_groups, 1),
            (rows, places, positions, tokens, page_tables, *made, num_tokens, width),
            {
                "TOKEN_STRIDE": tokens.stride(0),
                "GROUP_STRIDE": page_tables.stride(0),
                "PAGE_STRIDE": page_tables.stride(1),
                "PAGE_SIZE": page_size,
                "BLOCK": BLOCK,
                "num_warps": BLOCK // 32,
            },
            kind=None,  # no argument is specialised on
        )
    return made
