"""Draws with drafts follow the target's distribution, and are the draws without them."""

from __future__ import annotations

import os
import random
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from quire.llm import LLM
from quire.models.tiny import tiny_model
from quire.params import SamplingParams
from quire.sample.inputs import SampleInputs
from quire.sample.sampler import Sampler
from quire.spec.verify import verified
from tests.spec.cases import at_random_depths

VOCAB = 64
NUM_LANES, NUM_DRAWS = 500, 200_000  # draws of as many requests at once
LIMIT = 103.4  # of chi-square with 63 degrees of freedom, which one in a thousand exceeds
TEMPERATURE = 0.8

IS_LONG = bool(os.environ.get("QUIRE_LONG_TESTS"))

Lanes = list[list[int]]


def draw(
    sampler: Sampler, logits: torch.Tensor, seeds: list[int], positions: list[int]
) -> list[int]:
    count = len(positions)
    inputs = SampleInputs(
        temperature=torch.full((count,), TEMPERATURE),
        top_k=torch.zeros(count, dtype=torch.int64),
        top_p=torch.ones(count),
        min_p=torch.zeros(count),
        seeds=torch.tensor(seeds),
        positions=torch.tensor(positions),
        all_greedy=False,
        any_top_k=False,
        any_top_p=False,
        any_min_p=False,
        num_logprobs=None,
    )
    return sampler(logits.expand(count, -1), inputs).tokens.tolist()


def drafted(
    emitted: list[int], plain: list[int], rng: random.Random, likely: list[int]
) -> list[int]:
    """Guesses at what follows: half of them right, so that refusals are often behind others."""
    ahead = plain[len(emitted) : len(emitted) + rng.choice([0, 1, 1, 2])]
    return [token if rng.random() < 0.5 else rng.choice(likely) for token in ahead]


def chi_square(tokens: np.ndarray, logits: torch.Tensor) -> float:
    shares = torch.softmax(logits.double() / TEMPERATURE, 0).numpy()
    counts, expected = np.bincount(tokens, minlength=VOCAB), shares * len(tokens)
    assert expected.min() > 5, "too few draws for the test"
    return float(((counts - expected) ** 2 / expected).sum())


def test_draws_follow_the_distribution() -> None:
    """Red when accepted or refused drafts favour any token: reused noise, a second rule."""
    torch.manual_seed(0)
    logits = (torch.randn(VOCAB) * 1.5).clamp(min=-3.0)
    sampler, rng, length = Sampler(), random.Random(3), NUM_DRAWS // NUM_LANES
    seeds = [lane for lane in range(NUM_LANES) for _ in range(length)]
    flat = draw(sampler, logits, seeds, [*range(length)] * NUM_LANES)
    plain = [flat[lane * length : (lane + 1) * length] for lane in range(NUM_LANES)]
    likely = logits.topk(6).indices.tolist()
    emitted: Lanes = [[] for _ in range(NUM_LANES)]
    num_accepted = num_refused = 0
    while left := [lane for lane in range(NUM_LANES) if len(emitted[lane]) < length]:
        guesses = {lane: drafted(emitted[lane], plain[lane], rng, likely) for lane in left}
        rows = [
            (lane, len(emitted[lane]) + ahead)
            for lane, drafts in guesses.items()
            for ahead in range(len(drafts) + 1)
        ]
        drawn = iter(draw(sampler, logits, *map(list, zip(*rows, strict=True))))
        for lane, drafts in guesses.items():
            kept = verified([next(drawn) for _ in range(len(drafts) + 1)], drafts)
            emitted[lane] += kept
            num_accepted += len(kept) - 1
            num_refused += len(kept) <= len(drafts)
    assert all(mine[:length] == theirs for mine, theirs in zip(emitted, plain, strict=True))
    assert num_accepted > NUM_DRAWS / 5 and num_refused > NUM_DRAWS / 10
    assert chi_square(np.array([own[:length] for own in emitted]).ravel(), logits) < LIMIT


def test_an_engine_with_drafts_follows_the_distribution(tmp_path: Path) -> None:
    """The same through an engine, whose model says nothing, so that biases are all there is."""
    folder = tiny_model("llama", tmp_path / "m", tokenizer=False, vocab_size=VOCAB)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"].zero_()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 2}
    llm = LLM(
        str(folder),
        device="cpu",
        dtype="float32",
        skip_tokenizer_init=True,
        max_num_seqs=64,
        max_model_len=256,
        kv_cache_memory=1 << 24,
        speculative_config={**config, "adaptive": False},
    )
    at_random_depths(llm)
    torch.manual_seed(1)
    logits = torch.randn(VOCAB).clamp(min=-1.5)
    asked = SamplingParams(
        temperature=TEMPERATURE,
        logit_bias=dict(enumerate(logits.tolist())),
        max_tokens=200,
        ignore_eos=True,
    )
    params = [asked.with_(seed=seed) for seed in range(250 if IS_LONG else 64)]
    outputs = llm.generate([[1, 2, 3]] * len(params), params, use_tqdm=False)
    tokens = np.array([output.outputs[0].token_ids for output in outputs]).ravel()
    assert len(tokens) == 200 * len(params)
    assert 0 < llm.stats().num_accepted_tokens < llm.stats().num_drafted_tokens
    assert chi_square(tokens, logits) < LIMIT
