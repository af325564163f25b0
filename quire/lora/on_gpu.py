"""GpuAdapters: weights of adapters in a GPU's memory, and the table where kernels find them.

An adapter is one piece of memory of its own size, in the model's dtype, ranks padded to multiples
of 16. The table has a slot for each that may be there at once; a graph that was captured reads it
anew at every replay, so adapters come and go without another capture. Only one of a larger rank, or
of products that no adapter touched so far, is beyond what graphs were captured for: `version`
counts those.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.errors import NotSupported, Overloaded
from quire.kernels.low_rank_expand import MOST_PARTS
from quire.kernels.low_rank_places import PLACE, RANKS, Places
from quire.lora.folder import LowRank
from quire.lora.placed import Columns, Pairs, linears_of
from quire.models.decoder import Decoder
from quire.nn.linear import Linear


class Piece(NamedTuple):
    """One A and B in an adapter's memory: where they begin, in numbers."""

    pair: LowRank
    low: int
    high: int
    rank: int  # padded


class Held(NamedTuple):
    """An adapter in memory of a GPU or of its host."""

    memory: Tensor
    rows: np.ndarray  # [linears, parts, PLACE] of the table, pieces counted from where it begins


class GpuAdapters:
    def __init__(self, model: Decoder, num_slots: int) -> None:
        """Slots count from 1; 0 is no adapter."""
        self.device, self.dtype = model.device, model.dtype
        self._linears = {linear: i for i, linear in enumerate(linears_of(model).values())}
        shape = (1 + num_slots, len(self._linears), MOST_PARTS, PLACE.value)
        self._table = torch.zeros(shape, dtype=torch.int64, device=self.device)
        self._origin = torch.zeros(RANKS.value, dtype=self.dtype, device=self.device)
        self._held: dict[int, Held] = {}
        self._places: dict[Linear, Places] = {}
        self.version = 0

    def places(self, linear: Linear) -> Places | None:
        """None: no adapter so far adds to its products."""
        return self._places.get(linear)

    @contextmanager
    def as_if_of(self, rank: int) -> Iterator[None]:
        """Within, adapters of this rank seem to add to every product: for kernels to compile."""
        kept = self._places
        self._places = {
            linear: Places(self._origin, self._table, number, tuple(linear.parts.values()), rank)
            for linear, number in self._linears.items()
            if len(linear.parts) <= MOST_PARTS and linear.weight.shape[1] % RANKS.value == 0
        }
        try:
            yield
        finally:
            self._places = kept

    def put(self, slot: int, found: Mapping[Linear, Pairs]) -> int:
        """Returns the bytes it takes. Raises Overloaded, and then nothing has changed."""
        pieces, size = _laid_out(found)
        memory = self._room_for(size)
        rows = np.zeros(self._table.shape[1:], dtype=np.int64)
        for linear, columns in found.items():
            for end, piece in zip(columns, pieces[linear], strict=True):
                _fill(memory, piece)
                _enter(rows[self._linears[linear]], linear, end, piece)
        self._place(slot, Held(memory, rows))
        for linear in found:
            self._widen(linear, max(piece.rank for piece in pieces[linear]))
        return memory.nbytes

    def drop(self, slot: int) -> None:
        """Nobody's rows have the slot any more; the stream keeps the memory for those who had."""
        del self._held[slot]

    def copy_of(self, slot: int) -> Held:
        """In memory of the host. Later work of the stream waits for the copy; nobody else does."""
        memory, rows = self._held[slot]
        return Held(_host_room(memory).copy_(memory, non_blocking=True), rows)

    def restore(self, slot: int, copy: Held) -> None:
        """From `copy_of`, whichever slot it was. Raises Overloaded."""
        memory = self._room_for(len(copy.memory)).copy_(copy.memory, non_blocking=True)
        self._place(slot, Held(memory, copy.rows))

    def _place(self, slot: int, held: Held) -> None:
        away = held.memory.data_ptr() - self._origin.data_ptr()
        assert away % (RANKS.value * self.dtype.itemsize) == 0, f"{away} bytes between them"
        rows = held.rows.copy()
        rows[rows[..., 2] > 0, :2] += away // self.dtype.itemsize  # where a part has a rank
        host = torch.from_numpy(rows)
        host = host.pin_memory() if held.memory.is_cuda else host
        self._table[slot].copy_(host, non_blocking=True)
        self._held[slot] = held

    def _room_for(self, size: int) -> Tensor:
        try:
            return torch.empty(size, dtype=self.dtype, device=self.device)
        except torch.OutOfMemoryError:
            raise Overloaded(
                f"no room for an adapter of {size * self.dtype.itemsize:,} bytes on the GPU: lower"
                " gpu_memory_utilization or max_loras, or name adapters at start, which sets their"
                " memory aside"
            ) from None

    def _widen(self, linear: Linear, rank: int) -> None:
        known = self._places.get(linear)
        if known is None or known.num_ranks < rank:
            sizes = tuple(linear.parts.values())
            self._places[linear] = Places(
                self._origin, self._table, self._linears[linear], sizes, rank
            )
            self.version += 1


def _laid_out(found: Mapping[Linear, Pairs]) -> tuple[dict[Linear, list[Piece]], int]:
    """The pieces of each linear one behind the other, and the numbers they are in all. Inputs and
    ranks come by sixteens, so every piece begins at a multiple of 32 bytes."""
    pieces: dict[Linear, list[Piece]] = {}
    size = 0
    for linear, pairs in found.items():
        own = pieces[linear] = []
        for pair in pairs.values():
            num_out, num_in = pair.expand.shape[0], pair.shrink.shape[1]
            if num_in % 16:
                raise NotSupported(f"got an adapter of {num_in} inputs, want a multiple of 16")
            rank = -(-pair.rank // RANKS.value) * RANKS.value
            own.append(Piece(pair, size, size + rank * num_in, rank))
            size += rank * (num_in + num_out)
    return pieces, size


def _enter(rows: np.ndarray, linear: Linear, columns: Columns, piece: Piece) -> None:
    """Into a linear's rows [parts, PLACE], for every part that the pair's columns cover."""
    scale, begin = int(np.float32(piece.pair.scale).view(np.int32)), 0
    for part, size in enumerate(linear.parts.values()):
        if columns[0] <= begin and begin + size <= columns[1]:
            high = piece.high + (begin - columns[0]) * piece.rank
            rows[part] = (piece.low, high, piece.rank, scale)
        begin += size


def _host_room(memory: Tensor) -> Tensor:
    """For as much: pinned where the host locks it, else copies are slower."""
    try:
        return torch.empty_like(memory, device="cpu", pin_memory=memory.is_cuda)
    except RuntimeError:
        return torch.empty_like(memory, device="cpu")


def _fill(memory: Tensor, piece: Piece) -> None:
    """A [rank, in] and B [out, rank], zeros where ranks are padded. Straight from the file, whose
    pinned block torch keeps until copies have run."""
    pair, rank = piece.pair, piece.rank
    low = memory[piece.low : piece.high].view(rank, -1)
    high = memory[piece.high : piece.high + rank * len(pair.expand)].view(-1, rank)
    if pair.rank < rank:
        low[pair.rank :].zero_()
        high[:, pair.rank :].zero_()
    low[: pair.rank].copy_(_in_dtype(pair.shrink, memory.dtype), non_blocking=True)
    high[:, : pair.rank].copy_(_in_dtype(pair.expand, memory.dtype), non_blocking=True)


def _in_dtype(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers that are too large for the dtype would reach other rows: products with their zeros
    are none."""
    made = stored.to(dtype)
    if made is not stored and not bool(made.isfinite().all()):
        most = stored.abs().max().item()
        raise NotSupported(f"got an adapter with weights up to {most:g}, too large for {dtype}")
    return made
