"""Products as the native library defines them, in numpy: whole numbers, then one fp32 chain.

Written from the definition (docs/decisions/0009), for bits to be compared, not nearness. A fused
multiply-add is made of doubles: the product of two floats is exact there, and the sum is rounded
to odd, so that rounding it once more to fp32 gives what one rounding would have given.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.quant.coded import Coded

Floats = NDArray[np.float32]
Whole = NDArray[np.int64]


def fma(a: Floats, b: Floats, c: Floats) -> Floats:
    """a * b + c, rounded once."""
    product, added = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    total = product + added
    part = total - product  # Knuth's sum: what `total` lacks
    missing = (product - (total - part)) + (added - part)
    towards = np.where(missing > 0, np.inf, -np.inf)
    is_even = (total.view(np.int64) & 1) == 0
    odd = np.where((missing != 0) & is_even, np.nextafter(total, towards), total)
    return odd.astype(np.float32)


def rounded(x: Floats, most: int) -> tuple[Whole, Floats]:
    """Rows [rows, in] as whole numbers of at most `most`, and a scale for each row."""
    top = np.abs(x).max(1, keepdims=True)
    limit = np.float32(most)
    with np.errstate(divide="ignore", over="ignore"):
        inverse = limit / top
    inverse[~(inverse <= np.float32(3.4e38))] = 0.0
    return np.rint(x * inverse).astype(np.int64), (top / limit).astype(np.float32)


def of_blocks(given: Tensor, above: Tensor | None, coded: Coded) -> Floats:
    """Scales or offsets [out, groups] as one float for each block: [out, blocks]."""
    if coded.are_powers:
        wide = np.ldexp(np.float32(1), given.int().numpy() - 128)
    elif coded.eighths:
        eighths, number = given.view(torch.float8_e4m3fn).float().numpy(), above.numpy()
        wide = eighths / number if coded.eighths == "over" else eighths * number
    elif above is None:
        wide = given.float().numpy()
    else:
        wide = given.float().numpy() * above.float().numpy().repeat(coded.super_size, 1)
    return wide.astype(np.float32).repeat(coded.share, 1)


def whole_codes(coded: Coded) -> Whole:
    """Codes less their zeros: [out, in]."""
    if coded.tables is not None:
        found = np.take_along_axis(coded.tables.numpy(), coded.codes.numpy().astype(np.int64), 1)
        return found.astype(np.int64)
    if coded.table is not None:
        return np.array(coded.table, dtype=np.int64)[coded.codes.numpy()]
    signed = coded.codes.numpy().view(np.int8) if coded.bits == 8 else coded.codes.numpy()
    codes = signed.astype(np.int64)
    if coded.zeros is not None:
        return codes - coded.zeros.numpy().astype(np.int64).repeat(coded.block * coded.share, 1)
    return codes - (0 if coded.offsets is not None else coded.zero)


def product(x: Tensor, coded: Coded) -> Floats:
    """[rows, in] fp32 -> [rows, out] fp32."""
    numbers, row_scales = rounded(x.numpy(), 127 if coded.inputs == "int8-row" else 127 * 128)
    shape = (-1, coded.shape[1] // coded.block, coded.block)
    by_block, codes = numbers.reshape(shape), whole_codes(coded).reshape(shape)
    scales = of_blocks(coded.scales, coded.super_scales, coded)
    offsets = None
    if coded.offsets is not None:
        offsets = of_blocks(coded.offsets, coded.super_offsets, coded)
    acc: Floats = np.zeros((len(x), coded.shape[0]), dtype=np.float32)
    for b in range(shape[1]):
        sums = (by_block[:, b] @ codes[:, b].T).astype(np.float32)  # rounded once, to fp32
        acc = fma(sums, scales[None, :, b], acc)
        if offsets is not None:
            totals = by_block[:, b].sum(1, keepdims=True).astype(np.float32)
            acc = fma(offsets[None, :, b], totals, acc)
    return acc * row_scales
