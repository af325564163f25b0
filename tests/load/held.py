"""Held: a checkpoint of tensors in memory, and the vectors that reference packages wrote."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import safe_open
from torch import Tensor

from quire.errors import CheckpointError
from quire.load.checkpoint import Checkpoint, Stored
from quire.load.unpack import readable
from quire.quant.weight import Weight

VECTORS = Path(__file__).parent / "vectors"
CPU = torch.device("cpu")


@dataclass
class Held:
    """`Checkpoint`."""

    config: Mapping[str, Any]
    files: ClassVar[tuple[Path, ...]] = ()
    tensors: dict[str, Tensor]

    def names(self) -> Sequence[str]:
        return list(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self.tensors:
            raise CheckpointError(f"no tensor {name!r}")
        return tuple(self.tensors[name].shape)

    def read(self, name: str) -> Tensor:
        return self.tensors[name]

    def stored(self, name: str) -> Stored:
        tensor = self.tensors[name]
        kind = str(tensor.dtype).removeprefix("torch.")
        return Stored(kind, tensor.numel() * tensor.element_size())

    def packed(self, name: str, rows: slice | None = None) -> Weight | None:
        return None


def plain(said: Mapping[str, Any], tensors: dict[str, Tensor]) -> Checkpoint:
    """As the loader sees it; `said` is the quantization_config."""
    return readable(Held({"quantization_config": said}, tensors), CPU)


@dataclass(frozen=True)
class Vector:
    said: dict[str, Any]
    tensors: dict[str, Tensor]  # of a module called "w"
    want: Tensor


def vectors(name: str, method: str | None = None) -> dict[str, Vector]:
    """Of a file; the method is called like it, unless said otherwise."""
    found = {}
    with safe_open(VECTORS / f"{name}.safetensors", "pt") as file:
        cases = json.loads(file.metadata()["cases"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for case, said in cases.items():
        own = {
            "w" + name.removeprefix(case): tensor
            for name, tensor in tensors.items()
            if name.startswith(case + ".")
        }
        found[case] = Vector({"quant_method": method or name, **said}, own, own.pop("w.want"))
    return found
