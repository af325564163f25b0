"""Formats of weights with everything the engine does to requests, on CUDA: the CPU's matrix, a few
cells of it, with graphs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

pytest.importorskip("llguidance")  # some of the requests have grammars

from tests.quant.matrix import check, folder_of

CELLS = (
    ("fp8", "llama"),
    ("int8", "gemma3_text"),
    ("rtn-int4-g32", "qwen3_moe"),
    ("nf4", "deepseek_v3"),
    ("mxfp4", "qwen3_moe"),
    ("gptq with g_idx", "llama"),
    ("awq", "gemma3_text"),
    ("2:4", "llama"),
)


@pytest.mark.parametrize("form, family", CELLS)
def test_alone_and_in_a_crowd(form: str, family: str, tmp_path: Path) -> None:
    """Red when a format's bits on a GPU depend on the batch, on chunks, on graphs, on cached
    prefixes or on lost pages."""
    folder, how = folder_of(form, family, tmp_path)
    check(folder, device="cuda", page_size=16, **how)  # of smaller pages the kernels take none
