"""Heads and StepPointers: one layer's attention and one step, as the native library reads them.

`attn/native.py` is the backend that fills them in, for tapes and for steps layer by layer.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from quire.forward import Batch
from quire.native.tape import Step


class Heads(ctypes.Structure):
    """`qn_heads` of quire_native.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("keys", "values")),
        ("page_stride", c_int64),
        *((name, c_void_p) for name in ("cos", "sin")),
        *((name, c_void_p) for name in ("q_norm", "k_norm", "offsets", "factors", "sinks")),
        *((name, c_int32) for name in ("num_heads", "num_kv_heads", "head_dim", "rotated")),
        *((name, c_int32) for name in ("window", "group", "form", "turned")),
        *((name, c_float) for name in ("scale", "softcap", "norm_eps", "k_scale", "v_scale")),
    )


class StepPointers:
    """A step's tensors as addresses, with a batch for each layer group."""

    def __init__(self, num_groups: int) -> None:
        self.slots = (ctypes.c_void_p * num_groups)()
        self.tables = (ctypes.c_void_p * num_groups)()

    def step(self, batches: Sequence[Batch]) -> Step:
        """Without samples. The batches must outlive it."""
        first = batches[0]
        for group, batch in enumerate(batches):
            self.slots[group] = address_of(batch.slots, torch.int64)
            self.tables[group] = address_of(batch.page_table, torch.int32)
        trees = {} if first.paths is None else _trees(first.paths)
        return Step(
            **trees,
            ids=address_of(first.input_ids, torch.int64),
            positions=address_of(first.positions, torch.int64),
            slots=ctypes.addressof(self.slots),
            tables=ctypes.addressof(self.tables),
            query_starts=address_of(first.query_starts, torch.int32),
            context_lens=address_of(first.context_lens, torch.int32),
            rows=address_of(first.rows, torch.int32),
            num_tokens=first.num_tokens,
            num_seqs=first.num_seqs,
            table_stride=first.page_table.stride(0),
            page_size=first.page_size,
        )


def _trees(paths: Tensor) -> dict[str, int]:
    return {"paths": address_of(paths, torch.int32), "path_stride": paths.stride(0)}


def address_of(tensor: Tensor, dtype: torch.dtype) -> int:
    is_row = tensor.stride(-1) == 1 or not tensor.numel()
    assert tensor.dtype == dtype and is_row, (tensor.dtype, tensor.stride())
    return tensor.data_ptr()
