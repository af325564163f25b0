"""Whether the Hopper kernels can run: they need that chip and a Triton whose Gluon we know.

Modules written in Gluon are imported only where `has_hopper_kernels` is true.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module

import torch
import triton

__all__ = ["has_hopper_kernels"]

# Versions of Triton whose Gluon we know; it is no stable language.
GLUON_VERSIONS = ("3.6.",)


@cache
def has_hopper_kernels(device: torch.device) -> bool:
    if device.type != "cuda" or not torch.cuda.is_available():
        return False
    if torch.cuda.get_device_capability(device)[0] != 9:
        return False
    version: str = triton.__version__
    return version.startswith(GLUON_VERSIONS) and _has_gluon()


def _has_gluon() -> bool:
    try:
        import_module("triton.experimental.gluon")
    except ImportError:
        return False
    return True
