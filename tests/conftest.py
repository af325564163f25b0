"""Fixtures shared by all tests: a tiny model folder on disk, and the real default model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from quire.llm import LLM


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of two layers with a byte-level tokenizer, as Hugging Face would save it."""
    from tests.engine.tiny import save_tiny_folder

    folder = tmp_path_factory.mktemp("tiny-llama")
    save_tiny_folder(folder)
    return folder


@pytest.fixture(scope="session")
def make_llm(tiny_folder: Path) -> Callable[..., LLM]:
    """Build an LLM from the tiny folder; arguments as for LLM."""

    def make(**changes: Any) -> LLM:
        from quire.llm import LLM

        args = {
            "device": "cpu",
            "dtype": "float32",
            "page_size": 4,
            "max_model_len": 128,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 32,
            "kv_cache_memory": 1 << 21,
            **changes,
        }
        return LLM(str(tiny_folder), **args)

    return make


@pytest.fixture(scope="session")
def default_model_path() -> Path:
    """The model `LLM()` uses when none is named; downloaded at most once, else the test skips."""
    from quire.errors import QuireError
    from quire.load.hub import resolve_model

    try:
        return Path(resolve_model("default"))
    except QuireError as error:
        pytest.skip(f"the default model is not here and could not be downloaded: {error}")
