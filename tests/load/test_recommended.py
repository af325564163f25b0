"""Sampling as a model's makers recommend it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.load.recommended import recommended_sampling


@pytest.mark.parametrize(
    ("config", "want"),
    [
        ({"temperature": 0.6, "top_k": 20, "max_length": 9}, {"temperature": 0.6, "top_k": 20}),
        ({"temperature": 0.6, "do_sample": False}, {}),
        ({"temperature": -1.0}, {}),  # every request would be refused
        ({"top_p": "high"}, {}),
        ({}, {}),
    ],
)
def test_a_folder_says(tmp_path: Path, config: dict[str, object], want: dict[str, float]) -> None:
    """Red when a file's values are lost, or its nonsense reaches requests."""
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    assert recommended_sampling("some-folder", tmp_path) == want


def test_without_a_file(tmp_path: Path) -> None:
    assert recommended_sampling("some-folder", tmp_path) == {}


def test_a_known_model_says(tmp_path: Path) -> None:
    """Red when the default model is sampled so hot that it talks nonsense."""
    assert recommended_sampling("default", tmp_path / "x.gguf")["temperature"] < 0.5
