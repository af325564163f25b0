"""Codebook: 4, 8 or 16 values of their own for every four rows, where the weights that matter lie.

Values are found by k-means, each weight counting as much as its input's Hessian diagonal: how far
an error of it moves the output (SqueezeLLM's idea, arXiv 2306.07629). Groups of inputs have scales,
and values are whole numbers below them, so kernels of whole numbers look four rows up at a time.
Two to four bits a weight; NF4's sixteen values are the same everywhere. The layout is our own;
`load/codebook.py` reads it.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.compress.block import BlockTensors, Matrix
from quire.compress.grid import Grid
from quire.compress.layouts.words import to_bytes
from quire.compress.passes.recipe import Kept, Pass, Recipe, check_groups
from quire.compress.seen import Needs, Seen
from quire.errors import NotSupported
from quire.load.codebook import ROWS

MOST = 127  # of a value
ROUNDS = 25
TURNS = 2  # of scales after values, and codes after scales
AT_ONCE = 1 << 22  # weights clustered at once


class CodebookPass(Pass):
    needs = Needs(rows=True)
    widths = (4, 2, 3)
    takes = ("group",)

    def __init__(self, recipe: Recipe, dtype: torch.dtype) -> None:
        super().__init__(recipe, dtype)
        self.grid = Grid(self.bits, recipe.group_size(), dtype=torch.float16)

    def check(self, module: str, shape: tuple[int, int]) -> None:
        check_groups(module, shape[1], self.grid)
        size = 8 // math.gcd(8, self.bits)  # codes that fill bytes
        if shape[1] % size:
            raise NotSupported(
                f"{module} has {shape[1]} inputs, codebooks of {self.bits} bits want multiples of"
                f" {size}; name it in --keep"
            )

    def pack(self, matrix: Matrix, block: BlockTensors, seen: Seen | None) -> dict[str, Tensor]:
        weight = block.tensors[matrix.name]
        num_out, num_in = weight.shape
        energy = torch.ones(num_in, device=weight.device)
        if seen is not None and seen.num_tokens:
            energy = (seen.energy / seen.energy.mean().clamp(min=1e-30)).clamp(min=1e-4)
        padded = F.pad(weight, (0, 0, 0, -num_out % ROWS))
        some = padded.split(max(ROWS, AT_ONCE // num_in // ROWS * ROWS))
        made = [self._clustered(part, energy) for part in some]
        codes, values, scales = (torch.cat(tensors) for tensors in zip(*made, strict=True))
        return {
            "weight_codes": to_bytes(codes[:num_out], self.bits),
            "weight_values": values.to(torch.int8),
            "weight_scale": scales[:num_out].half(),
        }

    def said(self, kept: Kept) -> dict[str, object]:
        modules = list(kept.modules)
        return {"quant_method": "codebook", "bits": self.bits, "modules_to_not_convert": modules}

    def _clustered(self, weight: Tensor, energy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Codes [out, in], values [out / 4, 2**bits] and scales [out, groups]."""
        split = self.grid.split(weight)  # [out, groups, group]
        scales = _half(split.abs().amax(-1) / MOST)
        counts = energy.view(split.shape[1:])  # [groups, group]
        # An error in units of a scale moves the output by so much.
        weights = counts * scales.unsqueeze(-1).square()
        by_four = weights.reshape(len(weight) // ROWS, -1)
        points = (split / scales.unsqueeze(-1)).reshape(by_four.shape)
        values = cluster(points, by_four, 1 << self.bits)
        values = values.round().clamp(-MOST, MOST).sort(1).values
        codes = nearest(points, values)
        for _ in range(TURNS):
            near = values.gather(1, codes.long()).view_as(split)
            above = (counts * split * near).sum(-1)
            below = (counts * near.square()).sum(-1)
            scales = torch.where((above > 0) & (below > 0), _half(above / below), scales)
            codes = nearest((split / scales.unsqueeze(-1)).reshape(by_four.shape), values)
        return codes.view(weight.shape), values, scales


def _half(scales: Tensor) -> Tensor:
    """As they are stored; never 0."""
    finfo = torch.finfo(torch.float16)
    return scales.nan_to_num(0.0, 0.0, 0.0).clamp(finfo.tiny, finfo.max).half().float()


def cluster(points: Tensor, energy: Tensor, count: int = 16) -> Tensor:
    """[groups, points], weighted by the same or by [points] -> [groups, count] values, rising.

    Lloyd's rounds from quantiles of the weighted points."""
    weights = energy.expand_as(points).contiguous()
    ordered, order = points.sort(1)
    share = weights.gather(1, order).double().cumsum(1)
    share = share / share[:, -1:]
    places = (torch.arange(count, device=points.device) + 0.5) / count
    at = torch.searchsorted(share, places.double().expand(len(points), -1).contiguous())
    values = ordered.gather(1, at.clamp(max=points.shape[1] - 1))
    if count > 4:  # outliers have values of their own, where there are enough
        values[:, 0], values[:, -1] = ordered[:, 0], ordered[:, -1]
    for _ in range(ROUNDS):
        codes = nearest(points, values).long()
        mass = torch.zeros_like(values).scatter_add_(1, codes, weights)
        total = torch.zeros_like(values).scatter_add_(1, codes, weights * points)
        values = torch.where(mass > 0, total / mass.clamp(min=1e-30), values).sort(1).values
    return values


def nearest(points: Tensor, values: Tensor) -> Tensor:
    """uint8 codes of the nearest of rising values [groups, count]."""
    middles = ((values[:, 1:] + values[:, :-1]) / 2).contiguous()
    return torch.searchsorted(middles, points.contiguous()).byte()
