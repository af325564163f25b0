"""Which tiles a batch-invariant matmul uses, as plain data.

No tile changes a bit of the result, so the choice may follow the batch. The numbers come from
`benchmarks/gpu_matmul.py` on an H200; nothing is tuned at start-up. The kernel is in
`matmul_kernel.py`. On Hopper few rows take `stream_matmul.py` instead, whose sizes are in
`stream_configs.py`. `vendor_matmul.py` decides when the vendor's library is used.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from quire.kernels.chip import Chip

__all__ = [
    "SMALL",
    "WIDE",
    "TileConfig",
    "fits_one_round",
    "pick_config",
    "rounds_of",
]


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
    tma: bool = False  # load through tensor descriptors where shapes and alignment allow it
    group_m: int = 8  # row tiles that walk together over the weights, to share them in L2


SMALL = 8 << 20  # elements: one round of our tiles covers such a weight
WIDE = 16384  # weight rows: from here on a product takes several rounds, with other tiles

_UP_TO_16 = TileConfig(16, 64, 128, 8, 4, swap=True)
_UP_TO_32 = TileConfig(32, 64, 128, 8, 4, swap=True)
_WIDE_UP_TO_16 = TileConfig(16, 64, 256, 5, 4, swap=True, tma=True)
_UP_TO_64 = TileConfig(64, 64, 128, 6, 4, swap=True, tma=True)
_WIDE_UP_TO_64 = (
    TileConfig(64, 128, 64, 6, 4, tma=True),
    TileConfig(64, 64, 128, 7, 4, swap=True, tma=True),
)
# For more rows. What counts is how many rounds of the chip the tiles take, because the last round
# is rarely full. Each tile comes with its relative time of a round, measured on an H200.
_ROUNDS = (
    (TileConfig(128, 256, 64, 4, 8, tma=True), 1.00),
    (TileConfig(128, 128, 64, 6, 8, tma=True), 0.55),
    (TileConfig(64, 256, 64, 4, 4, tma=True), 0.59),
)


def fits_one_round(m: int, n: int, units: int) -> bool:
    """Whether each 64 x 64 tile of the product gets a multiprocessor of its own."""
    return -(-m // 64) * -(-n // 64) <= units


def pick_config(m: int, n: int, k: int, chip: Chip) -> TileConfig:
    """The measured tiles for m rows of x and a weight of n rows and k columns, with fewer stages
    where the chip has no room for all."""
    config = _measured(m, n, k, chip.units)
    of_stage = 2 * (config.block_m + config.block_n) * config.block_k
    return replace(config, num_stages=max(1, min(config.num_stages, chip.shared // of_stage)))


def _measured(m: int, n: int, k: int, units: int) -> TileConfig:
    is_wide = n >= WIDE
    if m <= 16:
        fits = k % _WIDE_UP_TO_16.block_k == 0
        return _WIDE_UP_TO_16 if is_wide and fits else _UP_TO_16
    if m <= 32:
        return _UP_TO_32
    if m <= 128 and fits_one_round(m, n, units):
        return _UP_TO_64
    if m <= 64:
        return _least_tail(_WIDE_UP_TO_64, n, k, units) if is_wide else _UP_TO_64
    return _quickest(m, n, units)


def _least_tail(configs: tuple[TileConfig, ...], n: int, k: int, units: int) -> TileConfig:
    """The config whose rounds over n weight rows cost least; the first one wins a tie.

    The cost is counted in rows: a last round of a few large tiles takes as long as a full one. A
    config whose block does not divide k comes last."""

    def cost(config: TileConfig) -> tuple[bool, int]:
        tiles = -(-n // config.block_n)
        return k % config.block_k != 0, -(-tiles // units) * config.block_n

    return min(configs, key=cost)


def rounds_of(m: int, n: int, units: int) -> tuple[float, float]:
    """(time of the best tiles, time if nothing idled), in rounds of the largest tile."""
    largest, _ = _ROUNDS[0]
    full = m * n / (largest.block_m * largest.block_n * units)
    return min(_round_times(m, n, units)), full


def _quickest(m: int, n: int, units: int) -> TileConfig:
    times = _round_times(m, n, units)
    return _ROUNDS[times.index(min(times))][0]


def _round_times(m: int, n: int, units: int) -> list[float]:
    """The time of each tile of `_ROUNDS`, in rounds of the largest tile."""
    times = []
    for config, round_time in _ROUNDS:
        tiles = -(-m // config.block_m) * -(-n // config.block_n)
        times.append(-(-tiles // units) * round_time)
    return times
