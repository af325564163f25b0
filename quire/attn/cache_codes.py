"""Rows of codes: what the cache keeps of a head when it keeps no floats, in plain torch.

    scale = the row's largest magnitude / form.top, as a bf16 rounded up
    code  = row / scale to the nearest code, ties to even

Of E4M3, whose steps grow with the number, larger scales are tried as well: where they lay a row's
large numbers on codes, the row loses a third less (`finest`). A checkpoint's scale takes the place
of the row's own; what lies beyond it is cut off. A row with a number that is none has the scale
NaN, so all of it is read as NaN. Rotated rows are multiplied by the Hadamard matrix of +1 and -1,
queries by it over its size, so their products stay the same; results are turned back.
`native/src/cache_codes.h` computes the same codes, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.attn.backend import AttnSpec, HeadTransform, LayerCache
from quire.kv.forms import FP8, SCALE_BYTES, CacheForm, rotation_of

NO_NUMBER = 0x7FC0  # NaN as a bf16
SCALES = 32  # tried for a row of E4M3: from the least that holds it to nearly twice that
STRIDE = 4  # between two, in last places of a bf16; 128 are an octave
LEAST_EXPONENT = 32  # of a scale: below, errors in units of it would overflow


def turned(x: Tensor, block: int) -> Tensor:
    """Every `block` numbers of the last dimension times the Hadamard matrix, unscaled, in fp32.

    Sums of pairs, then of pairs of those: a row's bits do not depend on what lies beside it."""
    x = x.float()
    step = 1
    while step < block:
        pairs = x.unflatten(-1, (-1, 2, step))
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        x = torch.stack((low + high, low - high), -2).flatten(-3)
        step *= 2
    return x


@dataclass(frozen=True, slots=True)
class RowCodes:
    """A row lies as its codes, then its scales. A page is [page_size, heads, row bytes]."""

    form: CacheForm
    widths: tuple[int, ...]  # of the parts of a row that have a scale each
    block: int  # numbers that are rotated together
    heads: tuple[int, int]  # page size, heads

    @staticmethod
    def of(cache: LayerCache, spec: AttnSpec) -> RowCodes | None:
        """None where the cache keeps floats."""
        if not cache.form.is_coded:
            return None
        widths: tuple[int, ...] = (spec.head_dim,)
        if spec.value_dim is not None:
            widths = (spec.value_dim, spec.head_dim - spec.value_dim)
        block = rotation_of(cache.form, spec.head_dim)
        return RowCodes(cache.form, widths, block, (spec.page_size, spec.num_kv_heads))

    # ------------------------------------------------------------ pages

    def write(self, pages: Tensor, slots: Tensor, rows: Tensor, scale: float | None) -> None:
        """[tokens, heads, dim] at their slots of [pages, bytes]."""
        size = self.heads[0]
        at = pages.unflatten(-1, (*self.heads, -1))
        at[slots // size, slots % size] = self.encode(turned(rows, self.block), scale)

    def read(self, pages: Tensor) -> Tensor:
        """[pages, bytes] -> [pages, page size, heads, dim] in fp32, rotated as they were."""
        return self.decode(pages.unflatten(-1, (*self.heads, -1)))

    def turned_queries(self, q: Tensor) -> Tensor:
        return q if self.block == 1 else (turned(q, self.block) / self.block).to(q.dtype)

    turned_back = turned_queries  # the matrix is its own inverse, up to its size

    # ------------------------------------------------------------ rows

    def encode(self, rows: Tensor, scale: float | None) -> Tensor:
        """[..., dim] fp32 -> [..., row bytes] uint8."""
        parts = [self._scaled(part, scale) for part in rows.split(self.widths, -1)]
        codes = torch.cat([self._codes(ratio) for ratio, _ in parts], -1)
        scales = torch.cat([bits.to(torch.int16) for _, bits in parts], -1)
        return torch.cat((codes, scales.view(torch.uint8)), -1)

    def _scaled(self, part: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
        """A part over its scale, and the scale as the bits of a bf16."""
        top = part.abs().amax(-1, keepdim=True)
        limit = torch.full_like(top, self.form.top)
        # Over a tensor: for a number, torch multiplies by its rounded inverse on GPUs, and a
        # quotient that is a bf16 would be rounded up to the next one.
        wanted = top / limit if scale is None else torch.full_like(top, scale)
        bits = (wanted.view(torch.int32) + 0xFFFF) >> 16
        bits = bits.masked_fill(~top.isfinite(), NO_NUMBER)
        if scale is None and self.form.name == "fp8":
            bits = finest(part, bits)
        own = (bits << 16).view(torch.float32)
        ratio = torch.where(own > 0, part / own, 0.0)
        return ratio.clamp(-self.form.top, self.form.top), bits

    def _codes(self, ratio: Tensor) -> Tensor:
        if self.form.name == "fp8":
            return ratio.to(torch.float8_e4m3fn).view(torch.uint8)
        if self.form.name == "int8":
            return ratio.round().to(torch.int8).view(torch.uint8)
        codes = (ratio + self.form.top).round().to(torch.uint8)
        return codes[..., ::2] | codes[..., 1::2] << 4

    def decode(self, rows: Tensor) -> Tensor:
        """[..., row bytes] -> [..., dim] fp32."""
        split = rows.shape[-1] - SCALE_BYTES * len(self.widths)
        values = self._values(rows[..., :split])
        scales = (
            rows[..., split:]
            .clone(memory_format=torch.contiguous_format)
            .view(torch.bfloat16)
            .float()
        )
        parts = values.split(self.widths, -1)
        return torch.cat([part * scales[..., i : i + 1] for i, part in enumerate(parts)], -1)

    def _values(self, codes: Tensor) -> Tensor:
        if self.form.name == "fp8":
            return codes.contiguous().view(torch.float8_e4m3fn).float()
        if self.form.name == "int8":
            return codes.contiguous().view(torch.int8).float()
        both = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
        return both.float() - self.form.top


def finest(rows: Tensor, least: Tensor) -> Tensor:
    """[..., dim] fp32 and the bits of the least scale, [..., 1] int32 -> those of the scale whose
    E4M3 codes lie nearest to the row, the lesser one of two.

    Errors are counted in whole 32nds of the least scale's power of two. Sums of such squares are
    exact, so every device finds the same scale."""
    exponent = least >> 7
    can_search = (exponent >= LEAST_EXPONENT) & (exponent < 255)
    unit = ((259 - exponent.clamp(LEAST_EXPONENT, 254)) << 23).view(torch.float32)
    found, lowest = least, torch.full_like(least, torch.iinfo(torch.int32).max)
    for i in range(SCALES):
        tried = least + STRIDE * i
        scale = (tried << 16).view(torch.float32)
        near = (rows / scale).clamp(-FP8.top, FP8.top).to(torch.float8_e4m3fn).float() * scale
        off = ((near - rows).abs() * unit).round().to(torch.int32)
        cost = off.square().sum(-1, keepdim=True, dtype=torch.int32)
        is_nearer = can_search & (cost < lowest)
        found, lowest = torch.where(is_nearer, tried, found), torch.where(is_nearer, cost, lowest)
    return found


def store_rows(
    cache: LayerCache, codes: RowCodes, slots: Tensor, qkv: Sequence[Tensor], heads: HeadTransform
) -> Tensor:
    """Keys and values [tokens, heads, dim] into pages of codes; returns the queries for them."""
    q, k, v = qkv
    scales, dtype = cache.scales, q.dtype
    if heads.balance is not None:
        q, k = heads.balance.of(q, k)
    codes.write(cache.keys, slots, k, scales.keys if scales else None)
    codes.write(cache.values, slots, v, scales.values if scales else None)
    return q.to(dtype)
