"""Hessian: what a change of weights does to outputs, as the inputs' outer products tell.

The inverse says how the error of one column is best spread over those to come; its Cholesky factor
has that for every column at once. GPTQ (rounding) and SparseGPT (cutting) read it alike.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.errors import QuireError

DAMP = 0.01  # of the mean diagonal, added to all of it
MOST_DAMP = 10.0


def inverse_factor(gram: Tensor, order: Tensor | None, module: str) -> Tensor:
    """Upper Cholesky factor of the damped Hessian's inverse. Inputs that were always 0 get a
    Hessian of their own, so that their weights are rounded to nearest."""
    hessian = gram.clone() if order is None else gram[order][:, order]
    diagonal = hessian.diagonal()
    mean = diagonal.mean().item() or 1.0
    diagonal[diagonal == 0] = mean
    damp = DAMP
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
