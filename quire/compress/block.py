"""BlockTensors: one block's tensors in fp32, under the names they are stored by.

A *site* is a place where inputs meet one or more matrices: `qkv`, `out`, `up`, `down`, `router`,
`experts.3.up`. A pass changes the tensors, by site or by name, and writes what came of them.
Which scales may move from one product to the one before is `folds.py`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from quire.models.names import Target
from quire.nn.parameter import Index, Parameter


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight [out, in] that multiplies."""

    name: str  # of the stored tensor, ".weight" at its end
    site: str
    parts: Mapping[str, slice]  # which of its rows are which part of the site's product

    @property
    def module(self) -> str:
        return self.name.removesuffix(".weight")


@dataclass(slots=True)
class BlockTensors:
    prefix: str  # of our names: "layers.3."
    tensors: dict[str, Tensor]  # by stored name
    targets: Mapping[str, Target]
    matrices: list[Matrix] = field(default_factory=list)
    kept: frozenset[str] = frozenset()  # modules that stay plain
    changed: dict[str, Tensor] = field(default_factory=dict)  # in the place of `tensors`, by name

    @staticmethod
    def of(
        prefix: str,
        tensors: dict[str, Tensor],
        targets: Mapping[str, Target],
        parameters: Mapping[str, Parameter],
    ) -> BlockTensors:
        made = BlockTensors(prefix, tensors, targets)
        for name, target in targets.items():
            if parameters[target.name].can_pack:
                made.matrices.append(_matrix(name, target, prefix, parameters[target.name]))
        return made

    def at(self, site: str) -> list[Matrix]:
        return [matrix for matrix in self.matrices if matrix.site == site]

    @property
    def sites(self) -> list[str]:
        return list(dict.fromkeys(matrix.site for matrix in self.matrices))

    def named(self, ours: str) -> Tensor | None:
        """The tensor that is one of ours, whole: "attn_norm.weight"."""
        for name, target in self.targets.items():
            if target.name == self.prefix + ours and target.part is None:
                return self.tensors[name]
        return None

    def scale_columns(self, site: str, scale: Tensor) -> None:
        for matrix in self.at(site):
            self.tensors[matrix.name] *= scale

    def divide_rows(self, site: str, part: str, scale: Tensor) -> None:
        """Outputs of a part, and their bias, by [rows]."""
        for matrix in self.at(site):
            if part in matrix.parts:
                self.tensors[matrix.name][matrix.parts[part]] /= scale.unsqueeze(1)
        for name, target in self.targets.items():
            stem = self.prefix + site
            if target.name == f"{stem}.bias" and target.part == part:
                self.tensors[name] /= scale
            elif target.name == f"{stem}.bias" and target.part is None:
                (rows,) = (m.parts[part] for m in self.at(site) if part in m.parts)
                self.tensors[name][rows] /= scale


def _matrix(name: str, target: Target, prefix: str, parameter: Parameter) -> Matrix:
    """Experts have a site each; the parts of their products are "gate", "up" and "down"."""
    own = target.name.removeprefix(prefix)
    if own.startswith("experts."):
        expert, _, part = (target.part or "").partition(".")
        kind = own.removeprefix("experts.")
        rows = slice(None)
        return Matrix(name, f"experts.{expert}.{kind}", {part or kind: rows})
    site = own.removesuffix(".weight")
    if target.part is not None:
        return Matrix(name, site, {target.part: slice(None)})
    return Matrix(name, site, {part: _rows(at) for part, at in parameter.parts.items()})


def _rows(index: Index) -> slice:
    assert isinstance(index, slice), index
    return index
