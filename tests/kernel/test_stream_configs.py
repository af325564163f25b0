"""What the streaming matmul is told to do fits the chip and covers the weight."""

from __future__ import annotations

import pytest

from quire.kernels.chip import H200
from quire.kernels.stream_configs import StreamConfig, boxes_of, pick_stream

SHAPES = (
    (4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336), (128256, 4096),  # 8B
    (5120, 5120), (7168, 5120), (34816, 5120), (5120, 17408), (151936, 5120),  # 14B
    (1024, 2048), (4096, 1024), (6144, 1024), (1024, 3072),  # 0.6B
    (896, 896), (1152, 896), (9728, 896), (896, 4864),  # sums of an odd number of 128
)  # fmt: skip


def _shared_bytes(config: StreamConfig) -> int:
    return config.num_stages * (config.tile + config.block_m) * config.block_k * 2


@pytest.mark.parametrize("n,k", SHAPES)
@pytest.mark.parametrize("m", [1, 4, 5, 8, 9, 16, 17, 32])
def test_portions_fit_the_chip_and_the_weight(m: int, n: int, k: int) -> None:
    config = pick_stream(m, n, k, gated=False, chip=H200)
    assert config is not None
    assert n % config.rows == 0 and config.rows % 8 == 0 and config.rows <= config.tile == 64
    assert k % config.block_k == 0 and k // config.block_k >= config.num_stages
    assert m <= config.block_m <= max(8, 2 * m)
    assert 1 <= config.num_ahead <= config.num_stages
    assert _shared_bytes(config) <= 226 << 10  # barriers have the rest


@pytest.mark.parametrize("m", [1, 5, 32])
def test_narrow_weights_keep_most_of_the_chip_reading(m: int) -> None:
    """In one round, as long as a multiprocessor takes one program at a time."""
    for n, k in ((4096, 4096), (6144, 4096), (5120, 5120), (7168, 5120), (4096, 14336)):
        config = pick_stream(m, n, k, gated=False, chip=H200)
        assert config is not None
        assert 88 <= n // config.rows <= 132, f"{n=} {config=}"
        assert _shared_bytes(config) > (228 << 10) / 2


@pytest.mark.parametrize("m,tile", [(33, 128), (64, 128), (96, 256), (128, 256), (256, 128)])
def test_wide_weights_stream_for_more_rows_where_tiles_fill_the_chip(m: int, tile: int) -> None:
    config = pick_stream(m, 28672, 4096, gated=True, chip=H200)
    assert config is not None and config.rows == config.tile == tile
    assert m <= config.block_m and _shared_bytes(config) <= 226 << 10
    assert (
        pick_stream(m, 34816, 5120, gated=True, chip=H200) is None
    )  # 136 tiles of 256, 272 of 128
    assert pick_stream(m, 4096, 14336, gated=False, chip=H200) is None


@pytest.mark.parametrize("n,k", [(1024, 2048), (4096, 1024), (6144, 1024), (1024, 3072)])
@pytest.mark.parametrize("m", [33, 64, 80, 256])
def test_small_weights_stream_in_tiles(m: int, n: int, k: int) -> None:
    config = pick_stream(m, n, k, gated=n == 6144, chip=H200)
    assert config == StreamConfig(64, 64, 128, 6, 3)
    assert n % config.rows == 0 and k // config.block_k >= config.num_stages
    assert _shared_bytes(config) <= 226 << 10


@pytest.mark.parametrize("n,k,rows", [(4096, 4096, 32), (6144, 4096, 48), (7168, 5120, 56)])
def test_narrow_weights_stream_while_one_tile_holds_the_rows(n: int, k: int, rows: int) -> None:
    for m in (33, 64):
        config = pick_stream(m, n, k, gated=False, chip=H200)
        assert config is not None and config.rows == rows and config.block_m == 64
        assert _shared_bytes(config) <= 226 << 10
    for m in (65, 120, 129, 256):
        assert pick_stream(m, n, k, gated=False, chip=H200) is None
    config = pick_stream(128, n, k, gated=False, chip=H200)
    assert (config is not None) == (n > k)  # a projection to heads
    assert config is None or _shared_bytes(config) <= 226 << 10


@pytest.mark.parametrize("n,k", [(4096, 14336), (12288, 2048), (512, 4096), (1024, 896)])
def test_what_was_slower_or_not_measured_is_left_to_others(n: int, k: int) -> None:
    assert pick_stream(64, n, k, gated=False, chip=H200) is None
    assert pick_stream(128, n, k, gated=False, chip=H200) is None


@pytest.mark.parametrize("m", [65, 80, 129, 200, 240])
def test_padding_is_left_to_others(m: int) -> None:
    assert pick_stream(m, 28672, 4096, gated=True, chip=H200) is None


@pytest.mark.parametrize("n,k", [(4096, 4160), (32001, 4096), (50257, 768), (9000 - 4, 256)])
def test_odd_weights_are_left_to_others(n: int, k: int) -> None:
    assert pick_stream(1, n, k, gated=False, chip=H200) is None


@pytest.mark.parametrize("rows", range(8, 65, 8))
def test_boxes_cover_the_rows_within_the_tile(rows: int) -> None:
    first, rest = boxes_of(rows)
    assert rows <= first + rest <= 64
    assert first & (first - 1) == 0 and rest & (rest - 1) == 0
    assert rest < first and (rest == 0 or first % rest == 0)
    assert (first + rest) * 3 < rows * 4, "a quarter of the copies would bring nothing"
