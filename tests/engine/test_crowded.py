"""Random requests of every parameter: the same alone as in a crowd that is short of memory."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

from quire.llm import LLM
from quire.params import SamplingParams

NUM_REQUESTS = 400 if os.environ.get("QUIRE_LONG_TESTS") else 24


def random_params(rng: random.Random) -> SamplingParams:
    """Each field at its default or somewhere in its range."""
    fields: dict[str, Callable[[], Any]] = {
        "temperature": lambda: rng.choice((0.0, 0.3, 1.0, 1.7)),
        "top_p": lambda: rng.uniform(0.1, 1.0),
        "top_k": lambda: rng.randint(1, 40),
        "min_p": lambda: rng.uniform(0.0, 0.3),
        "presence_penalty": lambda: rng.uniform(-1.0, 1.0),
        "frequency_penalty": lambda: rng.uniform(-1.0, 1.0),
        "repetition_penalty": lambda: rng.uniform(0.7, 1.5),
        "logprobs": lambda: rng.randint(0, 5),
        "prompt_logprobs": lambda: rng.randint(0, 3),
        "min_tokens": lambda: rng.randint(0, 5),
        "stop": lambda: [rng.choice("aeiou .")],
        "stop_token_ids": lambda: [rng.randint(3, 250)],
        "bad_words": lambda: [rng.choice("xyz")],
        "logit_bias": lambda: {rng.randint(3, 250): rng.uniform(-5.0, 5.0)},
        "ignore_eos": lambda: True,
        "n": lambda: 2,
    }
    chosen = {name: make() for name, make in fields.items() if rng.random() < 0.3}
    if chosen.get("temperature") == 0.0:
        chosen.pop("n", None)  # copies would be the same
    length = {"max_tokens": rng.randint(6, 40), "seed": rng.randint(0, 1 << 30)}
    return SamplingParams(**length, **chosen)


def test_alone_and_crowded(make_llm: Callable[..., LLM]) -> None:
    """Red when anything of a request's answer depends on who else runs, or on losing its pages."""
    rng = random.Random(7)
    shared = [rng.randint(3, 250) for _ in range(20)]
    prompts, params = [], []
    for _ in range(NUM_REQUESTS):
        own = [rng.randint(3, 250) for _ in range(rng.randint(1, 30))]
        prompts.append({"prompt_token_ids": shared[: rng.randint(0, 20)] + own})
        params.append(random_params(rng))
    alone = make_llm(max_num_seqs=2, enable_prefix_caching=False)
    page_bytes = alone._engine.runner.pool.cache.page_bytes
    num_homes = alone._engine.core.scheduler.kv.num_homes  # each with pages of its own
    crowded = make_llm(kv_cache_memory=page_bytes * (64 if num_homes == 1 else 36))
    got = crowded.generate(prompts, params, False)
    assert crowded.stats().num_preempted > 0
    for prompt, own, output in zip(prompts, params, got, strict=True):
        (want,) = alone.generate([prompt], [own], False)
        assert output.outputs == want.outputs, own
        assert output.prompt_logprobs == want.prompt_logprobs, own
