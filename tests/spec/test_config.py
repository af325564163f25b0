"""speculative_config: vLLM's keys and methods, and what is said to everything else."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from quire.errors import BadRequest, NotSupported
from quire.params import SamplingParams
from quire.speculative import METHODS, SpecConfig, parse_speculative
from tests.spec.cases import open_tiny


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"method": "ngarm"}, "did you mean 'ngram'"),
        ({"method": "eagle", "model": "x"}, "only EAGLE-3"),
        ({"method": "mtp", "model": "x"}, "does not read"),
        ({"method": "medusa+mtp", "model": "x"}, "at most"),
        ({"method": "ngram", "prompt_lookup_mx": 3}, "did you mean 'prompt_lookup_max'"),
        ({"method": "ngram", "model": "x"}, "does not read"),
        ({"method": "suffix", "num_speculative_tokens": 0}, "from 1 to 64"),
        ({"method": "suffix", "num_speculative_tokens": True}, "from 1 to 64"),
        ({"method": "ngram", "prompt_lookup_min": 4, "prompt_lookup_max": 2}, "above"),
        ({"method": "draft_model"}, "needs a model"),
        ({"method": "draft_model+early_exit", "model": "x"}, "at most"),
        ({"method": "suffix", "adaptive": "no"}, "True or False"),
        ({}, "want one of"),
        ("suffix", "want a dict"),
    ],
)
def test_what_is_wrong_is_named(given: Any, message: str) -> None:
    """Red when a key or a method is ignored, or the message does not say which."""
    with pytest.raises(NotSupported, match=message):
        parse_speculative(given)


def test_what_vllm_scripts_say_is_understood() -> None:
    """Red when a configuration as vLLM documents it means something else here."""
    assert parse_speculative({"model": "x", "num_speculative_tokens": 5}).method == "draft_model"
    assert parse_speculative({"model": "[ngram]", "prompt_lookup_max": 4}).method == "ngram"
    assert SpecConfig("ngram", prompt_lookup_max=4).ngram_sizes == range(4, 5)
    assert SpecConfig("ngram", prompt_lookup_min=2, prompt_lookup_max=4).ngram_sizes == range(2, 5)
    for method in METHODS:
        assert SpecConfig(method).depth == METHODS[method].depth


def test_requests_are_checked() -> None:
    """Red when a bad cap is accepted, or extra_args nobody reads are."""
    for bad in (
        {"num_speculative_tokens": -1},
        {"num_speculative_tokens": True},
        {"extra_args": {"speculate": 1}},
        {"extra_args": {"num_speculative_tokens": 2}, "num_speculative_tokens": 3},
    ):
        with pytest.raises(BadRequest):
            SamplingParams(**bad)
    assert SamplingParams(extra_args={"num_speculative_tokens": 2}).clone().extra_args


def test_models_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    """Red when a drafter whose tokens are unknown, or an exit behind the last layer, is run."""
    from quire.models.tiny import tiny_model

    other = tiny_model("llama", tmp_path / "other", vocab_size=300, tokenizer=False)
    with pytest.raises(NotSupported, match="300 tokens for a model with 258, and no tokenizer"):
        open_tiny(tmp_path, "llama", speculative_config={"model": str(other)})
    config = {"method": "early_exit", "exit_layer": 2}
    with pytest.raises(NotSupported, match="exit_layer=2"):
        open_tiny(tmp_path, "llama", speculative_config=config)


def test_a_drafter_that_is_the_target_is_always_right(tmp_path: Path) -> None:
    """Red when drafts are drawn with other noise, temperature, penalties or grammar."""
    from tests.spec.cases import answer, sampling

    open_tiny(tmp_path, "llama")
    config = {"model": str(tmp_path / "llama"), "num_speculative_tokens": 4, "adaptive": False}
    llm = open_tiny(tmp_path, "llama", speculative_config=config)
    kinds = ("greedy", "warm", "top-p", "min-p", "penalties", "logprobs")
    answer(llm, [("the cat", sampling(kind, 3, ignore_eos=True)) for kind in kinds])
    stats = llm.stats()
    assert stats.num_accepted_tokens == stats.num_drafted_tokens > 60
    assert stats.num_steps < 12


@pytest.mark.parametrize("config", [None, {"method": "ngram", "adaptive": False}])
def test_what_a_grammar_forces_takes_no_steps(
    config: dict[str, Any] | None, tmp_path: Path
) -> None:
    """Red when tokens without a choice cost a step each, with a method or with none."""
    from quire.params import StructuredOutputsParams

    text = "a long text that leaves no choice"
    params = SamplingParams(
        temperature=0.9, max_tokens=60, structured_outputs=StructuredOutputsParams(regex=text)
    )
    llm = open_tiny(tmp_path, "llama", speculative_config=config)
    before = llm.stats().num_steps
    (output,) = llm.generate("x", params, use_tqdm=False)
    assert output.outputs[0].text == text
    assert llm.stats().num_steps - before < len(text) / 3


@dataclass
class Counted:
    """As much of a generation as usage reads."""

    num_prompt: int = 3
    num_output: int = 9
    num_cached: int = 0
    num_predicted: tuple[int, int] = (0, 0)


def test_usage_tells_drafts_apart() -> None:
    """Red when accepted and refused drafts are not reported, or are where nothing was drafted."""
    from quire.server.usage import usage_of

    assert "completion_tokens_details" not in usage_of(Counted())
    usage = usage_of(Counted(num_predicted=(5, 2)), Counted(num_predicted=(1, 0)))
    details = {"accepted_prediction_tokens": 6, "rejected_prediction_tokens": 2}
    assert usage["completion_tokens_details"] == details
    assert usage["completion_tokens"] == 18
