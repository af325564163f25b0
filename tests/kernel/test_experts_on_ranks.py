"""Experts of two ranks with a GPU's kernels, in the interpreter: the bits of one rank."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from quire.dist.comm import SoloComm
from quire.dist.ranks import ALONE, Ranks
from quire.nn.experts import Experts
from quire.nn.ops import Visits
from quire.ops.cuda_ops import CudaOps

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NUM, HIDDEN, FFN, TOP_K = 6, 64, 32, 3


class Said(Exception):
    """What a rank says, before anybody answers."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows


class Saying(SoloComm):
    def gather_rows(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        raise Said(x)


class Hearing(SoloComm):
    """Of the first rank, which knows what the other one says."""

    def __init__(self, other: Tensor) -> None:
        self.other = other

    def gather_rows(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        assert [len(x), len(self.other)] == list(counts)
        return torch.cat([x, self.other])


def experts_of(ranks: Ranks) -> Experts:
    made = Experts(NUM, HIDDEN, FFN, torch.bfloat16, DEVICE, ranks=ranks)
    numbers = torch.Generator().manual_seed(0)
    for name in ("up", "down"):
        parameter = made.parameters[name]
        for expert in range(NUM):
            for part in (f"{expert}.gate", f"{expert}.up") if name == "up" else (str(expert),):
                shape = (FFN, HIDDEN) if name == "up" else (HIDDEN, FFN)
                weight = torch.randn(shape, generator=numbers)
                if not parameter.is_elsewhere(part):
                    parameter.put(part, weight)
    made.finish(CudaOps(DEVICE, torch.bfloat16))
    return made


def test_two_ranks_have_the_bits_of_one() -> None:
    """Red when results of ranks are added by another kernel than those of one, or when experts are
    numbered otherwise than its kernels count them."""
    numbers = torch.Generator().manual_seed(1)
    x = torch.randn(7, HIDDEN, generator=numbers).to(DEVICE, torch.bfloat16)
    chosen = torch.stack([torch.randperm(NUM, generator=numbers)[:TOP_K] for _ in range(7)])
    weights = torch.rand(7, TOP_K, generator=numbers).to(DEVICE)
    visits = Visits(chosen.int().to(DEVICE), weights)
    wanted = experts_of(ALONE)(x, visits, None)
    with pytest.raises(Said) as said:
        experts_of(Ranks(1, 2, Saying()))(x, visits, None)
    made = experts_of(Ranks(0, 2, Hearing(said.value.rows)))(x, visits, None)
    assert made.view(torch.int16).equal(wanted.view(torch.int16))
