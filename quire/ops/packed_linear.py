"""PackedLinear: the CUDA linear kernel of a weight that stays packed.

Few rows multiply with the packed weight. For many, unpacking it again for every tile of rows takes
longer than writing it out once: it is expanded into scratch and multiplied as a dense one is, to
the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quire.kernels.chip import chip_of
from quire.kernels.expand import Scratch, expand
from quire.kernels.matmul import Layouts, interleave, matmul
from quire.kernels.packed_matmul import packed_matmul
from quire.kernels.silu_mul import silu_mul
from quire.kernels.slabs import Slabs
from quire.kernels.vendor_matmul import is_faster, vendor_matmul
from quire.nn.ops import SumKernel

if TYPE_CHECKING:
    from quire.kernels.stream_packed import StreamPacked
    from quire.kernels.stream_packed_configs import StreamPackedConfig
    from quire.kernels.stream_sparse import StreamSparse

# Rows from which a weight is expanded. A tile takes 128 rows, so two tiles unpack twice, while an
# expansion reads the codes once and moves four bytes a weight. Not measured on a GPU yet.
EXPAND_ROWS = 257


class PackedLinear:
    def __init__(
        self,
        slabs: Slabs,
        bias: Tensor | None,
        layouts: Layouts,
        scratch: Scratch,
        dtype: torch.dtype,
        gate: str | None = None,
    ) -> None:
        if gate is not None:
            assert slabs.paired
            bias = None if bias is None else interleave(bias)
        self.slabs, self.bias, self.layouts, self.scratch = slabs, bias, layouts, scratch
        self.gate, self.pairs = gate, gate is not None
        self.stream = streamed(slabs, self.bias, gate)
        self._units = chip_of(slabs.codes.device).units
        num_out, num_in = slabs.shape
        scratch.reserve(num_out * num_in, dtype, slabs.codes.device)
        self._may_ask_library = False
        if slabs.codes.is_cuda:
            # Any numbers show whether the library gives our bits for this shape.
            some = scratch.view(slabs.shape).normal_(0.0, 0.02)
            self._may_ask_library = layouts.may_ask_library(some, self.bias)

    def __call__(self, x: Tensor) -> Tensor:
        """[m, k] -> [m, n], in x's dtype; gated [m, n / 2]."""
        x = self._ordered(x)
        if len(x) >= EXPAND_ROWS:
            return self._expanded(x)
        if self.stream is None:
            return packed_matmul(x, self.slabs, self.bias, gate=self.gate)
        return stream(self.stream, x)

    def sums(self, x: Tensor) -> Tensor:
        """[m, k] -> [m, n] in fp32."""
        x = self._ordered(x)
        out = torch.empty(len(x), self.slabs.shape[0], dtype=torch.float32, device=x.device)
        if len(x) >= EXPAND_ROWS:
            w = expand(self.slabs, self.scratch.view(self.slabs.shape))
            return matmul(x, w, self.bias, out)
        if self.stream is None:
            return packed_matmul(x, self.slabs, self.bias, out)
        return stream(self.stream, x, out)

    def _ordered(self, x: Tensor) -> Tensor:
        """With inputs in the order of the slabs' columns."""
        return x if self.slabs.order is None else x.index_select(1, self.slabs.order)

    def _expanded(self, x: Tensor) -> Tensor:
        (n, k), m = self.slabs.shape, len(x)
        w = expand(self.slabs, self.scratch.view((n, k)))
        is_plain = x.is_contiguous() and x.data_ptr() % 16 == 0
        may_ask = is_plain and self._may_ask_library
        if may_ask and is_faster(m, n, k, self.gate is not None, self._units):
            out = torch.empty(m, n, dtype=x.dtype, device=x.device)
            vendor_matmul(x, w, self.bias, out)
            return silu_mul(out, self.gate, interleaved=True) if self.gate else out
        return matmul(x, w, self.bias, gate=self.gate)


def streamed(
    slabs: Slabs, bias: Tensor | None, gate: str | None
) -> StreamPacked | StreamSparse | None:
    """None: the slabs are not laid out for it."""
    if not slabs.form.lanes:
        return None
    if slabs.form.kind == "2:4":
        from quire.kernels.stream_sparse import StreamSparse

        return StreamSparse(slabs, bias, gate)
    from quire.kernels.stream_packed import StreamPacked

    return StreamPacked(slabs, bias, gate)


def stream(
    product: StreamPacked | StreamSparse,
    x: Tensor,
    out: Tensor | None = None,
    config: StreamPackedConfig | None = None,
) -> Tensor:
    """[m, k] -> [m, n], gated [m, n / 2]. An fp32 `out` [m, n] gets the sums, ungated. `config`:
    None takes what is picked."""
    m, n = len(x), product.slabs.shape[0]
    if out is None:
        out = torch.empty(m, n // 2 if product.gate else n, dtype=x.dtype, device=x.device)
    if m > 0:
        x = (
            x
            if x.is_contiguous() and x.data_ptr() % 16 == 0
            else x.clone(memory_format=torch.contiguous_format)
        )
        product(x, out, config or product.pick(m))
    return out


class PartsLinear:
    """Parts in different forms, one below the other, and the gate after them."""

    pairs = False

    def __init__(self, parts: Sequence[SumKernel], gate: str | None) -> None:
        self.parts, self.gate = parts, gate

    def __call__(self, x: Tensor) -> Tensor:
        out = torch.cat([part(x) for part in self.parts], 1)
        return silu_mul(out, self.gate) if self.gate else out

    def sums(self, x: Tensor) -> Tensor:
        return torch.cat([part.sums(x) for part in self.parts], 1)
