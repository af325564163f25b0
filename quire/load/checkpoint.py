"""Checkpoint: named tensors plus a config, wherever they come from.

Names and layouts are those of Hugging Face checkpoints; readers of other containers (GGUF)
translate into them, so everything downstream knows one naming. Nothing is read until asked for,
and one tensor is in flight at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from quire.quant.weight import Weight


class Stored(NamedTuple):
    form: str  # the container's own word: a dtype, "Q4_K"
    num_bytes: int


class Checkpoint(Protocol):
    config: Mapping[str, Any]  # as in config.json
    files: Sequence[Path]  # what tensors are read from; none: they are from no file

    def names(self) -> Sequence[str]:
        """All tensor names, Hugging Face style."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape without reading the data."""
        ...

    def read(self, name: str) -> Tensor:
        """One CPU tensor, possibly a view of mapped memory. Raises CheckpointError."""
        ...

    def stored(self, name: str) -> Stored:
        """How it is stored, without reading the data."""
        ...

    def packed(self, name: str, rows: slice | None = None) -> Weight | None:
        """A matrix [out, in] in the form it is stored in, where kernels may take it so; None: what
        `read` gives is all there is. One that is stored transposed comes as [out, in] too. With
        `rows`, of these alone; of one with heads, whole heads."""
        ...
