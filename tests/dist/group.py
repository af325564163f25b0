"""One group of ranks for many models: processes that import torch are started once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.engine import build
from quire.engine.rank_group import RankGroup
from quire.engine.seat import seat_of
from quire.outputs import RequestOutput

PROMPTS = [
    list(range(2, 40)),
    [7, 8, 9],
    [*range(2, 20), 100, 101, 102],  # begins like the first
    [5] * 21,
]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=10, logprobs=3, prompt_logprobs=2),
    SamplingParams(temperature=1.0, seed=3, max_tokens=12, logprobs=2),
    SamplingParams(temperature=0.8, top_p=0.9, top_k=20, seed=5, max_tokens=9, logprobs=0),
    SamplingParams(
        temperature=0.7, seed=1, max_tokens=8, repetition_penalty=1.3, logprobs=1, ignore_eos=True
    ),
]
# Chunks of prompts, pages of generated tokens, several requests in a step.
SMALL = {"max_num_seqs": 3, "max_num_batched_tokens": 16, "page_size": 4, "max_model_len": 96}


@contextmanager
def model_on(group: RankGroup, folder: Path, **args: Any) -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "seat_of", lambda args: seat_of(args, group))
        stages = args.get("pipeline_parallel_size", 1)
        beside = group.size // stages // args.get("data_parallel_size", 1)
        sizes = {"tensor_parallel_size": beside, "device": "cpu"}
        llm = LLM(str(folder), **sizes | SMALL | args)
    try:
        yield llm
    finally:
        if group.trouble() is None:
            group.forget()


def alone(folder: Path, **args: Any) -> LLM:
    return LLM(str(folder), **{"device": "cpu"} | SMALL | args)


def answers(llm: LLM, prompts: Any = PROMPTS, params: Any = PARAMS) -> list[object]:
    """Everything that a model's numbers decide, exactly."""
    return [said(output) for output in llm.generate(prompts, params, use_tqdm=False)]


def said(output: RequestOutput) -> object:
    (one,) = output.outputs
    return (
        list(one.token_ids),
        one.finish_reason,
        one.cumulative_logprob,
        _numbers(one.logprobs),
        _numbers(output.prompt_logprobs),
    )


def _numbers(found: Any) -> object:
    if found is None:
        return None
    return [
        None if at is None else {token: (its.logprob, its.rank) for token, its in at.items()}
        for at in found
    ]
