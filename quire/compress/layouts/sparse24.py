"""compressed-tensors' `sparse-24-bitmask`: the reverse of `load/sparse24.py`, its reader."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.load.sparse24 import MASK, SHAPE, VALUES
from quire.quant.sparse24 import Sparse24


def pack(weight: Tensor) -> dict[str, Tensor]:
    """[out, in] with two zeros or more in every four."""
    sparse = Sparse24.of(weight)
    one = torch.ones((), dtype=torch.uint8, device=weight.device)
    nibbles = (one << (sparse.places & 3)) | (one << (sparse.places >> 2))  # [out, in / 4]
    if nibbles.shape[1] % 2:
        nibbles = torch.nn.functional.pad(nibbles, (0, 1))
    pairs = nibbles.unflatten(1, (-1, 2))
    return {
        VALUES: sparse.values,
        MASK: pairs[..., 0] | pairs[..., 1] << 4,
        SHAPE: torch.tensor(weight.shape, dtype=torch.int64).view(2, 1),
    }


def said(kept: list[str]) -> dict[str, object]:
    """`quantization_config`: nothing is quantised, and two of four are kept."""
    return {
        "quant_method": "compressed-tensors",
        "format": "dense",
        "quantization_status": "compressed",
        "config_groups": {},
        "ignore": [],
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
        "sparsity_config": {
            "format": "sparse-24-bitmask",
            "global_sparsity": 0.5,
            "ignore": kept,
            "registry_requires_subclass": False,
            "sparsity_structure": "2:4",
            "targets": ["Linear"],
        },
    }
