"""A model on several ranks is judged like the same one on one: every score, bit by bit."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import LLM
from quire.engine.rank_group import RankGroup
from quire.evaluate.compare import Reference, TokenScores, score_windows
from quire.evaluate.footprint import resident_bytes
from quire.evaluate.tasks import Choice, answer_logprobs
from quire.evaluate.texts import HeldOut, Windows, cut
from quire.models.tiny import tiny_model
from tests.dist.group import alone, answers, model_on
from tests.evaluate.conftest import TEXT

LENGTH = 80  # a window takes several steps
SIZES = {"max_model_len": LENGTH + 1, "max_num_batched_tokens": 30}
CHOICES = [Choice((5, 6, 7, 8, 9), 3), Choice((9,) * 21, 15)]


def windows_of(llm: LLM) -> Windows:
    return cut(HeldOut("text", TEXT, "0" * 64), llm.get_tokenizer(), LENGTH, 2 * LENGTH)


def judged(llm: LLM, reference: Reference) -> tuple[TokenScores, Any]:
    found = score_windows(llm, reference.windows, reference)
    return found, answer_logprobs(llm, CHOICES, "")


@pytest.mark.parametrize(
    ("family", "stages", "args"),
    [("qwen3", 1, {"quantization": "rtn-int4-g32"}), ("deepseek_v3", 2, {}), ("gemma", 1, {})],
)
def test_scores_are_those_of_one_rank(
    family: str, stages: int, args: dict[str, Any], group: RankGroup, tmp_path: Path
) -> None:
    """Red when ranks disagree about who reads a prompt, or a reference needs a model that left."""
    folder = tiny_model(family, tmp_path / "one", hidden_size=64)
    other = tiny_model(family, tmp_path / "other", seed=5, hidden_size=64)
    one = alone(other, **args | SIZES)
    windows = windows_of(one)
    reference = Reference(one, windows)
    score_windows(one, windows, keep=reference)
    expected, chosen = judged(alone(folder, **args | SIZES), reference)
    said = answers(alone(folder, **args))
    args = args | {"pipeline_parallel_size": stages}
    with model_on(group, other, **args | SIZES) as llm:
        reference = Reference(llm, windows)
        score_windows(llm, windows, keep=reference)
        reference.release_layers()
    del llm
    gc.collect()
    with model_on(group, folder, **args | SIZES) as llm:
        found, found_chosen = judged(llm, reference)
        assert answers(llm) == said, "logprobs of prompts are made again"
        weights = resident_bytes(llm._engine.runner.model)
    assert 0 < weights < resident_bytes(one._engine.runner.model)
    assert np.array_equal(found.logprobs, expected.logprobs)
    assert np.array_equal(found.divergence, expected.divergence)
    assert expected.divergence.mean() > 0.01
    assert np.array_equal(found_chosen, chosen)
