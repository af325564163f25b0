"""HeadGraphs: pieces of a head's guess as CUDA graphs, captured when first needed, replayed after.

A piece reads its inputs from lasting places and leaves there what the next one needs, so any piece
can follow any other. It runs once before it is captured; behind that the places are as they were.
`feature_graphs.py` and `medusa_graphs.py` have the pieces. The memory is that of the target's
graphs, as only one of all runs at a time. A piece that cannot be captured runs kernel by kernel
from then on; the log says which and why.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from quire.obs.log import log_event
from quire.runner.graphs import Graph, GraphMemory
from quire.runner.upload import ALIGNED

Piece = Callable[[], Tensor | None]  # may give logits, good until the next piece


class Lasting:
    """Tensors of up to `most` rows at addresses that last."""

    def __init__(self, most: int) -> None:
        self.most = -(-most // ALIGNED) * ALIGNED  # parts of several begin aligned
        self._places: dict[str, Tensor] = {}

    def put(self, name: str, x: Tensor) -> None:
        """Into the first rows of the place, which is made for the first such tensor."""
        self.place(name, x)[: len(x)].copy_(x)

    def put_joined(self, name: str, parts: list[Tensor]) -> None:
        """These, one behind the other."""
        num_rows = sum(map(len, parts))
        torch.cat(parts, out=self.place(name, parts[0])[:num_rows])

    def place(self, name: str, like: Tensor) -> Tensor:
        place = self._places.get(name)
        if place is None:
            place = self._places[name] = like.new_zeros(self.most, *like.shape[1:])
        return place

    def run_and_restore(self, piece: Piece) -> None:
        """Places that are made meanwhile stay."""
        before = {name: place.clone() for name, place in self._places.items()}
        try:
            piece()
        finally:
            for name, place in before.items():
                self._places[name].copy_(place)

    def first(self, name: str, num: int) -> Tensor:
        return self._places[name][:num]

    def chosen(self, names: Iterable[str], index: Tensor) -> list[Tensor]:
        """These rows of each."""
        return [self._places[name].index_select(0, index) for name in names]


class Captured(NamedTuple):
    graph: Graph
    made: Tensor | None


class HeadGraphs:
    def __init__(self, memory: GraphMemory, kept: Lasting) -> None:
        """`kept`: what pieces read and leave."""
        self.memory, self._kept = memory, kept
        self._captured: dict[Hashable, Captured] = {}
        self._failed: set[Hashable] = set()

    def run(self, key: Hashable, piece: Piece) -> Tensor | None:
        """What the piece gives; the key tells apart all that a graph of it cannot read."""
        captured = self._captured.get(key)
        if captured is None and key not in self._failed:
            captured = self._capture(key, piece)
        if captured is None:
            return piece()
        captured.graph.replay()
        return captured.made

    def _capture(self, key: Hashable, piece: Piece) -> Captured | None:
        first = partial(self._kept.run_and_restore, piece)
        try:
            self._captured[key] = captured = Captured(*self.memory.capture(first, piece, key))
        except RuntimeError as error:  # no memory, or a call that no graph can hold
            self._failed.add(key)
            why = " ".join(str(error).split())
            log_event("head_without_graph", severity=logging.WARNING, graph=str(key), error=why)
            return None
        return captured
