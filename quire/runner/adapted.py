"""Which of a step's rows have an adapter. A step without any is none of this file's business."""

from __future__ import annotations

import numpy as np

from quire.lora.bank import AdapterBank
from quire.lora.step import Numbers, StepAdapters
from quire.nn.linear import Adapted
from quire.runner.gather import StepShape
from quire.runner.rows import RequestRows


def adapted_of(bank: AdapterBank | None, rows: RequestRows, shape: StepShape) -> Adapted | None:
    """For a step that runs layer by layer."""
    numbers = numbers_of(bank, rows, shape)
    if bank is None or numbers is None:
        return None
    fed, drawn = np.repeat(numbers, shape.query_lens), numbers[shape.sampled]
    if bank.on_gpu is None:
        return bank.step(fed, drawn)
    from quire.lora.step_on_gpu import GpuStep  # CPU installs need no triton

    return GpuStep.of(bank.on_gpu, bank.tiles(fed), lambda: bank.tiles(drawn))


def recorded_of(
    bank: AdapterBank | None, rows: RequestRows, shape: StepShape
) -> StepAdapters | None:
    """For a step that replays a tape."""
    numbers = numbers_of(bank, rows, shape)
    if bank is None or numbers is None:
        return None
    return bank.step(np.repeat(numbers, shape.query_lens), numbers[shape.sampled])


def numbers_of(bank: AdapterBank | None, rows: RequestRows, shape: StepShape) -> Numbers | None:
    """[seqs]; None: nobody has an adapter."""
    if bank is None:
        return None
    numbers: Numbers = rows.adapters[shape.rows]
    return numbers if numbers.any() else None
