"""Heads that draft, whole on the first of several ranks, beside a model that lies on all of them.

Oracle: one rank without drafts, token by token and float by float. The heads are right by
construction (`tests/spec/test_right_heads.py`), so that accepted drafts go every way there is.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.engine.rank_group import RankGroup
from quire.errors import NotSupported
from quire.flat_args import args_of
from quire.models.registry import spec_of
from quire.models.tiny import tiny_model
from quire.models.tiny_configs import tiny_config
from quire.resolve import resolve
from tests.dist.group import alone, answers, model_on
from tests.spec.test_right_heads import RIGHT, TREE

IS_LONG = bool(os.environ.get("QUIRE_LONG_TESTS"))

GREEDY = SamplingParams(temperature=0.0, max_tokens=14, logprobs=2, ignore_eos=True)
WARM = GREEDY.with_(temperature=0.8, seed=3)
WISHES = [
    GREEDY,
    GREEDY.with_(prompt_logprobs=1),
    WARM,
    WARM.with_(repetition_penalty=1.4, top_k=20),
    GREEDY.with_(num_speculative_tokens=0),
]
BASE = [2 + i * 7 % 90 for i in range(45)]
PROMPTS = [BASE, [9, 8, 7], [*BASE[:30], 5, 6], [3] * 21, BASE[:33]]

# method -> how many stages; all else is side by side
CASES = [("eagle3", 1), ("eagle3 tree", 1), ("mtp", 1), ("medusa", 1), ("medusa", 2), ("mtp", 2)]


def drafted(llm: LLM) -> tuple[int, int]:
    stats = llm.stats()
    return stats.num_drafted_tokens, stats.num_accepted_tokens


@pytest.mark.parametrize(("method", "stages"), CASES)
def test_heads_stay_on_the_first_rank(
    method: str, stages: int, group: RankGroup, tmp_path: Path
) -> None:
    """Red when a guess needs ranks that do not compute it, when ranks verify other drafts than the
    first one made, keep those that were wrong, or leave out other tokens of a step."""
    name, _, is_tree = method.partition(" ")
    make, family, _ = RIGHT[name]
    said = {**make(tmp_path), "num_speculative_tokens": 3, "adaptive": False}
    if is_tree:
        said |= {"speculative_token_tree": TREE, "num_speculative_tokens": 6}
    args: dict[str, Any] = {"speculative_config": said}
    expected = answers(alone(tmp_path / family), PROMPTS, WISHES)
    one = alone(tmp_path / family, **args)
    assert answers(one, PROMPTS, WISHES) == expected
    with model_on(group, tmp_path / family, **args, pipeline_parallel_size=stages) as llm:
        assert answers(llm, PROMPTS, WISHES) == expected
        num_drafted, num_accepted = drafted(llm)
        assert num_accepted > num_drafted / 5
        if stages == 1:
            assert drafted(llm) == drafted(one), "the same guesses"
        assert answers(llm, PROMPTS, WISHES) == expected  # from cached pages


@pytest.mark.parametrize(("family", "stages"), [("deepseek_v3", 1), ("qwen2_moe", 2)])
def test_an_early_exit_is_a_model_of_its_own(
    family: str, stages: int, group: RankGroup, tmp_path: Path
) -> None:
    """Red when a guess needs layers of other ranks, or takes others than the first ones."""
    folder = tiny_model(family, tmp_path)
    said = {"method": "early_exit", "num_speculative_tokens": 3, "adaptive": False}
    args: dict[str, Any] = {"speculative_config": said, "pipeline_parallel_size": stages}
    expected = answers(alone(folder), PROMPTS, WISHES)
    one = alone(folder, speculative_config=said)
    assert answers(one, PROMPTS, WISHES) == expected
    with model_on(group, folder, **args) as llm:
        assert answers(llm, PROMPTS, WISHES) == expected
        assert drafted(llm)[0] > 0
        assert stages > 1 or drafted(llm) == drafted(one), "the same guesses"


@pytest.mark.skipif(not IS_LONG, reason="set QUIRE_LONG_TESTS=1")
def test_heads_on_four_ranks(tmp_path: Path) -> None:
    """Red as above, where ranks outnumber key heads, and where stages are shared out."""
    group = RankGroup(4)
    try:
        for i, (method, stages) in enumerate(CASES):
            name, _, is_tree = method.partition(" ")
            make, family, _ = RIGHT[name]
            at = tmp_path / str(i)
            said = {**make(at), "num_speculative_tokens": 3, "adaptive": False}
            if is_tree:
                said |= {"speculative_token_tree": TREE, "num_speculative_tokens": 6}
            expected = answers(alone(at / family), PROMPTS, WISHES)
            args: dict[str, Any] = {"speculative_config": said, "pipeline_parallel_size": stages}
            with model_on(group, at / family, **args) as llm:
                assert answers(llm, PROMPTS, WISHES) == expected, (method, stages)
    finally:
        group.close()


@pytest.mark.parametrize(
    ("said", "way_out"),
    [
        ({"method": "early_exit"}, "keep no windows"),
        ({"method": "eagle3", "model": "x"}, "pipeline_parallel_size=1"),
        ({"method": "mtp", "tree": 2}, "leave speculative_config's tree out"),
    ],
)
def test_what_stages_cannot_draft_with_is_said(said: dict[str, Any], way_out: str) -> None:
    """Red when ranks start with drafts that need what other ranks have."""
    args = {"device": "cpu", "pipeline_parallel_size": 2, "speculative_config": said}
    with pytest.raises(NotSupported, match=way_out):
        resolve(args_of(args), spec_of(tiny_config("gemma3_text")))
