"""Codebook checkpoints, as `quire quantize` writes them: sixteen values for each few rows.

A projection is `weight_codes` [out, in / 2] of bytes, the first code in the low bits, and
`weight_values` [out / rows, 16], where `rows` outputs share their values.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from quire.load.checkpoint import Checkpoint
from quire.load.module import FLOATS, Module, Modules
from quire.load.unpack import Piece
from quire.load.words import dense_codes
from quire.quant.clustered import Clustered

NUM_VALUES = 16


class CodebookReader:
    """`unpack.Reader`."""

    def __init__(self, stored: Checkpoint, device: torch.device) -> None:
        self._modules = Modules.of(stored, device)

    def __call__(self, name: str) -> Mapping[str, Piece] | None:
        path, _, last = name.rpartition(".")
        if last == "weight_values" and f"{path}.weight_codes" in self._modules.names:
            return {}
        if last != "weight_codes":
            return None
        return {f"{path}.weight": codebook_piece(self._modules[path])}


def codebook_piece(module: Module) -> Piece:
    """Checked by its headers. Raises CheckpointError."""
    num_out, num_bytes = module.matrix("weight_codes", torch.uint8)
    num_groups, _ = module.matrix("weight_values", *FLOATS)
    if num_out % num_groups:
        raise module.error("weight_values", f"a number of rows that {num_out} is a multiple of")
    module.check("weight_values", (num_groups, NUM_VALUES), *FLOATS)
    pack = partial(_weight, module, num_out // num_groups)
    return Piece((num_out, 2 * num_bytes), lambda: pack().dequantize(), pack)


def _weight(module: Module, rows: int) -> Clustered:
    stored = module.read("weight_codes")
    values = module.scales("weight_values").repeat_interleave(rows, 0)
    return Clustered(dense_codes(stored, 4, 2 * stored.shape[1]), values)
