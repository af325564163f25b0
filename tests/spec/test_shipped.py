"""The head that comes with Quire: found by the model's name, small, and of no effect on tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from quire.errors import NotSupported
from quire.load.shipped import FOLDER, shipped_head
from quire.runner.feature_drafter import FeatureDrafter
from tests.spec.cases import open_tiny

MOST_BYTES = 16 << 20


def test_the_default_model_has_one(default_model_path: Path) -> None:
    """Red when the head is not found, not read whole, never right, or changes a token."""
    llm = LLM(
        "default",
        device="cpu",
        max_model_len=256,
        kv_cache_memory=64 << 20,
        speculative_config={"method": "eagle3", "adaptive": False, "num_speculative_tokens": 2},
    )
    drafter = llm._engine.runner.drafter
    assert isinstance(drafter, FeatureDrafter)
    assert drafter.layer.head.vocabulary is not None, "it names few tokens"
    asked = [{"role": "user", "content": "Why is the sky blue?"}]
    params = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
    drafted, plain = (
        llm.chat(asked, params.with_(num_speculative_tokens=depth), use_tqdm=False)[0]
        for depth in (None, 0)
    )
    assert drafted.outputs[0].token_ids == plain.outputs[0].token_ids
    assert drafted.metrics is not None and drafted.metrics.num_accepted_tokens > 6


def test_it_is_found_by_name_and_by_file(default_model_path: Path) -> None:
    """Red when a server, which is given the file's path, does not find what `LLM` finds."""
    found = {shipped_head("eagle3", name) for name in ("default", str(default_model_path))}
    assert found == {str(FOLDER / "smollm2-135m-instruct-eagle3")}


def test_it_is_small() -> None:
    folders = list(FOLDER.iterdir())
    assert folders, "there is one at least"
    for folder in folders:
        assert sum(file.stat().st_size for file in folder.iterdir()) <= MOST_BYTES, folder


def test_other_models_need_one(tmp_path: Path) -> None:
    with pytest.raises(NotSupported, match="comes with smollm2-135m-instruct-eagle3"):
        shipped_head("eagle3", "somebody/else")
    with pytest.raises(NotSupported, match=r"needs a model for .*quire distill"):
        open_tiny(tmp_path, "llama", speculative_config={"method": "eagle3"})
