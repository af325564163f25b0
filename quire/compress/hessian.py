"""Hessian: what a change of weights does to outputs, as the inputs' outer products tell.

The inverse says how the error of one column is best spread over those to come; its Cholesky factor
has that for every column at once. Whoever changes weights one input after the other, by rounding
(GPTQ) or by cutting (SparseGPT), goes through them with `in_turn`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quire.errors import QuireError

DAMP = 0.01  # of the mean diagonal, added to all of it
STRONG_DAMP = 1.0  # fits the calibration text less: what its inputs share others may not
MOST_DAMP = 10.0
BLOCK = 128  # columns whose errors are spread at once


def inverse_factor(gram: Tensor, order: Tensor | None, module: str, damp: float = DAMP) -> Tensor:
    """Upper Cholesky factor of the damped Hessian's inverse. Inputs that were always 0 get a
    Hessian of their own, so that their weights are rounded to nearest."""
    hessian = gram.clone() if order is None else gram[order][:, order]
    diagonal = hessian.diagonal()
    mean = diagonal.mean().item() or 1.0
    diagonal[diagonal == 0] = mean
    while damp <= MOST_DAMP:
        damped = hessian.clone()
        damped.diagonal().add_(damp * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not int(failed):
            inverse = torch.cholesky_inverse(lower)
            found, failed = torch.linalg.cholesky_ex(inverse, upper=True)
            upper: Tensor = found
            if not int(failed) and bool(upper.isfinite().all()):
                return upper
        damp *= 10.0
    raise QuireError(
        f"the Hessian of {module} has no Cholesky factor even when damped by {MOST_DAMP} times its"
        " mean diagonal: give more calibration text (--calibration FILE, --samples), or name the"
        " module in --keep"
    )


def in_turn(
    columns: Tensor, factor: Tensor, settle: Callable[[int], Tensor], block: int = BLOCK
) -> None:
    """Replace one column after the other by what `settle` makes of it, and let those to come make
    up for the error. Columns are rows here, [in, out]; the factor [in, in] is in their order."""
    for begin in range(0, len(columns), block):
        end = min(begin + block, len(columns))
        errors = torch.empty_like(columns[begin:end])
        for j in range(begin, end):
            settled = settle(j)
            error = (columns[j] - settled) / factor[j, j]
            columns[j] = settled
            columns[j + 1 : end].addr_(factor[j, j + 1 : end], error, alpha=-1.0)
            errors[j - begin] = error
        columns[end:].addmm_(factor[begin:end, end:].t(), errors, alpha=-1.0)
