"""GlooRing: rows from each stage to the next, and from the last to the first, over sockets.

A send is under way while the sender goes on; what it sends is kept until it has been received. A
receive waits no longer than the deadline, and a stage that dies is noticed at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from quire.dist.gloo import Meeting, gloo_group
from quire.errors import RankLost


class GlooRing:
    """`dist.stages.Link`."""

    def __init__(self, meeting: Meeting, index: int, count: int, deadline_s: float) -> None:
        self.index, self.count, self.deadline_s = index, count, deadline_s
        self._group: Any = gloo_group(meeting, index, count, deadline_s)
        self._under_way: deque[tuple[dist.Work, Tensor]] = deque()

    def send(self, x: Tensor) -> None:
        if not x.numel():
            return
        # No more steps than stages are under way, so this one was received long ago.
        while len(self._under_way) > self.count:
            work, _ = self._under_way.popleft()
            self._wait(work.wait)
        data = x.contiguous().view(torch.uint8)
        to = (self.index + 1) % self.count
        self._wait(lambda: self._under_way.append((self._group.send([data], to, 0), data)))

    def receive(self, into: Tensor) -> None:
        if into.numel():
            source, data = (self.index - 1) % self.count, into.view(torch.uint8)
            self._wait(lambda: self._group.recv([data], source, 0).wait())

    def _wait(self, act: Callable[[], object]) -> None:
        try:
            act()
        except RuntimeError as error:
            raise RankLost(
                f"stage {self.index} of {self.count} lost touch with another stage within"
                f" {self.deadline_s:g} s: {str(error).splitlines()[0]}"
            ) from error
