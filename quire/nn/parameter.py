"""Parameter: a tensor that a checkpoint fills, as a whole or part by part.

Parts that arrive packed are kept as they are, beside the floats. Memory for floats is taken when
the first of them arrive, so a packed model never has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from quire.dist.cuts import Cut
from quire.quant.weight import Dense, Inputs, Weight

Index = int | slice | tuple[int, slice]  # what a part is of the tensor
WHOLE = ""  # the name of a parameter's only part


class Kept(NamedTuple):
    """What one of several ranks keeps of a parameter."""

    cuts: Mapping[str, Cut]  # rows, by part or of the WHOLE
    elsewhere: frozenset[str] = frozenset()  # parts that only other ranks have
    columns: Cut | None = None  # inputs, where a sum is split; None: all


class Parameter:
    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        parts: Mapping[str, Index] | None = None,
        can_pack: bool = False,
        kept: Kept | None = None,
    ) -> None:
        """`parts`: none: it is filled as a whole.
        `can_pack`: it multiplies, so a kernel may take it in another form.
        `kept`: shape and parts are what this rank has of it; None: all there is."""
        self.shape, self.dtype, self.device, self.can_pack = shape, dtype, device, can_pack
        self.parts: dict[str, Index] = dict(parts or {})
        self.kept = kept
        self.packed: dict[str, Weight] = {}  # by part
        self._tensor: Tensor | None = None
        self._inputs: Inputs = "float"

    @staticmethod
    def of(tensor: Tensor, kept: Kept | None = None) -> Parameter:
        """A tensor that is there already."""
        made = Parameter(tuple(tensor.shape), tensor.dtype, tensor.device, kept=kept)
        made._tensor = tensor
        return made

    @property
    def tensor(self) -> Tensor:
        """The floats. Before any were put, uninitialised memory."""
        if self._tensor is None:
            self._tensor = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        return self._tensor

    @property
    def num_elements(self) -> int:
        return torch.Size(self.shape).numel()

    def shape_of(self, part: str | None) -> tuple[int, ...]:
        if part is None:
            return self.shape
        return tuple(torch.empty(self.shape, device="meta")[self.parts[part]].shape)

    def is_elsewhere(self, part: str | None) -> bool:
        return self.kept is not None and part in self.kept.elsewhere

    def stored_shape(self, part: str | None) -> tuple[int, ...]:
        """As a checkpoint has it, for all ranks."""
        shape = self.shape_of(part)
        if self.kept is None:
            return shape
        cuts, columns = self.kept.cuts, self.kept.columns
        if columns is not None:
            return (*shape[:-1], columns.total)
        if (cut := cuts.get(part or WHOLE)) is not None:
            return (cut.total, *shape[1:])
        return shape if part else (sum(cut.total for cut in cuts.values()), *shape[1:])

    def own_rows(self, part: str | None) -> slice | Tensor | None:
        """Which rows of a stored part, or of all, are this rank's; None: every one."""
        if self.kept is None or not self.kept.cuts:
            return None
        cuts = self.kept.cuts
        found = cuts.get(part or WHOLE)
        if found is None and part is None and len(cuts) == 1:
            (found,) = cuts.values()
        if found is not None:
            return slice(found.begin, found.end)
        if part is not None:
            return None
        rows, first = [], 0
        for cut in cuts.values():
            rows.append(torch.arange(first + cut.begin, first + cut.end))
            first += cut.total
        return torch.cat(rows)

    @property
    def own_columns(self) -> Cut | None:
        """Which inputs are this rank's; None: every one."""
        return None if self.kept is None else self.kept.columns

    def view(self, part: str | None) -> Tensor:
        return self.tensor if part is None else self.tensor[self.parts[part]]

    def put(self, part: str | None, tensor: Tensor, inputs: Inputs = "float") -> None:
        """Fill the part, or all of it, with floats."""
        self.view(part).copy_(tensor)  # converts the dtype and moves to the device
        self._inputs = inputs

    def keep(self, part: str | None, weight: Weight) -> None:
        """Fill the part with a weight in the form it has."""
        if part is None and len(self.parts) == 1:
            (part,) = self.parts
        self.packed[part or WHOLE] = weight

    def weights(self) -> list[Weight]:
        """What was put, one below the other; alike parts of floats as one."""
        if not self.packed:
            return [Dense(self.tensor, self._inputs)]
        if WHOLE in self.packed:
            return [self.packed[WHOLE]]
        return [self.weight(part) for part in self.parts]

    def weights_of(self, parts: list[str], whole: Index) -> list[Weight]:
        """Some neighbouring parts; `whole` is the index of them all."""
        if not any(part in self.packed for part in parts):
            return [Dense(self.tensor[whole], self._inputs)]
        return [self.weight(part) for part in parts]

    def weight(self, part: str) -> Weight:
        return self.packed.get(part) or Dense(self.view(part), self._inputs)

    def reorder(self, part: str, rows: Tensor) -> None:
        """Give the part's rows another order."""
        name = WHOLE if WHOLE in self.packed and list(self.parts) == [part] else part
        if (packed := self.packed.get(name)) is not None:
            self.packed[name] = packed.pick(rows)
        else:
            assert WHOLE not in self.packed, "the parts are packed as one"
            self.view(part).copy_(self.view(part)[rows.to(self.device)])

    def release(self) -> None:
        """A kernel has what it needs."""
        self._tensor, self.packed = None, {}
