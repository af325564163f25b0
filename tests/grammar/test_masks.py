"""Bits: written, narrowed, applied to logits and checked against what was drawn."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.grammar.matcher import GrammarError, num_words
from quire.params import SamplingParams
from quire.request import RequestId
from quire.runner.masks import NOTHING_LEFT, StepMask, _bits_of, _narrow
from quire.runner.rows import RowInfo
from quire.sample.inputs import TokenMask
from quire.sample.mask import apply_mask
from quire.sample.sampler import Sampler
from tests.sample.cases import Row, make_inputs

INF = float("inf")


def tokens_of(bits: np.ndarray) -> set[int]:
    return {32 * i + j for i, word in enumerate(bits) for j in range(32) if int(word) >> j & 1}


def random_sets(count: int, vocab_size: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [np.flatnonzero(rng.random(vocab_size) < p).tolist() for p in rng.random(count)]


@pytest.mark.parametrize("tokens", [[], [0], [31], [31, 32, 63, 64], list(range(100)), [5, 5, 99]])
def test_bits_of(tokens: list[int]) -> None:
    """Red when the sign bit of a word, or a repeated token, goes wrong."""
    assert tokens_of(_bits_of(tokens, 4)) == set(tokens)


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 500])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_apply(vocab_size: int, dtype: torch.dtype) -> None:
    """Red when a bit lands on another token, or a row without a mask is touched."""
    logits = torch.randn(5, vocab_size).to(dtype)
    want = logits.clone()
    rows, sets = [3, 0], random_sets(2, vocab_size)
    for row, keep in zip(rows, sets, strict=True):
        banned = [t for t in range(vocab_size) if t not in keep]
        want[row, banned] = -INF
    bits = np.stack([_bits_of(keep, num_words(vocab_size)) for keep in sets])
    apply_mask(logits, TokenMask(torch.tensor(rows), torch.from_numpy(bits)))
    assert torch.equal(logits, want)


def test_nothing_brings_a_masked_token_back() -> None:
    """Red when a filter, noise or an infinite logit draws what the mask forbids."""
    rows = [Row(t, top_k=k, top_p=p, seed=s) for s, (t, k, p) in enumerate(
        [(0.0, 0, 1.0), (1.0, 0, 1.0), (5.0, 3, 1.0), (1.0, 0, 0.3)] * 8
    )]  # fmt: skip
    sets = [keep or [7] for keep in random_sets(len(rows), 90, seed=2)]
    bits = np.stack([_bits_of(keep, 3) for keep in sets])
    logits = torch.randn(len(rows), 90) * 5
    for i, keep in enumerate(sets):
        banned = next(t for t in range(90) if t not in keep)
        logits[i, banned] = INF
    inputs = make_inputs(rows)
    inputs = type(inputs)(
        **{name: getattr(inputs, name) for name in inputs.__slots__ if name != "mask"},
        mask=TokenMask(torch.arange(len(rows)), torch.from_numpy(bits)),
    )
    for token, keep in zip(Sampler()(logits, inputs).tokens.tolist(), sets, strict=True):
        assert token in keep


def info(**params: object) -> RowInfo:
    return RowInfo(SamplingParams(**params), num_prompt=4, banned_until_min=(5, 40))


def test_narrow() -> None:
    """Red when a ban that leaves nothing is only found after token 0 was drawn."""

    def narrowed(tokens: list[int], num_output: int = 0, **params: object) -> set[int]:
        bits = _bits_of(tokens, 2)
        _narrow(bits, info(**params), num_output)
        return tokens_of(bits)

    assert narrowed([0, 5, 40]) == {0, 5, 40}
    assert narrowed([0, 5, 40], allowed_token_ids=[5, 7]) == {5}
    assert narrowed([0, 5, 40], num_output=2, min_tokens=3) == {0}
    assert narrowed([0, 5, 40], num_output=3, min_tokens=3) == {0, 5, 40}
    with pytest.raises(GrammarError, match="no token is left"):
        narrowed([0, 5], allowed_token_ids=[7])
    with pytest.raises(GrammarError, match="no token is left"):
        narrowed([5, 40], num_output=0, min_tokens=3)


def test_what_was_drawn_is_judged() -> None:
    """Red when a forbidden token gets past the host, or a failure is reported for another work."""
    bits = np.stack([_bits_of(keep, 3) for keep in ([1, 64], [31, 95], [2])])
    ids = [RequestId(i) for i in (7, 8, 9)]
    step = StepMask(ids, places=[0, 2, 3], works=[4, 6, 7], bits=bits, failed={3: "known"})
    assert step.failures([64, 50, 95, 0]) == {3: "known"}
    assert step.failures([2, 50, 31, 2]) == {0: NOTHING_LEFT, 3: "known"}
