"""What ranks say to each other, whichever way they say it. Ranks are threads here."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from quire.dist.comm import Comm
from quire.dist.gloo import GlooComm
from quire.dist.host import HostComm
from quire.errors import RankLost
from quire.native.exchange import SLOT_BYTES, SharedComm, make_memory
from quire.native.library import find_library

T = TypeVar("T")
KINDS = ["gloo", "gloo through host"]
if find_library().library is not None:
    KINDS += ["shared", "shared through host"]
SIZE = 3


def comms_of(kind: str, folder: Path, deadline_s: float) -> Callable[[int], Comm]:
    library = find_library().library
    name, _, through_host = kind.partition(" ")
    if through_host:  # as GPUs would, whose tensors those of a CPU stand for
        carriers = comms_of(name, folder, deadline_s)
        return lambda rank: HostComm(carriers(rank))
    if kind == "gloo":
        return lambda rank: GlooComm(folder / "meeting", rank, SIZE, deadline_s)
    make_memory(folder / "memory", SIZE)
    assert library is not None
    return lambda rank: SharedComm(folder / "memory", (rank, SIZE), deadline_s, library)


def on_all(make: Callable[[int], Comm], work: Callable[[Comm, int], T]) -> list[T]:
    with ThreadPoolExecutor(SIZE) as pool:
        return list(pool.map(lambda rank: work(make(rank), rank), range(SIZE)))


@pytest.mark.parametrize("kind", KINDS)
def test_every_verb_is_exact(kind: str, tmp_path: Path) -> None:
    """Red when a way to talk loses a row, a column, or the sign of a zero."""
    widths, counts = [5, 3, 0], [2, 0, 4]
    numbers = torch.Generator().manual_seed(0)
    columns = torch.randn(7, 8, generator=numbers)
    long = torch.randn(SLOT_BYTES // 4000, 3000, generator=numbers)  # in several pieces
    rows = torch.randn(6, 5, generator=numbers)
    table = torch.randn(SIZE, 4, generator=numbers)
    table[1, 2] = -0.0

    def work(comm: Comm, rank: int) -> list[torch.Tensor]:
        begin, first = sum(widths[:rank]), sum(counts[:rank])
        told = torch.arange(9) if rank == 0 else torch.zeros(9, dtype=torch.int64)
        got = [
            comm.gather(columns[:, begin : begin + widths[rank]], widths),
            comm.gather(long[:, 1000 * rank : 1000 * (rank + 1)], [1000] * SIZE),
            comm.gather_rows(rows[first : first + counts[rank]], counts),
            comm.merge(torch.where(torch.arange(SIZE)[:, None] == rank, table, 0.0)),
            comm.gather(columns[:0, :2], [2] * SIZE),
        ]
        comm.tell(told)
        return [*got, told]

    wanted = [columns, long, rows, table, torch.empty(0, 2 * SIZE), torch.arange(9)]
    for got in on_all(comms_of(kind, tmp_path, 60.0), work):
        for mine, want in zip(got, wanted, strict=True):
            assert mine.shape == want.shape
            assert mine.contiguous().view(torch.uint8).equal(want.contiguous().view(torch.uint8))


@pytest.mark.parametrize("kind", KINDS)
def test_who_does_not_come_is_not_waited_for(kind: str, tmp_path: Path) -> None:
    """Red when a collective has no deadline."""

    def work(comm: Comm, rank: int) -> bool:
        if rank == 1:
            time.sleep(1.0)  # alive, but busy with something else
            return True
        with pytest.raises(RankLost, match="rank"):
            comm.gather(torch.ones(2, 2), [2] * SIZE)
        return True

    begun = time.monotonic()
    assert all(on_all(comms_of(kind, tmp_path, 0.3), work))
    assert time.monotonic() - begun < 30.0
