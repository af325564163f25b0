"""Factors beside GGUF tensors: `X.scale` multiplies the weights of `X.weight`.

Files converted from NVFP4 have one for a matrix, or one for each expert. What lies beside for
kernels that round their inputs (`X.input_scale`) is not read: inputs are taken as they are.
"""

from __future__ import annotations

import math
from collections.abc import Container
from dataclasses import replace

from quire.load.gguf import GGUFFile, bad_field
from quire.quant.coded import Coded

_WEIGHT, _SCALE, _INPUT_SCALE = ".weight", ".scale", ".input_scale"
_LEAST = 2.0**-60  # what stays as one number for all, times another, is far from fp32's ends


def is_factor(name: str, names: Container[str]) -> bool:
    """Whether a tensor is one of those, beside a weight that is there."""
    for end in (_INPUT_SCALE, _SCALE):
        if name.endswith(end) and name.removesuffix(end) + _WEIGHT in names:
            return True
    return False


def factor_of(file: GGUFFile, name: str, expert: int | None) -> float | None:
    """Of a weight; None: there is none. Raises CheckpointError."""
    beside = name.removesuffix(_WEIGHT) + _SCALE
    if not name.endswith(_WEIGHT) or beside not in file.tensors:
        return None
    info, weight = file.tensors[beside], file.tensors[name]
    count = 1 if expert is None else weight.shape[0]
    if math.prod(info.shape) != count or info.type.name != "F32":
        shown = f"{info.type.name} {info.shape}"
        raise bad_field(file.path, f"tensor {beside!r}", shown, f"want {count} of F32")
    factor = float(file.read(beside).flatten()[expert or 0])
    if not math.isfinite(factor):
        raise bad_field(file.path, f"tensor {beside!r}", factor, "a scale is not finite")
    return factor


def times(weight: Coded, factor: float) -> Coded | None:
    """None: the form has no place for it."""
    if weight.super_scales is None or not weight.eighths or not _LEAST <= factor <= 1 / _LEAST:
        return None
    return replace(weight, super_scales=weight.super_scales * factor)
