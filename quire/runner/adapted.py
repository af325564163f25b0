"""Which of a step's rows have an adapter. A step without any is none of this file's business."""

from __future__ import annotations

import numpy as np

from quire.lora.bank import AdapterBank
from quire.lora.step import StepAdapters
from quire.runner.gather import StepShape
from quire.runner.rows import RequestRows


def adapted_of(
    bank: AdapterBank | None, rows: RequestRows, shape: StepShape
) -> StepAdapters | None:
    if bank is None:
        return None
    numbers = rows.adapters[shape.rows]  # [seqs]
    if not numbers.any():
        return None
    return bank.step(np.repeat(numbers, shape.query_lens), numbers[shape.sampled])
