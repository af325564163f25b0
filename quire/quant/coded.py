"""Coded: a weight kept as whole numbers, the form that every packed format is brought into.

    weight = scale * (code - zero) + offset

with one scale (and zero or offset) for each row and `share` blocks of inputs. A code may also stand
for a number in a table. Formats with two levels of scales keep small whole numbers for blocks and
an fp16 for each `super_size` of them, or floats of eight bits below one fp32 for a whole row
(NVFP4), which its writers divide by or multiply with. The zero is one for all, or one for each
scale. Where inputs of one scale are no neighbours, columns of codes are sorted and `order` says
which inputs they are for. `dequantize` is the reference that kernels are tested against. How codes
lie in memory is `native/panels.py`'s.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor

from quire.quant.weight import Inputs, Weight

# Codes, blocks and whether there are offsets or zeros: what kernels of whole numbers are built for.
_RUN = 1 << 18  # weights made at once: what lies between stays in cache


@dataclass(frozen=True, slots=True)
class Coded:
    """A weight [out, in]; `groups` below is in / (block * share)."""

    codes: Tensor  # [out, in] uint8, each below 2**bits; signed bytes where bits is 8
    bits: int  # 2, 4, 5, 6 or 8
    block: int  # inputs whose products are summed in whole numbers: 16 or 32
    scales: Tensor  # [out, groups] fp16 or fp32; uint8 or int8 below super scales
    zero: int = 0
    offsets: Tensor | None = None  # as scales
    super_size: int = 1  # groups below one super scale
    super_scales: Tensor | None = None  # [out, groups / super_size] fp16; eighths: [out, 1] fp32
    super_offsets: Tensor | None = None
    table: tuple[int, ...] | None = None  # what codes of 4 bits stand for: 16 signed bytes
    tables: Tensor | None = None  # [out, 16] int8: the same for each row; four share theirs
    are_powers: bool = False  # scales are uint8 exponents: 2**(e - 128)
    # Scales are bytes of finite E4M3 without a sign, times the row's super scale, or over it.
    eighths: Literal["", "times", "over"] = ""
    inputs: Inputs = "float"
    share: int = 1  # blocks that share a scale
    zeros: Tensor | None = None  # [out, groups] uint8, int8 where bits is 8; then no zero
    order: Tensor | None = None  # [in] int64: the input of each column of codes; None: its own

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def can_pair(self) -> bool:
        """Whether a scale and its offset fit into one byte, as Q2_K has them."""
        pair = (self.scales, self.offsets)
        return all(t is not None and t.dtype == torch.uint8 and int(t.max()) < 16 for t in pair)

    @property
    def num_bytes(self) -> int:
        """Codes lie one to a byte here, and are counted in their bits."""
        others = [t for name, t in self._tensors().items() if name not in ("codes", "tables")]
        others += [] if self.order is None else [self.order]
        beside: int = sum(t.numel() * t.element_size() for t in others)
        tables = 0 if self.tables is None else self.tables.numel() // 4
        return self.codes.numel() * self.bits // 8 + tables + beside

    def pick(self, rows: Tensor | slice) -> Coded:
        """Some rows, or all in another order."""
        picked: dict[str, Any] = {n: t[rows].contiguous() for n, t in self._tensors().items()}
        return replace(self, **picked)

    def columns(self, begin: int, end: int) -> Coded:
        if self.order is not None:
            raise ValueError(
                f"got inputs {begin} to {end} of a weight whose columns are sorted by their scales:"
                " neighbours among its inputs share nothing"
            )
        cut: dict[str, Any] = {}
        # One scale for a whole row is one for any part of it that has whole blocks.
        is_row = self.scales.shape[1] == 1 and self.super_scales is None
        if is_row and begin % self.block == end % self.block == 0:
            codes = self.codes[:, begin:end].contiguous()
            return replace(self, codes=codes, share=(end - begin) // self.block)
        for name, tensor in self._tensors().items():
            if name == "tables" or (name == "super_scales" and self.eighths):  # of whole rows
                continue
            width = self.shape[1] // tensor.shape[1]  # inputs that one of its columns is for
            if begin % width or end % width:
                raise ValueError(
                    f"got inputs {begin} to {end}, want multiples of {width}: they share scales"
                )
            cut[name] = tensor[:, begin // width : end // width].contiguous()
        return replace(self, **cut)

    def is_like(self, other: Weight) -> bool:
        return (
            isinstance(other, Coded)
            and self._form() == other._form()
            and (self.order is other.order or _are_equal(self.order, other.order))
        )

    def join(self, below: Coded) -> Coded:
        joined: dict[str, Any] = {
            name: torch.cat((tensor, getattr(below, name)))
            for name, tensor in self._tensors().items()
        }
        return replace(self, **joined)

    def _tensors(self) -> dict[str, Any]:
        """Those with a row for each output."""
        found = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "order"}
        return {name: value for name, value in found.items() if isinstance(value, Tensor)}

    def _form(self) -> tuple[object, ...]:
        values = [getattr(self, f.name) for f in fields(self) if f.name != "order"]
        return tuple((v.dtype, v.shape[1]) if isinstance(v, Tensor) else v for v in values)

    def dequantize(self) -> Tensor:
        """[out, in] fp32. Scale times code is rounded once, then the offset is added."""
        out = torch.empty(self.shape, dtype=torch.float32, device=self.codes.device)
        self.dequantize_to(out, max(1, _RUN // self.shape[1]))
        return out

    def dequantize_to(self, out: Tensor, num_rows: int) -> None:
        """Fills out [out, in], so few rows at a time that they stay in cache."""
        scales = self._wide(self.scales, self.super_scales).unsqueeze(-1)
        offsets = None
        if self.offsets is not None:
            offsets = self._wide(self.offsets, self.super_offsets).unsqueeze(-1)
        weight = out.view(*self.scales.shape, self.block * self.share)
        zeros = None if self.zeros is None else self.zeros.unsqueeze(-1)
        places = None if self.order is None else self.order.argsort()
        for start in range(0, len(out), num_rows):
            rows = slice(start, start + num_rows)
            if self.tables is not None:
                out[rows] = self.tables[rows].gather(1, self.codes[rows].long())
            else:
                self._put_values(self.codes[rows], out[rows])
            if zeros is not None:
                weight[rows] -= zeros[rows]
            weight[rows] *= scales[rows]
            if offsets is not None:
                weight[rows] += offsets[rows]
            if places is not None:
                out[rows] = out[rows].index_select(1, places)

    def _put_values(self, codes: Tensor, out: Tensor) -> None:
        if self.table is not None:
            table = torch.tensor(self.table, dtype=torch.float32, device=codes.device)
            torch.index_select(table, 0, codes.view(-1).int(), out=out.view(-1))
            return
        out.copy_(codes.view(torch.int8) if self.bits == 8 else codes)
        if self.zero:
            out -= self.zero

    def _wide(self, given: Tensor, above: Tensor | None) -> Tensor:
        if self.are_powers:
            return torch.ldexp(torch.ones_like(given, dtype=torch.float32), given.int() - 128)
        if above is None:
            return given.float()
        if self.eighths:
            wide = given.view(torch.float8_e4m3fn).float()
            return wide / above if self.eighths == "over" else wide * above
        groups = given.float().view(*above.shape, self.super_size)
        return groups.mul_(above.float().unsqueeze(-1)).view(given.shape)


def _are_equal(one: Tensor | None, other: Tensor | None) -> bool:
    return one is not None and other is not None and torch.equal(one, other)
