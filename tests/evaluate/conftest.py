"""Two tiny models of one vocabulary, the second a little off, and a text for them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from quire.evaluate.texts import HeldOut
from quire.llm import LLM
from tests.engine.tiny import random_llama, save_tiny_folder

TEXT = "the quick brown fox jumps over the lazy dog, and naïve cafés return 42. " * 12


class Tiny(NamedTuple):
    folder: Path
    oracle: Any  # the same weights in transformers


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return _saved(tmp_path_factory.mktemp("tiny"), 0.0)


@pytest.fixture(scope="session")
def shaken(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return _saved(tmp_path_factory.mktemp("shaken"), 0.02)


def _saved(folder: Path, noise: float) -> Tiny:
    model = random_llama()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += noise * torch.randn(parameter.shape, generator=generator)
    save_tiny_folder(folder, model)
    return Tiny(folder, model)


@pytest.fixture(scope="session")
def open_tiny() -> Callable[..., LLM]:
    def opened(one: Tiny, **changes: Any) -> LLM:
        args = {"device": "cpu", "dtype": "float32", "page_size": 4, "max_model_len": 96}
        return LLM(str(one.folder), **{**args, "kv_cache_memory": 1 << 22, **changes})

    return opened


@pytest.fixture(scope="session")
def held_out() -> HeldOut:
    return HeldOut("fox", TEXT, "0" * 64)
