"""Strip: memory on the device in rows of one node, where pages wait for the step that loads them.

Pages that a request needs are brought here, in a lane of their own, while other requests go on.
Loading is then a copy inside the device. The pool has no page for what may not come, so nothing can
leak or deadlock there. A row is free again when nobody has it any more. The first free rows are
taken first, so that pages that come together mostly lie together and can be copied as one piece.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush

import torch
from torch import Tensor

from quire.kv.tier_index import Buffer, Stored
from quire.memory.lanes import Lane


class StripRow:
    __slots__ = ("_free", "_index")

    def __init__(self, index: int, free: list[int]) -> None:
        self._index, self._free = index, free

    @property
    def index(self) -> int:
        return self._index

    def __del__(self) -> None:  # a fifth of the time of a finalizer, and prompts have hundreds
        heappush(self._free, self._index)


class Strip:
    def __init__(self, num: int, node_bytes: int, lane: Lane, device: torch.device) -> None:
        self.rows = torch.zeros((num, node_bytes), dtype=torch.uint8, device=device)
        self.lane = lane
        self._free = list(range(num))  # a heap; any thread may take and give back

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> StripRow | None:
        """None: all are in use."""
        try:
            return StripRow(heappop(self._free), self._free)
        except IndexError:
            return None

    def take_many(self, count: int) -> list[StripRow]:
        """As many as there are, and not more than `count`."""
        return [row for _ in range(count) if (row := self.take()) is not None]

    def bring(self, nodes: Sequence[Stored]) -> list[StripRow]:
        """Copies of the first of these nodes, which are in memory of the host; returns when they
        are there. Not for the thread that steps."""
        rows: list[StripRow] = []
        for node in nodes:
            row = self.take()
            if row is None or node.data is None:
                break
            if node.landing is not None and not node.landing.is_over():
                self.lane.after(node.landing)
            rows.append(row)
        pairs = list(zip(rows, (node.data for node in nodes), strict=False))

        def copy() -> None:
            for row, data in pairs:
                assert data is not None
                self.rows[row.index].copy_(as_tensor(data), non_blocking=True)

        self.lane.do(copy)
        self.lane.mark().wait()
        return rows


def runs(own: Sequence[int], others: Sequence[int]) -> Iterator[tuple[int, int]]:
    """[begin, end) of pairs that follow each other on both sides.

    >>> list(runs([4, 5, 6, 9], [0, 1, 3, 4]))
    [(0, 2), (2, 3), (3, 4)]
    """
    begin = 0
    for at in range(1, len(own) + 1):
        step = at - begin
        if at == len(own) or (own[at], others[at]) != (own[begin] + step, others[begin] + step):
            yield begin, at
            begin = at


def as_tensor(data: Buffer) -> Tensor:
    """The same bytes, [bytes] uint8."""
    return torch.frombuffer(data, dtype=torch.uint8)
