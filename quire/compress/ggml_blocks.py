"""From floats to GGUF blocks: the reverse of `quant/gguf_codes.py`, one function for each type.

Types of one level (Q8_0 to Q5_1) take their scale from the range of a block. Types of two levels
(the "K" types) search: for each sub-block the scale, and where there is one the offset, that loses
least when large weights count more; then these are rounded to whole numbers of 6 or 8 bits below
one fp16 for 256 weights. The search is ggml's own in kind, and so are its constants.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from quire.compress.layouts.words import to_bytes

SUPER = 256  # weights below one fp16 of the two-level types
FALLBACK = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}  # for rows that 256 does not divide
BLOCK_SIZES = {"Q4_0": 32, "Q4_1": 32, "Q5_0": 32, "Q5_1": 32, "Q8_0": 32}
BLOCK_SIZES |= {"Q4_K": SUPER, "Q5_K": SUPER, "Q6_K": SUPER}
AT_ONCE = 1 << 20  # weights searched at once: what lies between stays small


def quantise(weight: Tensor, kind: str) -> Tensor:
    """[..., row] floats -> uint8 [..., row_bytes].

    >>> quantise(torch.ones(3, 64), "Q8_0").shape
    torch.Size([3, 68])
    """
    blocks = weight.float().reshape(-1, BLOCK_SIZES[kind])
    parts = [_KINDS[kind](some) for some in blocks.split(AT_ONCE // BLOCK_SIZES[kind])]
    return torch.cat(parts).view(*weight.shape[:-1], -1)


def fitting(kind: str, row: int) -> str:
    """The type, or the one that stands in for it where a row is no multiple of its blocks."""
    if row % BLOCK_SIZES[kind] == 0:
        return kind
    other = FALLBACK.get(kind, "F16")
    return other if other in BLOCK_SIZES and row % BLOCK_SIZES[other] == 0 else "F16"


# ------------------------------------------------------------ one level


def _q8_0(blocks: Tensor) -> Tensor:
    step = blocks.abs().amax(1, keepdim=True) / 127
    codes = _round(blocks * _inverse(step)).to(torch.int8)
    return torch.cat((_half(step), codes.view(torch.uint8)), 1)


def _symmetric(blocks: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """The largest weight, with its sign, is the lowest code."""
    middle = 2 ** (bits - 1)
    largest = blocks.gather(1, blocks.abs().argmax(1, keepdim=True))
    step = largest / -middle
    codes = (blocks * _inverse(step) + (middle + 0.5)).trunc().clamp(0, 2 * middle - 1)
    return step, codes.byte()


def _ranged(blocks: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    low = blocks.amin(1, keepdim=True)
    step = (blocks.amax(1, keepdim=True) - low) / (2**bits - 1)
    codes = ((blocks - low) * _inverse(step) + 0.5).trunc().clamp(0, 2**bits - 1)
    return step, low, codes.byte()


def _q4_0(blocks: Tensor) -> Tensor:
    step, codes = _symmetric(blocks, 4)
    return torch.cat((_half(step), _halves(codes)), 1)


def _q4_1(blocks: Tensor) -> Tensor:
    step, low, codes = _ranged(blocks, 4)
    return torch.cat((_half(step), _half(low), _halves(codes)), 1)


def _q5_0(blocks: Tensor) -> Tensor:
    step, codes = _symmetric(blocks, 5)
    return torch.cat((_half(step), to_bytes(codes >> 4, 1), _halves(codes & 15)), 1)


def _q5_1(blocks: Tensor) -> Tensor:
    step, low, codes = _ranged(blocks, 5)
    return torch.cat((_half(step), _half(low), to_bytes(codes >> 4, 1), _halves(codes & 15)), 1)


# ------------------------------------------------------------ two levels


class _Search(NamedTuple):
    """How many steps a scale is tried in, beside the one of the whole range."""

    most: int  # the largest code
    first: float
    count: int


def _affine(x: Tensor, how: _Search) -> tuple[Tensor, Tensor]:
    """[blocks, n] -> scale and minimum (0 or less), [blocks, 1], that lose least."""
    weight = x.square().mean(1, keepdim=True).sqrt() + x.abs()
    low, high = x.amin(1, keepdim=True).clamp(max=0.0), x.amax(1, keepdim=True)
    span = (high - low).clamp(min=1e-30)
    scale, least = span / how.most, low
    best = _loss(x, weight, (how.most / span * (x - low)).round().clamp(0, how.most), scale, low)
    total, sum_x = weight.sum(1, keepdim=True), (weight * x).sum(1, keepdim=True)
    for i in range(how.count + 1):
        factor = (how.first + 0.1 * i + how.most) / span
        codes = (factor * (x - low)).round().clamp(0, how.most)
        sum_l, sum_l2, sum_xl = (
            (weight * other).sum(1, keepdim=True) for other in (codes, codes * codes, codes * x)
        )
        spread = total * sum_l2 - sum_l * sum_l
        safe = torch.where(spread > 0, spread, 1.0)
        own = (total * sum_xl - sum_x * sum_l) / safe
        off = (sum_l2 * sum_x - sum_l * sum_xl) / safe
        flat = sum_xl / sum_l2.clamp(min=1e-30)  # an offset above 0 cannot be stored
        own, off = torch.where(off > 0, flat, own), off.clamp(max=0.0)
        loss = _loss(x, weight, codes, own, off)
        better = (loss < best) & (spread > 0)
        scale, least = torch.where(better, own, scale), torch.where(better, off, least)
        best = torch.where(better, loss, best)
    return scale, least


def _loss(x: Tensor, weight: Tensor, codes: Tensor, scale: Tensor, low: Tensor) -> Tensor:
    return (weight * (scale * codes + low - x).square()).sum(1, keepdim=True)


def _two_levels(blocks: Tensor, how: _Search) -> tuple[Tensor, Tensor]:
    """Blocks of 256 in eight parts: the head of 16 bytes (scales), and codes [blocks, 256]."""
    parts = blocks.view(-1, 8, 32)
    scale, low = (found.view(-1, 8) for found in _affine(parts.reshape(-1, 32), how))
    d = (scale.amax(1, keepdim=True).clamp(min=0.0) / 63).half()
    m = ((-low).amax(1, keepdim=True) / 63).half()
    scales = (scale * _inverse(d.float())).round().clamp(0, 63)
    lows = (-low * _inverse(m.float())).round().clamp(0, 63)
    step, off = (d.float() * scales).unsqueeze(-1), (m.float() * lows).unsqueeze(-1)
    codes = ((parts + off) * _inverse(step)).round().clamp(0, how.most).byte()
    head = torch.cat((_half(d), _half(m), _six_bits(scales.byte(), lows.byte())), 1)
    return head, codes.view(len(blocks), SUPER)


def _six_bits(scales: Tensor, lows: Tensor) -> Tensor:
    """Eight scales and eight offsets of six bits in twelve bytes."""
    tops = [(four[:, :4] | (four[:, 4:] >> 4) << 6) for four in (scales, lows)]
    return torch.cat((*tops, (scales[:, 4:] & 15) | (lows[:, 4:] & 15) << 4), 1)


def _q4_k(blocks: Tensor) -> Tensor:
    head, codes = _two_levels(blocks, _Search(15, -1.0, 20))
    pairs = codes.view(-1, 4, 2, 32)
    return torch.cat((head, (pairs[:, :, 0] | pairs[:, :, 1] << 4).flatten(1)), 1)


def _q5_k(blocks: Tensor) -> Tensor:
    head, codes = _two_levels(blocks, _Search(31, -0.5, 15))
    pairs = (codes & 15).view(-1, 4, 2, 32)
    # Byte j holds the fifth bits of weight j of every part.
    fifth = (codes >> 4).view(-1, 8, 32).transpose(1, 2).reshape(-1, 8)
    tops = to_bytes(fifth, 1).view(-1, 32)
    return torch.cat((head, tops, (pairs[:, :, 0] | pairs[:, :, 1] << 4).flatten(1)), 1)


def _q6_k(blocks: Tensor) -> Tensor:
    parts = blocks.view(-1, 16, 16)
    scale = _symmetric_scale(parts.reshape(-1, 16)).view(-1, 16)
    largest = scale.gather(1, scale.abs().argmax(1, keepdim=True))
    d = (largest / -128).half()
    scales = (scale * _inverse(d.float())).round().clamp(-128, 127)
    step = (d.float() * scales).unsqueeze(-1)
    codes = (parts * _inverse(step)).round().clamp(-32, 31).add(32).byte().view(-1, 2, 4, 32)
    low, high = codes & 15, codes >> 4
    bottom = torch.cat((low[:, :, 0] | low[:, :, 2] << 4, low[:, :, 1] | low[:, :, 3] << 4), 2)
    top = high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6
    whole = scales.to(torch.int8).view(torch.uint8)
    return torch.cat((bottom.flatten(1), top.flatten(1), whole, _half(d)), 1)


def _symmetric_scale(x: Tensor) -> Tensor:
    """[blocks, n] -> [blocks, 1]: the scale of codes from -32 to 31 that loses least."""
    weight = x * x
    largest = x.gather(1, x.abs().argmax(1, keepdim=True))
    safe = torch.where(largest == 0, 1.0, largest)
    best, scale = torch.full_like(safe, -1.0), torch.zeros_like(safe)
    for i in (0, *range(-9, 0), *range(1, 10)):
        codes = (x * (-(32 + 0.1 * i) / safe)).round().clamp(-32, 31)
        along = (weight * x * codes).sum(1, keepdim=True)
        norm = (weight * codes * codes).sum(1, keepdim=True)
        gain = along * along / norm.clamp(min=1e-30)
        better = (gain > best) & (norm > 0)
        scale = torch.where(better, along / norm.clamp(min=1e-30), scale)
        best = torch.where(better, gain, best)
    return scale


# ------------------------------------------------------------ bits


def _inverse(step: Tensor) -> Tensor:
    return torch.where(step == 0, 0.0, 1 / step)


def _round(x: Tensor) -> Tensor:
    """Halves away from zero, as C does it."""
    size = x.abs()
    whole = size.floor()
    return x.sign() * (whole + (2 * (size - whole)).floor())


def _half(values: Tensor) -> Tensor:
    """[blocks, 1] -> the two bytes of an fp16."""
    return values.half().contiguous().view(torch.uint8)


def _halves(codes: Tensor) -> Tensor:
    """[blocks, 32] of four bits: the first half in the low bits, the second in the high."""
    return codes[:, :16] | codes[:, 16:] << 4


_KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
