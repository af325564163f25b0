"""Caches for Hopper's attention kernels: which tensors they accept, and the descriptors that the
copy engine reads."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from quire.kernels.hopper import has_hopper_kernels
from quire.kernels.launch import alignments
from quire.kernels.paged_inputs import PagedInputs

__all__ = ["BAND", "KeptDescriptors", "suits_hopper"]

BAND = gl.constexpr(64)  # columns of a copied box: 128 bytes, the span of the swizzle


def suits_hopper(q: Tensor, inputs: PagedInputs) -> bool:
    """Whether the Hopper kernels can copy these tensors and compute this kind of attention."""
    _, page_size, head_dim = inputs.heads
    return (
        has_hopper_kernels(q.device)
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.dtype == inputs.keys.dtype  # and so no codes
        and head_dim in (64, 128)
        and page_size in (16, 32, 64, 128, 256)
        and not inputs.window
        and not inputs.softcap
        and inputs.sinks is None
        and all(alignments(inputs.keys, inputs.values))  # as the copy engine wants them
    )


class KeptDescriptors:
    """Descriptors of the caches seen so far: making one costs more than using it."""

    def __init__(self, describe: Callable[[Tensor], TensorDescriptor]) -> None:
        self._describe = describe
        self._kept: dict[tuple[int, torch.dtype, torch.Size], TensorDescriptor] = {}

    def __call__(self, cache: Tensor) -> TensorDescriptor:
        key = (cache.data_ptr(), cache.dtype, cache.shape)
        found = self._kept.get(key)
        if found is None:
            found = self._kept[key] = self._describe(cache)
        return found
