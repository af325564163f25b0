"""A capture that runs out of memory half way, on a real device: its steps run without a graph, and
graphs before and after it are whole."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from quire.runner.graphs import GraphCache


def _step(rows: Tensor, positions: Tensor, *bounds: object) -> Tensor:
    half = rows.float() * 2
    if torch.cuda.is_current_stream_capturing() and len(rows) == 4:
        torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
    return half + positions


def test_a_capture_without_memory_leaves_other_graphs_alone() -> None:
    graphs = GraphCache(_step, max_batch=8, max_context=64, spare_row=8)
    for size in (2, 4, 8, 4, 2):
        for shift in (1, 5):
            rows = torch.arange(size, dtype=torch.int32, device="cuda")
            logits = graphs.replay(rows, torch.full_like(rows, shift), longest=20)
            assert logits.tolist() == [2 * row + shift for row in range(size)]
    assert sorted(size for size, *_ in graphs.graphs) == [2, 8]
