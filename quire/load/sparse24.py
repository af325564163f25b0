"""2:4 weights of compressed-tensors (`sparse-24-bitmask`): two values of every four inputs.

A projection is `compressed` [out, in / 2], the values; `bitmask` [out, in / 8] of bytes, a bit for
each weight, the first lowest, two of four set; and `shape` [2, 1].
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from quire.errors import CheckpointError
from quire.load.module import FLOATS, Module
from quire.load.unpack import Piece
from quire.quant.sparse24 import Sparse24

VALUES, MASK, SHAPE = "compressed", "bitmask", "shape"
# Of a nibble with two bits set: the lower place, and four times the higher; others are none.
NONE = 255
PLACES = {0b0011: 4, 0b0101: 8, 0b0110: 9, 0b1001: 12, 0b1010: 13, 0b1100: 14}


def sparse24_piece(module: Module) -> Piece:
    """Checked by its headers. Raises CheckpointError."""
    num_out, half = module.matrix(VALUES, *FLOATS)
    module.check(MASK, (num_out, -(-2 * half // 8)), torch.uint8)
    if half % 2:
        raise module.error(VALUES, "an even number of columns: two of every four inputs")
    said = module.read(SHAPE).flatten().tolist()  # 16 bytes
    if said != [num_out, 2 * half]:
        raise CheckpointError(
            f"tensor {module.path(SHAPE)} says {said}, and yet {module.path(VALUES)} has"
            f" {num_out} by {half} values, two of every four inputs"
        )
    pack = partial(_weight, module)
    return Piece((num_out, 2 * half), lambda: pack().dequantize(), pack)


def _weight(module: Module) -> Sparse24:
    values, mask = module.read(VALUES), module.read(MASK)
    table = torch.full((16,), NONE, dtype=torch.uint8, device=mask.device)
    for nibble, both in PLACES.items():
        table[nibble] = both
    nibbles = torch.stack((mask & 15, mask >> 4), -1).flatten(1)[:, : values.shape[1] // 2]
    places: Tensor = table[nibbles.int()]
    if bool((places == NONE).any()):
        raise CheckpointError(
            f"tensor {module.path(MASK)} has four inputs of which not two are kept"
        )
    return Sparse24(values, places)
