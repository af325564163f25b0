"""How long a chain of matrix-unit additions takes by itself: the floor of a product of few rows."""

from __future__ import annotations

from functools import partial

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@gluon.jit
def chain_kernel(
    y, turns, FIELDS: gl.constexpr, N: gl.constexpr, SHARED_A: gl.constexpr, num_warps: gl.constexpr
):
    """`turns` times FIELDS * 64 inputs: 64 rows by N columns."""
    of_total: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, of_total, 2)
    flat: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    spread: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    ones = gl.full([N, 64], 1.0, gl.bfloat16, spread)
    inputs = gl.allocate_shared_memory(gl.bfloat16, [N, 64], flat, ones)
    high = gl.full([64, 64], 1.0, gl.bfloat16, spread)
    weights = gl.allocate_shared_memory(gl.bfloat16, [64, 64], flat, high)
    weight = weights.load(operand)
    fence_async_shared()
    gl.thread_barrier()
    total = gl.zeros([64, N], gl.float32, of_total)
    for _ in range(turns):
        for _f in gl.static_range(FIELDS):
            if SHARED_A:
                total = warpgroup_mma(weights, inputs.permute([1, 0]), total, is_async=True)
            else:
                total = warpgroup_mma(weight, inputs.permute([1, 0]), total, is_async=True)
        total = warpgroup_mma_wait(0, deps=[total])
    row = gl.arange(0, 64, gl.SliceLayout(1, of_total))[:, None]
    column = gl.arange(0, N, gl.SliceLayout(0, of_total))[None, :]
    gl.store(y + row * N + column, total)


def measure() -> list[dict[str, object]]:
    """Cycles of 16 inputs, from two lengths of the same chain, on all multiprocessors."""
    from benchmarks.gpu_matmul import graph_micros

    found: list[dict[str, object]] = []
    for n in (8, 16, 32, 64, 128):
        y = torch.empty(64 * n, device="cuda")
        for shared in (False, True):
            for fields in (2, 4, 8):
                times = []
                for turns in (64, 192):
                    launch = partial(
                        chain_kernel[(132,)], y, turns, FIELDS=fields, N=n, SHARED_A=shared,
                        num_warps=4,
                    )  # fmt: skip
                    times.append(graph_micros([launch] * 8, 5))
                ns = (times[1] - times[0]) * 1e3 / 128 / fields / 4
                found.append(
                    {"chain": n, "shared": shared, "fields": fields, "ns_per_16": round(ns, 2),
                     "right": bool((y == float(192 * fields * 64)).all())}
                )  # fmt: skip
    return found
