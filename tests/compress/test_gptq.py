"""GPTQ against its definition, written out column by column in fp64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from quire.compress.grid import Grid, Steps
from quire.compress.hessian import DAMP, inverse_factor
from quire.compress.passes.fp8 import row_scales, to_codes
from quire.compress.passes.gptq import Rounding
from quire.compress.passes.gptq_fp8 import in_codes
from quire.errors import QuireError

OUT, IN = 24, 64


def correlated(seed: int = 0, rows: int = 512) -> Tensor:
    """[rows, in] inputs that have much in common, some of them large."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(IN, IN, generator=generator) + 2 * torch.randn(1, IN, generator=generator)
    return torch.randn(rows, IN, generator=generator) @ mixing * torch.linspace(0.2, 2.0, IN)


def weights(seed: int = 1) -> Tensor:
    return torch.randn(OUT, IN, generator=torch.Generator().manual_seed(seed))


def by_definition(
    weight: Tensor,
    gram: Tensor,
    near: Callable[[int, Tensor], Tensor],
    order: list[int],
    damp: float = DAMP,
) -> Tensor:
    """The values that optimal brain surgery leaves: quantise an input (`near`), spread its error by
    the inverse Hessian, strike the input out of the inverse, go on."""
    hessian = gram.double()
    hessian += damp * hessian.diagonal().mean() * torch.eye(IN, dtype=torch.float64)
    inverse, left = torch.linalg.inv(hessian), weight.double().clone()
    out = torch.empty_like(left)
    for j in order:
        out[:, j] = near(j, left[:, j])
        error = (left[:, j] - out[:, j]) / inverse[j, j]
        left -= error[:, None] * inverse[j]
        inverse = inverse - inverse[:, j, None] * inverse[j] / inverse[j, j]
    return out.float()


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_it_is_optimal_brain_surgery(bits: int, act_order: bool) -> None:
    """Red when an error is spread over the wrong inputs, in the wrong order or with the wrong
    factor: codes then differ in many places, not in the few where fp32 rounds otherwise."""
    x, weight, grid = correlated(), weights(), Grid(bits, 16)
    gram = x.t() @ x
    order = gram.diagonal().argsort(descending=True, stable=True) if act_order else None
    made = Rounding(grid, order, True).of(weight, inverse_factor(gram, order, "w"))
    steps = grid.steps(grid.split(weight)).of_inputs(grid.groups(IN, weight.device))

    def near(j: int, column: Tensor) -> Tensor:
        own = Steps(steps.scales[:, j].double(), steps.zeros[:, j].double())
        return grid.near(column, own)

    want = by_definition(weight, gram, near, list(range(IN)) if order is None else order.tolist())
    assert torch.equal(made.groups, grid.groups(IN, weight.device))
    assert (made.values() == want).float().mean() > 0.97


@pytest.mark.parametrize("is_static", [False, True])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_outputs_move_less_than_by_rounding(bits: int, is_static: bool) -> None:
    """Red when GPTQ no longer beats rounding to nearest on the outputs."""
    x, weight, grid = correlated(), weights(), Grid(bits, 16)
    gram = x.t() @ x
    order = gram.diagonal().argsort(descending=True, stable=True)
    made = Rounding(grid, order, is_static).of(weight, inverse_factor(gram, order, "w")).values()

    def cost(near: Tensor) -> float:
        return (x @ (near - weight).t()).square().sum().item()

    assert cost(made) < 0.5 * cost(grid.rounded(weight))


def test_steps_and_damping_may_be_given() -> None:
    """Red when AWQ's cut ranges are found anew, or its damping is GPTQ's."""
    x, weight, grid = correlated(), weights(), Grid(4, 16, True)
    gram = x.t() @ x
    cut = grid.steps(grid.split(weight), 0.8)
    made = Rounding(grid, None, True).of(weight, inverse_factor(gram, None, "w", 1.0), cut)
    own = cut.of_inputs(made.groups)

    def near(j: int, column: Tensor) -> Tensor:
        return grid.near(column, Steps(own.scales[:, j].double(), own.zeros[:, j].double()))

    want = by_definition(weight, gram, near, list(range(IN)), 1.0)
    assert made.steps is cut
    assert (made.values() == want).float().mean() > 0.97


def test_floats_of_eight_bits_too() -> None:
    """Red when errors of floats are spread otherwise than those of whole numbers, or when it does
    not pay."""
    x, weight = correlated(), weights()
    gram = x.t() @ x
    order = gram.diagonal().argsort(descending=True, stable=True)
    codes, scale = in_codes(weight, inverse_factor(gram, order, "w"), order, torch.float32)
    made, wide = codes.float() * scale, scale.flatten().double()
    want = by_definition(
        weight, gram, lambda j, column: to_codes(column, wide).double() * wide, order.tolist()
    )
    assert torch.equal(scale, row_scales(weight, torch.float32))
    assert (made == want).float().mean() > 0.97
    plain = to_codes(weight, scale).float() * scale
    moved = [(x @ (near - weight).t()).square().sum() for near in (made, plain)]
    assert moved[0] < 0.5 * moved[1]


def test_groups_follow_the_order_unless_static() -> None:
    """Red when g_idx does not say which group an input is in."""
    x, grid = correlated(), Grid(4, 16)
    gram = x.t() @ x
    order = gram.diagonal().argsort(descending=True, stable=True)
    made = Rounding(grid, order, False).of(weights(), inverse_factor(gram, order, "w"))
    assert made.groups[order].tolist() == [i // 16 for i in range(IN)]
    assert bool((made.groups.diff() < 0).any())


def test_without_tokens_it_rounds_to_nearest() -> None:
    """Red when an expert that saw nothing is set to zero."""
    weight, grid = weights(), Grid(4, 16)
    factor = inverse_factor(torch.zeros(IN, IN), None, "w")
    made = Rounding(grid, None, True).of(weight, factor)
    assert torch.equal(made.codes, grid.nearest(weight).codes)


def test_a_hessian_that_is_none_is_named() -> None:
    """Red when NaN among the inputs ends in codes without a word."""
    with pytest.raises(QuireError, match=r"the Hessian of model\.x has no Cholesky factor"):
        inverse_factor(torch.full((IN, IN), float("nan")), None, "model.x")
