"""Hush: steps of one rank alone, before the others are ready.

While a model is loaded, each rank measures its largest step by itself. Nobody may be asked then, and
what a step computes means nothing: what others would say is zeros.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from quire.dist.comm import Comm
from quire.dist.stages import Link


class Hush:
    """Whether this rank keeps to itself for now."""

    def __init__(self) -> None:
        self.is_on = False

    @contextmanager
    def kept(self) -> Iterator[None]:
        self.is_on = True
        try:
            yield
        finally:
            self.is_on = False


class HushedComm:
    """`dist.comm.Comm`."""

    def __init__(self, comm: Comm, hush: Hush) -> None:
        self.comm, self.hush = comm, hush

    def gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        if self.hush.is_on:
            return x.new_zeros(len(x), sum(widths))
        return self.comm.gather(x, widths)

    def gather_rows(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        if self.hush.is_on:
            return x.new_zeros(sum(counts), x.shape[1])
        return self.comm.gather_rows(x, counts)

    def merge(self, x: Tensor) -> Tensor:
        return x if self.hush.is_on else self.comm.merge(x)

    def tell(self, x: Tensor) -> None:
        if not self.hush.is_on:
            self.comm.tell(x)

    def check(self) -> None:
        self.comm.check()


class HushedLink:
    """`dist.stages.Link`."""

    def __init__(self, link: Link, hush: Hush) -> None:
        self.link, self.hush = link, hush

    def send(self, x: Tensor) -> None:
        if not self.hush.is_on:
            self.link.send(x)

    def receive(self, into: Tensor) -> None:
        if self.hush.is_on:
            into.zero_()
        else:
            self.link.receive(into)
