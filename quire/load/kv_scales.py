"""Scales of keys and values that a checkpoint brings for a cache in fp8.

Calibrated once, one for each layer, and stored under several names: compressed-tensors'
(`kv_cache_scheme`), ModelOpt's and those of other fp8 checkpoints. Checkpoints without them, and
layers with one alone, leave the scale to each row.
"""

from __future__ import annotations

import math

from quire.errors import CheckpointError, NotSupported
from quire.kv.spec import KvScales
from quire.load.checkpoint import Checkpoint

LAYER = "model.layers.{i}.self_attn."
# First come, first served.
KEYS = ("k_scale", "attn.k_scale", "k_proj.k_scale", "qkv_proj.k_scale", "k_proj.output_scale")
VALUES = ("v_scale", "attn.v_scale", "v_proj.v_scale", "qkv_proj.v_scale", "v_proj.output_scale")
BOTH = "kv_scale"


def kv_scales(checkpoint: Checkpoint, num_layers: int) -> dict[int, KvScales]:
    """By layer; empty where the checkpoint has none."""
    names = set(checkpoint.names())
    found: dict[int, KvScales] = {}
    for layer in range(num_layers):
        at = LAYER.format(i=layer)
        pair = [
            next((at + last for last in (*lasts, BOTH) if at + last in names), None)
            for lasts in (KEYS, VALUES)
        ]
        if pair[0] is not None and pair[1] is not None:
            found[layer] = KvScales(_read(checkpoint, pair[0]), _read(checkpoint, pair[1]))
    return found


def _read(checkpoint: Checkpoint, name: str) -> float:
    if math.prod(checkpoint.shape(name)) != 1:
        raise NotSupported(
            f"tensor {name} has shape {checkpoint.shape(name)}: scales of single heads are not"
            " read; use kv_cache_dtype='fp8_per_token_head', which needs none"
        )
    scale = float(checkpoint.read(name).float().item())
    if not (math.isfinite(scale) and scale > 0):
        raise CheckpointError(
            f"tensor {name} is {scale}, want a scale above 0; use"
            " kv_cache_dtype='fp8_per_token_head', which needs none"
        )
    return scale
