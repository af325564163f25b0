"""NativeLinear: products of one Linear through the native library, part by part.

Parts of different formats (a file may keep v at more bits than q and k) are panels of their own;
each writes its columns of the result.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.native.library import Library
from quire.native.panels import PANEL, Panels, pack
from quire.native.tape import Rows
from quire.quant.weight import Weight


class NativeLinear:
    def __init__(self, parts: Sequence[Panels], library: Library) -> None:
        self.parts, self.library = tuple(parts), library
        self.num_out = sum(part.num_out for part in parts)

    @staticmethod
    def of(weights: Sequence[Weight], bias: Tensor | None, library: Library) -> NativeLinear:
        """From parts one below the other, each `can_be_panels`. Like neighbours become one."""
        parts, first = [], 0
        for weight in join_alike(weights):
            own = None if bias is None else bias[first : first + weight.shape[0]]
            parts.append(pack(weight, own))
            first += weight.shape[0]
        for part in parts:
            assert library.can_multiply(part.weight), f"no kernel for {part.weight.bits} bits"
        return NativeLinear(parts, library)

    def rows(self, ids: Tensor) -> Tensor:
        """Rows of the weight itself, [ids] -> [ids, in]: an embedding. Of one part only."""
        (part,) = self.parts
        ids = ids.contiguous()
        out = torch.empty(len(ids), part.num_in)
        self.library.rows(part.weight, ids.data_ptr(), len(ids), out.data_ptr())
        return out

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, in] fp32 -> [tokens, out] fp32."""
        if isinstance(x, Rows):
            return x.tape.product(x, self.parts)
        num_rows, library = x.shape[0], self.library
        x = x if x.stride(-1) == 1 else x.contiguous()
        out = torch.empty(num_rows, self.num_out)
        needed = max(library.scratch_bytes(part.weight, num_rows) for part in self.parts)
        scratch = torch.empty(needed, dtype=torch.uint8)
        column = out.data_ptr()
        for part in self.parts:
            rows = x if part.order is None else x.index_select(1, part.order)
            source, into = (rows.data_ptr(), rows.stride(0)), (column, self.num_out)
            library.product(part.weight, source, num_rows, into, scratch.data_ptr())
            column += 4 * part.num_out
        return out


def join_alike(weights: Sequence[Weight]) -> list[Weight]:
    """Neighbours of one form as one weight, where borders are those of panels."""
    joined: list[Weight] = []
    for weight in weights:
        last = joined[-1] if joined else None
        if last is not None and last.shape[0] % PANEL == 0 and last.is_like(weight):
            joined[-1] = last.join(weight)
        else:
            joined.append(weight)
    return joined
