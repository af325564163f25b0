"""NativeAttention: attention of the native library, recorded on a tape or run layer by layer.

Keys lie with tokens as lanes, so scores need no transposing. The cache may be fp16 beside packed
weights, or codes with scales; `native/src/attend.c` has the arithmetic and `quire_native.h` the
layout. Latents and heads of odd sizes are left to `cpu.py`.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from quire.attn.backend import AttnCaps, AttnSpec, HeadTransform, LayerCache
from quire.attn.moves import move_in_runs
from quire.errors import NotSupported
from quire.forward import Batch
from quire.kv.forms import rotation_of
from quire.kv.spec import KvScales
from quire.native.heads import Heads, StepPointers
from quire.native.library import find_library
from quire.native.tape import ATTEND, STORE, Op, Rows, Step

MAX_HEAD_DIM = 512
LARGEST_PAGE = 4096
# How the library calls what the cache keeps: `quire_native.h`.
FORMS = {"float32": 0, "float16": 1, "int8": 2, "fp8": 3, "int4": 4}


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
        codes={"int8": 16, "fp8": 16, "int4": 32},
        trees=True,
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

    def move(self, cache: LayerCache, sources: Tensor, targets: Tensor, spec: AttnSpec) -> None:
        for part, is_keys in ((cache.keys, True), (cache.values, False)):
            move_in_runs(part, sources, targets, spec, is_keys=is_keys, form=cache.form)

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
        if heads.balance is not None:
            made.offsets = _floats(heads.balance.offsets)
            made.factors = _floats(heads.balance.factors)
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
        form, scales, stored = cache.form, cache.scales or KvScales(0.0, 0.0), cache.keys.dtype
        assert stored == (torch.uint8 if form.is_coded else self.cache_dtype), (stored, form)
        name = form.name if form.is_coded else str(stored).removeprefix("torch.")
        return Heads(
            keys=cache.keys.data_ptr(),
            values=cache.values.data_ptr(),
            page_stride=cache.keys.stride(0) * stored.itemsize,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            window=spec.window or 0,
            form=FORMS[name],
            turned=rotation_of(form, spec.head_dim),
            k_scale=scales.keys,
            v_scale=scales.values,
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
