"""Which packed weights stream on Hopper, and in what sizes, as plain data.

The kernels are in `stream_packed.py` and `stream_turns.py`. No size changes a bit of the result.
The numbers were found by timing products of an 8B model on an H200. There is one way to store a
weight for all sizes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch

from quire.kernels.chip import Chip
from quire.kernels.launch import ceil_div, pad_to_power
from quire.kernels.slabs import SlabForm

__all__ = [
    "BESIDE",
    "FIELD",
    "StreamPackedConfig",
    "can_stream",
    "is_short",
    "least_slabs",
    "numbers_of_word",
    "own_rows",
    "shared_bytes",
    "stream_packed_ways",
    "words_of",
]

# Kernels of codes in two planes (3, 5 and 6 bits) compile for Hopper and have not run there yet.
PLANES_STREAM = False
FIELD = 64  # inputs of a field; a row of a slab is as many bytes of two fields
_SLAB = 2 * FIELD
_TILE = 64  # weight rows of the matrix instruction
_LEAST_ROWS, _ROW_UNIT = 32, 8  # weight rows a program owns: no fewer, and a multiple
_FEWEST_ROWS, _FEW_ROWS, _MANY_ROWS = 16, 32, 128  # of x
BESIDE = 11 << 10  # bytes of shared memory that a program leaves
# (slabs of a stage, stages) of a sum in turns, the fastest first. Stages are even, so that each
# group has stages of its own.
_TURNS = ((4, 6), (4, 4), (2, 6), (2, 4), (1, 4), (1, 2))


@dataclass(frozen=True, slots=True)
class StreamPackedConfig:
    rows: int  # of w that a program owns, a divisor of all rows
    tile: int  # rows of a stage: a power of two, no fewer than `rows`
    block_m: int  # rows of x in a tile
    slabs: int  # of a stage, counted in 128 inputs whatever the form's slabs have
    num_stages: int
    num_ahead: int  # of these, how many are asked for before the inputs are there
    in_turns: bool = False  # two warpgroups take turns at the sum


def can_stream(form: SlabForm, shape: tuple[int, int], dtype: torch.dtype, chip: Chip) -> bool:
    """Whether the kernel takes a form: one that can be unpacked in registers, with scales 16 inputs
    apart or more, and whole slabs of inputs."""
    fits = form.group in (0, 16, 32, 64) or form.group % _SLAB == 0
    is_laid = form.lanes and form.width == FIELD and form.rows == 1
    n, k = shape
    unit = max(_SLAB, form.slab)
    is_whole = k % unit == 0 and k >= 2 * unit and own_rows(n, 1) is not None
    if not (is_laid and is_whole and fits and _is_code(form, dtype)):
        return False
    return _Weight(shape, words_of(form, k), form.bits, least_slabs(form.fields), chip).fits(_TILE)


def is_short(form: SlabForm) -> bool:
    """Whether codes become weights without fp32: see `stream_unpack.py`."""
    is_plain = form.offsets == "" and form.super_size == 0 and form.zeros in ("", "u16")
    if form.kind == "e2m1":
        return is_plain and form.scales == "power"
    return form.kind == "int" and form.bits == 4 and is_plain and form.scales in ("f16", "bf16")


def _is_code(form: SlabForm, dtype: torch.dtype) -> bool:
    """Whether there is a way to unpack it in registers."""
    if is_short(form):
        return dtype == torch.bfloat16 or (form.kind == "int" and form.scales == "f16")
    is_kind = form.kind in ("int", "table", "e4m3") and form.scales in _NUMBERS_OF_WORD
    is_kind = is_kind and form.scales != "power" and (PLANES_STREAM or not form.high)
    return is_kind and form.offsets in ("", "f16", "u8") and form.zeros in ("", "u16", "u8", "s8")


_NUMBERS_OF_WORD = {"f32": 1, "f16": 2, "bf16": 2, "u8": 4, "s8": 4, "power": 4}


def numbers_of_word(form: SlabForm) -> int:
    """Scales in four bytes, where a zero or an offset may lie beside one."""
    is_pair = form.zeros == "u16" or form.offsets == "f16"
    return 1 if is_pair else _NUMBERS_OF_WORD[form.scales]


def words_of(form: SlabForm, k: int) -> int:
    """Beside the codes of a row of k inputs."""
    groups = ceil_div(k, form.group) if form.group else 1
    supers = ceil_div(groups, form.super_size) if form.super_size else 0
    bytes_of = [form.offsets == "u8", form.zeros in ("u8", "s8")]
    return ceil_div(groups, numbers_of_word(form)) + supers + sum(bytes_of) * ceil_div(groups, 4)


def least_slabs(fields: int) -> int:
    """Of 128 inputs, that a stage must have to hold whole slabs of a form."""
    return max(1, fields // 2)


@cache
def stream_packed_ways(
    m: int, shape: tuple[int, int], num_words: int, chip: Chip, bits: int = 4, fields: int = 2
) -> tuple[StreamPackedConfig, ...]:
    """For m rows of x: one for each kernel that can, the faster first. `num_words`: of scales in a
    row; `bits` of a code, `fields` of the form's slab."""
    rows = own_rows(shape[0], chip.units)
    assert rows is not None, f"got {shape[0]} rows, which no portion divides"
    weight = _Weight(shape, num_words, bits, least_slabs(fields), chip)
    together = _together(m, rows, weight)
    turns = _in_turns(m, rows, weight)
    return (together,) if turns is None else (turns, together)


def shared_bytes(config: StreamPackedConfig, num_words: int, bits: int = 4) -> int:
    """Of a program, but for barriers. Words of scales are kept as a power of two of rows."""
    of_stage = config.slabs * (config.tile * _SLAB * bits // 8 + 2 * _SLAB * config.block_m)
    of_sum = 4 * _TILE * config.block_m if config.in_turns else 0
    return config.num_stages * of_stage + 4 * config.tile * pad_to_power(num_words) + of_sum


@dataclass(frozen=True, slots=True)
class _Weight:
    shape: tuple[int, int]
    num_words: int
    bits: int
    least: int  # slabs of a stage
    chip: Chip

    def has_room(self, config: StreamPackedConfig) -> bool:
        return shared_bytes(config, self.num_words, self.bits) <= self.chip.shared - BESIDE

    def fits(self, tile: int) -> bool:
        """Whether some stages fit beside the words, for any rows of x."""
        block_m = _MANY_ROWS if self.least == 1 else _TILE // self.least
        return self.has_room(StreamPackedConfig(tile, tile, block_m, self.least, 2, 1))


def _in_turns(m: int, rows: int, weight: _Weight) -> StreamPackedConfig | None:
    """None: more rows of x than were measured, or of the weight than one program for each
    multiprocessor takes, so that those with more than one have two groups anyway."""
    n, k = weight.shape
    if m > _FEW_ROWS or n // rows > weight.chip.units:
        return None
    tile, block_m = max(_LEAST_ROWS, pad_to_power(rows)), max(8, pad_to_power(m))
    for slabs, stages in _TURNS:
        if slabs % weight.least:
            continue
        config = StreamPackedConfig(rows, tile, block_m, slabs, stages, 1, in_turns=True)
        is_whole = k % (slabs * _SLAB) == 0 and k // (slabs * _SLAB) >= stages
        if is_whole and weight.has_room(config):
            return config
    return None


def _together(m: int, rows: int, weight: _Weight) -> StreamPackedConfig:
    (n, k), num_units = weight.shape, weight.chip.units
    is_tall = weight.fits(2 * _TILE)
    is_wide = n >= 3 * _TILE * num_units
    block_m = _MANY_ROWS if m > _MANY_ROWS else max(8, pad_to_power(min(m, 64)))
    if m > _FEW_ROWS and is_wide and n % (2 * _TILE) == 0 and is_tall:
        rows = 2 * _TILE
    elif n % _TILE == 0 and (m > 64 or (m <= _FEWEST_ROWS and rows <= _LEAST_ROWS)):
        rows = _TILE  # half a tile takes nearly as long as a whole one
    tile = max(_LEAST_ROWS, pad_to_power(rows))
    most = 4
    if m > _MANY_ROWS:  # where programs wait for others, two should fit a multiprocessor
        most = 2 if n // rows * ceil_div(m, block_m) <= num_units else 1
    num_slabs = next(s for s in (4, 2, 1) if k % (s * _SLAB) == 0 and k >= 2 * s * _SLAB)
    num_slabs = max(weight.least, min(most, num_slabs))
    stages = 2 if is_wide or m > _FEW_ROWS else 3
    stages = min(stages, k // (num_slabs * _SLAB))
    # Asking for more before the wait slows down the kernel before.
    config = StreamPackedConfig(rows, tile, block_m, num_slabs, stages, 1)
    while config.slabs > weight.least and not weight.has_room(config):
        config = replace(config, slabs=config.slabs // 2)
    while config.block_m > 8 and not weight.has_room(config):
        config = replace(config, block_m=config.block_m // 2)
    return config


def own_rows(n: int, num_units: int) -> int | None:
    """Weight rows of a program, so that nearly every multiprocessor gets one; None: no number
    divides all rows."""
    share = ceil_div(n, num_units)
    fewest = min(_TILE, max(_LEAST_ROWS, ceil_div(share, _ROW_UNIT) * _ROW_UNIT))
    higher = [rows for rows in range(fewest, _TILE + 1, _ROW_UNIT) if n % rows == 0]
    lower = [rows for rows in range(fewest, 7, -_ROW_UNIT) if n % rows == 0]
    return next(iter(higher + lower), None)
