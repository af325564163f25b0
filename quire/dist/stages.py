"""Stage: some neighbouring layers of a model that lies on several ranks one behind the other.

The stream of hidden states enters the first stage as tokens and goes round: each stage sends it on,
and the last one sends the states it ends with back to the first, which has the embedding, the head
and all that draws. So weights that embedding and head share are held once, and grammars, penalties
and log-probabilities stay in one place. `ring.py` is the way between stages.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from quire.dist.cuts import shares
from quire.errors import NotSupported


class Link(Protocol):
    """From the stage before and to the stage behind. Raises RankLost within a deadline."""

    def send(self, x: Tensor) -> None:
        """Does not wait; x must not change any more."""
        ...

    def receive(self, into: Tensor) -> None:
        """The next rows that were sent to us; as many as there is room for."""
        ...


class NoLink:
    """Of a model that is on one stage."""

    def send(self, x: Tensor) -> None:
        raise AssertionError("sent to a stage that is not there")

    def receive(self, into: Tensor) -> None:
        raise AssertionError("awaited a stage that is not there")


@dataclass(frozen=True, slots=True)
class Stage:
    index: int = 0
    count: int = 1
    link: Link = field(default_factory=NoLink)

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1

    @property
    def is_only(self) -> bool:
        return self.count == 1

    def layers(self, num_layers: int) -> range:
        return stage_layers(num_layers, self.count)[self.index]


class EndsOnly(Stage):
    """A first stage that leaves all layers to others: embedding and output are left."""

    def layers(self, num_layers: int) -> range:
        return range(0)


def stage_layers(num_layers: int, num_stages: int) -> tuple[range, ...]:
    """As equal as can be, smaller ones first: the first stage has embedding and head as well.

    >>> stage_layers(7, 3)
    (range(0, 2), range(2, 4), range(4, 7))
    """
    if num_stages > num_layers:
        raise NotSupported(
            f"got {num_stages} stages for {num_layers} layers, want at least a layer for each; use"
            f" pipeline_parallel_size={num_layers} or less"
        )
    made, begin = [], 0
    for share in reversed(shares(num_layers, num_stages)):
        made.append(range(begin, begin + share.size))
        begin += share.size
    return tuple(made)
