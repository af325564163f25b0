"""Tables of step times that can be counted on fingers, and requests for them."""

from __future__ import annotations

from typing import Any

from quire.bench.serve.work import Ask
from quire.sched.cost_table import CostTable, EngineFacts


def table(**changes: Any) -> CostTable:
    """10 ms a step, and 1 ms for each token beyond the first."""
    facts = {
        "model": "made up",
        "device": "cpu",
        "ranks": 1,
        "overlaps": False,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": 512,
        "page_size": 4,
        "num_pages": 400,
        "windows": (None,),
        "stages": 1,
        "token_bytes": 1000,
    }
    own = {name: value for name, value in changes.items() if name in facts}
    others = {name: value for name, value in changes.items() if name not in facts}
    values = {"tokens": (1, 101), "times": (0.010, 0.110), "context_s": 0.0, "pair_s": 0.0}
    return CostTable(EngineFacts(**facts | own), **{"sample_s": 0.0, **values, **others})


def ask(at: float, prompt: int, output: int, mark: str = "") -> Ask:
    return Ask(at, " ".join(f"{mark}{i}" for i in range(prompt)), prompt, output)
