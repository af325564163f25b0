"""Bytes of weights in memory against the arithmetic of their formats: no hidden copy."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire import LLM
from quire.evaluate.footprint import resident_bytes
from quire.models.tiny import tiny_model
from quire.native.library import find_library

SIZES = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 1024}
SMALL = {"device": "cpu", "num_threads": 1, "max_model_len": 64, "kv_cache_memory": 1 << 22}
# Bits of a weight with its share of scales: of the layers (256 to 512 inputs), and of heads.
BITS = {
    "fp8": (8 + 32 / 256, 8 + 16 / 256),
    "int8": (8 + 16 / 256, 8 + 16 / 256),
    "nf4": (4 + 32 / 64, 8 + 16 / 32),
    "mxfp4": (4 + 8 / 32, 8 + 16 / 32),
    "rtn-int4-g128": (4 + 16 / 128, 8 + 16 / 128),
    "rtn-int4-g32": (4 + 16 / 32, 8 + 16 / 32),
    "rtn-int4-g32-asym": (4 + 24 / 32, 8 + 24 / 32),
    "rtn-int8-g32": (8 + 16 / 32, 8 + 16 / 32),
}


@pytest.mark.parametrize("name", BITS)
def test_rounded_weights_take_what_their_format_says(name: str, tmp_path: Path) -> None:
    """Red when a form is expanded, kept twice, or padded beyond its worth."""
    if find_library().library is None:
        pytest.skip("without the native library weights are expanded")
    folder = tiny_model("llama", tmp_path, seed=1, tokenizer=False, **SIZES)
    llm = LLM(str(folder), skip_tokenizer_init=True, quantization=name, **SMALL)  # type: ignore[arg-type]
    model = llm._engine.runner.model
    spec = model.spec
    kv = spec.num_kv_heads * spec.head_dim
    layer = 256 * (spec.num_heads * spec.head_dim + 2 * kv) + 256 * spec.num_heads * spec.head_dim
    layer += 3 * 256 * 512
    heads = 1024 * 256 * (1 if spec.tied else 2)
    in_layers, in_heads = BITS[name]
    norms = 4 * 256 * (2 * spec.num_layers + 1)
    want = (spec.num_layers * layer * in_layers + heads * in_heads) / 8 + norms
    assert resident_bytes(model) / want == pytest.approx(1.0, abs=0.03)
