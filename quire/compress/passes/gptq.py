"""GPTQ: round one input after the other, and let those not yet rounded make up for the error.

What a change of the weights does to the outputs is told by the Hessian, the inputs' outer products.
Its inverse says how the error of one column is best spread over the columns to come; the Cholesky
factor of the inverse has that for every column at once (Frantar et al., arXiv 2210.17323). Columns
go from the most to the least active (act order). Groups then keep the places and the scales that
they had before (static groups), or are made in that order, and `g_idx` tells.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.compress.block import BlockTensors, Matrix
from quire.compress.grid import Codes, Grid, Steps
from quire.compress.hessian import in_turn, inverse_factor
from quire.compress.layouts import gptq as layout
from quire.compress.passes.recipe import Kept, Pass, Recipe, check_groups
from quire.compress.seen import Needs, Seen


class Gptq(Pass):
    needs = Needs(rows=True, gram=True)

    widths = (4, 2, 3, 8)
    takes = ("group", "asymmetric", "act_order", "static_groups")

    def __init__(self, recipe: Recipe, dtype: torch.dtype) -> None:
        super().__init__(recipe, dtype)
        self.grid = Grid(self.bits, recipe.group_size(), recipe.asymmetric, torch.float16)
        self.act_order, self.static_groups = recipe.act_order, recipe.static_groups

    @property
    def is_scattered(self) -> bool:
        """Whether the inputs of a group are no neighbours."""
        return self.act_order and not self.static_groups and self.grid.group is not None

    def check(self, module: str, shape: tuple[int, int]) -> None:
        check_groups(module, shape[1], self.grid)
        layout.check(module, shape, self.grid.bits)

    def pack(self, matrix: Matrix, block: BlockTensors, seen: Seen | None) -> dict[str, Tensor]:
        assert seen is not None and seen.gram is not None
        weight = block.tensors[matrix.name]
        order = None
        if self.act_order:
            order = seen.gram.diagonal().argsort(descending=True, stable=True)
        factor = inverse_factor(seen.gram, order, matrix.module)
        rounding = Rounding(self.grid, order, self.static_groups or not self.act_order)
        return layout.pack(rounding.of(weight, factor), self.grid)

    def said(self, kept: Kept) -> dict[str, object]:
        modules = [name for name in kept.modules if name != "lm_head"]
        return layout.said(self.grid, self.is_scattered, modules, kept.quantises_head)


class Rounding:
    """One matrix, column by column in `order`."""

    def __init__(self, grid: Grid, order: Tensor | None, is_static: bool) -> None:
        self.grid, self.order, self.is_static = grid, order, is_static or grid.group is None

    def of(self, weight: Tensor, factor: Tensor, static: Steps | None = None) -> Codes:
        """[out, in], with the upper factor [in, in] in the same order; `static`: steps that others
        have chosen."""
        num_in, device = weight.shape[1], weight.device
        order = torch.arange(num_in, device=device) if self.order is None else self.order
        columns = weight.t()[order].contiguous()  # [in, out]: a column is a row here
        if static is None and self.is_static:
            static = self.grid.steps(self.grid.split(weight))
        places = self.grid.groups(num_in, device)
        groups = places[order] if self.is_static else places  # by column
        numbers = groups.tolist()
        codes = torch.empty_like(columns, dtype=torch.uint8)
        made: dict[int, Steps] = {}

        def settle(j: int) -> Tensor:
            if static is None and numbers[j] not in made:
                made[numbers[j]] = self._steps_at(columns, j)
            steps = _column(static, numbers[j]) if static else made[numbers[j]]
            found = self.grid.codes(columns[j], steps)
            codes[j] = found.byte()
            return (found - steps.zeros) * steps.scales

        in_turn(columns, factor, settle)
        if static is None:
            ordered = [made[i] for i in range(len(made))]
            static = Steps(
                torch.stack([s.scales for s in ordered], 1),
                torch.stack([s.zeros for s in ordered], 1),
            )
        back = order.argsort()
        return Codes(codes[back].t().contiguous(), static, groups[back])

    def _steps_at(self, columns: Tensor, begin: int) -> Steps:
        """Of the group that begins here, from the weights as they are by now."""
        assert self.grid.group is not None
        some = columns[begin : begin + self.grid.group].t().unsqueeze(1)  # [out, 1, group]
        return _column(self.grid.steps(some), 0)


def _column(steps: Steps, group: int) -> Steps:
    return Steps(steps.scales[:, group], steps.zeros[:, group])
