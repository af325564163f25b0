"""Checkpoints whose weights are stored as something else, seen as if they were plain.

Small numbers with their scales, all experts in one tensor, a transpose: a *reader* says of each
stored tensor which plain ones it holds, and `readable` wraps the checkpoint so that the loader
meets those alone. Nothing is made before it is asked for, and then one tensor at a time. A reader
is one file here and one line in `quant/methods.py`, by the checkpoint's own word for its weights; a
family that lays out plain numbers in its own way has a line in `LAYOUTS`. A reader may make its
tensors on the device they are for, where what is stored is smaller to send and quicker to unpack.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from quire.load.checkpoint import Checkpoint, Stored
from quire.quant.methods import METHODS, method_of
from quire.registry import Registry

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from quire.quant.weight import Weight


class Piece(NamedTuple):
    """A plain tensor, yet to be made of stored ones."""

    shape: tuple[int, ...]
    make: Callable[[], Tensor]
    pack: Callable[[], Weight | None] | None = None  # the same in the form that is stored


class Reader(Protocol):
    """Made from a checkpoint and the device its weights are for."""

    def __call__(self, name: str) -> Mapping[str, Piece] | None:
        """What the stored tensor `name` holds, by plain names. Empty: it is read along with another
        (scales, say). None: it is plain itself. Raises CheckpointError."""
        ...


# model_type of config.json -> the reader of its plain weights
LAYOUTS = Registry("checkpoint layout", {"gpt_oss": "quire.load.gpt_oss:ExpertReader"})


def readable(stored: Checkpoint, device: torch.device) -> Checkpoint:
    """With every weight under its own name and in its own shape, however it is stored."""
    kind = stored.config.get("model_type")
    if (method := method_of(stored.config)) is not None:
        return PlainCheckpoint(stored, METHODS.get(method)(stored, device))
    if isinstance(kind, str) and kind in LAYOUTS.entries:
        return PlainCheckpoint(stored, LAYOUTS.get(kind)(stored, device))
    return stored


class PlainCheckpoint:
    """`Checkpoint` over another one and its reader."""

    def __init__(self, stored: Checkpoint, read: Reader) -> None:
        self.config, self.files = stored.config, stored.files
        self._stored = stored
        self._pieces: dict[str, Piece | None] = {}  # None: as stored
        self._sources: dict[str, str] = {}  # the stored tensor that a piece is made of
        for name in stored.names():
            held = read(name)
            self._pieces.update({name: None} if held is None else held)
            self._sources.update(dict.fromkeys(held or (), name))

    def names(self) -> Sequence[str]:
        return list(self._pieces)

    def shape(self, name: str) -> tuple[int, ...]:
        piece = self._pieces.get(name)
        return self._stored.shape(name) if piece is None else piece.shape

    def read(self, name: str) -> Tensor:
        piece = self._pieces.get(name)
        return self._stored.read(name) if piece is None else piece.make()

    def source(self, name: str) -> str | None:
        """The stored tensor that it is made of, beside smaller ones; None: it is stored itself."""
        return self._sources.get(name)

    def stored(self, name: str) -> Stored:
        return self._stored.stored(name)  # of names that are stored, not of those made of them

    def packed(self, name: str, rows: slice | None = None) -> Weight | None:
        if (piece := self._pieces.get(name)) is None:
            return self._stored.packed(name, rows)
        weight = None if piece.pack is None else piece.pack()
        return weight if weight is None or rows is None else weight.pick(rows)
