"""Codebook: 4, 8 or 16 values of its own for each few rows, where the weights that matter lie.

Values are found by k-means, each weight counting as much as its input's Hessian diagonal: how far
an error of it moves the output (SqueezeLLM's idea, arXiv 2306.07629). Two to four bits a weight;
NF4's sixteen values are the same everywhere. The layout is our own; `load/codebook.py` reads it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quire.compress.block import BlockTensors, Matrix
from quire.compress.layouts.words import to_bytes
from quire.compress.passes.recipe import Kept, Pass
from quire.compress.seen import Needs, Seen
from quire.errors import NotSupported

ROWS = 1  # that share their values
ROUNDS = 25
AT_ONCE = 1 << 22  # weights clustered at once


class CodebookPass(Pass):
    needs = Needs(rows=True)
    widths = (4, 2, 3)

    def check(self, module: str, shape: tuple[int, int]) -> None:
        size = 8 // math.gcd(8, self.bits)  # codes that fill bytes
        if shape[0] % ROWS or shape[1] % size:
            raise NotSupported(
                f"{module} is {shape[0]} by {shape[1]}, codebooks of {self.bits} bits want rows in"
                f" multiples of {ROWS} and inputs in multiples of {size}; name it in --keep"
            )

    def pack(self, matrix: Matrix, block: BlockTensors, seen: Seen | None) -> dict[str, Tensor]:
        weight = block.tensors[matrix.name]
        energy = torch.ones(weight.shape[1], device=weight.device)
        if seen is not None and seen.num_tokens:
            energy = seen.energy / seen.energy.mean().clamp(min=1e-30)
        energy = energy.clamp(min=1e-4).repeat(ROWS)
        grouped = weight.view(-1, ROWS * weight.shape[1])
        some = grouped.split(max(1, AT_ONCE // grouped.shape[1]))
        values = torch.cat([cluster(part, energy, 1 << self.bits) for part in some])
        codes = torch.cat(
            [nearest(part, own) for part, own in zip(some, values.split(len(some[0])), strict=True)]
        )
        return {
            "weight_codes": to_bytes(codes.view(weight.shape), self.bits),
            "weight_values": values.half(),
        }

    def said(self, kept: Kept) -> dict[str, object]:
        modules = list(kept.modules)
        return {"quant_method": "codebook", "bits": self.bits, "modules_to_not_convert": modules}


def cluster(points: Tensor, energy: Tensor, count: int = 16) -> Tensor:
    """[groups, points] with weights [points] -> [groups, count] values, fp16 numbers, rising.

    Lloyd's rounds from quantiles of the weighted points; the last values are rounded to fp16."""
    ordered, order = points.sort(1)
    share = energy[order].double().cumsum(1)
    share = share / share[:, -1:]
    places = (torch.arange(count, device=points.device) + 0.5) / count
    at = torch.searchsorted(share, places.double().expand(len(points), -1).contiguous())
    values = ordered.gather(1, at.clamp(max=points.shape[1] - 1))
    if count > 4:  # outliers have values of their own, where there are enough
        values[:, 0], values[:, -1] = ordered[:, 0], ordered[:, -1]
    weights = energy.expand_as(points).contiguous()
    for _ in range(ROUNDS):
        codes = nearest(points, values).long()
        mass = torch.zeros_like(values).scatter_add_(1, codes, weights)
        total = torch.zeros_like(values).scatter_add_(1, codes, weights * points)
        values = torch.where(mass > 0, total / mass.clamp(min=1e-30), values).sort(1).values
    return values.half().float()


def nearest(points: Tensor, values: Tensor) -> Tensor:
    """uint8 codes of the nearest of rising values [groups, count]."""
    middles = ((values[:, 1:] + values[:, :-1]) / 2).contiguous()
    return torch.searchsorted(middles, points.contiguous()).byte()
