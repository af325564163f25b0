"""Caches of codes for `PagedCase`, with an oracle that does not share their arithmetic.

`decoded` finds every code by trying all of them, in fp64, and puts what the codes stand for in
place of keys and values; `PagedCase.expected` then computes plain attention over those.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from quire.attn.backend import LayerCache
from quire.kv.forms import CODED, CacheForm, rotation_of
from quire.kv.spec import KvScales
from tests.paged_case import PagedCase

FORMS = list(CODED)
TOPS = {"int8": 127.0, "fp8": 448.0, "int4": 7.5}


def coded_cache(case: PagedCase, name: str, fixed: KvScales | None = None) -> LayerCache:
    """What a window has left behind is of NaN."""
    form, spec = CODED[name], case.spec
    size = spec.page_size * spec.num_kv_heads * form.row_bytes(spec.head_dim)
    keys, values = (torch.zeros(case.num_pages, size, dtype=torch.uint8) for _ in range(2))
    if spec.window is not None:
        keys[-1] = values[-1] = 0xFF  # scales of NaN
    return LayerCache(keys, values, form, fixed)


def all_values(name: str) -> np.ndarray:
    """What the codes stand for, by the code."""
    if name == "int8":
        return np.arange(-127, 128, dtype=np.float64)
    if name == "int4":
        return np.arange(16) - 7.5
    exponent, fraction = np.divmod(np.arange(0x7F), 8)
    small, large = fraction / 512, (1 + fraction / 8) * 2.0 ** (exponent - 7)
    found = np.where(exponent == 0, small, large)
    return np.concatenate((-found[::-1], found))


def is_even(name: str) -> np.ndarray:
    """Which codes ties go to."""
    codes = {"int8": np.arange(-127, 128), "int4": np.arange(16)}
    fp8 = np.concatenate((np.arange(0x7F)[::-1], np.arange(0x7F)))
    return codes.get(name, fp8) % 2 == 0


def bf16_up(x: np.ndarray) -> np.ndarray:
    """The next bf16 that is not below an fp32, by trying."""
    cut = (x.astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)
    above = np.nextafter(cut, np.float32(np.inf))
    above = ((above.view(np.uint32) & 0xFFFF0000) + 0x10000).view(np.float32)
    return np.where(cut >= x, cut, above)


def near(x: Tensor, name: str, fixed: float | None) -> Tensor:
    """Rows [..., dim] as their nearest codes say, in fp64."""
    rows = x.double().numpy()
    top = np.float32(np.abs(rows).max(-1, keepdims=True)) / np.float32(TOPS[name])
    scale = bf16_up(top if fixed is None else np.full_like(top, fixed)).astype(np.float64)
    if name != "fp8" or fixed is not None:
        return torch.from_numpy(by_scale(rows, name, scale))
    # Of 32 scales over an octave the first that is nearest, in 32nds of the least one's power of 2.
    power = 2.0 ** np.floor(np.log2(np.where(scale > 0, scale, 1.0)))
    made, costs = [], []
    for i in range(32):
        own = (scale.astype(np.float32).view(np.uint32) + (i << 18)).view(np.float32)
        one = by_scale(rows, name, np.where(scale > 0, own, scale).astype(np.float64))
        off = np.abs((one - rows).astype(np.float32)) / power * 32
        made.append(one)
        costs.append((np.rint(off) ** 2).sum(-1))
    best = np.stack(costs).argmin(0)[None, ..., None]
    return torch.from_numpy(np.take_along_axis(np.stack(made), best, 0)[0])


def by_scale(rows: np.ndarray, name: str, scale: np.ndarray) -> np.ndarray:
    """Rows as the nearest codes say at this scale, in fp64."""
    with np.errstate(invalid="ignore"):  # 0 / 0: any code will do
        ratio = (rows.astype(np.float32) / scale.astype(np.float32))[..., None]
    values = all_values(name)
    ratio = ratio.clip(values.min(), values.max())
    distances = np.abs(ratio - values)
    nearest = distances == distances.min(-1, keepdims=True)
    found = (nearest * (1 + is_even(name))).argmax(-1)
    return values[found] * scale


def decoded(case: PagedCase, name: str, fixed: KvScales | None = None) -> PagedCase:
    """The same case with keys and values as a cache of codes has them."""
    spec, form = case.spec, CODED[name]
    turn = _turn(form, spec.head_dim)
    size = float(rotation_of(form, spec.head_dim))
    made = []
    for x in case.qkv:
        q, k, v = x.double().split([h * spec.head_dim for h in _counts(case)], 1)
        parts = [q]
        for part, by in ((k, fixed and fixed.keys), (v, fixed and fixed.values)):
            rows = part.unflatten(1, (-1, spec.head_dim))
            parts.append((near((rows @ turn).float(), name, by) @ turn / size).flatten(1))
        made.append(torch.cat(parts, 1))
    return replace(case, qkv=made)


def _counts(case: PagedCase) -> tuple[int, int, int]:
    return case.spec.num_heads, case.spec.num_kv_heads, case.spec.num_kv_heads


def _turn(form: CacheForm, dim: int) -> Tensor:
    """[dim, dim] with the Hadamard matrix along its diagonal; the identity where nothing turns."""
    size = rotation_of(form, dim)
    signs = [[(-1.0) ** (i & j).bit_count() for j in range(size)] for i in range(size)]
    block = torch.tensor(signs, dtype=torch.float64)
    return torch.block_diag(*[block] * (dim // len(block)))
