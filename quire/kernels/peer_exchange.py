"""Peer exchange: ranks hand each other their shares through memory of GPUs that all have mapped.

Each rank has a region of words of 64 bits: a mark for every program of every rank, how many turns
each of its own programs has had, and two halves of an outbox for each of them. In a turn a program
puts its slice of the rank's share into one half, raises its mark in everybody's region, waits for
theirs in its own, and copies what lies in their halves. Halves take turns: who raises a mark to
turn n has read everything of turn n - 1, so halves of turn n - 2 are free. Programs wait for the
same program of other ranks alone, never for each other. Turns are counted in the device's memory:
a launch that a graph has captured goes on counting when it is replayed.

A share larger than the halves takes several turns of one launch. Who waits looks now and then at a
word in memory of the host; once that is set, it goes on with whatever is there.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.launch import Launcher, ceil_div

__all__ = ["UNITS", "WORD", "Exchange", "Spots", "Verb", "exchange", "region_words", "unit_of"]

WORD = 8  # bytes
MOST_PROGRAMS = 16  # all of a launch must be on the device at once
HALF_WORDS = 1 << 15  # 256 KiB a program
BLOCK = 1024  # units that a program copies at a time
REGION_ALIGNMENT = 32  # words: outboxes begin at a multiple of 256 bytes

UNITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


class Verb(IntEnum):
    GATHER = 0  # everybody's share has a place of its own
    MERGE = 1  # bits of all are put together
    TELL = 2  # the first rank's share is everybody's


GATHER, MERGE, TELL = (tl.constexpr(int(verb)) for verb in Verb)


def head_words(size: int) -> int:
    """Marks and turns."""
    return ceil_div((size + 1) * MOST_PROGRAMS, REGION_ALIGNMENT) * REGION_ALIGNMENT


def region_words(size: int) -> int:
    """Of each of `size` ranks; zeros at first."""
    return head_words(size) + 2 * MOST_PROGRAMS * HALF_WORDS


def unit_of(num_bytes: int) -> int:
    """Bytes of the largest whole number that so many bytes consist of.

    >>> unit_of(48), unit_of(12), unit_of(7)
    (8, 4, 1)
    """
    return next(unit for unit in UNITS if num_bytes % unit == 0)


@triton.jit
def _raise_mark(address, turn, PLAIN: tl.constexpr):
    """All that this program has written is there for whoever sees the mark. PLAIN: not in the
    interpreter, which knows no instructions."""
    if PLAIN:
        tl.atomic_xchg(address.to(tl.pointer_type(tl.int64)), turn)
    else:
        tl.inline_asm_elementwise(
            """{
            .reg .pred is_first;
            .reg .u32 thread;
            mov.u32 thread, %tid.x;
            setp.eq.u32 is_first, thread, 0;
            @is_first st.release.sys.global.u64 [$1], $2;
            mov.u32 $0, 0;
            }""",
            "=r,l,l", [address, turn], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def _await_mark(address, turn, is_over, PLAIN: tl.constexpr):
    """Until another rank's mark is at this turn, or the host has set `is_over`. In the interpreter
    ranks run one after the other, and nobody waits."""
    if not PLAIN:
        tl.inline_asm_elementwise(
            """{
            .reg .pred is_done;
            .reg .u32 thread, looks, rest, over;
            .reg .u64 seen;
            mov.u32 looks, 0;
            mov.u32 thread, %tid.x;
            setp.ne.u32 is_done, thread, 0;
            @is_done bra done;
            again:
            ld.acquire.sys.global.u64 seen, [$1];
            setp.ge.u64 is_done, seen, $2;
            @is_done bra done;
            add.u32 looks, looks, 1;
            and.b32 rest, looks, 255;
            setp.ne.u32 is_done, rest, 0;
            @is_done bra again;
            ld.relaxed.sys.global.u32 over, [$3];
            setp.eq.u32 is_done, over, 0;
            @is_done bra again;
            done:
            mov.u32 $0, 0;
            }""",
            "=r,l,l,l", [address, turn, is_over], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def _taken(
    share, regions, half, first, at, last,
    RANK: tl.constexpr, OTHER: tl.constexpr, HEAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A block of a rank's share: our own, or what lies in the half of another one."""
    i = at + tl.arange(0, BLOCK)
    inside = i < last
    if OTHER == RANK:
        block = tl.load(share + i, mask=inside, other=0)
    else:
        outboxes = (tl.load(regions + OTHER) + HEAD).to(share.dtype)
        block = tl.load(outboxes + half + i - first, mask=inside, other=0, cache_modifier=".cg")
    return block


@triton.jit
def _deliver(
    share, into, regions, half, first, last, width, row_step, source_step,
    RANK: tl.constexpr, SIZE: tl.constexpr, VERB: tl.constexpr, HEAD: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """What everybody has put into their halves, to where it belongs."""
    for at in range(first, last, BLOCK):
        i = at + tl.arange(0, BLOCK)
        inside = i < last
        if VERB == GATHER:
            spot = (i // width).to(tl.int64) * row_step + i % width
            for other in tl.static_range(SIZE):
                block = _taken(share, regions, half, first, at, last, RANK, other, HEAD, BLOCK)
                tl.store(into + spot + other * source_step, block, mask=inside)
        elif VERB == MERGE:
            merged = tl.load(share + i, mask=inside, other=0)
            for other in tl.static_range(SIZE):
                if other != RANK:
                    merged |= _taken(
                        share, regions, half, first, at, last, RANK, other, HEAD, BLOCK
                    )
            tl.store(into + i, merged, mask=inside)
        elif RANK != 0:
            told = _taken(share, regions, half, first, at, last, RANK, 0, HEAD, BLOCK)
            tl.store(into + i, told, mask=inside)


@triton.jit(
    do_not_specialize=["num", "width", "row_step", "source_step"],
    do_not_specialize_on_alignment=["share", "into", "regions"],
)
def _exchange_kernel(
    share, into, regions, num, width, row_step, source_step,
    RANK: tl.constexpr, SIZE: tl.constexpr, VERB: tl.constexpr, PROGRAMS: tl.constexpr,
    HEAD: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    slice_units = tl.cdiv(tl.cdiv(num, tl.num_programs(0)), BLOCK) * BLOCK
    begin = program * slice_units
    end = tl.minimum(begin + slice_units, num)
    own, is_over = tl.load(regions + RANK), tl.load(regions + SIZE)
    turns = own.to(tl.pointer_type(tl.int64)) + SIZE * PROGRAMS + program
    turn = tl.load(turns)
    for first in range(begin, begin + slice_units, HALF):
        turn += 1
        last = tl.minimum(first + HALF, end)
        half = (program * 2 + turn % 2) * HALF
        if VERB != TELL or RANK == 0:
            outbox = (own + HEAD).to(share.dtype) + half
            for at in range(first, last, BLOCK):
                i = at + tl.arange(0, BLOCK)
                tl.store(outbox + i - first, tl.load(share + i, mask=i < last), mask=i < last)
        tl.debug_barrier()
        for other in tl.static_range(SIZE):
            if other != RANK:
                mark = tl.load(regions + other) + (RANK * PROGRAMS + program) * 8
                _raise_mark(mark, turn, PLAIN)
        for other in tl.static_range(SIZE):
            if other != RANK:
                mark = own + (other * PROGRAMS + program) * 8
                _await_mark(mark, turn, is_over, PLAIN)
        tl.debug_barrier()
        _deliver(
            share, into, regions, half, first, last, width, row_step, source_step,
            RANK, SIZE, VERB, HEAD, BLOCK,
        )  # fmt: skip
    tl.store(turns, turn)


_launch = Launcher(_exchange_kernel)


class Exchange(NamedTuple):
    """Ranks that have each other's regions mapped."""

    rank: int
    size: int
    regions: Tensor  # [ranks + 1] int64, addresses: each rank's region, and what ends all waiting


class Spots(NamedTuple):
    """Where numbers of a share go: number i of rank r to
    i // width * row_step + r * source_step + i % width. In units."""

    width: int
    row_step: int
    source_step: int


NO_SPOTS = Spots(1, 0, 0)


def exchange(
    between: Exchange, verb: Verb, share: Tensor, into: Tensor, spots: Spots = NO_SPOTS
) -> None:
    """Every rank's `share`, of one size and a dtype of `UNITS`, into everybody's `into`. `spots`
    are for what is gathered."""
    unit, num = share.element_size(), share.numel()
    assert UNITS[unit] == share.dtype == into.dtype and share.is_contiguous()
    assert 0 < num < 1 << 31, f"got a share of {num} units"
    grid = (min(ceil_div(num, BLOCK), MOST_PROGRAMS), 1, 1)
    _launch(grid, (share, into, between.regions, num, *spots), constants(between, verb, unit), unit)


def constants(between: Exchange, verb: Verb, unit: int) -> dict[str, object]:
    return {
        "RANK": between.rank,
        "SIZE": between.size,
        "VERB": int(verb),
        "PROGRAMS": MOST_PROGRAMS,
        "HEAD": head_words(between.size) * WORD,
        "HALF": HALF_WORDS * WORD // unit,
        "BLOCK": BLOCK,
        "PLAIN": not between.regions.is_cuda,
        "num_warps": 8,
    }
