"""Seen: what is remembered of the inputs of one product while calibration text runs through it.

The largest and the mean magnitude of each input, some whole rows, and, where a pass asks for it,
the sum of outer products: half of what GPTQ calls a Hessian. `Watch` stands in front of a kernel
and fills it. Rows are taken at even distances, so the same text gives the same ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.errors import QuireError
from quire.nn.ops import LinearKernel

MAX_ROWS = 512  # kept of each product's inputs
FEW_TOKENS = 128  # an expert that saw fewer is named


@dataclass(frozen=True, slots=True)
class Needs:
    """What a pass must know of inputs."""

    rows: bool = False
    gram: bool = False

    @property
    def calibration(self) -> bool:
        return self.rows or self.gram


class Seen:
    def __init__(self, num_in: int, needs: Needs, rows_a_call: int, device: torch.device) -> None:
        self.num_tokens = 0
        self.most = torch.zeros(num_in, device=device)  # [in] largest magnitude
        self._sum = torch.zeros(num_in, device=device)  # of magnitudes
        self._squares = torch.zeros(num_in, device=device)
        self.gram = torch.zeros(num_in, num_in, device=device) if needs.gram else None
        self._rows: list[Tensor] = []
        self._rows_a_call = rows_a_call

    def add(self, x: Tensor) -> None:
        """[tokens, in]."""
        if not len(x):
            return
        wide = x.float()
        self.num_tokens += len(wide)
        torch.maximum(self.most, wide.abs().amax(0), out=self.most)
        self._sum += wide.abs().sum(0)
        self._squares += wide.square().sum(0)
        if self.gram is not None:
            self.gram.addmm_(wide.t(), wide)
        step = -(-len(wide) // self._rows_a_call)
        self._rows.append(wide[::step].clone())

    @property
    def mean(self) -> Tensor:
        """[in] mean magnitude."""
        return self._sum / max(1, self.num_tokens)

    @property
    def energy(self) -> Tensor:
        """[in] mean square: the Hessian's diagonal."""
        return self._squares / max(1, self.num_tokens)

    @property
    def rows(self) -> Tensor:
        """[some tokens, in]."""
        return torch.cat(self._rows) if self._rows else self.most.new_zeros(0, len(self.most))

    def divide(self, scale: Tensor) -> None:
        """The inputs are divided by this from now on, [in]."""
        self.most, self._sum = self.most / scale, self._sum / scale
        self._squares = self._squares / scale.square()
        self._rows = [rows / scale for rows in self._rows]
        if self.gram is not None:
            self.gram /= scale * scale.unsqueeze(1)

    def check(self, name: str) -> None:
        """Raises QuireError where a number is none."""
        bad = (~self._squares.isfinite()).nonzero().flatten().tolist()
        if bad:
            raise QuireError(
                f"the inputs of {name} are not finite on the calibration text (input {bad[0]} of"
                f" {len(self._squares)}): their Hessian has no use; the weights before it are"
                " damaged, or another calibration text is needed (--calibration FILE)"
            )


class Watch:
    """A kernel whose inputs are looked at."""

    def __init__(self, kernel: LinearKernel, seen: Seen) -> None:
        self.kernel, self.seen = kernel, seen

    def __call__(self, x: Tensor) -> Tensor:
        self.seen.add(x)
        return self.kernel(x)


class Caught(Exception):
    """What was to be seen has been: the rest of the block need not run."""


class Catch:
    """A kernel in whose place inputs are kept, and everything behind it is left out."""

    def __init__(self, num_in: int, device: torch.device) -> None:
        self.rows = torch.empty(0, num_in, device=device)

    def __call__(self, x: Tensor) -> Tensor:
        self.rows = x.float()
        raise Caught
