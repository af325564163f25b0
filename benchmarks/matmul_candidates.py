"""What `gpu_matmul.py` tries: model shapes, batch sizes, and a few tile configs per batch size.

The lists are pruned by hand to the regime: few rows want deep pipelines over weight rows, many
rows want square tiles. A config that wins here is copied into `quire/kernels/matmul_configs.py`.
"""

from __future__ import annotations

from quire.kernels.chip import H200
from quire.kernels.matmul_configs import TileConfig, pick_config

SHAPES = {  # weights [n, k]: qkv, out, gate and up, down, vocabulary
    "8B": [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)],
    "14B": [(7168, 5120), (5120, 5120), (34816, 5120), (5120, 17408)],
    "0.6B": [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (151936, 1024)],
}
BATCHES = (1, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 8192)
REFERENCE = TileConfig(64, 64, 64, 3, 4)

T = TileConfig
CANDIDATES: dict[int, list[TileConfig]] = {  # by the most rows they are for
    16: [
        T(16, 64, 128, 8, 4, swap=True),
        T(16, 64, 128, 5, 4, swap=True),
        T(16, 64, 256, 4, 4, swap=True),
        T(16, 128, 128, 5, 4, swap=True),
        T(16, 64, 128, 8, 4, swap=True, tma=True),
        T(16, 32, 256, 5, 4, swap=True),  # the older matrix instruction, for twice the programs
        T(16, 16, 512, 5, 4, swap=True),
    ],
    32: [
        T(32, 64, 128, 8, 4, swap=True),
        T(32, 64, 128, 4, 4, swap=True),
        T(32, 128, 128, 5, 4, swap=True),
        T(32, 64, 128, 8, 4, swap=True, tma=True),
        T(32, 32, 256, 5, 4, swap=True),
    ],
    64: [
        T(64, 64, 128, 6, 4, swap=True),
        T(64, 64, 128, 6, 4, swap=True, tma=True),
        T(64, 64, 128, 3, 4, swap=True, tma=True),
        T(64, 128, 128, 4, 4, swap=True, tma=True),
        T(64, 128, 64, 6, 4, tma=True),
        T(64, 32, 128, 9, 4, tma=True),
    ],
    128: [
        T(64, 64, 128, 6, 4, swap=True, tma=True),
        T(128, 64, 128, 4, 4, swap=True, tma=True),
        T(128, 64, 64, 4, 4, swap=True, tma=True),
        T(128, 128, 64, 6, 8, tma=True),
        T(128, 128, 64, 3, 4, tma=True),
        T(64, 256, 64, 4, 4, tma=True),
    ],
    256: [
        T(128, 128, 64, 6, 8, tma=True),
        T(128, 128, 64, 3, 4, tma=True),
        T(128, 64, 64, 4, 4, swap=True, tma=True),
        T(64, 256, 64, 4, 4, tma=True),
        T(256, 64, 64, 5, 8, tma=True),
        T(256, 128, 64, 4, 8, tma=True),
        T(128, 256, 64, 4, 8, tma=True),
    ],
    1 << 30: [
        T(128, 256, 64, 4, 8, tma=True),
        T(128, 256, 64, 4, 8, tma=True, group_m=16),
        T(256, 128, 64, 4, 8, tma=True),
        T(128, 128, 64, 6, 8, tma=True),
        T(128, 128, 64, 4, 4, tma=True),
        T(64, 256, 64, 4, 4, tma=True),
        T(64, 256, 64, 4, 8, tma=True),
    ],
}


def candidates(m: int, n: int, k: int) -> list[TileConfig]:
    """What is worth a try for m rows, and the one that is picked today."""
    configs = next(configs for limit, configs in CANDIDATES.items() if m <= limit)
    return list(dict.fromkeys([*configs, pick_config(m, n, k, H200)]))


def describe(config: TileConfig) -> str:
    """Rows x weight rows x k.stages.warps, s: weights first, t: tensor descriptors.

    >>> describe(T(16, 64, 128, 8, 4, swap=True))
    '16x64x128.8.4s'
    """
    flags = "s" * config.swap + "t" * config.tma
    flags += f"g{config.group_m}" if config.group_m != 8 else ""
    tile = f"{config.block_m}x{config.block_n}x{config.block_k}"
    return f"{tile}.{config.num_stages}.{config.num_warps}{flags}"
