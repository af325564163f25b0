"""Comm: what ranks say to each other in the middle of a step. Four verbs, and every one exact.

All ranks call the same verbs in the same order. `SoloComm` is for a rank that is alone;
`native/exchange.py` has the one for a machine's memory, `gloo.py` the one for sockets, `peer.py` and
`nccl.py` those for GPUs, `host.py` that for GPUs through memory of the host. `devices.py` chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor


class Comm(Protocol):
    """Each call ends within a deadline. Raises RankLost when another rank is gone or late."""

    def gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        """Everybody's columns side by side: [rows, widths[rank]] -> [rows, sum(widths)]."""
        ...

    def gather_rows(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """Everybody's rows below each other: [counts[rank], width] -> [sum(counts), width]."""
        ...

    def merge(self, x: Tensor) -> Tensor:
        """Rows that are zeros on all ranks but one: those of the one, bit by bit."""
        ...

    def tell(self, x: Tensor) -> None:
        """What the first rank has in x goes into everybody's."""
        ...

    def check(self) -> None:
        """Raises RankLost where a verb that did not wait for the device has failed since: what came
        of it is not to be used."""
        ...


class Graphed(Protocol):
    """A `Comm` whose verbs can be part of a CUDA graph has this as well."""

    def launch(self, replay: Callable[[], object]) -> None:
        """Call `replay`, which launches a graph with verbs in it. Raises RankLost, and launches
        nothing, once the others are lost."""
        ...


class SoloComm:
    def gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        return x

    def gather_rows(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        return x

    def merge(self, x: Tensor) -> Tensor:
        return x

    def tell(self, x: Tensor) -> None:
        return

    def check(self) -> None:
        return
