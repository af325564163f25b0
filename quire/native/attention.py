"""TapeAttention: attention while a model is recorded. It takes a backend's place in the context.

Keys and values lie as `attn/cpu.py` keeps them: [pages, page_size, kv heads, head_dim] fp32. The
plan of a layer is the number of its layer group; who feeds what is the step's to say.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_void_p
from typing import TYPE_CHECKING, Any

from torch import Tensor

from quire.native.tape import ATTEND, LANES, STORE, NotRecordable, Rows, Tape

if TYPE_CHECKING:
    from quire.attn.backend import AttnSpec, HeadTransform, LayerCache


class Heads(ctypes.Structure):
    """`qn_heads` of quire_native.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("keys", "values", "cos", "sin")),
        *((name, c_void_p) for name in ("q_norm", "k_norm", "sinks")),
        *((name, c_int32) for name in ("num_heads", "num_kv_heads", "head_dim", "rotated")),
        *((name, c_int32) for name in ("window", "group")),
        *((name, c_float) for name in ("scale", "softcap", "norm_eps")),
    )


class TapeAttention:
    def __init__(self, tape: Tape) -> None:
        self.tape = tape

    def prepare(
        self, qkv: Rows, heads: HeadTransform, cache: LayerCache, group: int, spec: AttnSpec
    ) -> Any:
        made = self._heads(cache, group, spec)
        keep = self.tape.keep
        if heads.cos is not None and heads.sin is not None:
            made.cos, made.sin = keep(heads.cos), keep(heads.sin)
            made.rotated = 2 * heads.cos.shape[1]
        if heads.q_norm is not None and heads.k_norm is not None:
            made.q_norm, made.k_norm = keep(heads.q_norm), keep(heads.k_norm)
            made.norm_eps = heads.eps
        return self._add(STORE, qkv, made, spec)

    def run(
        self,
        q: Rows,
        cache: LayerCache,
        group: int,
        spec: AttnSpec,
        sinks: Tensor | None = None,
    ) -> Any:
        made = self._heads(cache, group, spec)
        if sinks is not None:
            made.sinks = self.tape.keep(sinks)
        return self._add(ATTEND, q, made, spec)

    def _heads(self, cache: LayerCache, group: int, spec: AttnSpec) -> Heads:
        if spec.head_dim % LANES or spec.value_dim is not None:
            raise NotRecordable(f"heads of {spec.head_dim}, want a multiple of {LANES}")
        return Heads(
            keys=self.tape.keep(cache.keys),
            values=self.tape.keep(cache.values),
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            window=spec.window or 0,
            group=group,
            scale=spec.scale,
            softcap=spec.softcap or 0.0,
        )

    def _add(self, kind: int, x: Rows, heads: Heads, spec: AttnSpec) -> Rows:
        self.tape.kept.append(heads)
        out = self.tape.rows(spec.num_heads * spec.head_dim, x.of_samples)
        at = {"x": x.address, "out": out.address}
        self.tape.add(kind, x.of_samples, **at, heads=ctypes.addressof(heads))
        return out
