"""Where splits begin: host and device agree with the definition, counted out one by one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

import tests.interpreter  # noqa: F401  mends the interpreter for this NumPy
from quire.kernels.splits import Splits, split_count, split_start

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAST = 3000


def borders(splits: Splits) -> list[int]:
    """`2 * octave` splits of the least size, then `octave` of twice, four times ... as much."""
    found, size = [0], splits.size
    for _ in range(2 * splits.octave):
        found.append(found[-1] + size)
    while found[-1] < LAST:
        size *= 1 if splits.octave == 0 else 2
        found += [found[-1] + size * (i + 1) for i in range(max(1, splits.octave))]
    return found


@triton.jit
def _both(ends, starts_out, counts_out, num, SIZE: tl.constexpr, OCTAVE: tl.constexpr):
    for i in range(num):
        tl.store(starts_out + i, split_start(i, SIZE, OCTAVE))
        tl.store(counts_out + i, split_count(tl.load(ends + i), SIZE, OCTAVE))


@pytest.mark.parametrize("octave", [0, 1, 2, 16])
def test_host_and_device_follow_the_definition(octave: int) -> None:
    splits = Splits(16, octave)
    starts = borders(splits)
    assert [splits.start(i) for i in range(len(starts))] == starts
    ends = np.unique([end for at in starts if at < LAST for end in (at, at + 1, at + 15)])
    counts = [sum(start < end for start in starts) for end in ends.tolist()]
    assert splits.counts(ends).tolist() == counts
    num = min(len(starts), len(ends))
    given = torch.tensor(ends[:num], dtype=torch.int32, device=DEVICE)
    out = torch.zeros(2, num, dtype=torch.int32, device=DEVICE)
    _both[(1,)](given, out[0], out[1], num, 16, octave)
    assert out.tolist() == [starts[:num], counts[:num]]
