"""Codebook checkpoints, as `quire quantize` writes them: 4, 8 or 16 values for each few rows.

A projection is `weight_codes` [out, in * bits / 8] of bytes, a stream of codes for each row, the
first in the lowest bits, and `weight_values` [out / rows, 2 ** bits], where `rows` outputs share
their values. `bits` is 2, 3 or 4, the same for all projections.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from quire.errors import NotSupported
from quire.load.checkpoint import Checkpoint
from quire.load.module import FLOATS, Module, Modules
from quire.load.unpack import Piece
from quire.load.words import dense_codes
from quire.models.spec import Config
from quire.quant.clustered import Clustered
from quire.quant.methods import said_of

BITS = (2, 3, 4)


class CodebookReader:
    """`unpack.Reader`."""

    def __init__(self, stored: Checkpoint, device: torch.device) -> None:
        self._modules = Modules.of(stored, device)
        self._bits = Config(said_of(stored.config)).count("bits", 4)
        if self._bits not in BITS:
            raise NotSupported(
                f"config.json: got bits={self._bits} of codebooks, of which {BITS} are read"
            )

    def __call__(self, name: str) -> Mapping[str, Piece] | None:
        path, _, last = name.rpartition(".")
        if last == "weight_values" and f"{path}.weight_codes" in self._modules.names:
            return {}
        if last != "weight_codes":
            return None
        return {f"{path}.weight": codebook_piece(self._modules[path], self._bits)}


def codebook_piece(module: Module, bits: int) -> Piece:
    """Checked by its headers. Raises CheckpointError."""
    num_out, num_bytes = module.matrix("weight_codes", torch.uint8)
    num_groups, _ = module.matrix("weight_values", *FLOATS)
    if num_out % num_groups:
        raise module.error("weight_values", f"a number of rows that {num_out} is a multiple of")
    module.check("weight_values", (num_groups, 1 << bits), *FLOATS)
    if num_bytes * 8 % bits:
        raise module.error("weight_codes", f"whole codes of {bits} bits a row")
    num_in = num_bytes * 8 // bits
    pack = partial(_weight, module, bits, num_out // num_groups)
    return Piece((num_out, num_in), lambda: pack().dequantize(), pack)


def _weight(module: Module, bits: int, rows: int) -> Clustered:
    stored = module.read("weight_codes")
    values = module.scales("weight_values").repeat_interleave(rows, 0)
    return Clustered(dense_codes(stored, bits, stored.shape[1] * 8 // bits), values)
