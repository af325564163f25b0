"""What `gpu_matmul.py` tries: model shapes, batch sizes, and a few tile configs per batch size.

The lists are pruned by hand to the regime: few rows want deep pipelines over weight rows, many
rows want square tiles. A config that wins here is copied into `quire/kernels/matmul_configs.py`.
"""

from __future__ import annotations

from quire.kernels.matmul_configs import TileConfig

SHAPES = {
    "8B": [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)],
    "14B": [(7168, 5120), (5120, 5120), (34816, 5120), (5120, 17408)],
    "0.6B": [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (151936, 1024)],
}
SMALL_BATCHES = (1, 8, 32, 64, 128, 256)
MIDDLE_BATCHES = (288, 320, 384, 448, 512, 576, 640, 704, 768, 896, 1024, 1280, 1536)
LARGE_BATCHES = (2048, 8192)  # 8B only
REFERENCE = TileConfig(64, 64, 64, 3, 4)

T = TileConfig
CANDIDATES: dict[int, list[TileConfig]] = {
    16: [
        T(16, 64, 128, 8, 4, swap=True, reduce="last"),
        T(16, 64, 128, 5, 4, swap=True, reduce="last"),
        T(16, 64, 256, 4, 4, swap=True, reduce="last"),
        T(16, 128, 128, 5, 4, swap=True, reduce="last"),
        T(16, 64, 128, 8, 4, swap=True, reduce="last", tma=True),
        T(16, 64, 256, 5, 4, swap=True, reduce="last", tma=True),
        T(16, 128, 128, 5, 4, swap=True, reduce="last", tma=True),
        T(64, 32, 128, 9, 4, reduce="last"),
        T(64, 32, 128, 9, 4, reduce="last", tma=True),
        T(16, 32, 256, 8, 4, swap=True, reduce="last"),  # mma.sync: fewer than 64 weight rows
        T(16, 32, 256, 5, 4, swap=True, reduce="last"),
        T(16, 16, 512, 5, 4, swap=True, reduce="last"),
        T(16, 64, 128, 8, 4, swap=True, reduce="kernel"),
        T(16, 64, 128, 5, 4, swap=True, reduce="last", pdl=True),
        T(16, 64, 128, 8, 4, swap=True, reduce="last", pdl=True),
        T(16, 32, 256, 5, 4, swap=True, reduce="last", pdl=True),
        T(16, 64, 128, 5, 4, swap=True, reduce="last", pdl=True, tma=True),
    ],
    32: [
        T(32, 64, 128, 8, 4, swap=True, reduce="last"),
        T(32, 64, 128, 4, 4, swap=True, reduce="last"),
        T(32, 128, 128, 5, 4, swap=True, reduce="last"),
        T(32, 64, 128, 8, 4, swap=True, reduce="last", tma=True),
        T(32, 128, 128, 5, 4, swap=True, reduce="last", tma=True),
        T(64, 32, 128, 9, 4, reduce="last"),
        T(64, 32, 128, 9, 4, reduce="last", tma=True),
        T(32, 32, 256, 5, 4, swap=True, reduce="last"),  # mma.sync
        T(32, 64, 128, 8, 4, swap=True, reduce="kernel"),
        T(32, 64, 128, 4, 4, swap=True, reduce="last", pdl=True),
    ],
    64: [
        T(64, 64, 128, 6, 4, swap=True, reduce="last"),
        T(64, 64, 128, 3, 4, swap=True, reduce="last"),
        T(64, 128, 128, 4, 8, swap=True, reduce="last"),
        T(64, 64, 128, 6, 4, swap=True, reduce="last", tma=True),
        T(64, 64, 128, 3, 4, swap=True, reduce="last", tma=True),
        T(64, 128, 128, 4, 4, swap=True, reduce="last", tma=True),
        T(64, 32, 128, 9, 4, reduce="last", tma=True),
        T(64, 64, 128, 6, 4, swap=True, reduce="kernel"),
        T(64, 64, 128, 3, 4, swap=True, reduce="last", pdl=True),
    ],
    128: [
        T(128, 64, 128, 4, 4, swap=True, reduce="last"),
        T(128, 64, 64, 4, 4, swap=True, reduce="last"),
        T(128, 128, 64, 6, 8, reduce="last"),
        T(128, 64, 128, 4, 4, swap=True, reduce="last", tma=True),
        T(128, 64, 64, 4, 4, swap=True, reduce="last", tma=True),
        T(128, 128, 64, 6, 8, reduce="last", tma=True),
        T(128, 128, 64, 3, 4, reduce="last", tma=True),
        T(64, 64, 128, 6, 4, swap=True, reduce="last", tma=True),
        T(128, 32, 128, 5, 4, reduce="last", tma=True),
        T(128, 64, 64, 4, 4, swap=True, reduce="last", pdl=True),
    ],
    256: [
        T(128, 128, 64, 6, 8, reduce="last"),
        T(128, 64, 64, 4, 4, swap=True, reduce="last"),
        T(128, 128, 64, 6, 8, reduce="last", tma=True),
        T(128, 128, 64, 3, 4, reduce="last", tma=True),
        T(128, 64, 64, 4, 4, swap=True, reduce="last", tma=True),
        T(256, 64, 64, 5, 8, reduce="last", tma=True),
        T(256, 128, 64, 4, 8, reduce="last", tma=True),
        T(128, 256, 64, 4, 8, reduce="last", tma=True),
    ],
    1536: [
        T(128, 256, 64, 4, 8, tma=True),
        T(128, 128, 64, 6, 8, tma=True),
        T(128, 128, 64, 5, 8, tma=True),
        T(128, 128, 64, 4, 4, tma=True),
        T(64, 256, 64, 4, 4, tma=True),
        T(64, 256, 64, 4, 8, tma=True),
        T(256, 128, 64, 4, 8, tma=True),
        T(64, 128, 64, 6, 4, tma=True),
        T(128, 128, 64, 6, 8, tma=True, reduce="last"),
        T(64, 256, 64, 4, 8, tma=True, reduce="last"),
    ],
    1 << 30: [
        T(128, 128, 64, 4, 8),
        T(128, 128, 64, 5, 8, tma=True),
        T(128, 128, 64, 3, 4, tma=True),
        T(128, 256, 64, 3, 8),
        T(128, 256, 64, 4, 8, tma=True),
        T(128, 256, 64, 4, 8, tma=True, group_m=16),
        T(256, 128, 64, 4, 8, tma=True),
        T(256, 128, 64, 4, 8, tma=True, reduce="park"),
        T(128, 256, 64, 4, 8, tma=True, reduce="park"),
    ],
}
# Built by the compiler's newest passes: run only on request, last, after everything is printed.
SPECIALIZED = [
    T(128, 256, 64, 3, 4, tma=True, specialize=True),
    T(128, 256, 64, 4, 4, tma=True, specialize=True),
    T(128, 128, 64, 4, 4, tma=True, specialize=True),
]


def split_options(n: int) -> tuple[int, ...]:
    """How many splits are worth a try for n weight rows."""
    if n <= 2048:
        return (1, 4, 8)
    return (1, 2, 4) if n <= 8192 else (1,)


def describe(config: TileConfig) -> str:
    flags = "s" * config.swap + "t" * config.tma + "w" * config.specialize + "p" * config.pdl
    flags += {"loop": "", "last": "L", "kernel": "K", "park": "P"}[config.reduce]
    flags += f"g{config.group_m}" if config.group_m != 8 else ""
    tile = f"{config.block_m}x{config.block_n}x{config.block_k}"
    return f"{tile}.{config.num_stages}.{config.num_warps}{flags}"
