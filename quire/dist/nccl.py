"""NcclComm: ranks on GPUs, one each. Collectives are queued on the device and nobody waits for them.

A watch (`watch.py`) aborts the group when one is late or a rank is dead. Torch's own would end the
process, which may be a user's; it is told not to. Collectives may be part of CUDA graphs: those end
before the group does, which waits for them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, FileStore

from quire.dist.gloo import MEET_S
from quire.dist.padded import bits_of, join_columns, join_rows, pad_columns, pad_rows
from quire.dist.watch import Watch, aside
from quire.env import leave_ends_to_us


class Options(Protocol):
    asyncOp: bool


class NcclComm:
    """`dist.comm.Comm` and `dist.comm.Graphed`."""

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
        self.device, self.meet_s = device, meet_s
        self._group: Any = None
        what = f"rank {self.rank} of {self.size} did not meet the others over NCCL"
        aside(lambda: self._begin(meeting), meet_s, lives, what)
        self._watch = Watch(place, deadline_s, lives, _aborting(self._group))

    def gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        return join_columns(self._all(pad_columns(x, widths)), widths)

    def gather_rows(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        return join_rows(self._all(pad_rows(x, counts)), counts)

    def merge(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        if x.numel():
            how = dist.AllreduceOptions()
            self._queue(lambda: self._group.allreduce([bits_of(x)], how), how)
        return x

    def tell(self, x: Tensor) -> None:
        if x.numel():
            how = dist.BroadcastOptions()
            self._queue(lambda: self._group.broadcast([x], how), how)

    def check(self) -> None:
        self._watch.check()

    def launch(self, replay: Callable[[], object]) -> None:
        self._watch.launch(replay)

    def _all(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        every, how = x.new_empty(self.size, *x.shape), AllgatherOptions()
        if x.numel():
            self._queue(lambda: self._group._allgather_base(every.flatten(0, 1), x, how), how)
        return every

    def _queue(self, begin: Callable[[], dist.Work | None], how: Options) -> None:
        self.check()
        if torch.cuda.is_current_stream_capturing():
            how.asyncOp = False  # on this stream, and not on one of the group's
        try:
            work = begin()
            if work is not None:
                work.wait()  # the stream does, and not the host
        except RuntimeError as error:
            self._watch.lose(str(error).splitlines()[0])
            self.check()
        self._watch.note()

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


def _aborting(group: Any) -> Callable[[], object]:
    """In a thread that nobody waits for: an abort ends when the last graph has, and whoever drops
    those may be the one who calls."""
    return lambda: threading.Thread(target=group.abort, name="nccl-abort", daemon=True).start()
