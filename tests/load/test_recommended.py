"""Sampling as a model's makers recommend it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from quire.errors import CheckpointError
from quire.load.recommended import recommended_sampling


@pytest.mark.parametrize(
    ("config", "want"),
    [
        ({"temperature": 0.6, "top_k": 20, "max_length": 9}, {"temperature": 0.6, "top_k": 20}),
        ({"temperature": 0.6, "do_sample": False}, {}),
        ({"temperature": None, "top_p": 0.9}, {"top_p": 0.9}),
        ({}, {}),
    ],
)
def test_a_folder_says(tmp_path: Path, config: dict[str, object], want: dict[str, float]) -> None:
    """Red when a file's values are lost."""
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    assert recommended_sampling("some-folder", tmp_path) == want


@pytest.mark.parametrize(
    "config",
    [
        {"temperature": -1.0},
        {"temperature": math.nan},
        {"temperature": True},
        {"top_p": "high"},
        {"top_p": math.inf},
        {"top_k": 1.5},
        {"top_k": 10**30},
        {"min_p": []},
        {"repetition_penalty": 0},
    ],
)
def test_nonsense_is_named_at_the_start(tmp_path: Path, config: dict[str, object]) -> None:
    """Red when a file's nonsense reaches requests, or is passed over in silence."""
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=rf"generation_config.json: got {next(iter(config))}"):
        recommended_sampling("some-folder", tmp_path)


def test_without_a_file(tmp_path: Path) -> None:
    assert recommended_sampling("some-folder", tmp_path) == {}


def test_a_known_model_says(tmp_path: Path) -> None:
    """Red when the default model is sampled so hot that it talks nonsense."""
    assert recommended_sampling("default", tmp_path / "x.gguf")["temperature"] < 0.5
