"""Grid: which whole numbers a weight may be rounded to, and what they stand for.

    weight = scale * (code - zero)

with one scale (and zero) for each row and group of inputs. Scales are rounded to the dtype they are
stored in before any code is chosen, so nothing is lost between choosing and storing. How codes are
packed is `layouts/`'s business, which codes are best that of `passes/`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.load.grouped import consecutive

TINIEST = 1e-8  # of a scale: a group of zeros has one too


@dataclass(frozen=True, slots=True)
class Steps:
    """Scales and zeros of some groups; a zero is a code."""

    scales: Tensor  # [out, groups] fp32, numbers that the stored dtype has
    zeros: Tensor  # [out, groups] fp32, whole

    def of_inputs(self, groups: Tensor) -> Steps:
        """Those of each input, by its group: [out, in]."""
        return Steps(self.scales[:, groups], self.zeros[:, groups])


@dataclass(frozen=True, slots=True)
class Codes:
    """A weight [out, in] on its grid."""

    codes: Tensor  # [out, in] uint8
    steps: Steps
    groups: Tensor  # [in] int64: the group of each input

    def values(self) -> Tensor:
        """[out, in] fp32."""
        own = self.steps.of_inputs(self.groups)
        return (self.codes.float() - own.zeros) * own.scales


@dataclass(frozen=True, slots=True)
class Grid:
    bits: int
    group: int | None  # inputs that share a scale; None: all of a row
    has_zeros: bool = False
    dtype: torch.dtype = torch.float16  # that scales are stored in

    @property
    def most(self) -> int:
        return (1 << self.bits) - 1

    @property
    def middle(self) -> int:
        return 1 << (self.bits - 1)

    def groups(self, num_in: int, device: torch.device) -> Tensor:
        """[in]: the group of each input."""
        return consecutive(num_in, self.group or num_in, device)

    def split(self, weight: Tensor) -> Tensor:
        """[out, in] -> [out, groups, group]."""
        return weight.view(len(weight), -1, self.group or weight.shape[1])

    def steps(self, weight: Tensor, clip: Tensor | float = 1.0) -> Steps:
        """From the range of each group [out, groups, group]; `clip` [out, groups] shrinks it."""
        low, high = weight.amin(-1).clamp(max=0.0) * clip, weight.amax(-1).clamp(min=0.0) * clip
        if not self.has_zeros:
            scales = self._stored(torch.maximum(high, -low) * 2 / self.most)
            return Steps(scales, torch.full_like(scales, self.middle))
        scales = self._stored((high - low) / self.most)
        return Steps(scales, (-low / scales).round_().clamp_(0, self.most))

    def codes(self, weight: Tensor, steps: Steps) -> Tensor:
        """The nearest codes, fp32; steps are of the same shape or broadcast."""
        return (weight / steps.scales + steps.zeros).round_().clamp_(0, self.most)

    def near(self, weight: Tensor, steps: Steps) -> Tensor:
        """What the nearest codes stand for."""
        return (self.codes(weight, steps) - steps.zeros) * steps.scales

    def rounded(self, weight: Tensor, clip: Tensor | float = 1.0) -> Tensor:
        """[out, in] -> the same, each number replaced by the nearest on the grid."""
        split = self.split(weight)
        steps = self.steps(split, clip)
        wide = Steps(steps.scales.unsqueeze(-1), steps.zeros.unsqueeze(-1))
        return self.near(split, wide).view_as(weight)

    def nearest(self, weight: Tensor, clip: Tensor | float = 1.0) -> Codes:
        """[out, in] rounded to nearest."""
        split = self.split(weight)
        steps = self.steps(split, clip)
        wide = Steps(steps.scales.unsqueeze(-1), steps.zeros.unsqueeze(-1))
        codes = self.codes(split, wide).byte().view(weight.shape)
        return Codes(codes, steps, self.groups(weight.shape[1], weight.device))

    def _stored(self, scales: Tensor) -> Tensor:
        finfo = torch.finfo(self.dtype)
        least = max(TINIEST, float(finfo.tiny))
        return scales.clamp(least, float(finfo.max)).to(self.dtype).float()
