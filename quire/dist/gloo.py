"""GlooComm: ranks on CPUs over sockets, of other machines or where memory cannot be shared.

A process group of its own, so that a process may hold several models and nothing is global. Every
collective has a deadline; a rank that dies is noticed at once, because its sockets close.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._C._distributed_c10d import FileStore, PrefixStore, TCPStore

from quire.errors import RankLost

MEET_S = 300.0  # for all ranks to have started: each imports torch first


class Network(NamedTuple):
    """Where ranks of several machines meet: a store on the first one."""

    host: str
    port: int
    own_host: str  # at which others reach us
    name: str = ""  # of those who meet

    def of(self, name: str) -> Network:
        return self._replace(name=self.name + name)


# On one machine, a file that does not exist yet, in a folder that only this user can open.
Meeting = Path | Network


def gloo_group(meeting: Meeting, rank: int, size: int, deadline_s: float) -> Any:
    store: Any
    if isinstance(meeting, Network):
        whole = TCPStore(meeting.host, meeting.port, timeout=timedelta(seconds=MEET_S))
        store = PrefixStore(meeting.name, whole)
    else:
        store = FileStore(str(meeting), size)
        store.set_timeout(timedelta(seconds=MEET_S))
    # The stubs know of a group only what the default group of a process needs.
    kind: Any = dist.ProcessGroupGloo
    options = kind._Options()
    # One interface alone: these sockets take orders from anybody who connects.
    host = meeting.own_host if isinstance(meeting, Network) else "127.0.0.1"
    options._devices = [kind.create_device(hostname=host)]
    options._timeout = timedelta(seconds=deadline_s)
    return kind(store, rank, size, options)


def meeting_store(host: str) -> Any:
    """On the first machine, for as long as ranks talk; its port is `store.port`."""
    return TCPStore(host, 0, is_master=True, wait_for_workers=False)


class GlooComm:
    def __init__(self, meeting: Meeting, rank: int, size: int, deadline_s: float) -> None:
        self.rank, self.size, self.deadline_s = rank, size, deadline_s
        self._group = gloo_group(meeting, rank, size, deadline_s)

    def gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        widest = max(widths)
        own = x if widths[self.rank] == widest else F.pad(x, (0, widest - widths[self.rank]))
        every = self._all(own)  # [ranks, rows, widest]
        if min(widths) == widest:
            return every.transpose(0, 1).reshape(len(x), sum(widths))
        return torch.cat([each[:, :width] for each, width in zip(every, widths, strict=True)], 1)

    def gather_rows(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        most = max(counts)
        own = x if counts[self.rank] == most else F.pad(x, (0, 0, 0, most - counts[self.rank]))
        every = self._all(own)  # [ranks, most, width]
        return torch.cat([each[:count] for each, count in zip(every, counts, strict=True)])

    def merge(self, x: Tensor) -> Tensor:
        # Whole numbers: a sum of floats would turn -0.0 into 0.0.
        x = x.contiguous()
        bits = x.view(torch.int32) if x.dtype.itemsize == 4 else x.view(torch.uint8)
        if x.numel():
            self._wait(lambda: self._group.allreduce([bits], dist.AllreduceOptions()))
        return x

    def tell(self, x: Tensor) -> None:
        self._wait(lambda: self._group.broadcast([x], dist.BroadcastOptions()))

    def _all(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        every = x.new_empty(self.size, *x.shape)
        if x.numel():
            self._wait(lambda: self._group._allgather_base(every.flatten(0, 1), x))
        return every

    def _wait(self, begin: Callable[[], dist.Work]) -> None:
        try:
            begin().wait()
        except RuntimeError as error:
            raise RankLost(
                f"rank {self.rank} of {self.size} lost touch with another rank within"
                f" {self.deadline_s:g} s: {str(error).splitlines()[0]}"
            ) from error
