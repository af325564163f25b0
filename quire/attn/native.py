"""NativeAttention: attention of the native library, recorded on a tape or run layer by layer.

Keys lie with tokens as lanes, so scores need no transposing, and the cache may be fp16 beside
packed weights; `native/src/attend.c` has the arithmetic and `quire_native.h` the layout. Latents
and heads of odd sizes are left to `cpu.py`.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from quire.attn.backend import AttnCaps, AttnSpec, HeadTransform, LayerCache
from quire.errors import NotSupported
from quire.forward import Batch
from quire.native.heads import Heads, StepPointers
from quire.native.library import find_library
from quire.native.tape import ATTEND, STORE, Op, Rows, Step

MAX_HEAD_DIM = 512
LARGEST_PAGE = 4096


@dataclass(frozen=True, slots=True)
class NativePlan:
    """A step layer by layer, and what its addresses point into."""

    batch: Batch
    pointers: StepPointers
    step: Step


class NativeAttention:
    """While a model is recorded, a layer's plan is the number of its layer group, and queries are
    `Rows`: who feeds what is the replayed step's to say."""

    caps = AttnCaps(
        devices=frozenset({"cpu"}),
        dtypes=frozenset({torch.float32}),
        head_dims=frozenset(range(16, MAX_HEAD_DIM + 1, 16)),
        page_sizes=frozenset(1 << i for i in range(LARGEST_PAGE.bit_length())),
        graphs=False,
    )

    def __init__(self, cache_dtype: torch.dtype = torch.float32) -> None:
        """Raises NotSupported where there is no native library."""
        library, reason = find_library()
        if library is None:
            raise NotSupported(reason)
        self.library, self.cache_dtype = library, cache_dtype

    def cache_shape(self, num_pages: int, spec: AttnSpec) -> tuple[int, ...]:
        return (num_pages, spec.num_kv_heads, spec.page_size * spec.head_dim)

    def plan(self, batch: Batch, spec: AttnSpec, max_context: int | None = None) -> NativePlan:
        pointers = StepPointers(1)
        return NativePlan(batch, pointers, pointers.step((batch,)))

    def recorded_plan(self, group: int, batch: Batch) -> int:
        return group

    def prepare(
        self, qkv: Tensor, heads: HeadTransform, cache: LayerCache, plan: object, spec: AttnSpec
    ) -> Tensor:
        made = self._heads(cache, spec)
        if heads.cos is not None and heads.sin is not None:
            made.cos, made.sin = _floats(heads.cos), _floats(heads.sin)
            made.rotated = 2 * heads.cos.shape[1]
        if heads.q_norm is not None and heads.k_norm is not None:
            made.q_norm, made.k_norm = _floats(heads.q_norm), _floats(heads.k_norm)
            made.norm_eps = heads.eps
        return self._do(STORE, qkv, made, plan, (heads, cache))

    def run(
        self,
        q: Tensor,
        cache: LayerCache,
        plan: object,
        spec: AttnSpec,
        sinks: Tensor | None = None,
    ) -> Tensor:
        made = self._heads(cache, spec)
        if sinks is not None:
            made.sinks = _floats(sinks)
        return self._do(ATTEND, q, made, plan, (sinks, cache))

    def _heads(self, cache: LayerCache, spec: AttnSpec) -> Heads:
        assert cache.keys.dtype == self.cache_dtype, (cache.keys.dtype, self.cache_dtype)
        return Heads(
            keys=cache.keys.data_ptr(),
            values=cache.values.data_ptr(),
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            window=spec.window or 0,
            is_half=self.cache_dtype == torch.float16,
            scale=spec.scale,
            softcap=spec.softcap or 0.0,
        )

    def _do(self, kind: int, x: Tensor, heads: Heads, plan: object, kept: object) -> Tensor:
        """The operation, now or when the tape is replayed. `kept` is what addresses point into."""
        width = heads.num_heads * heads.head_dim
        at = ctypes.addressof(heads)
        if isinstance(x, Rows):
            assert isinstance(plan, int), f"{plan=}"
            heads.group = plan
            x.tape.kept += [heads, kept]
            into = x.tape.rows(width, x.of_samples)
            x.tape.add(kind, x.of_samples, x=x.address, out=into.address, heads=at)
            return cast("Any", into)
        assert isinstance(plan, NativePlan), f"{plan=}"
        x = x.contiguous()
        out = torch.empty(len(x), heads.num_heads, heads.head_dim)
        op = Op(kind=kind, x=_floats(x), out=out.data_ptr(), heads=at)
        self.library.run(ctypes.addressof(op), 1, plan.step, 0)
        return out


def _floats(tensor: Tensor) -> int:
    """The address of numbers that the library reads: fp32, in a row."""
    assert tensor.dtype == torch.float32 and tensor.is_contiguous(), (tensor.dtype, tensor.shape)
    return tensor.data_ptr()
