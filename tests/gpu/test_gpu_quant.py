"""The engine with packed weights on CUDA: the tokens of expanded ones, with and without graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from quire import LLM, SamplingParams
from quire.bench.shapes import SHAPES, shrunk, write_shape
from quire.ops.cuda_ops import CudaOps

FORMS = ("rtn-int4-g32", "rtn-int4-g32-asym", "fp8-weights", "int8-weights", "nf4", "mxfp4")
PROMPTS = [[7 * i % 97 + 3 for i in range(length)] for length in (1, 5, 40, 300)]


def _tokens(folder: str, form: str, **options: Any) -> list[list[int]]:
    llm = LLM(
        folder,
        load_format="dummy",
        quantization=form,
        skip_tokenizer_init=True,
        kv_cache_memory=64 << 20,
        **options,
    )
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    found = llm.generate(PROMPTS, params, use_tqdm=False)
    tokens = [list(each.outputs[0].token_ids) for each in found]
    del llm
    return tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_shape(shrunk(SHAPES["8b"]), Path(tmp_path_factory.mktemp("shape")))


@pytest.mark.parametrize("form", FORMS)
def test_packed_weights_give_the_tokens_of_expanded_ones(
    form: str, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when a packed kernel, a graph or the expansion of long prompts changes a bit."""
    packed = _tokens(folder, form)
    assert _tokens(folder, form, enforce_eager=True) == packed

    def refuse(self: CudaOps, device: torch.device, dtype: torch.dtype) -> None:
        made(self, device, dtype)
        self.packed.check = lambda *_: "refused by a test"

    made = CudaOps.__init__
    monkeypatch.setattr(CudaOps, "__init__", refuse)
    with pytest.warns(RuntimeWarning, match="refused by a test"):
        assert _tokens(folder, form) == packed


def test_nothing_is_refused_here(folder: str) -> None:
    """Red when a form that should run packed on this GPU is expanded."""
    for form in FORMS:
        llm = LLM(
            folder,
            load_format="dummy",
            quantization=form,
            skip_tokenizer_init=True,
            kv_cache_memory=64 << 20,
        )
        said = [each for each in llm._engine.decisions if each.what == "expanded weights"]
        del llm
        assert said == [], form
