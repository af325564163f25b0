"""Bytes of weights, counted where they lie."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from quire.evaluate.footprint import MemoryWatch, resident_bytes
from quire.llm import LLM
from quire.native.library import find_library
from tests.evaluate.conftest import Tiny


def test_bytes_of_a_model(open_tiny: Callable[..., LLM], tiny: Tiny) -> None:
    """Red when a weight is kept twice, or the count misses one."""
    if find_library().library is None:
        pytest.skip("without the native library MKL packs weights, and adds megabytes to each")
    llm = open_tiny(tiny)
    params = sum(p.numel() for p in tiny.oracle.parameters())
    assert 1.0 <= resident_bytes(llm._engine.runner.model) / (4 * params) < 1.03


def test_shared_memory_counts_once() -> None:
    shared = torch.zeros(100)

    def closed_over() -> torch.Tensor:
        return shared

    assert resident_bytes([shared, shared[:10], {"a": shared}, closed_over]) == 400
    assert resident_bytes([torch.zeros(3), torch.zeros(3)]) == 24


def test_memory_watch_sees_a_rise() -> None:
    watch = MemoryWatch(torch.device("cpu"))
    held = torch.ones(16 << 20)
    del held
    peak = watch.peak()
    assert peak is None or peak >= 60 << 20
