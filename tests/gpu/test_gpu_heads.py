"""BitNet and classification heads on a GPU: near transformers, and the same bits in any batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

import transformers
from safetensors.torch import save_file

from quire.llm import LLM
from quire.models.tiny import tiny_model
from quire.ops.int8_inputs import Int8SumInputs
from quire.ops.matmul_linear import MatmulLinear
from quire.ops.packed_linear import PackedLinear
from quire.params import SamplingParams
from tests.model.test_bitnet import eager, expected, read_tensors, ternary_folder
from tests.model.test_classifiers import TEXTS

__all__ = ["eager"]  # a fixture that acts by being here

SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}
TERNARY = {"hidden_size": 64, "intermediate_size": 96}  # whole blocks of 32 inputs
LONG = [text * 9 for text in TEXTS]


def llm_of(folder: Path, **changes: Any) -> LLM:
    words = {"device": "cuda", "dtype": "bfloat16", "page_size": 16, "kv_cache_memory": 1 << 26}
    return LLM(str(folder), **{**words, **changes})


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_ternary_weights(dtype: str, tmp_path: Path) -> None:
    """Packed, and expanded. Red when the rounding of activations differs on the device, or reads
    other rows, and when ternary weights no longer stay packed here."""
    folder = ternary_folder(tmp_path, "autobitlinear", "offline", **TERNARY)
    llm = llm_of(folder, dtype=dtype)
    said = {each.what: each.value for each in llm._engine.decisions}
    assert ("int2 " in said.get("weights", "")) == (dtype == "auto"), said
    assert "expanded weights" not in said
    layer = llm._engine.runner.model.blocks[0].mlp.down.kernel
    assert isinstance(layer, Int8SumInputs)
    assert isinstance(layer.kernel, PackedLinear if dtype == "auto" else MatmulLinear)
    ids = llm.get_tokenizer().encode(TEXTS[1])
    want = expected(folder, ids)
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=3)
    (output,) = llm.generate([ids], params, use_tqdm=False)
    assert output.outputs[0].logprobs is not None
    for token, logprob in output.outputs[0].logprobs[0].items():
        assert abs(logprob.logprob - want[token].item()) < 0.3  # bf16, and steps of the rounding
    some = [text * 4 for text in TEXTS]  # its context is 256
    together = [o.outputs[0].token_ids for o in llm.generate(some, params, use_tqdm=False)]
    bare = {"max_num_seqs": 1, "enable_prefix_caching": False, "enforce_eager": True}
    lone = llm_of(folder, dtype=dtype, **bare)
    alone = [lone.generate([t], params, use_tqdm=False)[0].outputs[0].token_ids for t in some]
    assert together == alone


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Gemma2"])
def test_heads(family: str, tmp_path: Path) -> None:
    """Red when a head reads another row, or company or chunks change its numbers."""
    folder = tiny_model(f"{family}ForSequenceClassification", tmp_path, seed=5, **SIZES)
    tensors = {name: (tensor * 0.4).bfloat16() for name, tensor in read_tensors(folder).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    oracle = transformers.AutoModelForSequenceClassification.from_pretrained(
        folder, dtype=torch.float32
    ).eval()
    llm = llm_of(folder, max_num_batched_tokens=128)
    found = llm.reward(LONG, use_tqdm=False)
    for output in found:
        with torch.no_grad():
            want = oracle(torch.tensor([output.prompt_token_ids])).logits[0].tolist()
        assert output.outputs.data == pytest.approx(want, abs=0.1)
    lone = llm_of(folder, max_num_seqs=1, enable_prefix_caching=False)
    alone = [lone.reward(text, use_tqdm=False)[0].outputs.data for text in LONG]
    assert [output.outputs.data for output in found] == alone
