"""GlooComm: ranks on CPUs over sockets, of other machines or where memory cannot be shared.

A process group of its own, so that a process may hold several models and nothing is global. Every
collective has a deadline; a rank that dies is noticed at once, because its sockets close.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore, PrefixStore, TCPStore

from quire.dist.padded import bits_of, join_columns, join_rows, pad_columns, pad_rows
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
        return join_columns(self._all(pad_columns(x, widths)), widths)

    def gather_rows(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        return join_rows(self._all(pad_rows(x, counts)), counts)

    def merge(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        if x.numel():
            self._wait(lambda: self._group.allreduce([bits_of(x)], dist.AllreduceOptions()))
        return x

    def tell(self, x: Tensor) -> None:
        self._wait(lambda: self._group.broadcast([x], dist.BroadcastOptions()))

    def check(self) -> None:
        """Every verb has waited."""

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
