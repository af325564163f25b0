"""Apply a grammar's token mask: a token whose bit is not set cannot be drawn.

The mask comes after every other edit, so neither a bias nor a penalty brings a token back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

    from quire.sample.inputs import TokenMask


def apply_mask(logits: Tensor, mask: TokenMask) -> None:
    """Writes -inf into [S, V] logits in place, on a CPU; `kernels/token_mask.py` is a GPU's."""
    vocab_size = logits.shape[1]
    octets = mask.bits.numpy().view(np.uint8)  # [M, 4 * words]
    allowed = np.unpackbits(octets, axis=1, count=vocab_size, bitorder="little")
    for row, keep in zip(mask.rows.tolist(), allowed, strict=True):
        logits[row, np.flatnonzero(keep == 0)] = float("-inf")
