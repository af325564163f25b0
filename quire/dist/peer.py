"""PeerComm: ranks on GPUs that can map each other's memory, one GPU for all of them included.

Every verb is one launch of a kernel (`kernels/peer_exchange.py`): nothing waits on the host, and
launches may be part of CUDA graphs. Bits are moved and never added. Shares of unequal sizes are
padded. A watch (`watch.py`) ends the waiting when a rank is late or dead. Ranks on one GPU have it
in turns, each until its slice of time is over, so they wait for milliseconds.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from quire.dist.gloo import MEET_S
from quire.dist.mapped import MappedMemory, OwnMemory
from quire.dist.padded import join_columns, join_rows, pad_columns, pad_rows
from quire.dist.watch import Watch, aside
from quire.errors import RankLost
from quire.kernels.peer_exchange import (
    NO_SPOTS,
    UNITS,
    WORD,
    Exchange,
    Spots,
    Verb,
    exchange,
    region_words,
    unit_of,
)


class PeerComm:
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
        self._own = OwnMemory(region_words(self.size) * WORD, device)
        handles = self._met(meeting, meet_s, lives)
        self._others = [
            None if rank == self.rank else MappedMemory(handle, device)
            for rank, handle in enumerate(handles)
        ]
        # Kernels that wait look at it, so it is given back after our memory, which awaits them.
        self._is_over = torch.zeros(1, dtype=torch.int32, pin_memory=True).numpy()
        regions = [self._own.address if one is None else one.address for one in self._others]
        places = torch.tensor([*regions, self._is_over.ctypes.data], dtype=torch.int64)
        self._between = Exchange(*place, places.to(device))
        weakref.finalize(self, self._is_over.fill, 1)
        self._watch = Watch(place, deadline_s, lives, partial(self._is_over.fill, 1))
        self._prove(device)

    def gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        if min(widths) < max(widths):
            return join_columns(self._all(pad_columns(x, widths)), widths)
        every = x.new_empty(len(x), sum(widths))
        num_bytes = x.shape[1] * x.element_size()
        if x.numel():
            unit = unit_of(num_bytes)
            width = num_bytes // unit
            self._exchange(Verb.GATHER, unit, x, every, Spots(width, width * self.size, width))
        return every

    def gather_rows(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        every = self._all(pad_rows(x, counts))
        return every.flatten(0, 1) if min(counts) == max(counts) else join_rows(every, counts)

    def merge(self, x: Tensor) -> Tensor:
        merged = torch.empty_like(x, memory_format=torch.contiguous_format)
        if x.numel():
            self._exchange(Verb.MERGE, unit_of(x.numel() * x.element_size()), x, merged)
        return merged

    def tell(self, x: Tensor) -> None:
        assert x.is_contiguous(), "what is told is written where it is"
        if x.numel():
            unit = unit_of(x.numel() * x.element_size())
            told = torch.empty_like(x) if x.data_ptr() % unit else x
            self._exchange(Verb.TELL, unit, x, told)
            if told is not x and self.rank:
                x.copy_(told)

    def check(self) -> None:
        self._watch.check()

    def launch(self, replay: Callable[[], object]) -> None:
        self._watch.launch(replay)

    def _all(self, x: Tensor) -> Tensor:
        """Shares of one size: [ranks, ...]."""
        every = x.new_empty(self.size, *x.shape)
        if x.numel():
            num_bytes = x.numel() * x.element_size()
            unit = unit_of(num_bytes)
            width = num_bytes // unit
            self._exchange(Verb.GATHER, unit, x, every, Spots(width, 0, width))
        return every

    def _exchange(
        self, verb: Verb, unit: int, x: Tensor, into: Tensor, spots: Spots = NO_SPOTS
    ) -> None:
        """`unit` follows from sizes that all ranks know: they must move the same ones."""
        self.check()
        x = x.contiguous()
        if x.data_ptr() % unit:
            x = x.clone()
        kind = UNITS[unit]
        exchange(self._between, verb, x.flatten().view(kind), into.flatten().view(kind), spots)
        self._watch.note()

    # ------------------------------------------------------------ meeting

    def _met(self, meeting: Path, meet_s: float, lives: Callable[[], bool]) -> list[bytes]:
        """The handles of all."""
        own, handles = self._own.handle(), list[bytes]()

        def begin() -> None:
            store = FileStore(str(meeting), self.size)
            store.set_timeout(timedelta(seconds=meet_s))
            store.set(f"handle-{self.rank}", own.hex())
            for rank in range(self.size):
                handles.append(bytes.fromhex(store.get(f"handle-{rank}").decode()))

        what = f"rank {self.rank} of {self.size} did not meet the others to share memory of GPUs"
        aside(begin, meet_s, lives, what)
        return handles

    def _prove(self, device: torch.device) -> None:
        """Everybody reads everybody, before somebody counts on it."""
        said = torch.tensor([[self.rank]], device=device)
        heard = self.gather(said, [1] * self.size).tolist()
        self.check()
        if heard != [list(range(self.size))]:
            raise RankLost(
                f"rank {self.rank} of {self.size} read {heard} in memory that ranks have mapped"
            )
