"""Which tiles and how many splits a batch-invariant matmul uses, as plain data.

Two choices are kept apart because they have different rights. `split_plan(n, k)` says which ranges
of k are summed on their own before being added up; it decides the bits of the result, so it may
look at the weight's shape only. `pick_config(m, n, k)` says how the same sums are laid on the chip;
it may look at the batch too, because no tile shape changes a bit. The kernels are in `matmul.py`;
the numbers come from `benchmarks/gpu_matmul.py` on an H200, nothing is tuned at start-up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Reduce", "SplitPlan", "TileConfig", "pick_config", "split_plan"]

# Who adds the splits of one output tile:
#   loop    the tile's only program, one split after the other (no scratch; for many rows)
#   last    one program per split; the last to arrive reads all partial sums back
#   kernel  one program per split; a second small kernel adds them
#   park    the tile's only program, keeping finished splits in scratch: for tiles so large that
#           a second accumulator does not fit in registers
Reduce = Literal["loop", "last", "kernel", "park"]


@dataclass(frozen=True, slots=True)
class TileConfig:
    """One way to lay the product on the chip. Every config gives the same bits."""

    block_m: int  # rows of x per program
    block_n: int  # rows of w (columns of y) per program
    block_k: int
    num_stages: int
    num_warps: int
    # Weights on the row side of the matrix unit: wgmma wants 64 rows there, and a small batch
    # has far fewer, while its other side goes down to 8.
    swap: bool = False
    reduce: Reduce = "loop"
    group_m: int = 8  # row tiles that walk together over the weights, to share them in L2
    tma: bool = False  # load through tensor descriptors where shapes and alignment allow it
    # One group of warps loads, the others multiply; needs tma, four warps and a single split.
    specialize: bool = False
    # Programmatic dependent launch: start while the kernel before still runs, fetch the first
    # weights into L2, then wait. Only sound when that kernel does not write the weights.
    pdl: bool = False


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """k is cut into `num_splits` ranges of `split_len` (the last may be shorter)."""

    num_splits: int
    split_len: int

    @staticmethod
    def of(k: int, num_splits: int) -> SplitPlan:
        if num_splits <= 1:
            return SplitPlan(1, k)
        split_len = -(-k // num_splits)
        split_len = -(-split_len // _SPLIT_ALIGN) * _SPLIT_ALIGN
        return SplitPlan(-(-k // split_len), split_len)


# Splits end on a multiple of every block_k in use, so that inner loops need no masks.
_SPLIT_ALIGN = 256
# Programs of 64 weight rows that keep a large card's memory busy. Constants and not the device's
# own count: the bits of a model should not change with the card it runs on.
_TARGET_PROGRAMS = 64
_MAX_SPLITS = 4
# Deep and narrow weights (down projections) gain from two ranges once 256 rows are multiplied.
_DEEP, _DEEP_MAX_N = 3, 4096


def split_plan(n: int, k: int) -> SplitPlan:
    """Ranges of k to sum separately for a weight of n rows: narrow weights are cut further."""
    tiles = -(-n // 64)
    num_splits = 1
    while num_splits < _MAX_SPLITS and tiles * num_splits < _TARGET_PROGRAMS:
        num_splits *= 2
    if num_splits == 1 and n <= _DEEP_MAX_N and k >= _DEEP * n:
        num_splits = 2
    return SplitPlan.of(k, num_splits)


# Tiles by number of splits and rows of x, one column per limit; the best of
# `benchmarks/gpu_matmul.py` in the geometric mean over its shapes on an H200.
_LIMITS = (16, 32, 64, 128, 256)
_TILES = {
    1: (
        TileConfig(16, 64, 128, 8, 4, swap=True),
        TileConfig(32, 64, 128, 8, 4, swap=True),
        TileConfig(64, 64, 128, 6, 4, swap=True, tma=True),
        TileConfig(128, 64, 128, 4, 4, swap=True, tma=True),
    ),
    2: (
        TileConfig(16, 64, 128, 5, 4, swap=True, reduce="last"),
        TileConfig(32, 64, 128, 8, 4, swap=True, reduce="last"),
        TileConfig(64, 64, 128, 6, 4, swap=True, tma=True, reduce="last"),
        TileConfig(128, 64, 128, 4, 4, swap=True, tma=True, reduce="last"),
        TileConfig(128, 128, 64, 6, 8, tma=True, reduce="last"),
    ),
    4: (
        TileConfig(16, 64, 128, 5, 4, swap=True, reduce="last"),
        TileConfig(32, 64, 128, 4, 4, swap=True, reduce="last"),
        TileConfig(64, 64, 128, 6, 4, swap=True, reduce="kernel"),
        TileConfig(64, 64, 128, 6, 4, swap=True, tma=True, reduce="last"),
        TileConfig(128, 64, 64, 4, 4, swap=True, reduce="last"),
    ),
}
# More rows: what counts is how many rounds of the chip the tiles take, because the last round is
# rarely full. Each with the time of a round, relative, as measured on an H200; over 92 measured
# products a choice by these is 1.4 % from the best. The cost of summing splits apart is in it.
_MULTIPROCESSORS = 132
_ROUNDS = {
    1: (
        (TileConfig(128, 256, 64, 4, 8, tma=True), 1.00),
        (TileConfig(128, 128, 64, 6, 8, tma=True), 0.55),
        (TileConfig(64, 256, 64, 4, 4, tma=True), 0.59),
    ),
    2: (
        (TileConfig(128, 128, 64, 5, 8, tma=True), 1.00),
        (TileConfig(128, 128, 64, 6, 8, tma=True, reduce="last"), 0.55),
    ),
    4: (
        (TileConfig(128, 128, 64, 5, 8, tma=True), 1.00),
        (TileConfig(64, 256, 64, 4, 8, tma=True, reduce="last"), 0.40),
    ),
}


def pick_config(m: int, n: int, k: int) -> TileConfig:
    """The measured tiles for m rows of x and a weight of [n, k]."""
    num_splits = split_plan(n, k).num_splits
    kind = num_splits if num_splits <= 2 else 4
    if m <= _LIMITS[-2 if num_splits == 1 else -1]:
        return _TILES[kind][sum(m > limit for limit in _LIMITS)]

    def seconds(choice: tuple[TileConfig, float]) -> float:
        config, round_time = choice
        tiles = -(-m // config.block_m) * -(-n // config.block_n)
        programs = tiles * num_splits if config.reduce == "last" else tiles
        return -(-programs // _MULTIPROCESSORS) * round_time

    return min(_ROUNDS[kind], key=seconds)[0]
