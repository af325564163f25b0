"""NcclComm: ranks on GPUs, one each. Collectives are queued on the device and nobody waits for them.

A thread watches instead: when the oldest one is not done within the deadline, or another rank is
dead, it aborts the group. The device then goes on with whatever is there, so results count only
after `check`. Torch's own watchdog would end the process, which may be a user's; it is told not to.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from quire.dist.gloo import MEET_S
from quire.dist.padded import bits_of, join_columns, join_rows, pad_columns, pad_rows
from quire.env import leave_ends_to_us
from quire.errors import RankLost

LOOK_S = 0.1  # between looks at what is under way


class NcclComm:
    """`dist.comm.Comm`."""

    def __init__(
        self,
        meeting: Path,
        place: tuple[int, int],
        deadline_s: float,
        device: torch.device,
        lives: Callable[[], bool] = lambda: True,
        meet_s: float = MEET_S,
    ) -> None:
        """`meeting`: a file that does not exist yet. `place`: our rank, of how many. Raises
        RankLost when somebody does not come within `meet_s`."""
        self.rank, self.size = place
        self.device, self.deadline_s, self.meet_s = device, deadline_s, meet_s
        self._why: str | None = None  # it is lost
        self._under_way: deque[tuple[torch.cuda.Event, float]] = deque()
        self._lives = lives
        self._group: Any = None
        self._meet(meeting)
        self._begun = time.monotonic()  # of the oldest, or later: when the one before it was done
        threading.Thread(target=_watch, args=(weakref.ref(self),), name="nccl", daemon=True).start()

    def gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        return join_columns(self._all(pad_columns(x, widths)), widths)

    def gather_rows(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        return join_rows(self._all(pad_rows(x, counts)), counts)

    def merge(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        if x.numel():
            self._queue(lambda: self._group.allreduce([bits_of(x)], dist.AllreduceOptions()))
        return x

    def tell(self, x: Tensor) -> None:
        if x.numel():
            self._queue(lambda: self._group.broadcast([x], dist.BroadcastOptions()))

    def check(self) -> None:
        if self._why is not None:
            raise RankLost(f"rank {self.rank} of {self.size} {self._why}")

    def _all(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        every = x.new_empty(self.size, *x.shape)
        if x.numel():
            self._queue(lambda: self._group._allgather_base(every.flatten(0, 1), x))
        return every

    def _queue(self, begin: Callable[[], dist.Work]) -> None:
        self.check()
        try:
            begin().wait()  # the stream does, and not the host
        except RuntimeError as error:
            self._lose(str(error).splitlines()[0])
            self.check()
        done = torch.cuda.Event()
        done.record()
        self._under_way.append((done, time.monotonic()))

    # ------------------------------------------------------------ beginning and end

    def _meet(self, meeting: Path) -> None:
        """Aside: the library waits for others without an end."""
        failed: list[RuntimeError] = []
        met = threading.Event()

        def begin() -> None:
            try:
                self._begin(meeting)
                met.set()
            except RuntimeError as error:
                failed.append(error)

        aside = threading.Thread(target=begin, name="nccl-meet", daemon=True)
        aside.start()
        until = time.monotonic() + self.meet_s + LOOK_S
        while aside.is_alive() and time.monotonic() < until and self._lives():
            aside.join(LOOK_S)
        if not met.is_set():
            why = str(failed[0]).splitlines()[0] if failed else "somebody is missing"
            raise RankLost(
                f"rank {self.rank} of {self.size} did not meet the others over NCCL within"
                f" {self.meet_s:g} s: {why}"
            )

    def _begin(self, meeting: Path) -> None:
        torch.cuda.set_device(self.device)  # of this thread
        leave_ends_to_us()
        store = FileStore(str(meeting), self.size)
        store.set_timeout(timedelta(seconds=self.meet_s))
        # Everybody is here before anybody is in the library.
        store.set(f"here-{self.rank}", "1")
        store.wait([f"here-{rank}" for rank in range(self.size)])
        # The stubs know of a group only what the default group of a process needs.
        kind: Any = dist.ProcessGroupNCCL
        options = kind.Options()
        options._timeout = timedelta(seconds=self.meet_s)
        self._group = kind(store, self.rank, self.size, options)
        # The library's memory is taken now, before anybody counts what is left.
        self._group.allreduce([torch.ones(1, device=self.device)], dist.AllreduceOptions()).wait()
        torch.cuda.synchronize(self.device)

    def look(self) -> bool:
        """After whoever is late or dead; whether to look again."""
        while self._under_way and self._under_way[0][0].query():
            self._under_way.popleft()
            self._begun = time.monotonic()
        if self._under_way and self._why is None:
            waited = time.monotonic() - max(self._begun, self._under_way[0][1])
            if waited > self.deadline_s:
                self._lose(f"heard nothing of the others within {self.deadline_s:g} s")
            elif not self._lives():
                self._lose("lost touch with another rank, which is dead")
        return self._why is None

    def _lose(self, why: str) -> None:
        """What waits on the device goes on, with whatever is there."""
        if self._why is None:
            self._why = why
            self._group.abort()


def _watch(watched: weakref.ref[NcclComm]) -> None:
    """For as long as anybody has it."""
    goes_on = True
    while goes_on:
        time.sleep(LOOK_S)
        comm = watched()
        goes_on = comm is not None and comm.look()
        del comm
