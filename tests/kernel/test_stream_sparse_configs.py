"""What the streaming matmul of 2:4 weights is told to do fits the chip and covers the weight."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.chip import H200, Chip
from quire.kernels.stream_packed_configs import StreamPackedConfig
from quire.kernels.stream_sparse_configs import can_stream_sparse, sparse_bytes, stream_sparse_ways

NARROW = ((4096, 4096), (6144, 4096), (4096, 14336), (5120, 17408), (7168, 5120), (896, 4864))
WIDE = ((28672, 4096), (34816, 5120), (128256, 4096))
ODD = ((1000, 1536), (8 * 131, 512), (512, 256), (24, 896))
ROWS = (1, 7, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 256)


def _ways(m: int, n: int, k: int, chip: Chip = H200) -> tuple[StreamPackedConfig, ...]:
    return stream_sparse_ways(m, (n, k), chip)


@pytest.mark.parametrize("n,k", NARROW + WIDE + ODD)
@pytest.mark.parametrize("m", ROWS)
def test_sizes_fit_the_chip_and_the_weight(m: int, n: int, k: int) -> None:
    assert can_stream_sparse((n, k), torch.bfloat16, H200)
    for config in _ways(m, n, k):
        assert sparse_bytes(config) <= 222 << 10  # barriers have the rest
        steps = k // (128 * config.slabs)
        assert n % config.rows == 0 and k % (128 * config.slabs) == 0
        assert config.rows <= config.tile and config.tile in (32, 64, 128)
        assert config.tile <= 64 or config.rows == config.tile, "bits come in boxes of 64 rows"
        assert 2 <= config.num_stages <= steps and config.num_ahead < config.num_stages
        assert config.block_m >= min(m, 64) and config.block_m & (config.block_m - 1) == 0


@pytest.mark.parametrize("n,k", NARROW)
@pytest.mark.parametrize("m", [1, 16, 17, 32])
def test_few_rows_of_narrow_weights_are_summed_in_turns(m: int, n: int, k: int) -> None:
    turns, together = _ways(m, n, k)
    assert turns.in_turns and not together.in_turns
    assert turns.tile <= 64 and turns.num_stages % 2 == 0, "a group shares stages with the other"
    assert n // turns.rows <= H200.units, "a second program would wait for the first"
    assert not any(way.in_turns for way in _ways(33, n, k))


@pytest.mark.parametrize("n,k", WIDE)
@pytest.mark.parametrize("m", [1, 32])
def test_wide_weights_are_not(m: int, n: int, k: int) -> None:
    assert [way.in_turns for way in _ways(m, n, k)] == [False]


def test_what_is_narrow_depends_on_the_chip() -> None:
    assert [way.in_turns for way in _ways(1, 8192, 4096, H200)] == [True, False]
    assert [way.in_turns for way in _ways(1, 8192, 4096, H200._replace(units=78))] == [False]
