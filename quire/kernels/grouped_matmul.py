"""Grouped matmul: each row times the weight of its expert, for rows sorted by expert.

A tile is up to `block_m` sorted rows of one expert by `block_n` rows of its weight. Only the device
knows how many tiles an expert needs. So the grid covers the largest possible number, each program
looks up its tile, and programs without one return. As in `matmul.py` an output is
one chain of fp32 matrix-unit additions over increasing k whatever the tile, so a row's bits depend
on that row and its expert only; tiles may follow the number of rows freely. A bias is added to
the finished sum, before its only rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.launch import Launcher, alignments
from quire.kernels.route import SortedPairs

__all__ = [
    "GroupTile",
    "max_tiles",
    "multiply_gathered",
    "multiply_scattered",
    "own_rows",
    "own_tile",
    "pick_tile",
]


@dataclass(frozen=True, slots=True)
class GroupTile:
    """One way to lay the product on the chip. Every tile gives the same bits."""

    block_m: int  # rows of one expert per program
    block_n: int  # rows of its weight
    block_k: int
    num_stages: int
    num_warps: int
    # Weights on the row side of the matrix unit, which wants 64 rows there and would otherwise
    # fall back to an older instruction that rounds differently.
    swap: bool = False
    group_m: int = 8  # row tiles that walk together over the weights, to share them in L2


# By the mean number of rows an expert gets, one column per limit.
_LIMITS = (16, 32, 96)
_TILES = (
    GroupTile(16, 64, 128, 5, 4, swap=True),
    GroupTile(32, 64, 128, 5, 4, swap=True),
    GroupTile(64, 64, 128, 4, 4, swap=True),
    GroupTile(128, 128, 64, 4, 8),
)
_FP32_TILE = GroupTile(32, 32, 32, 2, 4)  # no matrix unit: for tests, not for speed


def pick_tile(num_pairs: int, num_experts: int) -> GroupTile:
    """Tiles about as high as the rows of an average expert: most weights are then read once."""
    mean = num_pairs / num_experts
    return _TILES[sum(mean > limit for limit in _LIMITS)]


def max_tiles(num_pairs: int, num_experts: int, block_m: int) -> int:
    """The most tiles that any routing needs: one for each expert with a row, the rest full.

    >>> max_tiles(3, 8, 16), max_tiles(8, 8, 16), max_tiles(40, 8, 16)
    (3, 8, 10)
    """
    first = min(num_pairs, num_experts)
    return first + (num_pairs - first) // block_m


@triton.jit
def own_tile(tiles_m, N, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """(row tile of this program, its first weight row): programs walk down GROUP_M row tiles before
    moving to the next weight tile."""
    program = tl.program_id(0)
    group_size = GROUP_M * tl.cdiv(N, BLOCK_N)
    first_m = program // group_size * GROUP_M
    group_m = tl.minimum(tiles_m - first_m, GROUP_M)
    tile = first_m + program % group_size % group_m
    return tile, program % group_size // group_m * BLOCK_N


@triton.jit
def own_rows(counts, tile, NUM: tl.constexpr, PAD: tl.constexpr, BLOCK_M: tl.constexpr):
    """(expert of this tile, its first sorted row, its number of rows); expert >= NUM: no tile."""
    expert = tl.arange(0, PAD)
    rows = tl.load(counts + expert, mask=expert < NUM, other=0)
    tiles = (rows + BLOCK_M - 1) // BLOCK_M
    own = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32), 0)
    is_lower = expert < own
    skipped = (tile - tl.sum(tl.where(is_lower, tiles, 0), 0)) * BLOCK_M
    left = tl.sum(tl.where(expert == own, rows, 0), 0) - skipped
    return own, tl.sum(tl.where(is_lower, rows, 0), 0) + skipped, tl.minimum(left, BLOCK_M)


@triton.jit
def _sum_tile(
    x_rows, w_rows, live, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr, SWAP: tl.constexpr,
):  # fmt: skip
    """fp32 sum over all of k: one chain of matrix-unit additions, k increasing."""
    if SWAP:
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    offs_k = tl.arange(0, BLOCK_K)
    tl.assume(K > 0)  # no path that skips the loop: keeps wide chains asynchronous
    for k in tl.range(0, K, BLOCK_K):
        if EVEN_K:
            x_tile = tl.load(x_rows + k, mask=live[:, None], other=0.0)
            w_tile = tl.load(w_rows + k)
        else:  # adding zero products leaves an accumulator's bits alone
            inside = (offs_k < K - k)[None, :]
            x_tile = tl.load(x_rows + k, mask=live[:, None] & inside, other=0.0)
            w_tile = tl.load(w_rows + k, mask=inside, other=0.0)
        if SWAP:
            acc = tl.dot(w_tile, x_tile.T, acc, input_precision="ieee")
        else:
            acc = tl.dot(x_tile, w_tile.T, acc, input_precision="ieee")
    if SWAP:
        acc = acc.T
    return acc  # [BLOCK_M, BLOCK_N]


@triton.jit(do_not_specialize=["tiles_m"])
def _grouped_kernel(
    x, w, bias, y, pairs, counts, tiles_m, N, K,
    NUM: tl.constexpr, PAD: tl.constexpr, TOP_K: tl.constexpr, GATHER: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, EVEN_K: tl.constexpr, SWAP: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    tile, n_start = own_tile(tiles_m, N, BLOCK_N, GROUP_M)
    expert, row, num_rows = own_rows(counts, tile, NUM, PAD, BLOCK_M)
    if expert >= NUM:
        return
    offs_m = tl.arange(0, BLOCK_M)
    live = offs_m < num_rows
    sorted_rows = (row + offs_m).to(tl.int64)
    pair_rows = tl.load(pairs + sorted_rows, mask=live, other=0).to(tl.int64)
    if GATHER:
        from_rows, to_rows = pair_rows // TOP_K, sorted_rows
    else:
        from_rows, to_rows = sorted_rows, pair_rows

    offs_n, offs_k = n_start + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    # Rows past N read the last row again: never stored, and the loads need no mask.
    w_row = expert.to(tl.int64) * N + tl.minimum(offs_n, N - 1)
    total = _sum_tile(
        x + from_rows[:, None] * K + offs_k[None, :], w + w_row[:, None] * K + offs_k[None, :],
        live, K, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, SWAP,
    )  # fmt: skip
    if HAS_BIAS:
        total += tl.load(bias + w_row).to(tl.float32)[None, :]
    cells = y + to_rows[:, None] * N + offs_n[None, :]
    tl.store(cells, total.to(y.dtype.element_ty), mask=live[:, None] & (offs_n < N)[None, :])


_launch = Launcher(_grouped_kernel)


def multiply_gathered(
    x: Tensor,
    w: Tensor,
    pairs: SortedPairs,
    tile: GroupTile | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """x [tokens, k], w [experts, n, k] -> [pairs, n]: the token of each pair times its expert's
    weight, rows sorted by expert; plus its row of bias [experts, n]."""
    return _multiply(x, Weights(w, bias), pairs, tile, is_gather=True)


def multiply_scattered(
    x: Tensor,
    w: Tensor,
    pairs: SortedPairs,
    tile: GroupTile | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """x [pairs, k] sorted by expert, w [experts, n, k] -> [pairs, n], token by token."""
    return _multiply(x, Weights(w, bias), pairs, tile, is_gather=False)


class Weights(NamedTuple):
    w: Tensor
    bias: Tensor | None


def _multiply(
    x: Tensor, weights: Weights, pairs: SortedPairs, tile: GroupTile | None, is_gather: bool
) -> Tensor:
    w, bias = weights
    num_experts, n, k = w.shape
    num_pairs = pairs.pairs.numel()
    assert x.shape[1] == k and k % 16 == 0, f"got x {tuple(x.shape)}, w {tuple(w.shape)}"
    assert x.shape[0] * (pairs.top_k if is_gather else 1) == num_pairs, f"{x.shape=} {num_pairs=}"
    assert x.dtype == w.dtype and x.is_contiguous() and w.is_contiguous()
    assert bias is None or (bias.shape == (num_experts, n) and bias.is_contiguous())
    y = torch.empty((num_pairs, n), dtype=x.dtype, device=x.device)
    if num_pairs == 0:
        return y
    if tile is None:
        tile = _FP32_TILE if w.dtype == torch.float32 else pick_tile(num_pairs, num_experts)
    tiles_m = max_tiles(num_pairs, num_experts, tile.block_m)
    _launch(
        (tiles_m * triton.cdiv(n, tile.block_n), 1, 1),
        # Without a bias the weight stands in its place, unread.
        (x, w, w if bias is None else bias, y, pairs.pairs, pairs.counts, tiles_m, n, k),
        {
            "NUM": num_experts,
            "PAD": triton.next_power_of_2(num_experts),
            "TOP_K": pairs.top_k,
            "GATHER": is_gather,
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "BLOCK_K": tile.block_k,
            "GROUP_M": tile.group_m,
            "EVEN_K": k % tile.block_k == 0,
            "SWAP": tile.swap,
            "HAS_BIAS": bias is not None,
            "num_warps": tile.num_warps,
            "num_stages": tile.num_stages,
        },
        _kind(x, weights, y),
    )
    return y


def _kind(x: Tensor, weights: Weights, y: Tensor) -> tuple[object, ...]:
    """What a compiled kernel was made for: see `launch.py`."""
    w, bias = weights
    kind_of_bias = None if bias is None else bias.dtype
    return (x.dtype, *w.shape[1:], kind_of_bias, alignments(x, w, y, bias))
