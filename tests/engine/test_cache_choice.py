"""What users may ask of the cache's form, and scales that checkpoints bring for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.errors import CheckpointError, NotSupported
from quire.kv.spec import KvScales
from tests.engine.tiny import random_llama, save_tiny_folder


@pytest.mark.parametrize(
    ("words", "match"),
    [
        ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype='fp8_e5m2'.*want 'auto', 'int8'"),
        ({"kv_cache_dtype": "int3"}, "kv_cache_dtype='int3'; want"),
        ({"calculate_kv_scales": True}, "fp8_per_token_head"),
    ],
)
def test_what_cannot_be_had(words: dict[str, Any], match: str, tmp_path: Path) -> None:
    save_tiny_folder(tmp_path)
    with pytest.raises(NotSupported, match=match):
        LLM(str(tmp_path), device="cpu", **words)


def scaled_folder(folder: Path, names: dict[str, torch.Tensor]) -> str:
    """A tiny model whose checkpoint brings scales of its cache."""
    from safetensors.torch import load_file, save_file

    save_tiny_folder(folder, random_llama(head_dim=32))
    (file,) = folder.glob("*.safetensors")
    save_file({**load_file(file), **names}, file, {"format": "pt"})
    return str(folder)


@pytest.mark.parametrize(
    "key", ["k_scale", "k_proj.k_scale", "attn.k_scale", "k_proj.output_scale"]
)
def test_scales_of_checkpoints(key: str, tmp_path: Path) -> None:
    """Red when a name that vLLM's checkpoints use is not found, or is used where it should not."""
    value = key.replace("k_", "v_")
    names = {
        f"model.layers.{i}.self_attn.{last}": torch.tensor([0.01 * (i + 1)])
        for i in range(2)
        for last in (key, value)
    }
    llm = LLM(scaled_folder(tmp_path, names), device="cpu", kv_cache_dtype="fp8")
    pool = llm._engine.runner.pool
    assert [pool.layer(i).scales for i in range(2)] == [
        KvScales(*2 * [pytest.approx(0.01 * (i + 1))]) for i in range(2)
    ]
    assert any(d.what == "kv cache scales" and d.value == "calibrated" for d in llm.decisions)
    assert llm.generate(["abc"], SamplingParams(max_tokens=3), use_tqdm=False)
    for form in ("fp8_per_token_head", "int8"):
        llm = LLM(str(tmp_path), device="cpu", kv_cache_dtype=form)
        assert llm._engine.runner.pool.layer(0).scales is None


def test_scales_that_are_none(tmp_path: Path) -> None:
    at = "model.layers.0.self_attn."
    for wrong, error in ((torch.tensor([0.0]), CheckpointError), (torch.ones(4), NotSupported)):
        folder = tmp_path / error.__name__
        folder.mkdir()
        path = scaled_folder(folder, {at + "k_scale": wrong, at + "v_scale": wrong.clone()})
        with pytest.raises(error, match="fp8_per_token_head"):
            LLM(path, device="cpu", kv_cache_dtype="fp8")
