"""Codebook checkpoints, as `quire quantize` writes them: 4, 8 or 16 values for every four rows.

A projection is `weight_codes` [out, in * bits / 8] of bytes, a stream of codes for each row, the
first in the lowest bits; `weight_values` [ceil(out / 4), 2 ** bits] of signed bytes; and
`weight_scale` [out, groups]. A weight is its scale times the value that its code stands for. `bits`
is 2, 3 or 4, the same for all projections.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
import torch.nn.functional as F

from quire.errors import NotSupported
from quire.load.checkpoint import Checkpoint
from quire.load.module import FLOATS, Module, Modules
from quire.load.unpack import Piece
from quire.load.words import dense_codes
from quire.models.spec import Config
from quire.quant.coded import Coded
from quire.quant.methods import said_of

BITS = (2, 3, 4)
ROWS = 4  # that share their values
BLOCK = 32
BESIDE = ("weight_values", "weight_scale")


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
        if last in BESIDE and f"{path}.weight_codes" in self._modules.names:
            return {}
        if last != "weight_codes":
            return None
        return {f"{path}.weight": codebook_piece(self._modules[path], self._bits)}


def codebook_piece(module: Module, bits: int) -> Piece:
    """Checked by its headers. Raises CheckpointError."""
    num_out, num_bytes = module.matrix("weight_codes", torch.uint8)
    if num_bytes * 8 % bits:
        raise module.error("weight_codes", f"whole codes of {bits} bits a row")
    num_in = num_bytes * 8 // bits
    module.check("weight_values", (-(-num_out // ROWS), 1 << bits), torch.int8)
    rows, num_groups = module.matrix("weight_scale", *FLOATS)
    if rows != num_out or num_in % num_groups:
        raise module.error("weight_scale", f"{num_out} by a number that {num_in} is a multiple of")
    pack = partial(_weight, module, bits)
    return Piece((num_out, num_in), lambda: pack().dequantize(), pack)


def _weight(module: Module, bits: int) -> Coded:
    stored = module.read("weight_codes")
    num_out, num_in = len(stored), stored.shape[1] * 8 // bits
    values = F.pad(module.read("weight_values"), (0, 16 - (1 << bits)))
    tables = values.repeat_interleave(ROWS, 0)[:num_out]
    scales = module.scales("weight_scale")
    group = num_in // scales.shape[1]
    block = group if group % BLOCK else BLOCK
    codes = dense_codes(stored, bits, num_in)
    return Coded(codes, 4, block, scales, tables=tables, share=group // block)
