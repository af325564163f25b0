"""What the machine at hand can do, measured beside the rows.

Two machines of one type differ by several percent, and a warm chip is slower than a cool one.
A plain reduction measures how fast memory is read, a square product the matrix units, and a series
of empty launches the host.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch
    from torch import Tensor

READ = 8 << 30  # bytes
SQUARE = 8192  # rows and columns
LAUNCHES = 1000
REPEATS = 5


class Rates(NamedTuple):
    read_tb_s: float
    multiply_tflop_s: float
    launch_us: float

    def describe(self) -> str:
        """
        >>> Rates(4.2, 690.0, 3.1).describe()
        'reads 4.20 TB/s, multiplies 690 TFLOP/s, launches in 3.1 us'
        """
        return (
            f"reads {self.read_tb_s:.2f} TB/s, multiplies {self.multiply_tflop_s:.0f} TFLOP/s,"
            f" launches in {self.launch_us:.1f} us"
        )


def machine_rates(memory: Tensor) -> Rates:
    """`memory` is a large tensor, such as the page pool's; it is only read."""
    import torch

    device = memory.device
    is_cuda = device.type == "cuda"
    words = memory.view(-1).view(torch.float32)[: READ // 4]
    square = SQUARE if is_cuda else 256
    dtype = torch.bfloat16 if is_cuda else torch.float32
    x, w = (torch.randn(square, square, device=device).to(dtype) for _ in range(2))
    out, one = torch.empty_like(x), torch.zeros(1, device=device)

    def launch() -> None:
        for _ in range(LAUNCHES):
            one.add_(1.0)

    read = _seconds(lambda: words.sum(), device)
    multiply = _seconds(lambda: torch.mm(x, w, out=out), device)
    launches = _seconds(launch, device)
    return Rates(
        words.nbytes / read / 1e12, 2 * square**3 / multiply / 1e12, launches / LAUNCHES * 1e6
    )


def _seconds(work: Callable[[], Any], device: torch.device) -> float:
    import torch

    def once() -> float:
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    once()
    return statistics.median(once() for _ in range(REPEATS))
