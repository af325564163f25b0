"""Sparsity: how many weights of a matrix go, and the masks that scores make of it.

Either a share of all weights, or a pattern N:M, which keeps N of every M inputs in a row. A mask is
True where a weight goes. Ties go to the first, so the same scores give the same mask.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.errors import BadRequest, NotSupported

USUAL = 0.5
MAX_RUN = 64  # M of a pattern


@dataclass(frozen=True, slots=True)
class Sparsity:
    share: float  # of weights that go
    run: tuple[int, int] | None = None  # N kept of every M; None: wherever they lie

    @staticmethod
    def of(share: float | None, pattern: str | None) -> Sparsity:
        """
        >>> Sparsity.of(None, "2:4")
        Sparsity(share=0.5, run=(2, 4))
        """
        if pattern is None:
            share = USUAL if share is None else share
            if not 0.0 < share < 1.0:
                raise BadRequest(
                    f"got --sparsity {share:g}, want a share of weights above 0 and below 1",
                    param="sparsity",
                )
            return Sparsity(share)
        found = re.fullmatch(r"(\d{1,3}):(\d{1,3})", pattern)
        kept, size = (int(found[1]), int(found[2])) if found else (0, 0)
        if not 0 < kept < size <= MAX_RUN:
            raise BadRequest(
                f"got --pattern {pattern!r}, want N:M with 0 < N < M <= {MAX_RUN}, such as 2:4:"
                " N weights are kept of every M",
                param="pattern",
            )
        if share is not None and abs(share - (1 - kept / size)) > 1e-6:
            raise BadRequest(
                f"got --sparsity {share:g} and --pattern {pattern}, which makes it"
                f" {1 - kept / size:g}; leave one out",
                param="sparsity",
            )
        return Sparsity(1 - kept / size, (kept, size))

    @property
    def is_two_of_four(self) -> bool:
        return self.run == (2, 4)

    def check(self, module: str, num_in: int) -> None:
        if self.run is not None and num_in % self.run[1]:
            raise NotSupported(
                f"{module} has {num_in} inputs, no multiple of {self.run[1]}, which the pattern"
                f" {self.run[0]}:{self.run[1]} wants; name it in --keep"
            )

    def in_runs(self, scores: Tensor) -> Tensor:
        """Of every M inputs of [out, in], those with the smallest scores."""
        assert self.run is not None
        kept, size = self.run
        split = scores.view(-1, size)
        return _smallest(split, size - kept).view_as(scores)

    def in_rows(self, scores: Tensor) -> Tensor:
        """Of every row of [out, in], or of its runs."""
        if self.run is not None:
            return self.in_runs(scores)
        return _smallest(scores, int(scores.shape[1] * self.share))

    def in_all(self, scores: Tensor) -> Tensor:
        """Of all of [out, in], or of runs."""
        if self.run is not None:
            return self.in_runs(scores)
        return _smallest(scores.reshape(1, -1), int(scores.numel() * self.share)).view_as(scores)


def _smallest(scores: Tensor, count: int) -> Tensor:
    """True at the `count` smallest of each row."""
    order = scores.sort(dim=1, stable=True).indices[:, :count]
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(1, order, True)
