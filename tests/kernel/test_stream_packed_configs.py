"""What the streaming matmul of packed weights is told to do fits the chip and covers the weight."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from quire.kernels import stream_packed_configs
from quire.kernels.chip import H200, Chip
from quire.kernels.slabs import SlabForm
from quire.kernels.stream_packed_configs import (
    StreamPackedConfig,
    can_stream,
    shared_bytes,
    stream_packed_ways,
    words_of,
)

NARROW = ((4096, 4096), (6144, 4096), (4096, 14336), (5120, 17408), (7168, 5120), (896, 4864))
WIDE = ((28672, 4096), (34816, 5120), (128256, 4096))
ODD = ((1000, 1536), (8 * 131, 512), (512, 256), (24, 896))
ROWS = (1, 7, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 256)
FORM = SlabForm("int", 4, 0, 64, group=128, zero=8, lanes=True, scales="f16")
SMALL_GROUPS = replace(FORM, group=32)


def _words(k: int, form: SlabForm = FORM) -> int:
    return -(-k // (2 * form.group))


def _ways(m: int, n: int, k: int, chip: Chip = H200) -> tuple[StreamPackedConfig, ...]:
    return stream_packed_ways(m, (n, k), _words(k), chip)


@pytest.mark.parametrize("n,k", NARROW + WIDE + ODD)
@pytest.mark.parametrize("m", ROWS)
@pytest.mark.parametrize("form", [FORM, SMALL_GROUPS])
def test_sizes_fit_the_chip_and_the_weight(form: SlabForm, m: int, n: int, k: int) -> None:
    assert can_stream(form, (n, k), torch.bfloat16, H200)
    for config in stream_packed_ways(m, (n, k), _words(k, form), H200):
        assert shared_bytes(config, _words(k, form)) <= 222 << 10  # barriers have the rest
        steps = k // (128 * config.slabs)
        assert n % config.rows == 0 and k % (128 * config.slabs) == 0
        assert config.rows <= config.tile and config.tile in (32, 64, 128)
        assert 2 <= config.num_stages <= steps and config.num_ahead < config.num_stages
        assert config.block_m >= min(m, 64) and config.block_m & (config.block_m - 1) == 0


OTHERS = {
    "Q8_0": SlabForm("int", 8, 0, 64, group=32, lanes=True, scales="f16"),
    "rows of eight bits": SlabForm("int", 8, 0, 64, lanes=True, scales="f32"),
    "NF4": SlabForm("table", 4, 0, 64, group=64, lanes=True, scales="f32"),
    "Q4_K": SlabForm(
        "int", 4, 0, 64, group=32, lanes=True, scales="u8", offsets="u8", super_size=8
    ),
    "Q6_K": SlabForm("int", 4, 2, 64, group=16, lanes=True, scales="s8", super_size=16, zero=32),
    "Q5_0": SlabForm("int", 4, 1, 64, group=32, lanes=True, scales="f16", zero=16),
}


@pytest.mark.parametrize("n,k", NARROW[:4] + WIDE[:2])
@pytest.mark.parametrize("m", ROWS)
@pytest.mark.parametrize("name", OTHERS)
def test_other_codes_fit_too(
    name: str, m: int, n: int, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when a stage holds part of a slab, or more than a program may have."""
    monkeypatch.setattr(stream_packed_configs, "PLANES_STREAM", True)
    form = OTHERS[name]
    assert can_stream(form, (n, k), torch.bfloat16, H200)
    words = words_of(form, k)
    for config in stream_packed_ways(m, (n, k), words, H200, form.bits, form.fields):
        assert shared_bytes(config, words, form.bits) <= 222 << 10
        assert 128 * config.slabs % form.slab == 0 and k % (128 * config.slabs) == 0
        assert 2 <= config.num_stages <= k // (128 * config.slabs)


def test_what_lies_beside_codes_is_counted() -> None:
    assert [words_of(form, 4096) for form in OTHERS.values()] == [64, 1, 64, 80, 80, 64]


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


@pytest.mark.parametrize("m", [129, 200, 256])
def test_many_rows_take_tiles_of_128(m: int) -> None:
    """Programs that all fit at once get long stages, others short ones, so that two fit."""
    for (n, k), (rows, slabs) in {
        (4096, 4096): (64, 2), (4096, 14336): (64, 2), (6144, 4096): (64, 1),
        (28672, 4096): (128, 1),
    }.items():  # fmt: skip
        (config,) = _ways(m, n, k)
        assert (config.rows, config.block_m, config.slabs) == (rows, 128, slabs)
        if slabs == 1:
            assert 2 * shared_bytes(config, _words(k)) <= 227 << 10


def test_words_that_leave_no_room_are_left_to_others() -> None:
    """Red when a weight of long rows and small groups fails in its first product."""
    assert can_stream(SMALL_GROUPS, (8192, 28672), torch.bfloat16, H200)
    assert not can_stream(SMALL_GROUPS, (16384, 53248), torch.bfloat16, H200)
    assert can_stream(FORM, (16384, 53248), torch.bfloat16, H200)
