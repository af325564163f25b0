"""Kernel times: from what a profiler saw to time by kind of work. Pure, no torch.

A kernel's time here is what it adds to the step: a kernel that starts while the one before still
runs is charged from the end of that one. So times add up, and the rest of the step is time in which
no kernel ran.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import NamedTuple

from quire.bench.roofline import PRODUCTS

# Fragment of a kernel's or operator's name -> kind of work; the first that fits.
KINDS = (
    (r"grouped_kernel", "experts"),
    # nvjet: the vendor's library
    (r"matmul_kernel|nvjet|cublas|cutlass|mkl_linear|aten::addmm$|aten::mm$", "products"),
    (
        r"_split_kernel|_merge_kernel|_shared_kernel|_prefill_kernel|_hopper_kernel"
        r"|scaled_dot_product|latent|multiply_heads",
        "attention",
    ),
    (r"rope_kv_write", "cache write"),
    (r"rms_norm|layer_norm", "norms"),
    (r"silu|gelu|swiglu", "activation"),
    (r"step_inputs|embedding|indexSelect|vectorized_gather", "inputs"),
    (r"_scan_tiles|_pick_rows|_bound_rows|_gather_near|token_mask|argmax", "sampling"),
    (r"_route_kernel|_sort_kernel|_combine_kernel", "routing"),
    (r"[Mm]emcpy|[Mm]emset", "copies"),
)
OTHER = "other"
WAITING = re.compile(r"Sync$|Wait Event$")  # profilers may list these as if they were kernels


class Slice(NamedTuple):
    """One run of a kernel. `micros` is its own time, without what others did meanwhile."""

    name: str
    micros: float


class Span(NamedTuple):
    """The same as a device saw it."""

    name: str
    start: float  # microseconds
    end: float


@dataclass(frozen=True, slots=True)
class Share:
    """One kind of work in a step: all its launches together."""

    kind: str
    launches: float
    micros: float
    names: tuple[str, ...]


def own_times(spans: Iterable[Span]) -> list[Slice]:
    """Times in order of start, each charged from the end of the kernels before it.

    >>> own_times([Span("b", 3, 9), Span("a", 0, 5), Span("c", 6, 8)])
    [Slice(name='a', micros=5.0), Slice(name='b', micros=4.0), Slice(name='c', micros=0.0)]
    """
    found, reached = [], float("-inf")
    for name, start, end in sorted(spans, key=lambda span: span.start):
        found.append(Slice(name, float(max(0.0, end - max(start, reached)))))
        reached = max(reached, end)
    return found


def is_work(name: str) -> bool:
    return not WAITING.search(name)


def kind_of(name: str) -> str:
    return next((kind for pattern, kind in KINDS if re.search(pattern, name)), OTHER)


def shares(slices: Sequence[Slice], num_steps: int, num_layers: int) -> list[Share]:
    """Time and launches of one step by kind of work, the largest first."""
    kinds = _kinds(slices, num_steps, num_layers)
    found: dict[str, list[Slice]] = {}
    for kind, piece in zip(kinds, slices, strict=True):
        found.setdefault(kind, []).append(piece)
    parts = [
        Share(
            kind,
            len(pieces) / num_steps,
            sum(piece.micros for piece in pieces) / num_steps,
            _most_first(pieces),
        )
        for kind, pieces in found.items()
    ]
    return sorted(parts, key=lambda share: -share.micros)


def _kinds(slices: Sequence[Slice], num_steps: int, num_layers: int) -> list[str]:
    """The kind of each slice. Products share one kernel; their order in the step tells them apart.

    That needs as many products as a dense model has, four in each layer and the head; otherwise
    they all stay "products".
    """
    kinds = [kind_of(piece.name) for piece in slices]
    *inner, head = PRODUCTS
    order = [*inner * num_layers, head]
    if kinds.count("products") != num_steps * len(order):
        return kinds
    names = cycle(order)
    return [next(names) if kind == "products" else kind for kind in kinds]


def _most_first(pieces: Sequence[Slice]) -> tuple[str, ...]:
    """Names of the kernels by their time."""
    times: dict[str, float] = {}
    for name, micros in pieces:
        times[name] = times.get(name, 0.0) + micros
    return tuple(sorted(times, key=lambda name: -times[name]))


def by_name(slices: Sequence[Slice], num_steps: int) -> Mapping[str, tuple[float, float]]:
    """(launches, microseconds) of one step by the kernel's own name, the longest first."""
    found: dict[str, tuple[float, float]] = {}
    for name, micros in slices:
        launches, before = found.get(name, (0.0, 0.0))
        found[name] = (launches + 1 / num_steps, before + micros / num_steps)
    return dict(sorted(found.items(), key=lambda item: -item[1][1]))
