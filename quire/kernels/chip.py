"""Chip: what the sizes of a kernel's pieces depend on. No choice of sizes changes a bit.

How quick sizes are was measured on an H200. On any other chip its own numbers decide how work is
dealt out and what fits.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch

__all__ = ["H200", "Chip", "chip_of"]


class Chip(NamedTuple):
    units: int  # multiprocessors
    shared: int  # bytes of shared memory that one program may have


H200 = Chip(132, 227 << 10)


@cache
def chip_of(device: torch.device) -> Chip:
    """Of a device that is no GPU, an H200: what is compiled there is for another machine."""
    if device.type != "cuda":
        return H200
    found: Any = torch.cuda.get_device_properties(device)
    return Chip(found.multi_processor_count, found.shared_memory_per_block_optin)
