"""Module: the stored tensors of one projection, each checked before it is used.

Names, shapes and dtypes are asked of the headers alone, so that a file that does not fit is refused
before memory is taken for it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.errors import CheckpointError
from quire.load.checkpoint import Checkpoint

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Modules:
    """All of a checkpoint; their tensors are read to a device."""

    stored: Checkpoint
    device: torch.device
    names: frozenset[str]

    @staticmethod
    def of(stored: Checkpoint, device: torch.device) -> Modules:
        return Modules(stored, device, frozenset(stored.names()))

    def __getitem__(self, name: str) -> Module:
        return Module(self, name)


@dataclass(frozen=True, slots=True)
class Module:
    source: Modules
    name: str  # its tensors are called `name.last`

    def path(self, last: str) -> str:
        return f"{self.name}.{last}"

    def has(self, last: str) -> bool:
        return self.path(last) in self.source.names

    def shape(self, last: str) -> tuple[int, ...]:
        self._demand(last)
        return self.source.stored.shape(self.path(last))

    def dtype(self, last: str) -> torch.dtype:
        self._demand(last)
        return self.source.stored.read(self.path(last)).dtype

    def matrix(self, last: str, *dtypes: torch.dtype) -> tuple[int, int]:
        """The shape of a tensor with rows and columns. Raises CheckpointError."""
        shape = self.shape(last)
        if len(shape) != 2 or 0 in shape or self.dtype(last) not in dtypes:
            raise self.error(last, f"two dimensions of {_names(dtypes)}")
        return shape[0], shape[1]

    def check(self, last: str, shape: tuple[int, ...], *dtypes: torch.dtype) -> None:
        """Raises CheckpointError unless it is there as it should be."""
        if self.shape(last) != shape or self.dtype(last) not in dtypes:
            raise self.error(last, f"{shape} of {_names(dtypes)}")

    def error(self, last: str, want: str) -> CheckpointError:
        shape = self.source.stored.shape(self.path(last))
        kind = _names([self.dtype(last)])
        return CheckpointError(f"tensor {self.path(last)} has shape {shape} of {kind}, want {want}")

    def read(self, last: str) -> Tensor:
        return self.source.stored.read(self.path(last)).to(self.source.device)

    def scales(self, last: str) -> Tensor:
        """Numbers that weights are multiplied with, fp16 or fp32. Raises CheckpointError."""
        found = self.read(last)
        found = found if found.dtype is torch.float16 else found.float()
        self.demand_finite(last, found)
        return found

    def demand_finite(self, last: str, scales: Tensor) -> None:
        """Raises CheckpointError; `scales` were made of the tensor."""
        if not bool((is_finite := scales.isfinite()).all()):
            bad = scales[~is_finite].flatten()[0].item()
            raise CheckpointError(
                f"tensor {self.path(last)} has {bad} among its scales, want finite numbers"
            )

    def _demand(self, last: str) -> None:
        if not self.has(last):
            raise CheckpointError(
                f"no tensor {self.path(last)}, without which the weights of {self.name} cannot be"
                " read; the files are not those that config.json describes"
            )


def _names(dtypes: list[torch.dtype] | tuple[torch.dtype, ...]) -> str:
    return " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
