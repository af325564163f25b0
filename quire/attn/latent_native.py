"""LatentNative: latent attention of the native library, recorded on a tape or run layer by layer.

Every token takes the absorbed form, as in `latent_cpu.py`. A token's latent and rotated key lie in
one row of the cache, which may be fp16 beside packed weights; `native/src/latents.c` has the
arithmetic. On a tape a plan is the number of its layer group, as in `native.py`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int32, c_void_p
from typing import Any

import torch
from torch import Tensor

from quire.attn.backend import AttnCaps, AttnSpec, HeadTransform, LayerCache
from quire.attn.latent import Expand, LatentAttention, LatentPlan, Projected
from quire.attn.latent_forms import Part
from quire.attn.native import LARGEST_PAGE, NativePlan
from quire.errors import NotSupported
from quire.forward import Batch
from quire.native.heads import Heads, StepPointers
from quire.native.library import find_library
from quire.native.tape import ATTEND_LATENTS, LANES, STORE_LATENTS, Op, Rows

MAX_LATENT = 1024
HEADS_EACH = 8  # heads of one unit of work at most: they share each row they read


class Latents(ctypes.Structure):
    """`qn_latents` of quire_native.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("cache", "cos", "sin")),
        *((name, c_int32) for name in ("num_heads", "shares", "rank", "rope", "plain")),
        *((name, c_int32) for name in ("group", "is_half")),
        ("scale", c_float),
    )


class LatentNative(LatentAttention):
    caps = AttnCaps(
        devices=frozenset({"cpu"}),
        dtypes=frozenset({torch.float32}),
        head_dims=frozenset(range(2 * LANES, MAX_LATENT + 1, LANES)),
        page_sizes=frozenset(1 << i for i in range(LARGEST_PAGE.bit_length())),
        graphs=False,
        value_dims=frozenset(range(LANES, MAX_LATENT, LANES)),
        trees=True,
    )

    def __init__(self, cache_dtype: torch.dtype = torch.float32) -> None:
        """Raises NotSupported where there is no native library."""
        library, reason = find_library()
        if library is None:
            raise NotSupported(reason)
        super().__init__(cache_dtype)
        self.library = library

    def plan(self, batch: Batch, spec: AttnSpec, max_context: int | None = None) -> LatentPlan:
        pointers = StepPointers(1)
        made = NativePlan(batch, pointers, pointers.step((batch,)))
        return LatentPlan(batch, Part(None, batch), None, absorbed_plan=made)

    def recorded_plan(self, group: int, batch: Batch) -> LatentPlan:
        return LatentPlan(batch, Part(None, batch), None, absorbed_plan=group)

    def prepare(
        self,
        tokens: Projected,
        heads: HeadTransform,
        cache: LayerCache,
        plan: LatentPlan,
        spec: AttnSpec,
    ) -> Tensor:
        assert heads.cos is not None and heads.sin is not None, "latent keys are rotated"
        made, width = self._latents(cache, spec), tokens.q.shape[-1]
        if not isinstance(tokens.q, Rows):
            width *= spec.num_heads
        made.cos, made.sin = heads.cos.data_ptr(), heads.sin.data_ptr()
        made.plain = width // spec.num_heads - made.rope
        parts = [_flat(part) for part in tokens]
        if not isinstance(parts[1], Rows):
            parts[1] = parts[1].contiguous()
        q = self._do(STORE_LATENTS, parts, width, made, plan, (heads, cache))
        return _as_heads(q, spec.num_heads)

    def run(self, q: Tensor, cache: LayerCache, plan: LatentPlan, spec: AttnSpec) -> Tensor:
        made = self._latents(cache, spec)
        width = spec.num_heads * made.rank
        out = self._do(ATTEND_LATENTS, [_flat(q)], width, made, plan, cache)
        return _as_heads(out, spec.num_heads)

    def run_expanded(
        self, q: Tensor, cache: LayerCache, plan: LatentPlan, spec: AttnSpec, expand: Expand
    ) -> Tensor:
        raise AssertionError("no token is expanded on a CPU")

    def _latents(self, cache: LayerCache, spec: AttnSpec) -> Latents:
        assert spec.value_dim is not None and cache.keys.dtype == self.cache_dtype
        each = next(n for n in range(HEADS_EACH, 0, -1) if spec.num_heads % n == 0)
        return Latents(
            cache=cache.keys.data_ptr(),
            num_heads=spec.num_heads,
            shares=spec.num_heads // each,
            rank=spec.value_dim,
            rope=spec.head_dim - spec.value_dim,
            is_half=self.cache_dtype == torch.float16,
            scale=spec.scale,
        )

    def _do(
        self,
        kind: int,
        parts: Sequence[Any],  # of the operation's rows: x, then y and more
        width: int,
        latents: Latents,
        plan: LatentPlan,
        kept: object,
    ) -> Any:
        """The operation, now or when the tape is replayed. `kept` is what addresses point into."""
        x, at = parts[0], plan.absorbed_plan
        dealt = Heads(
            num_heads=latents.num_heads, num_kv_heads=latents.shares, head_dim=latents.rank
        )
        more: dict[str, Any] = {
            "heads": ctypes.addressof(dealt),
            "more": ctypes.addressof(latents),
        }
        if isinstance(x, Rows):
            assert isinstance(at, int), f"{at=}"
            latents.group = dealt.group = at
            x.tape.kept += [dealt, latents, kept]
            into = x.tape.rows(width, x.of_samples)
            x.tape.add(kind, x.of_samples, **_places(parts, Rows.place), out=into.address, **more)
            return into
        assert isinstance(at, NativePlan), f"{at=}"
        out = torch.empty(len(x), width)
        op = Op(kind=kind, **_places(parts, _place), out=out.data_ptr(), **more)
        self.library.run(ctypes.addressof(op), 1, at.step, 0)
        return out


def _flat(x: Any) -> Any:
    """Heads of a token side by side, as they are on a tape."""
    return x if isinstance(x, Rows) else x.flatten(1)


def _as_heads(x: Any, num_heads: int) -> Tensor:
    heads: Tensor = x.unflatten(1, (num_heads, x.shape[-1] // num_heads))
    return heads


def _place(x: Tensor) -> tuple[int, int]:
    assert x.dtype == torch.float32 and x.stride(-1) == 1, (x.dtype, x.stride())
    return x.data_ptr(), x.stride(0)


def _places(parts: Sequence[Any], place: Any) -> dict[str, int]:
    """Queries, and where there are any latents and keys, as the operation's fields."""
    found = dict(zip(("x", "x_stride"), place(parts[0]), strict=True))
    if len(parts) > 1:
        found["y"], _ = place(parts[1])
        found["weight"], found["out_stride"] = place(parts[2])
    return found
