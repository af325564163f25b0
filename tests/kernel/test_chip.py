"""What sizes kernels take on an H200, and that smaller chips get sizes that fit them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import astuple
from typing import Any

import pytest
import torch

from quire.kernels.chip import H200, Chip, chip_of
from quire.kernels.eight_bit_configs import many_tiles, pick_eight_bit_stream, pick_many
from quire.kernels.eight_bit_weight import CHAIN
from quire.kernels.matmul_configs import pick_config
from quire.kernels.slabs import SlabForm
from quire.kernels.stream_configs import pick_stream
from quire.kernels.stream_packed_configs import can_stream, shared_bytes, stream_packed_ways
from quire.kernels.stream_sparse_configs import (
    can_stream_sparse,
    sparse_bytes,
    stream_sparse_ways,
)
from quire.kernels.vendor_matmul import is_faster

SHAPES = (
    (4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336), (128256, 4096),  # 8B
    (5120, 5120), (7168, 5120), (34816, 5120), (5120, 17408), (151936, 5120),  # 14B
    (1024, 2048), (4096, 1024), (6144, 1024), (1024, 3072),  # 0.6B
    (896, 896), (1152, 896), (9728, 896), (896, 4864),  # sums of an odd number of 128
    (256, 384), (1000, 1536), (8448, 2880),
)  # fmt: skip
WHOLE = [(n, k) for n, k in SHAPES if k % 128 == 0]
FEW, MANY = range(1, 257), (*range(1, 513, 3), 1000, 1024, 2048, 4095, 8192)  # rows of x
GROUPS = (64, 128, 256)  # inputs of a word of scales
SMALLER = (Chip(132, 164 << 10), Chip(78, 227 << 10), Chip(20, 99 << 10), Chip(16, 48 << 10))


def choices(chip: Chip) -> dict[str, Iterable[Any]]:
    return {
        "matmul": (pick_config(m, n, k, chip) for n, k in SHAPES for m in MANY),
        "library": (
            is_faster(m, n, k, gated, chip.units)
            for n, k in SHAPES
            for m in MANY
            for gated in (False, True)
        ),
        "stream": (
            pick_stream(m, n, k, gated, chip)
            for n, k in SHAPES
            for m in FEW
            for gated in (False, True)
        ),
        "eight bits": (pick_eight_bit_stream(m, n, k, chip) for n, k in SHAPES for m in FEW),
        "many": (
            pick_many(m, n, widest, chip.units)
            for n, k in SHAPES
            for m in MANY
            for widest in (128, 256)
        ),
        "packed": (
            stream_packed_ways(m, (n, k), -(-k // group), chip)
            for n, k in WHOLE
            for m in FEW
            for group in GROUPS
        ),
        "2:4": (stream_sparse_ways(m, (n, k), chip) for n, k in WHOLE for m in FEW),
    }


def plain(choice: Any) -> Any:
    if isinstance(choice, tuple):
        return [plain(each) for each in choice]
    return choice if choice is None or isinstance(choice, (int, float)) else list(astuple(choice))


# Of all choices above. They were found by timing: whoever changes one measures it.
ON_AN_H200 = {
    "matmul": "30c7c3be813007b7",
    "library": "edd0fd40ed3ce9e0",
    "stream": "a994a10be1966332",
    "eight bits": "c3e092c81d75ddf4",
    "many": "61519fd0632741b1",
    "packed": "43b2977b0bfc7605",
    "2:4": "97c1b6da02ea65eb",
}


def test_an_h200_gets_what_was_measured() -> None:
    """Red when sizes for other chips change those of this one."""
    for name, found in choices(H200).items():
        text = json.dumps([plain(choice) for choice in found])
        assert hashlib.sha256(text.encode()).hexdigest()[:16] == ON_AN_H200[name], name


@pytest.mark.parametrize("chip", SMALLER)
@pytest.mark.parametrize("n,k", SHAPES)
def test_a_smaller_chip_has_room(chip: Chip, n: int, k: int) -> None:
    """Red when a kernel cannot be launched there."""
    for m in (1, 16, 17, 33, 64, 100, 128, 200, 256):
        tile = pick_config(m, n, k, chip)
        of_stage = 2 * (tile.block_m + tile.block_n) * tile.block_k
        assert tile.num_stages == 1 or tile.num_stages * of_stage <= chip.shared
        for gated in (False, True):
            streamed = pick_stream(m, n, k, gated, chip)
            if streamed is not None:
                of_stage = 2 * (streamed.tile + streamed.block_m) * streamed.block_k
                assert streamed.num_stages * of_stage <= chip.shared - (1 << 10)
                assert 1 <= streamed.num_ahead <= streamed.num_stages
                assert min(2, k // streamed.block_k) <= streamed.num_stages
        eight = pick_eight_bit_stream(m, n, k, chip)
        if eight is not None:
            assert eight.num_stages * (eight.tile + eight.block_m) * eight.block_k <= chip.shared
            assert n % eight.rows == 0


@pytest.mark.parametrize("chip", SMALLER)
@pytest.mark.parametrize("n,k", WHOLE)
def test_packed_weights_stream_only_where_there_is_room(chip: Chip, n: int, k: int) -> None:
    form = SlabForm("int", 4, 0, 64, group=128, zero=8, lanes=True, scales="f16")
    words = -(-k // 256)
    for m in (1, 16, 17, 33, 64, 100, 128, 200, 256):
        if can_stream(form, (n, k), torch.bfloat16, chip):
            for config in stream_packed_ways(m, (n, k), words, chip):
                assert shared_bytes(config, words) <= chip.shared - (5 << 10)
                assert config.num_stages >= 2 and n % config.rows == 0
        if can_stream_sparse((n, k), torch.bfloat16, chip):
            for config in stream_sparse_ways(m, (n, k), chip):
                assert sparse_bytes(config) <= chip.shared - (5 << 10)


def test_tiles_of_many_rows_fit() -> None:
    assert many_tiles(False, H200) == (128, 256) and many_tiles(True, H200) == (128,)
    for chip in SMALLER:
        assert all(4 * (128 + tile) * CHAIN <= chip.shared for tile in many_tiles(False, chip))
    assert many_tiles(False, Chip(20, 99 << 10)) == ()


def test_what_is_no_gpu_is_taken_for_an_h200() -> None:
    assert chip_of(torch.device("cpu")) == H200 == (132, 232448)
