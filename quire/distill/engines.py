"""The engine that answers are written with: made for many at once, and let go of for good."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from quire.llm import LLM

ROWS = {"cpu": 32}  # answers written side by side
ROWS_ELSEWHERE = 512  # a step of a small model is mostly launches: more rows cost little


def engine_for(model: str, device: torch.device, threads: int | None, seed: int) -> LLM:
    from quire.llm import LLM

    return LLM(
        model,
        device=device.type,
        # Many rows are quickest with plain weights, which the teacher has as well.
        dtype="auto" if device.type == "cpu" else "bfloat16",
        num_threads=threads,
        max_num_seqs=ROWS.get(device.type, ROWS_ELSEWHERE),
        seed=seed,
    )


def let_go(device: torch.device) -> None:
    """An engine nobody holds any more, with its cache: training needs the memory."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
