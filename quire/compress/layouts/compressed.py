"""compressed-tensors layouts: packed whole numbers, bytes of whole numbers, floats of 8 and 4 bits.

What each tensor holds is told in `load/compressed.py` and `load/floats4.py`, the readers.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from quire.compress.grid import Codes, Grid
from quire.compress.layouts.words import to_bytes, to_words

DYNAMIC_TOKEN = {"strategy": "token", "dynamic": True, "symmetric": True}


def pack_words(codes: Codes, grid: Grid) -> dict[str, Tensor]:
    """`pack-quantized`: any bits, as they are with 2**(bits - 1) for 0."""
    found = {
        "weight_packed": to_words(codes.codes, grid.bits),
        "weight_scale": codes.steps.scales.to(grid.dtype),
        "weight_shape": torch.tensor(codes.codes.shape, dtype=torch.int64),
    }
    if grid.has_zeros:  # packed along the outputs
        zeros = codes.steps.zeros.byte().t().contiguous()
        found["weight_zero_point"] = to_words(zeros, grid.bits).t().contiguous()
    return found


def pack_bytes(codes: Codes, grid: Grid) -> dict[str, Tensor]:
    """`int-quantized`: symmetric codes of eight bits as signed bytes."""
    return {
        "weight": (codes.codes ^ 128).view(torch.int8),
        "weight_scale": codes.steps.scales.to(grid.dtype),
    }


def pack_nibbles(codes: Tensor) -> Tensor:
    """uint8 [out, in] of four-bit floats -> [out, in / 2], the first in the low bits."""
    return to_bytes(codes, 4)


def int_weights(grid: Grid) -> dict[str, object]:
    return {
        "num_bits": grid.bits,
        "type": "int",
        "symmetric": not grid.has_zeros,
        "strategy": "channel" if grid.group is None else "group",
        "group_size": grid.group,
        "dynamic": False,
    }


def float_weights(bits: int, strategy: str, group_size: int | None = None) -> dict[str, object]:
    return {
        "num_bits": bits,
        "type": "float",
        "symmetric": True,
        "strategy": strategy,
        "group_size": group_size,
        "dynamic": False,
    }


def said(
    form: str,
    weights: Mapping[str, object],
    inputs: Mapping[str, object] | None,
    kept: list[str],
) -> dict[str, object]:
    """`quantization_config`: one group for all projections; `kept` are modules left plain."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {**group, "output_activations": None, "format": form}},
        "ignore": kept,
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }
