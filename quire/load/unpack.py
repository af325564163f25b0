"""Checkpoints whose weights are stored as something else, seen as if they were plain.

Small numbers with their scales, all experts in one tensor, a transpose: a family's *unpacker* says
of each stored tensor which plain ones it holds, and `plain` wraps the checkpoint so that the loader
meets those alone. Nothing is made before it is read, and then one tensor at a time. An unpacker is
one file here and one line in `UNPACKERS`; it may make its tensors on the device they are for, where
what is stored is smaller to send and quicker to unpack.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from quire.load.checkpoint import Checkpoint
from quire.registry import Registry

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from quire.quant.coded import Coded


class Piece(NamedTuple):
    """A plain tensor, yet to be made of stored ones."""

    shape: tuple[int, ...]
    make: Callable[[], Tensor]


class Unpacker(Protocol):
    def __call__(self, stored: Checkpoint, name: str) -> Mapping[str, Piece] | None:
        """What the stored tensor `name` holds, by plain names. Empty: it is read along with another
        (scales, say). None: it is plain itself. Raises CheckpointError."""
        ...


# model_type of config.json -> device -> its unpacker
UNPACKERS = Registry(
    "packed checkpoint",
    {"gpt_oss": "quire.load.gpt_oss:ExpertUnpacker"},
)


def plain(stored: Checkpoint, device: torch.device) -> Checkpoint:
    """The checkpoint with every weight under its own name and in its own shape."""
    kind = stored.config.get("model_type")
    if not isinstance(kind, str) or kind not in UNPACKERS.entries:
        return stored
    return PlainCheckpoint(stored, UNPACKERS.get(kind)(device))


class PlainCheckpoint:
    """`Checkpoint` over another one and its unpacker."""

    def __init__(self, stored: Checkpoint, unpack: Unpacker) -> None:
        self.config = stored.config
        self._stored = stored
        self._pieces: dict[str, Piece | None] = {}  # None: as stored
        for name in stored.names():
            held = unpack(stored, name)
            self._pieces.update({name: None} if held is None else held)

    def names(self) -> Sequence[str]:
        return list(self._pieces)

    def shape(self, name: str) -> tuple[int, ...]:
        piece = self._pieces.get(name)
        return self._stored.shape(name) if piece is None else piece.shape

    def read(self, name: str) -> Tensor:
        piece = self._pieces.get(name)
        return self._stored.read(name) if piece is None else piece.make()

    def coded(self, name: str) -> Coded | None:
        return self._stored.coded(name) if self._pieces.get(name) is None else None
