"""A safetensors file, written: the reverse of `load/safetensors_checkpoint.py`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import IO

import torch
from torch import Tensor

from quire.load.safetensors_checkpoint import DTYPES, LENGTH_BYTES

ALIGNMENT = 8
_CODES = {dtype: code for code, dtype in DTYPES.items()}


def write_tensors(file: IO[bytes], tensors: Mapping[str, Tensor]) -> int:
    """Writes all, largest items first so that each lies aligned; returns the file's size."""
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name in order:
        tensor = tensors[name]
        size = tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + size],
        }
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    file.write(len(text).to_bytes(LENGTH_BYTES, "little"))
    file.write(text)
    for name in order:
        raw = tensors[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        file.write(raw.numpy().data)
    return LENGTH_BYTES + len(text) + at
