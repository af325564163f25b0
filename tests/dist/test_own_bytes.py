"""Ranks side by side read their share of a file's bytes: what they have, and not one more."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from quire.config import EngineArgs
from quire.dist.ranks import Ranks
from quire.load.checkpoint import Checkpoint
from quire.load.loader import load_weights
from quire.load.open import open_model
from quire.models.decoder import Decoder, heads_of
from quire.models.registry import names_of, spec_of
from quire.models.tiny import tiny_model

WIDE = {"hidden_size": 64, "intermediate_size": 128}


class Reads(TorchDispatchMode):
    """Counts the bytes of some tensors that operations read; to take a view is to read nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0
        self._files: dict[int, Tensor] = {}  # by where they lie

    def watch(self, tensor: Tensor) -> Tensor:
        self._files[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        where = _address(made)
        for arg in args:
            if (at := _address(arg)) in self._files and at != where:
                read = made if func is torch.ops.aten.index.Tensor else arg
                self.num_bytes += read.numel() * read.itemsize
        return made


def _address(value: object) -> int | None:
    return value.untyped_storage().data_ptr() if isinstance(value, Tensor) else None


class Watched:
    """A checkpoint whose tensors are watched."""

    def __init__(self, inner: Checkpoint, reads: Reads) -> None:
        self._inner, self._reads = inner, reads

    def read(self, name: str) -> Tensor:
        return self._reads.watch(self._inner.read(name))

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)


def read_by(checkpoint: Checkpoint, ranks: Ranks) -> tuple[int, int]:
    """The bytes that a rank reads, and those that it has afterwards."""
    spec, reads = spec_of(checkpoint.config), Reads()
    sizes = heads_of(spec, 4), 32, torch.float32, torch.device("cpu")
    model = Decoder(spec, *sizes, ranks)
    with reads:
        watched: Any = Watched(checkpoint, reads)
        load_weights(model, watched, names_of(checkpoint.config, spec))
    held = sum(own.num_elements * 4 for own in model.parameters().values())
    return reads.num_bytes, held


@pytest.mark.parametrize("splits_sums", [False, True], ids=["exact", "fast"])
@pytest.mark.parametrize("family", ["qwen3", "phi3", "gpt2", "mixtral"])
def test_each_rank_reads_its_own_bytes(family: str, splits_sums: bool, tmp_path: Path) -> None:
    """Red when a rank reads rows, columns or experts that are another's, of a tensor for one weight
    (qwen3), for several (phi3), transposed (gpt2), or of experts (mixtral)."""
    folder = tiny_model(family, tmp_path, **WIDE)
    checkpoint = open_model(EngineArgs(model=str(folder))).checkpoint
    whole, held = read_by(checkpoint, Ranks())
    assert whole == held
    shares = [read_by(checkpoint, Ranks(rank, 2, splits_sums=splits_sums)) for rank in range(2)]
    for read, own in shares:
        assert read == own < 0.75 * whole
    assert sum(read for read, _ in shares) >= whole
