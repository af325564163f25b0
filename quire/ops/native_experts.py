"""Routing and experts of the native library: a layer's visits as one operation.

`route` chooses as `ops/route.py` does, and of equal scores the first. `NativeExperts` multiplies
what `ops/expert_loop.py` would, to the same bits, without a call for each expert. The kernels are
`native/src/route.c` and `experts.c`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int32, c_void_p
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quire.models.spec import RouterSpec
from quire.native.library import Library
from quire.native.linear import NativeLinear
from quire.native.panels import FLOAT_NAMES, Panels
from quire.native.recorder import recorder_of
from quire.native.tape import ADD_GATED, EXPERTS, LANES, ROUTE
from quire.nn.ops import GateForm, Visits
from quire.ops.native_rows import gate_fields

MAX_EXPERTS = 1024


class Route(ctypes.Structure):
    """`qn_route` of quire_native.h."""

    _fields_ = (
        ("correction", c_void_p),
        *((name, c_int32) for name in ("num_experts", "top_k", "num_groups", "top_groups")),
        *((name, c_int32) for name in ("group_best", "is_sigmoid", "normalizes")),
        ("scale", c_float),
    )


class Experts(ctypes.Structure):
    """`qn_experts` of quire_native.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("up", "down", "loads")),
        *((name, c_int32) for name in ("num_experts", "top_k", "up_parts", "hidden", "ffn")),
    )


def route(library: Library, logits: Tensor, rule: RouterSpec, correction: Tensor | None) -> Visits:
    """[tokens, experts] -> the best experts of each token."""
    on = recorder_of(logits, library)
    made = Route(
        correction=None if correction is None else on.keep(correction),
        num_experts=rule.num_experts,
        top_k=rule.top_k,
        num_groups=rule.num_groups,
        top_groups=rule.top_groups,
        group_best=rule.group_best,
        is_sigmoid=rule.score == "sigmoid",
        normalizes=rule.normalize,
        scale=rule.scale,
    )
    width = _visit_stride(rule.top_k)
    weights, experts = on.made(logits, width), on.made(logits, width)  # experts: int32, as wide
    x, stride = on.place(logits)
    into = {"out": on.at(weights), "sum": on.at(experts), "out_stride": width}
    on.do(ROUTE, logits, x=x, x_stride=stride, **into, more=on.keep(made))
    if isinstance(experts, Tensor):
        experts = experts.view(torch.int32)
    return Visits(experts[:, : rule.top_k], weights[:, : rule.top_k])


def add_gated(library: Library, x: Tensor, gate: Tensor, added: Tensor) -> Tensor:
    """x + sigmoid(gate) * added, of [tokens, width], [tokens, 1] and [tokens, width]."""
    on, width = recorder_of(x, library), x.shape[-1]
    out: Tensor = on.made(x, width)
    share, stride = on.place(gate)
    at = {"x": on.at(x), "y": on.at(added), "out": on.at(out)}
    on.do(ADD_GATED, x, **at, weight=share, x_stride=stride, width=width)
    return out


def can_fuse(up: Sequence[NativeLinear], down: Sequence[NativeLinear]) -> bool:
    """Whether experts are alike enough for one operation."""
    first = up[0].parts
    is_wide = first[0].num_in % LANES == 0 and down[0].parts[0].num_in % LANES == 0
    has_order = any(part.order is not None for each in (*up, *down) for part in each.parts)
    return (
        is_wide
        and not has_order
        and all(
            len(expert.parts) == len(first) and len({_inputs(part) for part in expert.parts}) == 1
            for expert in up
        )
    )


class NativeExperts:
    """`nn.ops.ExpertKernel`."""

    def __init__(
        self, up: Sequence[NativeLinear], down: Sequence[NativeLinear], gate: GateForm
    ) -> None:
        self.library, self.gate = up[0].library, gate
        self.parts = [part for expert in (*up, *down) for part in expert.parts]
        self._up, self._down = _addresses(up), _addresses(down)
        self._shape = {
            "num_experts": len(up),
            "up_parts": len(up[0].parts),
            "hidden": up[0].parts[0].num_in,
            "ffn": down[0].parts[0].num_in,
        }

    def __call__(self, x: Tensor, visits: Visits, loads: Tensor | None) -> Tensor:
        on, visits = recorder_of(x, self.library), _as_numbers(visits)
        made = Experts(
            up=ctypes.addressof(self._up),
            down=ctypes.addressof(self._down),
            loads=None if loads is None else loads.data_ptr(),
            top_k=visits.experts.shape[-1],
            **self._shape,
        )
        hidden = self._shape["hidden"]
        out: Tensor = on.made(x, hidden)
        experts, stride = on.place(visits.experts)
        weights, _ = on.place(visits.weights)
        on.do(
            EXPERTS,
            x,
            partial(self.library.experts_bytes, made),
            x=on.at(x),
            y=weights,
            weight=experts,
            x_stride=stride,
            out=on.at(out),
            more=on.keep(made, self, loads),
            **gate_fields(self.gate),
        )
        return out


def _visit_stride(top_k: int) -> int:
    return top_k + -top_k % LANES


def _as_numbers(visits: Visits) -> Visits:
    """Numbers of experts are int32 where floats would lie, as far apart as the weights."""
    experts, weights = visits
    if not isinstance(experts, Tensor):  # Rows
        return visits
    if experts.dtype != torch.int32 or experts.stride(0) != weights.stride(0):
        experts, weights = experts.int().contiguous(), weights.contiguous()
    return Visits(experts.view(torch.float32), weights)


def _inputs(part: Panels) -> tuple[bool, int]:
    """How a product takes its inputs: as they are, or rounded with a scale for blocks or rows."""
    return int(part.weight.bits) in FLOAT_NAMES, int(part.weight.planes)


def _addresses(linears: Sequence[NativeLinear]) -> Any:
    weights = [ctypes.addressof(part.weight) for linear in linears for part in linear.parts]
    return (c_void_p * len(weights))(*weights)
