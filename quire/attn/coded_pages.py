"""Pages of codes on a GPU, for the Triton backend: the bytes of `cache_codes.py` by kv head.

The codes and scales are those of `RowCodes`; where they lie is `kernels/coded_tile.py`'s to say.
Codes of eight bits are written by one kernel from the fused qkv. Codes of four bits are rotated
and written by torch, from rows that the kernel for floats left.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.attn.backend import AttnSpec, HeadTransform, LayerCache
from quire.attn.cache_codes import RowCodes, turned
from quire.attn.moves import move_by_head
from quire.forward import Batch
from quire.kernels.coded_kv_write import coded_kv_write
from quire.kernels.coded_tile import head_bytes
from quire.kernels.paged_inputs import Coded
from quire.kernels.rope_kv_write import HeadNorm, Rope, rope_kv_write
from quire.kv.forms import SCALE_BYTES

STAGED = 16  # tokens of a page that rows pass through on their way to codes of four bits


@dataclass(frozen=True, slots=True)
class CodedPages:
    cache: LayerCache
    codes: RowCodes
    coded: Coded

    @staticmethod
    def of(cache: LayerCache, spec: AttnSpec) -> CodedPages | None:
        """None where the cache keeps floats."""
        codes = RowCodes.of(cache, spec)
        if codes is None:
            return None
        heads = (spec.num_kv_heads, spec.page_size, spec.head_dim)
        return CodedPages(cache, codes, Coded(cache.form.bits, heads))

    @property
    def pages(self) -> tuple[Tensor, Tensor]:
        """[pages, bytes] of keys and of values, with elements as the kernels want them."""
        dtype = torch.int8 if self.cache.form.name == "int8" else torch.uint8
        return self.cache.keys.view(dtype), self.cache.values.view(dtype)

    def store(
        self, qkv: Tensor, batch: Batch, rope: Rope | None, norm: HeadNorm | None,
        heads: HeadTransform,
    ) -> Tensor:  # fmt: skip
        """Keys and values of the batch at its slots; its queries [tokens, heads, dim]."""
        balance, scales = heads.balance, self.cache.scales
        if self.coded.bits == 4:
            return self._store_rotated(qkv, batch, rope, norm, heads)
        return coded_kv_write(
            qkv,
            self.pages,
            self.coded,
            (batch.positions, batch.slots),
            rope,
            norm,
            None if balance is None else (balance.offsets, balance.factors),
            None if scales is None else (scales.keys, scales.values),
            self.cache.form.top,
        )

    def _store_rotated(
        self, qkv: Tensor, batch: Batch, rope: Rope | None, norm: HeadNorm | None,
        heads: HeadTransform,
    ) -> Tensor:  # fmt: skip
        num, (kv_heads, _, dim) = len(qkv), self.coded.heads
        shape = (2, -(-num // STAGED), kv_heads, STAGED, dim)
        staged = torch.empty(shape, dtype=qkv.dtype, device=qkv.device)
        slots = torch.arange(num, device=qkv.device, dtype=batch.slots.dtype)
        q = rope_kv_write(qkv, staged[0], staged[1], batch.positions, slots, rope, norm)
        k, v = staged.transpose(2, 3).flatten(1, 2)[:, :num]  # [tokens, kv_heads, dim] each
        if heads.balance is not None:
            balanced, k = heads.balance.of(q, k)
            q = balanced.to(q.dtype)
        for part, rows in ((self.cache.keys, k), (self.cache.values, v)):
            self._write(part, batch.slots, self.codes.encode(turned(rows, self.codes.block), None))
        return q

    def _write(self, part: Tensor, slots: Tensor, rows: Tensor) -> None:
        """[tokens, kv_heads, bytes] of codes and scales, as `RowCodes` makes them."""
        codes, scales = self._regions(part)
        page, at = slots // self.coded.heads[1], slots % self.coded.heads[1]
        codes[page, :, at] = rows[..., :-SCALE_BYTES]
        scales[page, :, at] = rows[..., -SCALE_BYTES:]

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Codes and scales at slots `sources` go to slots `targets`."""
        for part in self.cache[:2]:
            for region in self._regions(part):
                move_by_head(region, sources, targets)

    def _regions(self, part: Tensor) -> tuple[Tensor, Tensor]:
        """[..., pages, kv_heads, page size, bytes] of a row's codes, and of its scale."""
        kv_heads, page_size, dim = self.coded.heads
        width = dim * self.coded.bits // 8
        size = head_bytes(page_size, dim, self.coded.bits)
        whole = part.unflatten(-1, (kv_heads, size))
        codes = whole[..., : page_size * width].unflatten(-1, (page_size, width))
        scales = whole[..., page_size * width :].unflatten(-1, (page_size, SCALE_BYTES))
        return codes, scales

    def read(self, part: Tensor) -> Tensor:
        """[pages, kv_heads, page size, dim] numbers in fp32, rotated as they are."""
        return self.codes.decode(torch.cat(self._regions(part), -1))
