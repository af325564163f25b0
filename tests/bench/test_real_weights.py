"""The comparison with transformers itself: it must find nothing where there is nothing, and must
find what there is. With QUIRE_TEST_REAL=1 it also runs on a Gemma 3 and a Qwen (minutes)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import real_weights
from benchmarks.real_weights import Difference, compare, is_good
from quire.errors import QuireError


def test_a_model_equals_itself(tiny_folder: Path) -> None:
    result = compare(str(tiny_folder), num_tokens=8, num_threads=1)
    assert is_good(result), result
    assert result["equal_prompts"] == result["prompts"] == 16
    assert result["generated_checked"] == 2 and result["prefix_hit_tokens"] > 0
    assert not is_good({**result, "again_cached_tokens": 0})
    assert not is_good({**result, "again_same_tokens": False})


def test_a_model_with_other_weights_is_told_apart(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when the comparison could not see a wrong layer."""
    load = real_weights.load_oracle

    @torch.no_grad()
    def load_wrong(path: Path) -> Any:
        model = load(path)
        model.model.layers[1].self_attn.o_proj.weight.neg_()
        return model

    monkeypatch.setattr(real_weights, "load_oracle", load_wrong)
    result = compare(str(tiny_folder), num_tokens=8, num_threads=1)
    assert not is_good(result) and result["equal_prompts"] < 8
    first = Difference(**result["differences"][0])
    assert first.ours != first.theirs and first.is_tie == (first.margin < real_weights.TIE)


@pytest.mark.skipif(os.environ.get("QUIRE_TEST_REAL") != "1", reason="QUIRE_TEST_REAL is not 1")
@pytest.mark.parametrize(
    ("model", "window"), [("gemma-3-270m", 512), ("qwen2.5-coder-0.5b-instruct", None)]
)
def test_real_weights_say_what_transformers_says(model: str, window: int | None) -> None:
    try:
        result = compare(model, num_tokens=32, num_threads=2)
    except QuireError as error:
        if "download" not in str(error) and "QUIRE_OFFLINE" not in str(error):
            raise
        pytest.skip(f"{model} is not here and could not be downloaded: {error}")
    assert is_good(result), result
    assert result["window"] == window and result["prompts_over_600"] >= 2
