"""Fixtures shared by all tests: a tiny model folder on disk, and the real default model."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from quire.llm import LLM

# Read when triton is first imported, by whatever test that may be; see `interpreter.py`.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of two layers with a byte-level tokenizer, as Hugging Face would save it."""
    from tests.engine.tiny import save_tiny_folder

    folder = tmp_path_factory.mktemp("tiny-llama")
    save_tiny_folder(folder)
    return folder


PACKED = ["rtn-int4-g32"]
if os.environ.get("QUIRE_LONG_TESTS"):
    PACKED += ["rtn-int8-g32", "rtn-int4-g64-asym"]


@pytest.fixture(scope="session", params=["float32", *PACKED])
def weights(request: pytest.FixtureRequest) -> str:
    """How the models of `make_llm` keep their weights. What is compared with transformers says
    `@pytest.mark.parametrize("weights", ["float32"], indirect=True)`."""
    return str(request.param)


@pytest.fixture(scope="session")
def packed_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `tiny_folder`, of widths that can be packed and heads that the native library takes."""
    from tests.engine.tiny import random_llama, save_tiny_folder

    folder = tmp_path_factory.mktemp("tiny-packed")
    widths = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    save_tiny_folder(folder, random_llama(**widths))
    return folder


@pytest.fixture(scope="session")
def oracle_folder(
    weights: str, tiny_folder: Path, packed_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The values that the models of `make_llm` multiply with, in floats, for transformers."""
    if weights == "float32":
        return tiny_folder
    from tests.engine.tiny import save_rounded_folder

    folder = tmp_path_factory.mktemp("tiny-rounded")
    save_rounded_folder(packed_folder, folder, weights)
    return folder


@pytest.fixture(scope="session")
def near(weights: str) -> float:
    """How far from transformers a log-probability or a hidden state may be: packed products round
    their inputs to int8."""
    return 1e-4 if weights == "float32" else 0.2


@pytest.fixture(scope="session")
def make_llm(weights: str, tiny_folder: Path, packed_folder: Path) -> Callable[..., LLM]:
    """Build an LLM from a tiny folder, in floats or packed; arguments as for LLM."""
    is_packed = weights != "float32"
    folder = packed_folder if is_packed else tiny_folder
    form = {"quantization": weights} if is_packed else {"dtype": "float32"}

    def make(**changes: Any) -> LLM:
        from quire.llm import LLM

        args = {
            "device": "cpu",
            **form,
            "page_size": 4,
            "max_model_len": 128,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 32,
            "kv_cache_memory": 1 << 21,
            **changes,
        }
        return LLM(str(folder), **args)

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
