"""NativeHeads: every head of a row by a float weight of its own, all heads in one operation."""

from __future__ import annotations

import ctypes
from ctypes import c_int32, c_void_p

from torch import Tensor

from quire.native.library import Library
from quire.native.panels import pack_floats
from quire.native.recorder import recorder_of
from quire.native.tape import HEADS, Rows


class HeadWeights(ctypes.Structure):
    """`qn_head_weights` of quire_native.h."""

    _fields_ = (("weights", c_void_p), ("num_heads", c_int32), ("rest", c_int32))


class NativeHeads:
    """`nn.ops.HeadProduct`."""

    def __init__(self, weight: Tensor, library: Library) -> None:
        """`weight` is [heads, out, in]."""
        self.library = library
        self.panels = [pack_floats(head) for head in weight]
        addresses = [ctypes.addressof(head.weight) for head in self.panels]
        self._addresses = (c_void_p * len(addresses))(*addresses)

    def __call__(self, x: Tensor) -> Tensor:
        on, num_heads = recorder_of(x, self.library), len(self.panels)
        num_in, num_out = self.panels[0].num_in, self.panels[0].num_out
        flat = x if isinstance(x, Rows) else x.reshape(len(x), -1)
        rest = flat.shape[-1] // num_heads - num_in
        made = HeadWeights(ctypes.addressof(self._addresses), num_heads, rest)
        out: Tensor = on.made(flat, num_heads * (num_out + rest))
        on.do(HEADS, flat, x=on.at(flat), out=on.at(out), more=on.record(made, self))
        heads: Tensor = out.unflatten(1, (num_heads, num_out + rest))
        return heads
