"""What ranks hand each other through mapped memory: slices, halves and places, in the interpreter.

Ranks run one after the other here and nobody waits, so the first to run reads what the others have
not written yet. Each step is run twice, from the same turns: then everybody has read everything, of
up to two turns. More of them are for `tests/gpu/test_gpu_peer.py`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quire.kernels import peer_exchange
from quire.kernels.peer_exchange import (
    NO_SPOTS,
    UNITS,
    Exchange,
    Spots,
    Verb,
    exchange,
    head_words,
    region_words,
    unit_of,
)

if torch.cuda.is_available():
    pytest.skip("on a GPU ranks are processes: tests/gpu/test_gpu_peer.py", allow_module_level=True)

SIZE, PROGRAMS = 2, 2


class Group:
    def __init__(self) -> None:
        self.regions = [torch.zeros(region_words(SIZE), dtype=torch.int64) for _ in range(SIZE)]
        places = torch.tensor([*(region.data_ptr() for region in self.regions), 0])
        self.ranks = [Exchange(rank, SIZE, places) for rank in range(SIZE)]

    def run(
        self, verb: Verb, shares: list[Tensor], into: list[Tensor], spots: Spots = NO_SPOTS
    ) -> None:
        before = [self.turns(rank).clone() for rank in range(SIZE)]
        for _ in range(2):
            for rank in range(SIZE):
                self.turns(rank).copy_(before[rank])
                exchange(self.ranks[rank], verb, shares[rank], into[rank], spots)

    def turns(self, rank: int) -> Tensor:
        return self.regions[rank][SIZE * PROGRAMS : (SIZE + 1) * PROGRAMS]

    def marks(self, rank: int) -> Tensor:
        return self.regions[rank][: SIZE * PROGRAMS].view(SIZE, PROGRAMS)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shares of a few words fill programs and halves."""
    monkeypatch.setattr(peer_exchange, "MOST_PROGRAMS", PROGRAMS)
    monkeypatch.setattr(peer_exchange, "BLOCK", 4)
    monkeypatch.setattr(peer_exchange, "HALF_WORDS", 8)


@pytest.mark.parametrize(("num", "unit"), [(1, 8), (29, 8), (7, 1), (120, 2)])
def test_shares_go_where_they_belong(num: int, unit: int) -> None:
    """Red when a slice is lost between programs, turns or halves, or goes to another place."""
    group, kind = Group(), UNITS[unit]
    numbers = torch.Generator().manual_seed(num)
    for _ in range(2):  # with turns of both halves behind them
        shares = [torch.randint(0, 100, (num,), generator=numbers).to(kind) for _ in range(SIZE)]
        into = [torch.full((SIZE, num), 7, dtype=kind) for _ in range(SIZE)]
        group.run(Verb.GATHER, shares, into, Spots(num, 0, num))
        merged = [torch.zeros(num, dtype=kind) for _ in range(SIZE)]
        group.run(Verb.MERGE, shares, merged)
        told = [share.clone() for share in shares]
        group.run(Verb.TELL, told, told)
        for rank in range(SIZE):
            assert into[rank].equal(torch.stack(shares))
            assert merged[rank].equal(shares[0] | shares[1])
            assert told[rank].equal(shares[0])
            assert group.marks(rank)[1 - rank].equal(group.turns(rank)), "not in step"


def test_columns_lie_side_by_side() -> None:
    """Red when rows of shares are put one behind the other."""
    group, columns = Group(), [torch.arange(28).view(7, 4) + 100 * rank for rank in range(SIZE)]
    into = [torch.zeros(7, 4 * SIZE, dtype=torch.int64) for _ in range(SIZE)]
    group.run(Verb.GATHER, columns, into, Spots(4, 4 * SIZE, 4))
    assert all(made.equal(torch.cat(columns, 1)) for made in into)


def test_regions_are_large_enough() -> None:
    """Red when an outbox reaches into the next one, or beyond the region."""
    for size in (2, 3, 8):
        assert head_words(size) >= (size + 1) * PROGRAMS
        outboxes = region_words(size) - head_words(size)
        assert outboxes == 2 * PROGRAMS * peer_exchange.HALF_WORDS
    assert [unit_of(num) for num in (8, 4, 6, 3)] == [8, 4, 2, 1]


def test_it_builds_for_a_gpu() -> None:
    """Red when the assembler refuses an instruction that the interpreter never sees, or marks are
    raised and awaited by weaker ones than other GPUs need."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernel.compile_exchange"]
    root = Path(__file__).parents[2]
    run = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.split("\n")[:-1] == [
        f"{verb.name} st.release.sys 2 ld.acquire.sys 2 bar.sync 2" for verb in Verb
    ]
