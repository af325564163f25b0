"""Formats of weights with everything the engine does to requests, on CUDA: the CPU's matrix, some
cells of it, with graphs. Weights are wide enough for the kernels that stream them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

pytest.importorskip("llguidance")  # some of the requests have grammars

from quire import LLM
from quire.kernels.hopper import has_hopper_kernels
from quire.nn.moe import SparseMLP
from quire.ops.cuda_ops import GroupedExperts
from quire.ops.eight_bit_experts import EightBitExperts
from quire.ops.eight_bit_linear import EightBitLinear
from quire.ops.matmul_linear import MatmulLinear
from quire.ops.packed_linear import PackedLinear
from tests.quant.matrix import STREAMED, Cell, check, chosen, folder_of

CUDA = torch.device("cuda")
CELLS = (
    Cell("fp8", "llama", True),
    Cell("fp8 in blocks of 128", "llama", False),
    Cell("fp8 in blocks of 128", "qwen3_moe", True),
    Cell("fp8 with static inputs", "gemma3_text", True),
    Cell("int8", "gemma3_text", False),
    Cell("smoothquant", "llama", True),
    Cell("rtn-int4-g32", "llama", True),
    Cell("rtn-int4-g32", "qwen3_moe", False),
    Cell("gptq with g_idx", "llama", False),
    Cell("gptq with g_idx", "qwen3_moe", True),
    Cell("gptq of 3 bits", "llama", True),
    Cell("awq", "gemma3_text", True),
    Cell("nf4", "deepseek_v3", False),
    Cell("bitsandbytes nf4", "llama", True),
    Cell("mxfp4", "qwen3_moe", True),
    Cell("mxfp4", "llama", False),
    Cell("gpt-oss's mxfp4", "gpt_oss", True),
    Cell("nvfp4", "deepseek_v3", True),
    Cell("codebook", "llama", False),
    Cell("gguf Q4_K", "llama", True),
    Cell("bitnet", "bitnet", False),
    Cell("2:4", "llama", True),
)
EIGHT_BY_EIGHT = ("fp8", "int8", "smoothquant", "fp8 with static inputs", "fp8 in blocks of 128")
STREAM = ("rtn-int4-g32", "gptq", "gptq with g_idx", "mxfp4", "2:4")


def cells() -> list[Cell]:
    return chosen() if os.environ.get("QUIRE_LONG_TESTS") else list(CELLS)


@pytest.mark.parametrize("form, family, drafts", cells())
def test_alone_and_in_a_crowd(form: str, family: str, drafts: bool, tmp_path: Path) -> None:
    """Red when a format's bits on a GPU depend on the batch, on chunks, on graphs, on cached
    prefixes, on drafts or on lost pages, or when its own kernel is not what ran."""
    folder, how = folder_of(form, family, tmp_path, STREAMED)
    # Of smaller pages the kernels take none.
    llm = check(folder, drafts, device="cuda", page_size=16, **how)
    said = [each for each in llm._engine.decisions if each.what in ("expanded weights", "inputs")]
    assert said == []
    check_kernels(llm, form)


def check_kernels(llm: LLM, form: str) -> None:
    """Of the last block's second projections, or of its experts."""
    mlp, is_hopper = llm._engine.runner.model.blocks[-1].mlp, has_hopper_kernels(CUDA)
    if isinstance(mlp, SparseMLP):
        kernel = mlp.experts.kernel
        assert isinstance(kernel, EightBitExperts) == (form in EIGHT_BY_EIGHT)
        assert not isinstance(kernel, GroupedExperts)
        return
    kernel = mlp.down.kernel
    assert not isinstance(kernel, MatmulLinear)
    if form in EIGHT_BY_EIGHT:
        assert isinstance(kernel, EightBitLinear)
        assert not is_hopper or (kernel.few is not None and kernel.few.pick(6) is not None)
    elif form != "bitnet":
        assert isinstance(kernel, PackedLinear)
        assert (kernel.stream is not None) == (is_hopper and form in STREAM)
