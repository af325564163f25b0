"""Proof of a cache of codes: a backend's kernels beside the reference, on the device at hand.

Kernels for codes are compiled on the user's machine. Before an engine trusts them, one small step
of prompts and one of decodes go through them and through `reference.py`, which keeps codes in
plain torch. Results that differ by more than rounding refuse the form by name; nothing else is
affected.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from quire.attn.backend import AttentionBackend, AttnSpec, HeadTransform, LayerCache
from quire.attn.reference import ReferenceAttention
from quire.attn.select import select_backend
from quire.errors import NotSupported
from quire.forward import Batch
from quire.kv.forms import CacheForm

LENGTHS = (70, 33)  # of the prompts, in tokens
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}  # of the whole result
PLAIN = HeadTransform(None, None, None, None, 0.0)


def proved_backend(
    name: str | None,
    device: torch.device,
    dtype: torch.dtype,
    spec: AttnSpec,
    coded: CacheForm | None,
) -> tuple[str, AttentionBackend]:
    """What `select_backend` picks, proved where its kernels are compiled here."""
    name, backend = select_backend(name, device, dtype, spec, coded.name if coded else None)
    if coded is not None and device.type == "cuda":
        prove_codes(backend, coded, spec, device)
    return name, backend


def prove_codes(
    backend: AttentionBackend, form: CacheForm, spec: AttnSpec, device: torch.device
) -> None:
    """Raises NotSupported if the backend's codes are not the reference's."""
    spec = replace(spec, window=None, softcap=None)
    dtype = backend.cache_dtype
    try:
        error = max(_errors(backend, form, spec, dtype, device))
    except (RuntimeError, AttributeError, TypeError, ValueError) as fault:
        raise NotSupported(
            f"kv_cache_dtype={form.name!r} cannot run on this {device.type} device: {fault};"
            " leave it out"
        ) from fault
    if not error <= TOLERANCE[dtype]:
        raise NotSupported(
            f"kv_cache_dtype={form.name!r} differs by {error:.1e} from the reference on this"
            f" {device.type} device, want {TOLERANCE[dtype]:.0e} at most; leave it out"
        )


def _errors(
    backend: AttentionBackend,
    form: CacheForm,
    spec: AttnSpec,
    dtype: torch.dtype,
    device: torch.device,
) -> list[float]:
    """Of a step of prompts and a step of decodes, in shares of the results."""
    width = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    numbers = torch.Generator(device="cpu").manual_seed(0)
    steps = [LENGTHS, tuple(1 for _ in LENGTHS)]
    qkv = [torch.randn(sum(s), width, generator=numbers).to(device, dtype) for s in steps]
    both: list[list[Tensor]] = []
    for each in (backend, ReferenceAttention(dtype)):
        pages = sum(-(-(n + 1) // spec.page_size) for n in LENGTHS)
        size = spec.page_size * spec.num_kv_heads * form.row_bytes(spec.head_dim)
        data = torch.zeros(2, pages, size, dtype=torch.uint8, device=device)
        cache = LayerCache(data[0], data[1], form)
        both.append([])
        for lens, x in zip(steps, qkv, strict=True):
            before = (0,) * len(lens) if lens == LENGTHS else LENGTHS
            batch = _batch(lens, before, spec.page_size, device)
            plan = each.plan(batch, spec)
            q = each.prepare(x, PLAIN, cache, plan, spec)
            both[-1].append(each.run(q, cache, plan, spec).float())
    return [float((a - b).norm() / b.norm()) for a, b in zip(*both, strict=True)]


def _batch(
    lens: tuple[int, ...], before: tuple[int, ...], page_size: int, device: torch.device
) -> Batch:
    """Sequences whose pages lie one behind the other."""
    counts = [-(-(n + 1) // page_size) for n in LENGTHS]
    table = torch.zeros(len(lens), max(counts), dtype=torch.int32)
    positions, slots, first = [], [], 0
    for row, count in enumerate(counts):
        table[row, :count] = torch.arange(first, first + count)
        at = torch.arange(before[row], before[row] + lens[row])
        positions.append(at)
        slots.append(first * page_size + at)
        first += count
    queries = np.array(lens, np.int32)
    contexts = queries + np.array(before, np.int32)
    starts = np.concatenate([[0], np.cumsum(queries)]).astype(np.int32)
    return Batch(
        input_ids=torch.zeros(int(queries.sum()), dtype=torch.int64, device=device),
        positions=torch.cat(positions).to(device),
        slots=torch.cat(slots).to(device),
        query_starts=torch.from_numpy(starts).to(device),
        context_lens=torch.from_numpy(contexts).to(device),
        rows=torch.arange(len(lens), dtype=torch.int32, device=device),
        page_table=table.to(device),
        page_size=page_size,
        host_query_lens=queries,
        host_context_lens=contexts,
    )
