"""What two ranks on one GPU say to each other; run as a module it is the second one.

python -m tests.gpu.peer_case MEETING verbs|graphs|dies|hangs
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from quire.dist.peer import PeerComm

DEVICE = torch.device("cuda", 0)
SIZE, REPLAYS = 2, 25
LARGE = (40, 1 << 17)  # of eight bytes: some turns of each program


def drawn(*shape: int, seed: int = 0) -> Tensor:
    numbers = torch.Generator().manual_seed(seed)
    return torch.randint(-99, 99, shape, generator=numbers)


def verbs(comm: PeerComm) -> Iterator[tuple[Tensor, Tensor]]:
    """(what came, what should have)."""
    rank = comm.rank
    for dtype in (torch.float32, torch.bfloat16, torch.uint8, torch.int64):
        for widths in ([6, 6], [3, 3], [5, 2], [1, 0]):
            whole = drawn(7, sum(widths)).to(dtype).to(DEVICE)
            own = whole.split(widths, 1)[rank]
            yield comm.gather(own, widths), whole
        for counts in ([3, 3], [4, 1], [0, 2]):
            rows = drawn(sum(counts), 5).to(dtype).to(DEVICE)
            yield comm.gather_rows(rows.split(counts)[rank], counts), rows
        table = drawn(SIZE, 9).to(dtype).to(DEVICE) * -1
        is_own = torch.arange(SIZE, device=DEVICE)[:, None] == rank
        yield comm.merge(torch.where(is_own, table, torch.zeros_like(table))), table
        told = drawn(9, seed=rank).to(dtype).to(DEVICE)[1:]  # no place for words of 64 bits
        comm.tell(told)
        yield told, drawn(9).to(dtype).to(DEVICE)[1:]
    large = drawn(LARGE[0], 2 * LARGE[1]).to(DEVICE)
    yield comm.gather(large[:, rank * LARGE[1] : (rank + 1) * LARGE[1]], [LARGE[1]] * 2), large
    assert comm.gather(torch.empty(0, 4, device=DEVICE), [4, 4]).shape == (0, 8)


class Graphed:
    """A graph of every verb, and what it must give."""

    def __init__(self, comm: PeerComm) -> None:
        self.comm, self.given = comm, torch.zeros(4, 6, dtype=torch.int64, device=DEVICE)
        self._step()
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self.made = self._step()

    def _step(self) -> list[Tensor]:
        comm, told = self.comm, self.given.clone()
        comm.tell(told)
        whole = comm.gather(self.given, [6] * SIZE)
        own = torch.where(self.given % SIZE == comm.rank, self.given, 0)
        return [told, whole, comm.gather_rows(self.given, [4] * SIZE), comm.merge(own)]

    def replay(self, number: int) -> bool:
        """Whether everything came as it was said."""
        said = [drawn(4, 6, seed=SIZE * number + rank).to(DEVICE) for rank in range(SIZE)]
        self.given.copy_(said[self.comm.rank])
        self.comm.launch(self._graph.replay)
        parts = [torch.where(said[rank] % SIZE == rank, said[rank], 0) for rank in range(SIZE)]
        wanted = [said[0], torch.cat(said, 1), torch.cat(said), parts[0] | parts[1]]
        is_right = all(made.equal(want) for made, want in zip(self.made, wanted, strict=True))
        self.comm.check()
        return is_right


def check_verbs(comm: PeerComm) -> None:
    for got, want in verbs(comm):
        assert got.shape == want.shape
        assert got.contiguous().view(torch.uint8).equal(want.contiguous().view(torch.uint8))
    comm.check()


def check_graphs(comm: PeerComm) -> None:
    """Replays among verbs that run as they come: all count the same turns."""
    graphed = Graphed(comm)
    for number in range(REPLAYS):
        assert graphed.replay(number), f"replay {number}"
        if number % 5 == 0:
            check_verbs(comm)


def fail_after(number: int, how: Callable[[], object]) -> Callable[[PeerComm], None]:
    def work(comm: PeerComm) -> None:
        graphed = Graphed(comm)
        for i in range(number):
            assert graphed.replay(i)
        how()

    return work


WORKS = {
    "verbs": check_verbs,
    "graphs": check_graphs,
    "dies": fail_after(3, lambda: os.kill(os.getpid(), signal.SIGKILL)),
    "hangs": fail_after(3, lambda: time.sleep(600.0)),
}


def main(meeting: str, work: str) -> None:
    with torch.inference_mode():
        WORKS[work](PeerComm(Path(meeting), (1, SIZE), 60.0, DEVICE))


if __name__ == "__main__":
    main(*sys.argv[1:])
