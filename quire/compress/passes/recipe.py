"""Recipe: what a user asks for. Pass: what a method does with one block.

A pass says what it must know of inputs (`needs`), may move scales between products (`fold`), may
put other weights in the place of some (`act`), may leave some as they are that would lose too much
(`spared`), and turns one matrix into the tensors that are stored for it (`pack`).
`compress/methods.py` lists them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from quire.compress.block import BlockTensors, Matrix
from quire.compress.grid import Grid
from quire.compress.seen import Needs, Seen
from quire.errors import BadRequest, NotSupported
from quire.models.spec import ModelSpec

GROUP = 128
# What fields of a recipe are called on the command line.
OPTIONS = {
    "bits": "--bits",
    "group": "--group-size",
    "asymmetric": "--asymmetric",
    "act_order": "--no-act-order",
    "static_groups": "--no-static-groups",
    "static_inputs": "--static-inputs",
    "storage": "--type",
    "sparsity": "--sparsity",
    "pattern": "--pattern",
    "reconstruct": "--no-reconstruct",
    "plain": "--plain",
    "layers": "--layers",
    "heads": "--heads",
    "kv_heads": "--kv-heads",
    "mlp": "--mlp",
    "hidden": "--hidden",
}


@dataclass(frozen=True, slots=True)
class Recipe:
    method: str
    bits: int | None = None  # None: what is usual for the method
    group: int | None = None  # inputs that share a scale; 0: all of a row; None: as usual
    asymmetric: bool = False
    act_order: bool = True
    static_groups: bool = True
    static_inputs: bool = False  # fp8: scales of inputs come from calibration
    storage: str = "Q4_K"  # gguf: the type of most tensors
    sparsity: float | None = None  # pruning: the share of weights that go
    pattern: str | None = None  # pruning: N:M
    reconstruct: bool = True  # fit what is left to the dense outputs
    plain: bool = False  # 2:4: zeros are stored like other weights
    layers: int | None = None  # shrinking: how many are left; None: all
    heads: int | None = None
    kv_heads: int | None = None
    mlp: int | None = None
    hidden: int | None = None

    def bits_among(self, known: tuple[int, ...]) -> int:
        """The first is the usual one."""
        bits = known[0] if self.bits is None else self.bits
        if bits not in known:
            raise NotSupported(
                f"got --bits {bits} with --method {self.method}, which writes"
                f" {' or '.join(map(str, sorted(known)))} bits"
            )
        return bits

    def check(self, taken: tuple[str, ...]) -> None:
        """Raises BadRequest where anything but these fields was asked for in vain."""
        for name, option in OPTIONS.items():
            if name not in taken and getattr(self, name) != getattr(Recipe(self.method), name):
                raise BadRequest(
                    f"--method {self.method} has no use for {option}; leave it out", param=name
                )

    def group_size(self, usual: int | None = GROUP) -> int | None:
        return usual if self.group is None else self.group or None


@dataclass(frozen=True, slots=True)
class Kept:
    """Modules that stay plain, by stored name, for the config."""

    modules: tuple[str, ...]
    quantises_head: bool


class Pass(ABC):
    needs = Needs()
    reconstructs = False  # whether weights that `act` left are fitted to the dense outputs
    widths: ClassVar[tuple[int, ...]] = (4,)  # bits of a weight that it writes, the usual first;
    # empty: they stay what they are
    takes: ClassVar[tuple[str, ...]] = ()  # other fields of a recipe that it heeds

    def __init__(self, recipe: Recipe, dtype: torch.dtype) -> None:
        recipe.check((*self.takes, "bits") if self.widths else self.takes)
        self.bits = recipe.bits_among(self.widths) if self.widths else 0

    def check(self, module: str, shape: tuple[int, int]) -> None:
        """Raises NotSupported where the matrix does not fit the form it would be stored in."""
        return

    def fold(self, block: BlockTensors, seen: dict[str, Seen], spec: ModelSpec) -> None:
        """Change the block's tensors without changing what it computes. Mutates both."""
        return

    def act(self, matrices: Sequence[Matrix], block: BlockTensors, seen: dict[str, Seen]) -> None:
        """Put weights into `block.changed` that take the place of these matrices'."""
        return

    def spared(
        self, matrices: Sequence[Matrix], block: BlockTensors, seen: dict[str, Seen]
    ) -> dict[str, float]:
        """Modules that are to stay plain, with what their outputs would lose otherwise."""
        return {}

    @abstractmethod
    def pack(self, matrix: Matrix, block: BlockTensors, seen: Seen | None) -> dict[str, Tensor]:
        """Tensors to store, by the last part of their names. Must not change the block."""

    @abstractmethod
    def said(self, kept: Kept) -> dict[str, object]:
        """`quantization_config` of config.json; empty: the weights are plain."""


def check_groups(module: str, num_in: int, grid: Grid) -> None:
    if grid.group is not None and num_in % grid.group:
        fits = [size for size in (256, 128, 64, 32, 16) if num_in % size == 0]
        way = f"take --group-size {fits[0]}, or" if fits else ""
        raise NotSupported(
            f"{module} has {num_in} inputs, no multiple of the group size {grid.group}: {way}"
            f" --group-size 0 for one scale a row".replace(":  --", ": take --")
        )


def scale_dtype(dtype: torch.dtype) -> torch.dtype:
    """What scales are stored in beside plain tensors of this dtype."""
    return dtype if dtype in (torch.float16, torch.bfloat16) else torch.float32
